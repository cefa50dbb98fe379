from pathlib import Path

import pytest

from trivet.config.compute_dtype import ChosenDtype, choose_dtype, read_choice, record_choice, settle_compute_dtype
from trivet.config.keys import value_at
from trivet.config.layout import RunLayout
from trivet.config.load import LoadedConfig, load_config
from trivet.config.schema.base import Section
from trivet.config.schema.inference import InferenceConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.sft import SftConfig
from trivet.config.schema.trainer import TrainerConfig
from trivet.config.schema.vf_rl import VfRLConfig
from trivet.dialects.vf_translation import load_run
from trivet.errors import ConfigError
from trivet.machine import Machine

AMX = Machine(gpus=(), num_cpus=2, cpu_flags=frozenset({"avx2", "avx512_bf16", "amx_bf16"}))
AVX2 = Machine(gpus=(), num_cpus=2, cpu_flags=frozenset({"avx2"}))
HOPPER = Machine(gpus=("0",), num_cpus=2, compute_capabilities=((9, 0),))
_GROUPS = ("--orchestrator.rollouts-per-example", "2")
TURING = Machine(gpus=("0",), num_cpus=2, compute_capabilities=((7, 5),))


TRAINED, SERVED = "trainer.model.compute_dtype", "inference.model.dtype"


def settled(
    kind: type[Section], *argv: str, machine: Machine = AVX2, output_dir: Path, does_record: bool = False
) -> LoadedConfig[Section]:
    words = [*(_GROUPS if kind is RLConfig else ()), *argv, "--output-dir", str(output_dir)]
    return settle_compute_dtype(load_config(kind, words, environ={}), machine=machine, does_record=does_record)


def dtypes(loaded: LoadedConfig[Section], *keys: str) -> list[object]:
    return [value_at(loaded.config, tuple(key.split("."))) for key in keys]


@pytest.mark.parametrize(
    ("machine", "is_on_gpu", "expected"),
    [
        (AMX, False, "bfloat16"),
        (AVX2, False, "float32"),
        (HOPPER, True, "bfloat16"),
        (TURING, True, "float32"),
        (Machine(gpus=("0", "1"), num_cpus=2, compute_capabilities=((9, 0), (7, 5))), True, "float32"),
        (Machine(gpus=("0",), num_cpus=2), True, "bfloat16"),
    ],
)
def test_the_dtype_is_what_the_device_multiplies_fast(machine: Machine, is_on_gpu: bool, expected: str) -> None:
    assert choose_dtype(machine, is_on_gpu=is_on_gpu).dtype == expected


def test_a_limit_of_the_environment_is_named() -> None:
    limited = Machine(gpus=(), num_cpus=2, cpu_flags=AMX.cpu_flags, max_cpu_isa="AVX2")
    assert choose_dtype(limited, is_on_gpu=False) == ChosenDtype(
        dtype="float32", reason="this CPU has no instructions for bfloat16 products that ONEDNN_MAX_CPU_ISA=AVX2 allows"
    )


def test_both_roles_of_a_run_get_one_dtype_and_its_reason(tmp_path: Path) -> None:
    loaded = settled(RLConfig, output_dir=tmp_path)
    assert dtypes(loaded, TRAINED, SERVED) == ["float32", "float32"]
    for key in (TRAINED, SERVED):
        assert loaded.origins[key] == "auto: this CPU has no instructions for bfloat16 products"


@pytest.mark.parametrize(
    ("words", "machine", "expected"),
    [
        (["--deterministic", "true"], AMX, ["float32", "float32"]),
        (["--deterministic", "true"], TURING, ["float32", "float32"]),
        (["--deterministic", "true"], HOPPER, ["bfloat16", "bfloat16"]),
        (["--trainer.device", "cpu"], HOPPER, ["float32", "float32"]),
    ],
)
def test_a_run_on_a_cpu_computes_in_float32_where_it_must_and_one_on_a_gpu_in_that_gpus_dtype(
    words: list[str], machine: Machine, expected: list[str], tmp_path: Path
) -> None:
    assert dtypes(settled(RLConfig, *words, machine=machine, output_dir=tmp_path), TRAINED, SERVED) == expected


