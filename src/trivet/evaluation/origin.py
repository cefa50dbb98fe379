"""Reads model, environments and number of steps of the run that wrote a weights directory.

Called by the command `eval`, so that nobody has to repeat what the run's configuration says. Changes nothing in the run's
directory.
"""

import logging
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from trivet.config.layout import RunLayout
from trivet.config.load import load_config
from trivet.config.resolve import LOCAL_HOSTS
from trivet.config.schema.environment import EvalEnvConfig
from trivet.config.schema.inference import ClientConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.tables import as_table
from trivet.errors import ConfigError
from trivet.process.lock import holder_of
from trivet.wire.servers import server_root

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOrigin:
    """The run that wrote the policies. Without a run, every field keeps its default."""

    model_name: str | None = None
    """The model that the run started from."""
    trajectory_strategy: Literal["interleaved", "branching"] = "interleaved"
    max_steps: int | None = None
    envs: Sequence[EvalEnvConfig] = ()
    """The environments that it evaluates on, or else those that it trains on."""
    server_roots: Sequence[str] = ()
    """The servers that it generates with."""


def read_origin(weights_dir: Path | None) -> PolicyOrigin:
    """Return what is known of the run whose output directory has `weights_dir`."""
    if weights_dir is None:
        return PolicyOrigin()
    configs = _layout(weights_dir).configs
    try:
        if (path := configs / "orchestrator.toml").is_file():
            return _of_orchestrator(load_config(OrchestratorConfig, ["@", str(path)], environ={}).config)
        for path in (configs / "trainer.toml", configs / "sft.toml"):
            if path.is_file():
                return _of_trainer(path)
    except (ConfigError, tomllib.TOMLDecodeError) as exc:
        logger.warning("the configuration in %s is of another version and is not used: %s", configs, exc)
    return PolicyOrigin()


def require_free_servers(client: ClientConfig, origin: PolicyOrigin, weights_dir: Path | None) -> None:
    """Check that no live run generates with a server of `client`.

    Raises:
        ConfigError: a live run generates with one of the servers, which must not lose its policy.
    """
    if weights_dir is None or holder_of(_layout(weights_dir).lock) is None:
        return
    for url in client.base_url:
        if any(_is_same_server(url, root) for root in origin.server_roots):
            raise ConfigError(
                f"the run in {weights_dir.parent} is going on and generates with {url}: loading other weights there would end it; "
                "evaluate on a server of your own (client.base_url), or let the run evaluate itself ([orchestrator.eval])"
            )


def _is_same_server(one: str, other: str) -> bool:
    """Compare two addresses. All names of this machine are equal."""
    parts = [urlsplit(server_root(url)) for url in (one, other)]
    hosts = {"localhost" if part.hostname in LOCAL_HOSTS else part.hostname for part in parts}
    return len(hosts) == 1 and parts[0].port == parts[1].port


def _of_orchestrator(config: OrchestratorConfig) -> PolicyOrigin:
    envs = config.eval.env if config.eval is not None else [EvalEnvConfig(**env.model_dump()) for env in config.env]
    return PolicyOrigin(
        model_name=config.model.name,
        trajectory_strategy=config.trajectory_strategy,
        max_steps=config.max_steps,
        envs=tuple(envs),
        server_roots=tuple(server_root(url) for url in config.client.base_url),
    )


def _of_trainer(path: Path) -> PolicyOrigin:
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    model, max_steps = as_table(table.get("model")) or {}, table.get("max_steps")
    name = model.get("name")
    return PolicyOrigin(
        model_name=name if isinstance(name, str) else None, max_steps=max_steps if isinstance(max_steps, int) else None
    )


def _layout(weights_dir: Path) -> RunLayout:
    return RunLayout(weights_dir.absolute().parent)
