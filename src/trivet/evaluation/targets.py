"""Finds the policies that `eval` evaluates, reads the configuration of their run, and keeps the run from removing them.

The policies are the start model, the published steps, and steps that are published while `eval` runs. In the run's directory only
the acknowledgement of this reader is written.
"""

import asyncio
import logging
import os
import socket
import time
import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trivet.config.layout import STABLE, RunLayout
from trivet.config.load import load_config
from trivet.config.schema.environment import EvalEnvConfig
from trivet.config.schema.evaluation import EvalConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.tables import as_table
from trivet.errors import ConfigError
from trivet.step_directories import list_steps
from trivet.storage.durable import is_listed
from trivet.weights.retention import acknowledge, forget_reader
from trivet.wire.groups import server_root
from trivet.wire.versions import START_VERSION, PolicyVersion

logger = logging.getLogger(__name__)

_POLL_INTERVAL_S = 1.0
"""Seconds between two looks for newly published steps."""
_MAX_LISTED = 40
"""The most steps that a message lists."""
_LIFETIME_S = 600.0
"""Seconds after which a reader's acknowledgement expires. Until then nine renewals may fail."""
_RENEW_INTERVAL_S = 60.0
"""Seconds between two renewals of the acknowledgement."""


@dataclass(frozen=True, slots=True)
class Target:
    """A policy to evaluate."""

    step: int
    directory: Path | None
    """The directory of the published policy; None for the start model."""

    @property
    def name(self) -> str:
        """The step, or `base` for the start model, as log lines and progress bars show it."""
        return "base" if self.directory is None else str(self.step)


BASE = Target(START_VERSION, None)


def present_targets(config: EvalConfig, envs: Sequence[EvalEnvConfig]) -> list[Target]:
    """Return the policies that can be evaluated now, oldest first.

    Raises:
        ConfigError: there is nothing to evaluate, or a named step is missing and `watcher` does not wait for it.
    """
    if config.weights_dir is None:
        for key, is_given in {"steps": config.steps is not None, "watcher": config.watcher}.items():
            if is_given:
                raise ConfigError(
                    f"{key} is about directories inside weights_dir, which is not set: add --weights-dir outputs/weights"
                )
        if not config.eval_base:
            raise ConfigError(
                "nothing to evaluate: eval_base is false and weights_dir is not set; add --weights-dir outputs/weights"
            )
        return [BASE]
    complete = complete_steps(config.weights_dir)
    if not config.watcher:
        missing = [step for step in config.steps or [] if step not in complete]
        if missing or not complete:
            raise ConfigError(
                f"{config.weights_dir} holds no complete step {', '.join(map(str, missing)) or 'at all'}; "
                f"complete steps there: {_format_steps(sorted(complete))}. A run keeps the newest policies, those of checkpoints, "
                "and with ckpt.weights.interval = N every N-th"
            )
    found = [Target(step, complete[step]) for step in sorted(complete) if is_wanted(config, step, envs)]
    targets = [*([BASE] if config.eval_base else []), *found]
    if not targets and not config.watcher:
        raise ConfigError(
            f"no step in {config.weights_dir} is a multiple of interval ({config.interval}) and eval_base is false; complete steps "
            f"there: {_format_steps(sorted(complete))}"
        )
    return targets


def complete_steps(weights_dir: Path) -> dict[int, Path]:
    """Map each step that was published completely to its absolute directory, ascending."""
    return list_steps(weights_dir.absolute(), marker=STABLE)


def is_wanted(config: EvalConfig, step: int, envs: Sequence[EvalEnvConfig]) -> bool:
    """Return whether any of `envs` is to be evaluated on the policy of `step`."""
    return step in config.steps if config.steps is not None else any(is_due(config, step, env) for env in envs)


def is_due(config: EvalConfig, step: int, env: EvalEnvConfig) -> bool:
    """Return whether `env` is to be evaluated on the policy of `step`. If the configuration names `steps`, every environment is."""
    return config.steps is not None or step % (env.interval or config.interval) == 0


