"""A run is read from its files, while it goes on and after."""

import json
from pathlib import Path

import msgspec
import pytest

from support.made_run import STEPS, make_run
from support.tiny_models import publish_tiny_model
from trivet.config.layout import RunLayout
from trivet.errors import ConfigError, HistoryError, WeightsError
from trivet.library.run import Run, StepReader
from trivet.telemetry.metrics import MetricsWriter
from trivet.weights.publish import publish
from trivet.weights.retention import LiveReaders
from trivet.wire.versions import PolicyVersion


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return RunLayout(tmp_path)


def write(layout: RunLayout, role: str, steps: range, *, at: float = 100.0, resume_step: int = 10**6, **values: float) -> None:
    writer = MetricsWriter(layout.metrics / f"{role}.jsonl", resume_step=resume_step, clock=lambda: at)
    for step in steps:
        writer.write(step, values)
    writer.close()


def test_a_step_is_read_once_and_only_when_both_roles_have_finished_it(layout: RunLayout) -> None:
    reader = StepReader(layout)
    assert reader.read_new() == []
    write(layout, "orchestrator", range(1, 4), **{"reward/mean": 0.5})
    assert reader.read_new() == []
    write(layout, "trainer", range(1, 3), **{"loss/mean": 2.0})
    assert [(step.number, step.reward, step.loss) for step in reader.read_new()] == [(1, 0.5, 2.0), (2, 0.5, 2.0)]
    assert reader.read_new() == []
    write(layout, "trainer", range(3, 4))
    assert [step.number for step in reader.read_new()] == [3]


def test_a_step_that_is_taken_again_after_a_failure_is_not_read_again(layout: RunLayout) -> None:
    reader = StepReader(layout)
    for role in ("orchestrator", "trainer"):
        write(layout, role, range(1, 6))
    assert [step.number for step in reader.read_new()] == [1, 2, 3, 4, 5]
    for role in ("orchestrator", "trainer"):
        write(layout, role, range(4, 8), resume_step=3, again=1.0)
    assert [step.number for step in reader.read_new()] == [6, 7]
    assert [(step.number, "again" in step.metrics) for step in StepReader(layout).read_new()][2:5] == [
        (3, False),
        (4, True),
        (5, True),
    ]


def test_steps_of_an_earlier_start_are_left_out(layout: RunLayout) -> None:
    for role in ("orchestrator", "trainer"):
        write(layout, role, range(1, 4), at=50.0)
        write(layout, role, range(4, 5), at=150.0)
    assert [step.number for step in StepReader(layout, since=100.0).read_new()] == [4]


def test_supervised_fine_tuning_has_one_role_and_no_reward(layout: RunLayout) -> None:
    reader = StepReader(layout)
    assert reader.read_new() == []  # nothing says yet what kind of run it is
    write(layout, "sft", range(1, 3), **{"loss/mean": 1.5})
    steps = reader.read_new()
    assert [(step.loss, step.rollouts) for step in steps] == [(1.5, []), (1.5, [])]
    with pytest.raises(HistoryError, match="step 1 has no metric reward/mean; it has: loss/mean, time"):
        _ = steps[0].reward


def test_damaged_lines_are_passed_over(layout: RunLayout) -> None:
    write(layout, "sft", range(1, 2))
    with (layout.metrics / "sft.jsonl").open("ab") as file:
        file.write(b'{"step": \n[]\n{"time": 3.0}\n{"step": 2, "time": 100.0}\n{"step": 3')
    assert [step.number for step in StepReader(layout).read_new()] == [1, 2]


def test_a_finished_run_has_rollouts_policies_and_a_status(layout: RunLayout) -> None:
    make_run(layout)
    for role in ("orchestrator", "trainer"):
        write(layout, role, range(1, STEPS + 1))
    run = Run(layout.root)
    assert [step.number for step in run.steps] == list(range(1, STEPS + 1))
    rollouts = run.steps[0].rollouts
    assert rollouts
    assert [rollout.text for rollout in rollouts] == [
        "\n".join(message["content"] for message in rollout.completion if message["role"] == "assistant")
        for rollout in rollouts
    ]
    assert run.policies == sorted(run.policies, key=lambda policy: policy.version)
    assert run.policy.version == STEPS
    assert run.status.state == "done"
    with pytest.raises(ConfigError, match="holds no run"):
        Run(layout.root / "weights")


def test_damaged_rollouts_are_said(layout: RunLayout) -> None:
    for role in ("orchestrator", "trainer"):
        write(layout, role, range(1, 2))
    directory = layout.rollouts_step(1)
    directory.mkdir(parents=True)
    (directory / "rollouts.jsonl").write_bytes(msgspec.json.encode({"reward": 1.0}) + b"\n{")
    with pytest.raises(HistoryError, match="is damaged"):
        _ = StepReader(layout).read_new()[0].rollouts


def test_a_saved_policy_is_whole_and_nothing_but_the_policy(layout: RunLayout, tmp_path: Path) -> None:
    layout.metrics.mkdir()
    layout.readers.mkdir(parents=True)
    publish_tiny_model(layout, version=2)
    publish_tiny_model(layout, version=5)
    run = Run(layout.root)
    saved = run.policy.save(tmp_path / "saved")
    assert {path.name for path in saved.iterdir()} == {
        path.name for path in layout.weights_step(5).iterdir() if path.name not in ("STABLE", "manifest.json")
    }
    assert LiveReaders(layout).versions() == {}
    with pytest.raises(WeightsError, match="exists already"):
        run.policy.save(saved)
    weights = layout.weights_step(2) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(WeightsError, match="is not what was published"):
        run.policies[0].save(tmp_path / "other")
    assert {path.name for path in tmp_path.iterdir() if "other" in path.name} == set()


def test_a_run_without_a_policy_says_when_there_will_be_one(layout: RunLayout) -> None:
    layout.metrics.mkdir()
    with pytest.raises(WeightsError, match="the first is published after step 1"):
        _ = Run(layout.root).policy


def test_a_saved_adapter_names_its_base_for_every_working_directory(
    layout: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base").mkdir()
    layout.metrics.mkdir()
    for version, base in ((1, "base"), (2, "owner/name")):

        def write(directory: Path, base: str = base) -> None:
            (directory / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base, "r": 8}))

        publish(layout, version=PolicyVersion(version), run_id="r", write=write)
    saved = [policy.save(tmp_path / f"saved-{policy.version}") for policy in Run(layout.root).policies]
    configs = [json.loads((directory / "adapter_config.json").read_text()) for directory in saved]
    assert configs == [
        {"base_model_name_or_path": str(tmp_path / "base"), "r": 8},
        {"base_model_name_or_path": "owner/name", "r": 8},
    ]
