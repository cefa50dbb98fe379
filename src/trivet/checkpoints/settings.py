"""Keeps the configuration and a digest of the data in each part of a checkpoint, and compares both when a run is resumed.

A key that MAY_CHANGE does not list may change the results, so a run is resumed only with the same value.
"""

import logging
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from trivet.config.dump import literal, to_toml
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
"""The value before and the value now, by dotted key; None: unset."""
Values = Mapping[str, Any]
"""Values by dotted key. Keys that are unset are missing."""

_POSITION = re.compile(r"\.\d+(?=\.)")
"""The position of a table in a list, as `flatten` writes it into a dotted key."""
_LEARNING_RATE = "scheduler"
_SCHEDULES = (_LEARNING_RATE, "sampling.temp_scheduler", "env.*.sampling.temp_scheduler")
"""Sections of the roles that are schedules, with the keys `type` and `total_steps`."""

MAY_CHANGE = (
    *("run", "output_dir", "max_steps", "ckpt", "log", "wandb", "tracking", "heartbeat", "metrics_server"),
    *(
        "memory_profiler_path",
        "trace_path",
        "bench",
        "detectors",
        "faults",
        "rollout_transport",
        "env_nodes",
        "dist_timeout_seconds",
        "device",
    ),
    *("gpu_memory_utilization", "release_gpu_memory", "sleep_servers", "num_ranks", "weights", "micro_batch_tokens"),
    *("data.micro_batch_size", "data.pack_function", "data.record", "replay", "record_rollouts", "model.attn"),
    *("model.share_prefixes", "model.reshard_after_forward", "model.reduce_each_row", "model.ac", "model.ac_offloading"),
    *("model.fsdp_cpu_offload", "model.optim_cpu_offload", "model.dp_replicate", "model.cp", "model.ep"),
    *("model.experts_implementation", "model.dither", "model.fused_lm_head_chunk_size", "model.trust_remote_code"),
    *("eval", "val", "shown_samples", "strict_data"),
    *("tasks_per_minute", "workers_per_env", "env_start_timeout_s", "env_worker_timeout_s", "max_env_worker_restarts"),
    *("max_worker_memory", "env.*.venv", "env.*.env_vars", "rollout_timeout_s"),
    *("buffer.easy_fraction", "buffer.hard_fraction", "client", "teacher_model.client", "teacher_model.max_concurrent"),
    *("concurrency", "max_concurrent", "max_fruitless_batches", "reload_weights_on_start"),
)
"""Keys of any role that may change, with all keys below them: paths, ports, limits on time and memory, measurements and logs, when
to stop, and keys about resuming itself."""

_MEASUREMENTS = ("eval", "val")
"""Keys of MAY_CHANGE whose sections configure measurements."""
_MEASUREMENT_TIMES = (
    "eval.interval",
    "eval.env.*.interval",
    "eval.max_concurrent",
    "eval.eval_base_model",
    "eval.skip_eval_on_resume",
    "val.interval",
    "val.eval_on_start",
    *(f"eval.env.*.{name}" for name in ("venv", "env_vars")),
)
"""Keys of these sections that set when and in which process is measured, on which a score does not depend."""

SERVER_MAY_CHANGE = (
    *("run", "output_dir", "log", "faults", "name", "server", "parallel", "gpu_memory_utilization", "sleep_while_training"),
    *("cpu_kv_cache_gib", "weight_cache", "max_num_seqs", "enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank"),
    *("model.enforce_eager", "model.trust_remote_code"),
)
"""Keys of a server that do not change what it samples. The launcher compares the other keys with the server's last configuration
file, because checkpoints do not keep settings of servers, which stay up over a resume."""

EVERY_KEY = "*"
"""Entry of ckpt.allow_changes that allows every key. The roles of a fork are started with it."""


def write_settings(part: Path, config: Section) -> None:
    """Write `config` into a part that is not finished yet, without its secrets, which may change."""
    (part / CONFIG_FILE).write_text(to_toml(config, is_masked=True))


def require_same_settings(part: Path, config: Section, *, ckpt: CkptConfig, step: Step) -> None:
    """Refuse a `config` that differs from the settings under which the committed `part` of its role was made."""
    saved, now, defaults = read_settings(part / CONFIG_FILE), flatten_config(config), flatten_config(type(config)())
    continued_lengths = find_schedule_lengths(now, saved=saved)
    comparable = {key: value for key, value in (saved | find_schedule_lengths(saved)).items() if key not in continued_lengths}
    changed = find_changes(comparable, now, defaults=defaults, allowed=(*MAY_CHANGE, *ckpt.allow_changes))
    if changed and EVERY_KEY not in ckpt.allow_changes:
        lines = "".join(f"\n- {line}" for line in describe_changes(changed))
        raise ResumeError(
            f"checkpoint step_{step} was made by the {part.name} with other settings:{lines}\nSet them back, or name them in "
            f"{key_name('ckpt.allow_changes')} = {literal(list(changed))} to change them from step {step + 1} on"
        )


