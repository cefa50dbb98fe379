"""Replaces the dtype `auto` by the dtype in which a run computes and serves. `config.command` calls it before a command's checks.

A run chooses once and records the choice in its output directory. A resumed run keeps it. If roles are started by hand, perhaps on
different machines, the first one chooses for all.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import msgspec

from trivet.config.keys import value_at
from trivet.config.layout import RunLayout
from trivet.config.load import LoadedConfig, SectionT
from trivet.config.schema.base import Section
from trivet.config.schema.inference import InferenceConfig
from trivet.config.schema.model import Dtype
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.sft import SftConfig
from trivet.config.schema.trainer import TrainerConfig, TrainingConfig
from trivet.errors import ConfigError
from trivet.key_names import key_name
from trivet.machine import Machine
from trivet.storage.durable import DECODE_ERRORS, write_first, write_json_atomically

AUTO = "auto"
_FIRST_BF16_CAPABILITY = (8, 0)
"""Ampere: the first GPUs that multiply bfloat16."""
_DTYPE_KEYS: Mapping[type[Section], tuple[str, ...]] = {
    RLConfig: ("trainer.model.compute_dtype", "inference.model.dtype", "teacher_inference.model.dtype"),
    TrainerConfig: ("model.compute_dtype",),
    SftConfig: ("model.compute_dtype",),
    InferenceConfig: ("model.dtype",),
}
"""The keys that hold a dtype, by configuration. The first one is the dtype that counts for the run."""
_SERVER_KEY = "inference.model.dtype"
_TEACHER_PREFIX = "teacher_inference."
"""The keys of the teacher's server. On a GPU it keeps `auto`, vLLM's own choice: no other process computes with its weights."""


class ChosenDtype(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `RunLayout.compute_dtype`."""

    dtype: Dtype
    reason: str
    """Why this dtype was chosen, as a clause for the user."""


_DETERMINISTIC_ON_CPU = ChosenDtype(dtype="float32", reason="deterministic = true, on a CPU")
"""The choice for a deterministic run on a CPU: whether bfloat16 products give equal bytes twice there was never tested."""


def choose_dtype(machine: Machine, *, is_on_gpu: bool) -> ChosenDtype:
    """Return bfloat16 if this machine multiplies it in hardware, or if its GPU is unknown; else float32."""
    if not is_on_gpu:
        if found := machine.bf16_instructions:
            return ChosenDtype(dtype="bfloat16", reason=f"this CPU has {', '.join(found)}")
        limit = f" that ONEDNN_MAX_CPU_ISA={machine.max_cpu_isa} allows" if machine.max_cpu_isa else ""
        return ChosenDtype(dtype="float32", reason=f"this CPU has no instructions for bfloat16 products{limit}")
    if not machine.compute_capabilities:
        return ChosenDtype(dtype="bfloat16", reason="the driver does not say the GPU's compute capability")
    major, minor = lowest = min(machine.compute_capabilities)
    if lowest >= _FIRST_BF16_CAPABILITY:
        return ChosenDtype(dtype="bfloat16", reason=f"the GPU has compute capability {major}.{minor}")
    return ChosenDtype(dtype="float32", reason=f"a GPU has compute capability {major}.{minor}, and bfloat16 needs 8.0")