async def follow_targets(
    config: EvalConfig,
    present: Sequence[Target],
    *,
    envs: Sequence[EvalEnvConfig],
    max_steps: int | None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> AsyncIterator[Target]:
    """Yield the targets `present`, and with `watcher` also each policy that is published later.

    The iteration ends after the last of `steps`, or after `max_steps` of the run that publishes, or when nothing new was published
    for `watcher_timeout`.
    """
    for target in present:
        yield target
    if not config.watcher or config.weights_dir is None:
        return
    seen = {target.step for target in present}
    last = max(config.steps) if config.steps else max_steps
    until = f"until step {last}" if last is not None else "until Ctrl-C"
    logger.info("watching %s: %s, or nothing new for %.0f s", config.weights_dir, until, config.watcher_timeout)
    newest, changed_at = max(seen, default=0), clock()
    while True:
        for step, directory in sorted(complete_steps(config.weights_dir).items()):
            if step > newest:
                newest, changed_at = step, clock()
            if step not in seen and is_wanted(config, step, envs):
                seen.add(step)
                yield Target(step, directory)
                changed_at = clock()
        if last is not None and newest >= last:
            if missed := sorted(set(config.steps or ()) - seen):
                logger.warning("steps that were never published or removed before: %s", ", ".join(map(str, missed)))
            return
        if clock() - changed_at >= config.watcher_timeout:
            logger.warning(
                "nothing was published in %s for %.0f s (watcher_timeout): watching ends after step %s",
                *(config.weights_dir, config.watcher_timeout, newest),
            )
            return
        await sleep(_POLL_INTERVAL_S)


def _format_steps(steps: Sequence[int]) -> str:
    """Return the newest steps in one line, for a message."""
    if not steps:
        return "none"
    shown = ", ".join(map(str, steps[-_MAX_LISTED:]))
    return shown if len(steps) <= _MAX_LISTED else f"…, {shown}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOrigin:
    """The run that wrote the policies. If there is no run, every field keeps its default."""

    model_name: str | None = None
    """The model that the run started from."""
    trajectory_strategy: Literal["interleaved", "branching"] = "interleaved"
    max_steps: int | None = None
    envs: Sequence[EvalEnvConfig] = ()
    """The environments that the run evaluates on. If it has no evaluation, the environments that it trains on."""
    server_roots: Sequence[str] = ()
    """The addresses of the servers with which the run generates."""
    weights_url: str | None = None
    """The address from which its servers fetch policies; None if they read directories."""


def read_origin(weights_dir: Path | None) -> PolicyOrigin:
    """Read the saved configuration of the run whose output directory has `weights_dir`. Without one, return the defaults."""
    if weights_dir is None:
        return PolicyOrigin()
    configs = RunLayout(weights_dir.absolute().parent).configs
    try:
        if (path := configs / "orchestrator.toml").is_file():
            config = load_config(OrchestratorConfig, ["@", str(path)], environ={}).config
            envs = config.eval.env if config.eval is not None else [EvalEnvConfig(**env.model_dump()) for env in config.env]
            return PolicyOrigin(
                model_name=config.model.name,
                trajectory_strategy=config.trajectory_strategy,
                max_steps=config.max_steps,
                envs=tuple(envs),
                server_roots=tuple(server_root(url) for url in config.client.base_url),
                weights_url=config.weights.origin_url,
            )
        for path in (configs / "trainer.toml", configs / "sft.toml"):
            if path.is_file():
                table = tomllib.loads(path.read_text(encoding="utf-8"))
                name, max_steps = (as_table(table.get("model")) or {}).get("name"), table.get("max_steps")
                return PolicyOrigin(
                    model_name=name if isinstance(name, str) else None,
                    max_steps=max_steps if isinstance(max_steps, int) else None,
                )
    except (ConfigError, tomllib.TOMLDecodeError) as exc:
        logger.warning("the configuration in %s is of another version and is not used: %s", configs, exc)
    return PolicyOrigin()


class WeightsReader:
    """Keeps the trainer of a live run from removing policies that this evaluation still needs.

    It writes an acknowledgement (`weights.retention`) that expires after ten minutes and is renewed every minute. So a killed
    evaluation does not keep policies for ever.
    """

    def __init__(self, weights_dir: Path | None) -> None:
        layout = None if weights_dir is None else RunLayout(weights_dir.absolute().parent)
        self._layout = layout if weights_dir is not None and weights_dir.name == "weights" else None
        self._name = f"eval-{socket.gethostname()}-{os.getpid()}"
        self._needed: int | None = None

    def need(self, step: int) -> None:
        """Keep the policies of `step` and of all later steps, and release older policies."""
        self._needed = step
        if self._layout is None or not is_listed(self._layout.readers):
            return
        try:
            acknowledge(self._layout, self._name, PolicyVersion(step), lifetime_s=_LIFETIME_S)
        except OSError as exc:
            logger.warning(
                "%s cannot be written: policies may be removed before they are evaluated: %s", self._layout.readers, exc
            )
            self._layout = None

    async def run(self) -> None:
        """Renew the acknowledgement, until cancelled."""
        while True:
            await asyncio.sleep(_RENEW_INTERVAL_S)
            if self._needed is not None:
                self.need(self._needed)

    def close(self) -> None:
        """Release every policy. May be called again."""
        if self._layout is not None:
            forget_reader(self._layout, self._name)
        self._layout = None