def read_settings(path: Path) -> dict[str, Any]:
    """Return the values of a role's configuration file, or of the one in a part, by dotted key and without secrets."""
    try:
        return flatten(mask_table(tomllib.loads(path.read_text())))
    except (OSError, tomllib.TOMLDecodeError) as exc:
        raise CheckpointError(f"{path} cannot be read: {exc}") from exc


def flatten_config(config: Section) -> dict[str, Any]:
    """Return the values of `config` by dotted key, as `read_settings` does: without secrets, and without keys that are unset."""
    return flatten(tomllib.loads(to_toml(config, is_masked=True)))


def find_changes(
    saved: Values, now: Values, *, defaults: Values, allowed: Iterable[str], among: Iterable[str] | None = None
) -> Changes:
    """Return the keys whose value differs from the saved one, with both values.

    Args:
        defaults: values of keys that are missing in `saved`, because they did not exist then or were unset.
        allowed: keys that are left out, with all below them; `env.*.venv` means that key of every environment.
        among: keys to which the comparison is limited, in the same way; None: all.
    """
    pairs = {key: (saved.get(key, defaults.get(key)), now.get(key)) for key in sorted({*saved, *now})}
    return {
        key: (old, new)
        for key, (old, new) in pairs.items()
        if old != new and not _is_below(key, allowed) and (among is None or _is_below(key, among))
    }


def find_schedule_lengths(values: Values, *, saved: Values | None = None) -> dict[str, int]:
    """Return, by dotted key, the total_steps of each schedule for which `values` sets none. Such a schedule ends at max_steps.

    Every checkpoint keeps the resulting step. So a run that is resumed with another max_steps continues the same schedule.

    Args:
        saved: values of the checkpoint to resume, whose schedule is continued if its type is the same; None: every schedule begins.
    """
    lengths: dict[str, int] = {}
    for key, kind in values.items():
        schedule, dot, name = key.rpartition(".")
        if f"{dot}{name}" != ".type" or _POSITION.sub(".*", f"{schedule}.").rstrip(".") not in _SCHEDULES or kind == "constant":
            continue
        length_key = f"{schedule}.total_steps"
        begins = saved is None or saved.get(key) != kind or (schedule == _LEARNING_RATE and values.get("ckpt.skip_scheduler"))
        source = values if begins or saved is None else saved
        length = source.get(length_key, source.get("max_steps"))
        if length_key not in values and length is not None:
            lengths[length_key] = length
    return lengths


def find_changed_measurements(saved: Values, now: Values, *, defaults: Values) -> Changes:
    """Return the changes, in measurements that the run had before and has now, that make scores incomparable."""
    continued = [
        name for name in _MEASUREMENTS if all(any(_is_below(key, (name,)) for key in values) for values in (saved, now))
    ]
    return find_changes(saved, now, defaults=defaults, allowed=_MEASUREMENT_TIMES, among=continued)


def describe_changes(changed: Changes) -> list[str]:
    """Return a text with both values for each key."""
    return [f"{key} was {_format_value(old)} and is {_format_value(new)} now" for key, (old, new) in changed.items()]


def _format_value(value: Any | None) -> str:
    return "unset" if value is None else literal(value)


def _is_below(key: str, sections: Iterable[str]) -> bool:
    """Return whether a dotted key is one of `sections` or below one of them, in which `*` stands for any position of a list."""
    names = (key, _POSITION.sub(".*", key))
    return any(name == section or name.startswith(f"{section}.") for section in sections for name in names)


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested tables by dotted key. A table in a list has its position as its name, such as `env.0.id`."""
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
    """Size and digest of one data set: of an environment, or of conversations for supervised fine-tuning."""

    num_records: int
    digest: str
    """Digest of the records in their order; empty if it is unknown."""


def write_data_record(part: Path, records: Mapping[str, DataRecord]) -> None:
    """Write `records`, by the user's name of each data set, into a part that is not finished yet."""
    (part / DATA_FILE).write_bytes(msgspec.json.encode(records))


def compare_data(part: Path, records: Mapping[str, DataRecord], *, step: Step, strict_key: str | None) -> None:
    """Log each data set that differs from its record in the committed `part`.

    New and missing data sets are not compared, because they change the settings too, which `require_same_settings` compares.

    Args:
        strict_key: the key by which the user has forbidden other data; None: other data are allowed.
    """
    path = part / DATA_FILE
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
