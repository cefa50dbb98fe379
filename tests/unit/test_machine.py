import getpass
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from trivet.errors import ConfigError
from trivet.launcher.commands.trainer import count_ranks
from trivet.machine import (
    Heap,
    Machine,
    compile_cache_directory,
    inspect_machine,
    make_private_directory,
    select_capabilities,
    select_visible_gpus,
)


@pytest.mark.parametrize(
    ("visible", "num_installed", "expected"),
    [
        (None, 2, ("0", "1")),
        (None, 0, ()),
        ("", 2, ()),
        ("-1", 2, ()),
        ("1", 2, ("1",)),
        ("3, 1", 4, ("3", "1")),
        ("0,9,1", 2, ("0",)),
        ("GPU-8f3e,MIG-1", 1, ("GPU-8f3e", "MIG-1")),
        ("0", 0, ()),
    ],
)
def test_the_variable_of_cuda_limits_and_orders_the_gpus(
    visible: str | None, num_installed: int, expected: tuple[str, ...]
) -> None:
    assert select_visible_gpus(visible, num_installed=num_installed) == expected


def test_ranks_are_one_per_gpu_or_one() -> None:
    two_gpus, laptop = Machine(gpus=("0", "1"), num_cpus=8), Machine(gpus=(), num_cpus=2)
    assert count_ranks(two_gpus, device="auto", num_ranks=None) == 2
    assert count_ranks(two_gpus, device="cpu", num_ranks=None) == 1
    assert count_ranks(laptop, device="auto", num_ranks=None) == 1
    assert count_ranks(laptop, device="auto", num_ranks=2) == 2


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_ranks \(3\) must be at most the 2 GPU"):
        count_ranks(Machine(gpus=("0", "1"), num_cpus=8), device="cuda", num_ranks=3)


def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="shows no GPU"):
        count_ranks(Machine(gpus=(), num_cpus=2), device="cuda", num_ranks=None)


def test_capabilities_are_those_of_the_visible_gpus() -> None:
    installed = [(9, 0), (7, 5)]
    assert select_capabilities(("0",), installed=installed) == ((9, 0),)
    assert select_capabilities(("1", "0"), installed=installed) == ((7, 5), (9, 0))
    assert select_capabilities(("GPU-8f3e",), installed=installed) == ((9, 0), (7, 5)), "any of them may be meant"
    assert select_capabilities(("0",), installed=[]) == ()


@pytest.mark.parametrize(
    ("architecture", "flags", "limit", "expected"),
    [
        ("x86_64", {"avx2"}, "", ()),
        ("x86_64", {"avx2", "avx512f", "avx512bw"}, "", ()),
        ("x86_64", {"avx2", "avx512_bf16"}, "", ("avx512_bf16",)),
        ("x86_64", {"avx512_bf16", "amx_bf16"}, "", ("amx_bf16", "avx512_bf16")),
        ("x86_64", {"avx512_bf16", "amx_bf16"}, "AVX2", ()),
        ("x86_64", {"avx512_bf16", "amx_bf16"}, "AVX512_CORE_VNNI", ()),
        ("x86_64", {"avx512_bf16", "amx_bf16"}, "AVX512_CORE_AMX", ("amx_bf16", "avx512_bf16")),
        ("x86_64", {"avx512_bf16"}, "DEFAULT", ("avx512_bf16",)),
        ("aarch64", {"asimd", "bf16"}, "", ("bf16",)),
        ("aarch64", {"asimd"}, "", ()),
    ],
)
def test_bf16_counts_where_torch_multiplies_it_natively(
    architecture: str, flags: set[str], limit: str, expected: tuple[str, ...]
) -> None:
    machine = Machine(gpus=(), num_cpus=2, architecture=architecture, cpu_flags=frozenset(flags), max_cpu_isa=limit)
    assert machine.bf16_instructions == expected


