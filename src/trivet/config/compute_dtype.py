"""Replaces the dtype `auto` by the one that a run computes in and serves. `config.command` calls it before a command's checks.

A run chooses once. The choice lies in its output directory: a resumed run keeps it, and of roles that are started by hand on
different machines the first one chooses for all.
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
_KEYS: Mapping[type[Section], tuple[str, ...]] = {
    RLConfig: ("trainer.model.compute_dtype", "inference.model.dtype", "teacher_inference.model.dtype"),
    TrainerConfig: ("model.compute_dtype",),
    SftConfig: ("model.compute_dtype",),
    InferenceConfig: ("model.dtype",),
}
"""The dtypes of each kind of configuration; the first says what the run computes in."""
_SERVED = "inference.model.dtype"
_TEACHER = "teacher_inference."
"""A teacher's server on a GPU keeps `auto`, which is vLLM's own choice: nobody computes with its weights but itself."""


class ChosenDtype(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `RunLayout.compute_dtype`."""

    dtype: Dtype
    reason: str
    """Why this dtype was chosen, as a clause for the user."""


_DETERMINISTIC_ON_CPU = ChosenDtype(dtype="float32", reason="deterministic = true, on a CPU")
"""Whether the CPU's products in bfloat16 give the same bytes twice was never tried. On a GPU `auto` stays what it is."""


def choose_dtype(machine: Machine, *, is_on_gpu: bool) -> ChosenDtype:
    """Return the dtype that this machine multiplies fastest, of those that train well."""
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
    """Replace every `auto` in `loaded`, and add a notice about a dtype in which this machine computes slowly.

    With `does_record`, a role that was started by hand writes its choice for the others to follow.
    """
    config, notices = loaded.config, list(loaded.notices)
    keys = {key: value_at(config, tuple(key.split("."))) for key in _KEYS.get(type(config), ())}
    dtypes = {key: value for key, value in keys.items() if value is not None}
    if not dtypes:
        return loaded
    key, computed = next(iter(dtypes.items()))
    trainer = config.trainer if isinstance(config, RLConfig) else config
    is_on_gpu = bool(machine.gpus) and not (isinstance(trainer, TrainingConfig) and trainer.device == "cpu")
    own, file = choose_dtype(machine, is_on_gpu=is_on_gpu), _record_of(config)
    chosen = _DETERMINISTIC_ON_CPU if getattr(config, "deterministic", False) and not is_on_gpu else own
    if computed != AUTO:
        chosen = ChosenDtype(dtype=cast("Dtype", computed), reason="it is set")
    elif file is not None:
        chosen = read_choice(file) or chosen
    others = [(_SERVED, dtypes.get(_SERVED, AUTO), key_name(key), chosen.dtype)]
    if does_record and file is not None and isinstance(config, TrainerConfig | InferenceConfig):
        try:
            write_first(file, msgspec.json.encode(chosen))
        except OSError as exc:
            raise ConfigError(f"output_dir {str(file.parent)!r} cannot be written: {exc.strerror}; choose another") from exc
        recorded = read_choice(file) or chosen
        if computed == AUTO:
            chosen = recorded
        else:
            others.insert(0, (key, computed, f"the run in {file.parent}", recorded.dtype))
    for name, dtype, other, other_dtype in others:
        if dtype not in (AUTO, other_dtype):
            notices.append(
                f"{key_name(name)} ({dtype}) differs from that of {other} ({other_dtype}): their log-probabilities will differ by"
                " rounding"
            )
    if (chosen.dtype, own.dtype) == ("bfloat16", "float32"):
        notices.append(f"computing in bfloat16 is slow on this machine: {own.reason}; float32 is faster")
    automatic = [key for key, dtype in dtypes.items() if dtype == AUTO and not (is_on_gpu and key.startswith(_TEACHER))]
    return replace(
        loaded,
        config=_with_values(config, dict.fromkeys(automatic, chosen.dtype)),
        origins={**loaded.origins, **dict.fromkeys(automatic, f"auto: {chosen.reason}")},
        notices=tuple(notices),
    )


def describe_dtype(dtype: str, machine: Machine, *, is_on_gpu: bool) -> str:
    """Return `dtype` and its speed on this machine in words, for the first line of a log."""
    own = choose_dtype(machine, is_on_gpu=is_on_gpu)
    return f"{dtype} ({own.reason})" if own.dtype == dtype else f"{dtype} (here {own.dtype} would be faster: {own.reason})"


def read_choice(file: Path) -> ChosenDtype | None:
    """Return the choice recorded in `file`, or None when there is none; a ConfigError if it holds something else."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=ChosenDtype)
    except FileNotFoundError:
        return None
    except (OSError, *DECODE_ERRORS) as exc:
        raise ConfigError(f"{file} does not say which dtype the run computes in ({exc}); remove it") from exc


def record_choice(layout: RunLayout, config: RLConfig | SftConfig) -> None:
    """Keep the settled dtype of a run that begins or goes on in `layout`."""
    model = config.trainer.model if isinstance(config, RLConfig) else config.model
    choice = ChosenDtype(dtype=cast("Dtype", model.compute_dtype), reason="the run began so")
    write_json_atomically(layout.compute_dtype, choice)


def _record_of(config: Section) -> Path | None:
    """Return the file whose choice `config` follows: of the run that it resumes, or of the roles that run with it."""
    if isinstance(config, RLConfig | SftConfig):
        ckpt = config.trainer.ckpt if isinstance(config, RLConfig) else config.ckpt
        is_resumed = ckpt.resume_step is not None and ckpt.resume_from is None
        return RunLayout(config.output_dir).compute_dtype if is_resumed else None
    assert isinstance(config, TrainerConfig | InferenceConfig)
    is_apart = config.bench is not None if isinstance(config, TrainerConfig) else config.is_teacher
    return None if is_apart else RunLayout(config.output_dir).compute_dtype


def _with_values(section: SectionT, values: Mapping[str, str]) -> SectionT:
    """Return a copy of `section` with other values at dotted keys."""
    update: dict[str, object] = {}
    for name in {key.partition(".")[0] for key in values}:
        below = {key.partition(".")[2]: value for key, value in values.items() if key.partition(".")[0] == name}
        inner = getattr(section, name)
        update[name] = _with_values(inner, below) if isinstance(inner, Section) else below[""]
    return section.model_copy(update=update)
