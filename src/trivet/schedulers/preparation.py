"""Prepares a command for a scheduler: what the job needs of a node, what it refuses, and the files that are written for it."""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from trivet.config.masking import mask_table, names_secret
from trivet.config.schema.evaluation import EvalConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.sft import SftConfig
from trivet.config.tables import as_list, as_table
from trivet.errors import ConfigError, Diverged
from trivet.shown_text import printable
from trivet.storage.durable import write_atomically

Submittable = TypeVar("Submittable", RLConfig, SftConfig, EvalConfig)
FINAL_CODES = (ConfigError.exit_code, Diverged.exit_code)
"""Exit codes that every further start would repeat."""
RAY_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    # Ray's ports for Prometheus answer everybody, also with a token and TLS.
    "RAY_enable_metrics_collection": "0",
    "AUTOSCALER_METRIC_PORT": "-1",
    "DASHBOARD_METRIC_PORT": "-1",
}
"""Variables with which Ray is started wherever we do it: it reports nothing, and roles have the usual priority."""


def count_serving_machines(config: RLConfig, *, num_servers: int) -> int:
    """Return the machines that have room for `num_servers` servers of a run over several nodes."""
    return -(-config.deployment.num_infer_nodes * num_servers // config.deployment.servers_per_node)


def count_machines(config: RLConfig | SftConfig | EvalConfig) -> int:
    """Return the machines of a command: one, unless it is a run over several nodes."""
    if not isinstance(config, RLConfig) or not config.deployment.is_multi_node:
        return 1
    deployment = config.deployment
    num_serving = count_serving_machines(config, num_servers=deployment.num_servers)
    return deployment.num_train_nodes + num_serving + max(deployment.num_env_nodes, deployment.max_env_nodes or 0)


def count_gpus(config: RLConfig | SftConfig | EvalConfig, *, asked: int | None) -> int:
    """Return the GPUs that a command needs on each of its machines.

    Args:
        asked: what the scheduler's own key says. None: those that the configuration names, and none for an evaluation, which asks
            servers that run elsewhere.
    """
    if asked is not None:
        return asked
    if isinstance(config, EvalConfig):
        return 0
    if isinstance(config, SftConfig):
        return 0 if config.device == "cpu" else config.num_ranks or 1
    if config.deployment.is_multi_node:
        return config.deployment.gpus_per_node
    serving = config.inference_gpu_ids if config.inference is not None else []
    training = config.trainer_gpu_ids if config.trainer.device != "cpu" else []
    teaching = (config.teacher_gpu_ids or []) if config.teacher_inference is not None else []
    return max([*serving, *training, *teaching], default=-1) + 1


def commit_time_s(config: RLConfig | SftConfig | EvalConfig) -> float:
    """Return the seconds between a request to end and the end of a run that commits first; 0 for a command that does not."""
    return config.recovery.preemption_grace_s + config.shutdown_timeout_s if isinstance(config, RLConfig) else 0.0


def require_commits(config: RLConfig | SftConfig | EvalConfig, *, restarted_by: str, otherwise: str) -> None:
    """Refuse fine-tuning that a scheduler would start again, and that would begin anew each time.

    Args:
        restarted_by: what makes the scheduler start it again.
        otherwise: what to write so that it does not.

    Raises:
        ConfigError: there are no commits on the way.
    """
    if isinstance(config, SftConfig) and config.ckpt.interval is None:
        raise ConfigError(
            f"{restarted_by} needs ckpt.interval: fine-tuning commits nothing when it is asked to end, so a job that is started"
            f" again would begin anew; set ckpt.interval{otherwise}"
        )


def require_portable(
    config: RLConfig | SftConfig, section: str, *, shared: str, working_dir: Path, merged: str, secret: str
) -> None:
    """Refuse a command that would lose its results on other machines, or whose file would show secrets to those who read it.

    Args:
        section: the scheduler's table, in which the other texts name keys.
        shared: the directory that outlives the machines, on them.
        working_dir: where the command runs on them.
        merged: what the user merges into the file.
        secret: names secrets without their values.

    Raises:
        ConfigError: output_dir is elsewhere, or a value may be secret.
    """
    directory, overrides = (getattr(getattr(config, section), key) for key in (shared, merged))
    there = Path(os.path.normpath(working_dir / config.output_dir))
    if not there.is_relative_to(directory):
        raise ConfigError(
            f"output_dir is {str(there)!r} on the machines of the job, and not below {section}.{shared} ({str(directory)!r}): what"
            " is written there goes with them; choose another output_dir, such as a relative one"
        )
    table = config.model_dump(mode="json", exclude={"kubernetes", "skypilot"})
    if found := sorted(set(_find_hidden((), table, mask_table(table)))):
        raise ConfigError(
            f"{', '.join(found)} may hold a secret, and the written file would show it: remove it, and give the job what it needs"
            f" as a variable by {section}.{secret}"
        )
    if found := sorted(set(_find_variables(overrides))):
        raise ConfigError(
            f"{section}.{merged} gives {', '.join(found)} a value, which may be secret; name it in {section}.{secret} instead"
        )


def _find_variables(value: object) -> Iterator[str]:
    """Yield the names of variables that may be secret: of `{name = "A_TOKEN", value = "…"}` and of `{A_TOKEN = "…"}`."""
    for each in as_list(value) or []:
        yield from _find_variables(each)
    table = as_table(value) or {}
    name = table.get("name")
    if isinstance(name, str) and names_secret(name) and table.get("value") is not None:
        yield name
    for key, each in table.items():
        if isinstance(each, str) and key.isupper() and names_secret(key):
            yield key
        yield from _find_variables(each)


def _find_hidden(path: tuple[str, ...], value: object, shown: object) -> Iterator[str]:
    """Yield the keys of which a masked copy does not show the value, or a part of it."""
    if (table := as_table(value)) is not None and (masked := as_table(shown)) is not None:
        for name, each in table.items():
            yield from _find_hidden((*path, name), each, masked[name])
    elif (items := as_list(value)) is not None and (masked_items := as_list(shown)) is not None:
        for each, masked_each in zip(items, masked_items, strict=True):
            yield from _find_hidden(path, each, masked_each)
    elif value != shown:
        yield ".".join(path)


def write_files(directory: Path, files: Mapping[Path, str]) -> None:
    """Write the files of a job, which only their owner may read: they may hold keys.

    Raises:
        ConfigError: `directory` cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            write_atomically(path, text.encode(), is_private=True)
    except OSError as exc:
        raise ConfigError(f"{directory} cannot be written: {exc.strerror}; choose another output_dir") from exc


def show_notices(notices: Iterable[str]) -> None:
    """Print the notices about a configuration."""
    for notice in notices:
        print(f"notice: {printable(notice)}", file=sys.stderr)