_PRODUCT = """
import json, torch
from trivet.machine import inspect_machine
left, right = torch.ones(256, 256, dtype=torch.bfloat16), torch.ones(256, 256, dtype=torch.bfloat16)
left @ right
print(json.dumps(list(inspect_machine().bf16_instructions)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("limit", [None, "AVX2", "avx512_core_vnni"])
def test_the_answer_is_what_torch_does_with_a_product(limit: str | None) -> None:
    """oneDNN reports which kernel it ran: one for AMX or AVX512-BF16, or an emulation. Without oneDNN torch has no such
    kernel."""
    environ = {name: value for name, value in os.environ.items() if not name.endswith("_MAX_CPU_ISA")}
    environ |= {"ONEDNN_VERBOSE": "1", **({"ONEDNN_MAX_CPU_ISA": limit} if limit else {})}
    output = subprocess.run(
        [sys.executable, "-c", _PRODUCT], env=environ, capture_output=True, text=True, check=True, timeout=120
    ).stdout
    *log, answer = output.splitlines()
    kernels = " ".join(line for line in log if ",matmul," in line)
    is_native = "amx" in kernels or "avx512_core_bf16" in kernels or "avx10" in kernels
    assert bool(json.loads(answer)) == is_native, kernels


def test_this_machine_can_be_inspected() -> None:
    machine = inspect_machine({})
    assert machine.num_cpus >= 1
    assert machine.max_cpu_isa == ""
    assert machine.cpu_flags, "no processor is without flags"


def test_code_compiled_for_one_instruction_set_is_not_found_under_another(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compile_cache_directory({}) == compile_cache_directory({})
    assert compile_cache_directory({}) != compile_cache_directory({"ATEN_CPU_CAPABILITY": "avx2"})
    here = compile_cache_directory({})
    monkeypatch.setattr("trivet.machine._read_cpu_flags", lambda: frozenset({"avx2"}))
    assert compile_cache_directory({}) != here


def test_a_user_without_a_name_has_a_cache_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> NoReturn:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(getpass, "getuser", fail)
    assert f"torchinductor_uid_{os.getuid()}_" in str(compile_cache_directory({}))


def test_the_directory_of_compiled_code_is_of_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    directory = compile_cache_directory({})
    assert directory.parent == tmp_path
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    directory.chmod(0o777)
    assert stat.S_IMODE(compile_cache_directory({}).stat().st_mode) == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="gives a directory to another user")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, 65534, 65534)
    with pytest.raises(ConfigError, match="belongs to another user"):
        make_private_directory(theirs)


def test_a_link_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="TORCHINDUCTOR_CACHE_DIR"):
        make_private_directory(tmp_path / "link")
    assert compile_cache_directory({"TORCHINDUCTOR_CACHE_DIR": "/mine"}) == Path("/mine")


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([1000 + 10 * step for step in range(60)], [59]),
        ([1000, 1200, 1100, 1000, 1200] * 30, []),
        ([1000] * 30 + [3000] * 70, [39, 59, 79, 99]),
    ],
    ids=["grows from step to step", "stays", "needs more from step 30 on: once in twenty steps"],
)
def test_the_heap_is_trimmed_when_it_has_grown_by_a_quarter(
    sizes: list[int], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    trims, now = list[int](), 0
    monkeypatch.setattr("trivet.machine.resident_bytes", lambda: 1000 if now in trims else sizes[now])
    monkeypatch.setattr("trivet.machine.trim_heap", lambda: trims.append(now))
    heap = Heap()
    for now in range(len(sizes)):  # noqa: B007  read by the heap's functions
        heap.trim_if_grown()
    assert trims == expected


def test_free_memory_goes_back_although_glibc_was_told_to_keep_it() -> None:
    program = (
        "from trivet.machine import resident_bytes, trim_heap\n"
        "kept = [bytearray(4096 * 25) for _ in range(4000)]\n"
        "del kept[::2]; before = resident_bytes(); trim_heap(); print(before - resident_bytes())"
    )
    settings = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "34359738368", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | settings, check=True, capture_output=True, text=True
    )
    assert int(done.stdout) > 150 * 2**20, "2,000 buffers of 100 KiB between others"