@pytest.mark.parametrize(("machine", "expected"), [(HOPPER, "auto"), (AVX2, "float32")])
def test_a_teacher_on_a_gpu_keeps_the_choice_of_vllm(machine: Machine, expected: str, tmp_path: Path) -> None:
    teacher = ("--teacher-inference.model.name", "org/teacher", "--orchestrator.teacher-model.model.name", "org/teacher")
    loaded = settled(RLConfig, *teacher, "--teacher-gpu-ids", "[0]", machine=machine, output_dir=tmp_path)
    assert dtypes(loaded, "teacher_inference.model.dtype") == [expected]


def test_a_dtype_that_is_set_stays_and_is_called_slow_where_it_is(tmp_path: Path) -> None:
    loaded = settled(SftConfig, "--model.compute-dtype", "bfloat16", output_dir=tmp_path)
    assert dtypes(loaded, "model.compute_dtype") == ["bfloat16"]
    (notice,) = loaded.notices
    assert notice.startswith("computing in bfloat16 is slow on this machine: this CPU has no instructions")
    assert not settled(SftConfig, "--model.compute-dtype", "float32", machine=AMX, output_dir=tmp_path).notices


def test_a_server_of_another_dtype_is_said(tmp_path: Path) -> None:
    loaded = settled(RLConfig, "--max-steps", "1", "--inference.model.dtype", "float16", output_dir=tmp_path)
    differs = f"{SERVED} (float16) differs from that of {TRAINED} (float32)"
    assert any(differs in notice for notice in loaded.notices)


def test_a_resumed_run_keeps_the_dtype_that_it_began_with(tmp_path: Path) -> None:
    begun = settled(RLConfig, machine=AMX, output_dir=tmp_path)
    assert isinstance(begun.config, RLConfig)
    record_choice(RunLayout(tmp_path), begun.config)
    resumed = settled(RLConfig, "--ckpt.resume-step", "-1", output_dir=tmp_path)
    assert dtypes(resumed, TRAINED) == ["bfloat16"]
    assert any("slow on this machine" in notice for notice in resumed.notices)
    assert dtypes(settled(RLConfig, output_dir=tmp_path), TRAINED) == ["float32"], "a run that begins anew chooses anew"


def test_of_roles_started_by_hand_the_first_chooses(tmp_path: Path) -> None:
    server = settled(InferenceConfig, machine=AMX, output_dir=tmp_path, does_record=True)
    trainer = settled(TrainerConfig, output_dir=tmp_path, does_record=True)
    assert dtypes(server, "model.dtype") == dtypes(trainer, "model.compute_dtype") == ["bfloat16"]
    assert any("slow on this machine" in notice for notice in trainer.notices)
    assert [path.name for path in tmp_path.iterdir()] == [RunLayout(tmp_path).compute_dtype.name], "nothing else is left"


def test_a_role_with_a_dtype_of_its_own_is_told_of_the_others(tmp_path: Path) -> None:
    settled(InferenceConfig, output_dir=tmp_path, does_record=True)
    trainer = settled(TrainerConfig, "--model.compute-dtype", "bfloat16", machine=AMX, output_dir=tmp_path, does_record=True)
    (notice,) = trainer.notices
    assert notice.startswith("model.compute_dtype (bfloat16) differs from that of the run in")


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    settled(InferenceConfig, output_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_record_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    RunLayout(tmp_path).compute_dtype.write_text("float64")
    with pytest.raises(ConfigError, match="does not say which dtype the run computes in"):
        read_choice(RunLayout(tmp_path).compute_dtype)


@pytest.mark.parametrize(("bf16", "expected"), [((), "auto"), (("true",), "bfloat16"), (("false",), "float32")])
def test_vf_rl_chooses_too_unless_it_is_told(bf16: tuple[str, ...], expected: str) -> None:
    said = [word for value in bf16 for word in ("--trainer.args.bf16", value)]
    argv = ["--model", "m", "--env.id", "reverse-text", "--inference.gpus", "1", "--trainer.gpus", "1", *said]
    run = load_run(load_config(VfRLConfig, argv, environ={}), environ={}).config
    assert run.trainer.model.compute_dtype == expected
