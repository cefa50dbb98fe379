"""Keeps in a part the configuration and a digest of the data that it was made with, and compares both when a run is resumed.

A key that MAY_CHANGE does not list may have a part in the results: the same run goes on only with the same value.
"""

import logging
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from trivet.config.dump import literal, to_toml
from trivet.config.keys import find_key
from trivet.config.masking import mask_table
from trivet.config.schema.base import Section
from trivet.config.schema.shared import CkptConfig
from trivet.errors import CheckpointError, ResumeError
from trivet.key_names import key_name
from trivet.wire.versions import Step

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.toml"
DATA_FILE = "data.json"
Changes = Mapping[str, tuple[Any | None, Any | None]]
"""The value before and now, by dotted key."""
Values = Mapping[str, Any]
"""Values by dotted key, those that are unset left out."""

_POSITION = re.compile(r"\.\d+(?=\.)")
"""The position of a table in a list, as it stands in a dotted key."""
_LEARNING_RATE = "scheduler"
_SCHEDULES = (_LEARNING_RATE, "sampling.temp_scheduler", "env.*.sampling.temp_scheduler")
"""Sections of the roles with a `type` and a `total_steps`."""

MAY_CHANGE = (
    *("run", "output_dir", "max_steps", "ckpt", "log", "wandb", "heartbeat", "metrics_server", "memory_profiler_path"),
    *("trace_path", "bench", "detectors", "faults", "rollout_transport", "env_nodes", "dist_timeout_seconds", "device"),
    *("gpu_memory_utilization", "release_gpu_memory", "sleep_servers", "num_ranks", "weights", "micro_batch_tokens"),
    *("data.micro_batch_size", "data.pack_function", "data.record", "replay", "record_rollouts", "model.attn"),
    *("model.share_prefixes", "model.reshard_after_forward", "model.reduce_each_row", "model.ac", "model.ac_offloading"),
    *("model.fsdp_cpu_offload", "model.optim_cpu_offload", "model.dp_replicate", "model.dither"),
    *("model.fused_lm_head_chunk_size", "model.trust_remote_code", "eval", "val", "shown_samples", "strict_data"),
    *("tasks_per_minute", "workers_per_env", "env_start_timeout_s", "env_worker_timeout_s", "max_env_worker_restarts"),
    *("max_worker_memory", "env.*.venv", "env.*.env_vars", "env.*.keep_variables", "rollout_timeout_s"),
    *("buffer.easy_fraction", "buffer.hard_fraction", "client", "teacher_model.client", "teacher_model.max_concurrent"),
    *("concurrency", "max_concurrent", "max_fruitless_batches", "reload_weights_on_start"),
)
"""Keys of any role, with all below them: paths, ports, limits on time and memory, what is measured and logged, when to stop,
and what says by itself that it is about a resume."""

MEASURED = ("eval", "val")
WHEN_MEASURED = (
    "eval.interval",
    "eval.env.*.interval",
    "eval.max_concurrent",
    "eval.eval_base_model",
    "eval.skip_eval_on_resume",
    "val.interval",
    "val.eval_on_start",
    *(f"eval.env.*.{name}" for name in ("venv", "env_vars", "keep_variables")),
)
"""Keys of MAY_CHANGE that measure, and those among them that say when and where, so that a score does not depend on them."""

SERVER_MAY_CHANGE = (
    *("run", "output_dir", "log", "faults", "name", "server", "parallel", "gpu_memory_utilization", "sleep_while_training"),
    *("cpu_kv_cache_gib", "max_num_seqs", "enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank"),
    *("model.enforce_eager", "model.trust_remote_code"),
)
"""Keys of a server that have no part in what it samples. No checkpoint keeps those of servers, which stay up over a resume."""

EVERY_KEY = "*"
"""Entry of ckpt.allow_changes that allows every key. The roles of a fork are started with it."""


def write_settings(part: Path, config: Section) -> None:
    """Write `config` next to the state in a part that was begun and is not finished, without its secrets: they may change."""
    (part / CONFIG_FILE).write_text(to_toml(config, is_masked=True))


def require_same_settings(part: Path, config: Section, *, ckpt: CkptConfig, step: Step) -> None:
    """Refuse a `config` that differs from the settings under which the committed `part` of its role was made."""
    saved, now, defaults = read_settings(part / CONFIG_FILE), values_of(config), values_of(type(config)())
    continued = unset_lengths(now, saved=saved)
    saved = {
        key: value
        for key, value in (saved | unset_lengths(saved)).items()
        if key not in continued and find_key(type(config), tuple(key.split("."))) is not None  # else of an earlier version
    }
    changed = changes(saved, now, defaults=defaults, allowed=(*MAY_CHANGE, *ckpt.allow_changes))
    if changed and EVERY_KEY not in ckpt.allow_changes:
        lines = "".join(f"\n- {line}" for line in describe(changed))
        raise ResumeError(
            f"checkpoint step_{step} was made by the {part.name} with other settings:{lines}\nSet them back, or name them in "
            f"{key_name('ckpt.allow_changes')} = {literal(list(changed))} to change them from step {step + 1} on"
        )