def settle_compute_dtype(loaded: LoadedConfig[SectionT], *, machine: Machine, does_record: bool) -> LoadedConfig[SectionT]:
    """Replace every `auto` in `loaded`. Add a notice if this machine is slow in the chosen dtype, or if two dtypes differ.

    Args:
        does_record: True if a role that was started by hand writes its choice to the output directory, for the other roles.
    """
    config, notices = loaded.config, list(loaded.notices)
    keys = {key: value_at(config, tuple(key.split("."))) for key in _DTYPE_KEYS.get(type(config), ())}
    dtypes = {key: value for key, value in keys.items() if value is not None}
    if not dtypes:
        return loaded
    key, configured = next(iter(dtypes.items()))
    trainer = config.trainer if isinstance(config, RLConfig) else config
    is_on_gpu = bool(machine.gpus) and not (isinstance(trainer, TrainingConfig) and trainer.device == "cpu")
    fastest, file = choose_dtype(machine, is_on_gpu=is_on_gpu), _choice_file(config)
    chosen = _DETERMINISTIC_ON_CPU if getattr(config, "deterministic", False) and not is_on_gpu else fastest
    if configured != AUTO:
        chosen = ChosenDtype(dtype=cast("Dtype", configured), reason="it is set")
    elif file is not None:
        chosen = read_choice(file) or chosen
    if does_record and file is not None and isinstance(config, TrainerConfig | InferenceConfig):
        try:
            write_first(file, msgspec.json.encode(chosen))
        except OSError as exc:
            raise ConfigError(f"output_dir {str(file.parent)!r} cannot be written: {exc.strerror}; choose another") from exc
        recorded = read_choice(file) or chosen
        if configured == AUTO:
            chosen = recorded
        elif configured != recorded.dtype:
            notices.append(_describe_difference(key, configured, f"the run in {file.parent}", recorded.dtype))
    served = dtypes.get(_SERVER_KEY, AUTO)
    if served not in (AUTO, chosen.dtype):
        notices.append(_describe_difference(_SERVER_KEY, served, key_name(key), chosen.dtype))
    if (chosen.dtype, fastest.dtype) == ("bfloat16", "float32"):
        notices.append(f"computing in bfloat16 is slow on this machine: {fastest.reason}; float32 is faster")
    automatic = [key for key, dtype in dtypes.items() if dtype == AUTO and not (is_on_gpu and key.startswith(_TEACHER_PREFIX))]
    return replace(
        loaded,
        config=_with_values(config, dict.fromkeys(automatic, chosen.dtype)),
        origins={**loaded.origins, **dict.fromkeys(automatic, f"auto: {chosen.reason}")},
        notices=tuple(notices),
    )


def _describe_difference(key: str, dtype: object, other: str, other_dtype: str) -> str:
    """Return the notice that the dtype of `key` is another than that of `other`, a key or a run."""
    difference = f"{key_name(key)} ({dtype}) differs from that of {other} ({other_dtype})"
    return f"{difference}: their log-probabilities will differ by rounding"


def describe_dtype(dtype: str, machine: Machine, *, is_on_gpu: bool) -> str:
    """Return `dtype` with a remark on its speed on this machine, for the first line of a log."""
    fastest = choose_dtype(machine, is_on_gpu=is_on_gpu)
    if dtype == fastest.dtype:
        return f"{dtype} ({fastest.reason})"
    return f"{dtype} (here {fastest.dtype} would be faster: {fastest.reason})"


def read_choice(file: Path) -> ChosenDtype | None:
    """Return the choice recorded in `file`, or None if the file does not exist. Raises a ConfigError if it holds something else."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=ChosenDtype)
    except FileNotFoundError:
        return None
    except (OSError, *DECODE_ERRORS) as exc:
        raise ConfigError(f"{file} does not say which dtype the run computes in ({exc}); remove it") from exc


def record_choice(layout: RunLayout, config: RLConfig | SftConfig) -> None:
    """Record the dtype of a run that starts or resumes in `layout`. No key of `config` is `auto` any more."""
    model = config.trainer.model if isinstance(config, RLConfig) else config.model
    choice = ChosenDtype(dtype=cast("Dtype", model.compute_dtype), reason="the run began so")
    write_json_atomically(layout.compute_dtype, choice)


def _choice_file(config: Section) -> Path | None:
    """Return the file with the choice that `config` must follow, of the resumed run or of the other roles. None if it is free."""
    if isinstance(config, RLConfig | SftConfig):
        ckpt = config.trainer.ckpt if isinstance(config, RLConfig) else config.ckpt
        is_resumed = ckpt.resume_step is not None and ckpt.resume_from is None
        return RunLayout(config.output_dir).compute_dtype if is_resumed else None
    assert isinstance(config, TrainerConfig | InferenceConfig)
    is_alone = config.bench is not None if isinstance(config, TrainerConfig) else config.is_teacher
    return None if is_alone else RunLayout(config.output_dir).compute_dtype


def _with_values(section: SectionT, values: Mapping[str, str]) -> SectionT:
    """Return a copy of `section` in which the dotted keys of `values` have these values."""
    update: dict[str, object] = {}
    for name in {key.partition(".")[0] for key in values}:
        inner_values = {key.partition(".")[2]: value for key, value in values.items() if key.partition(".")[0] == name}
        inner = getattr(section, name)
        update[name] = _with_values(inner, inner_values) if isinstance(inner, Section) else inner_values[""]
    return section.model_copy(update=update)