def read_settings(path: Path) -> dict[str, Any]:
    """Return the values, by dotted key, of a configuration that was written for a role or kept in a part, without secrets."""
    try:
        return flatten(mask_table(tomllib.loads(path.read_text())))
    except (OSError, tomllib.TOMLDecodeError) as exc:
        raise CheckpointError(f"{path} cannot be read: {exc}") from exc


def values_of(config: Section) -> dict[str, Any]:
    """Return the values of `config` by dotted key, as `read_settings` does: without secrets, and without keys that are unset."""
    return flatten(tomllib.loads(to_toml(config, is_masked=True)))


def changes(
    saved: Values, now: Values, *, defaults: Values, allowed: Iterable[str], among: Iterable[str] | None = None
) -> Changes:
    """Return the keys whose value differs from the saved one, with both values; None is unset.

    Args:
        defaults: values of keys that did not exist, or were null, when `saved` was written.
        allowed: keys that are left out, with all below them; `env.*.venv` is the key of every environment.
        among: keys to which the comparison is limited, in the same way; None: all.
    """
    pairs = {key: (saved.get(key, defaults.get(key)), now.get(key)) for key in sorted({*saved, *now})}
    return {
        key: (old, new)
        for key, (old, new) in pairs.items()
        if old != new and not _is_below(key, allowed) and (among is None or _is_below(key, among))
    }


def unset_lengths(values: Values, *, saved: Values | None = None) -> dict[str, int]:
    """Return the total_steps of each schedule that has none in `values`, by dotted key: it ends at max_steps.

    That is decided once: every checkpoint keeps the step, so that a run which is resumed with another max_steps goes on along the
    same schedule.

    Args:
        saved: of the checkpoint resumed from, whose schedule of the same type is continued; None: every schedule begins.
    """
    lengths: dict[str, int] = {}
    for key, kind in values.items():
        schedule, dot, name = key.rpartition(".")
        if f"{dot}{name}" != ".type" or _POSITION.sub(".*", f"{schedule}.").rstrip(".") not in _SCHEDULES or kind == "constant":
            continue
        begins = saved is None or saved.get(key) != kind or (schedule == _LEARNING_RATE and values.get("ckpt.skip_scheduler"))
        known = values if begins or saved is None else saved
        length = known.get(f"{schedule}.total_steps", known.get("max_steps"))
        if f"{schedule}.total_steps" not in values and length is not None:
            lengths[f"{schedule}.total_steps"] = length
    return lengths


def other_measurements(saved: Values, now: Values, *, defaults: Values) -> Changes:
    """Return the changes of evaluations that go on: scores before and after them differ by more than the policy."""
    goes_on = [name for name in MEASURED if all(any(_is_below(key, (name,)) for key in values) for values in (saved, now))]
    return changes(saved, now, defaults=defaults, allowed=WHEN_MEASURED, among=goes_on)


def describe(changed: Changes) -> list[str]:
    """Return a line with both values for each key."""
    return [f"{key} was {_show(old)} and is {_show(new)} now" for key, (old, new) in changed.items()]


def _show(value: Any | None) -> str:
    return "unset" if value is None else literal(value)


def _is_below(key: str, prefixes: Iterable[str]) -> bool:
    names = (key, _POSITION.sub(".*", key))
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes for name in names)


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return values by dotted key; tables in a list get their position as a name."""
    values: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in cast("list[Any]", value)):
            value = {str(index): item for index, item in enumerate(cast("list[Any]", value))}
        if isinstance(value, Mapping):
            values |= flatten(cast("Mapping[str, Any]", value), f"{prefix}{name}.")
        else:
            values[f"{prefix}{name}"] = value
    return values


class DataRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One data set: an environment of the orchestrator, or conversations of supervised fine-tuning."""

    num_records: int
    digest: str
    """Digest of its contents in their order; empty: unknown."""


def write_data_record(part: Path, records: Mapping[str, DataRecord]) -> None:
    """Write `records`, by the user's name of each data set, into a part that was begun and is not finished."""
    (part / DATA_FILE).write_bytes(msgspec.json.encode(records))


def compare_data(part: Path, records: Mapping[str, DataRecord], *, step: Step, strict_key: str | None) -> None:
    """Log each data set that differs from the one in the committed `part`; new and missing ones are a matter of the settings.

    Args:
        strict_key: the key because of which the run refuses other data; None: it goes on.
    """
    path = part / DATA_FILE
    if not path.exists():  # a part that an earlier version wrote
        return
    try:
        saved = msgspec.json.decode(path.read_bytes(), type=dict[str, DataRecord])
    except (OSError, msgspec.MsgspecError) as exc:
        raise CheckpointError(f"{path} cannot be read: {exc}") from exc
    for name, record in records.items():
        before = saved.get(name, record)
        if before == record or not before.digest or not record.digest:
            continue
        if record.num_records != before.num_records:
            counts = f"{record.num_records} instead of {before.num_records}"
        else:
            counts = f"{record.num_records} as before, with other contents"
        message = (
            f"{name}: the data are not those of checkpoint step_{step} ({counts}). Data that are drawn at every start need a seed, "
            "for example in the arguments of the environment"
        )
        if strict_key is not None:
            raise ResumeError(
                f"{message}; {key_name(strict_key)} = true refuses to go on: give the same data, or remove the key"
            )
        logger.warning("%s", message)
