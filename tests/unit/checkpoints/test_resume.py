import json
from pathlib import Path

import pytest

from trivet.checkpoints.commit import (
    CHECKPOINT_SCHEMA,
    ORCHESTRATOR,
    PARTS,
    TRAINER,
    begin_part,
    commit,
    committed_steps,
    finish_part,
    verify_checkpoint,
)
from trivet.checkpoints.resume import adopt, choose_fork, choose_resume_step, choose_start
from trivet.checkpoints.settings import write_settings
from trivet.config.layout import COMMITTED, RunLayout
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.schema.trainer import TrainerConfig
from trivet.errors import CheckpointError, ConfigError, ResumeError
from trivet.wire.versions import Step

CONFIGS = {TRAINER: TrainerConfig, ORCHESTRATOR: OrchestratorConfig}


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path / "run")
    for step in (2, 4):
        write_checkpoint(layout, step)
    return layout


def write_checkpoint(layout: RunLayout, step: int, *, parts: tuple[str, ...] = PARTS) -> None:
    for name in parts:
        part = begin_part(layout, Step(step), name)
        (part / "state").write_text(f"{name} {step}")
        write_settings(part, CONFIGS[name]())
        finish_part(layout, Step(step), name)
    commit(layout, Step(step), parts=parts)


def trainer(layout: RunLayout, resume_step: int | None = -1, **values: object) -> TrainerConfig:
    return TrainerConfig.model_validate({"output_dir": layout.root, "ckpt": {"resume_step": resume_step}} | values)


def content_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_whole_checkpoint_under_the_same_settings_is_resumed(layout: RunLayout) -> None:
    assert choose_resume_step(trainer(layout)) == 4
    assert choose_resume_step(trainer(layout, 2)) == 2
    assert choose_resume_step(trainer(layout, None)) is None
    orchestrator = OrchestratorConfig.model_validate({"output_dir": layout.root, "ckpt": {"resume_step": -1}})
    assert choose_resume_step(orchestrator) == 4


@pytest.mark.parametrize("part", PARTS)
def test_a_trainer_looks_at_both_parts_before_it_removes_anything_later(layout: RunLayout, part: str) -> None:
    (layout.checkpoint_step(2) / part / "state").write_text("another thing")
    with pytest.raises(CheckpointError, match=f"{part}/state has 13 bytes"):
        choose_resume_step(trainer(layout, 2))
    assert committed_steps(layout) == [2, 4]


def test_another_schema_is_refused_with_both_versions_and_the_weights_to_start_from(layout: RunLayout) -> None:
    path = layout.checkpoint_step(4) / COMMITTED
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"schema": CHECKPOINT_SCHEMA + 1, "version": "9.0"}))
    with pytest.raises(CheckpointError, match=rf"schema {CHECKPOINT_SCHEMA + 1} \(trivet 9.0\).*weights/step_4'"):
        choose_resume_step(trainer(layout))
    path.write_text(json.dumps({name: record[name] for name in ("step", "time", "parts")}))
    with pytest.raises(CheckpointError, match="another version of trivet wrote it"):
        choose_resume_step(trainer(layout))


def test_a_checkpoint_without_the_roles_part_is_refused(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    write_checkpoint(layout, 3, parts=(TRAINER,))
    with pytest.raises(CheckpointError, match="has no part of the orchestrator"):
        choose_resume_step(OrchestratorConfig.model_validate({"output_dir": tmp_path, "ckpt": {"resume_step": 3}}))


def test_a_role_that_starts_anew_does_not_begin_over_committed_checkpoints(layout: RunLayout, tmp_path: Path) -> None:
    for kind in (TrainerConfig, OrchestratorConfig):
        with pytest.raises(ConfigError, match=r"holds the committed checkpoints .*ckpt\.resume_step = -1"):
            choose_start(kind(output_dir=layout.root))
        choose_start(kind(output_dir=tmp_path / "new"))


def test_a_role_alone_cannot_fork_and_a_run_is_no_fork_of_itself(layout: RunLayout) -> None:
    with pytest.raises(ResumeError, match="give it to `rl`, or to `sft`"):
        choose_resume_step(TrainerConfig.model_validate({"ckpt": {"resume_from": layout.root}}))
    with pytest.raises(ResumeError, match="is the run's own output_dir"):
        choose_fork(layout, source=layout.root, resume_step=2)


def test_a_fork_begins_with_the_others_checkpoint_and_leaves_it_as_it_is(layout: RunLayout, tmp_path: Path) -> None:
    fork = RunLayout(tmp_path / "fork")
    before = content_of(layout.root)
    assert choose_fork(fork, source=layout.root, resume_step=None) == 4
    step = choose_fork(fork, source=layout.root, resume_step=2)
    adopt(layout.root, step, into=fork)
    assert committed_steps(fork) == [2]
    assert verify_checkpoint(fork, step) == verify_checkpoint(layout, step)
    (fork.checkpoint_step(2) / TRAINER / "state").unlink()
    assert content_of(layout.root) == before


def test_a_fork_takes_the_policies_that_its_first_batch_needs(layout: RunLayout, tmp_path: Path) -> None:
    for version in (1, 2):
        layout.weights_step(version).mkdir(parents=True)
        (layout.weights_step(version) / "model.safetensors").write_text(f"policy {version}")
        (layout.weights_step(version) / "STABLE").touch()
    fork = RunLayout(tmp_path / "fork")
    adopt(layout.root, Step(2), into=fork, versions=range(2))
    assert [path.name for path in fork.weights.iterdir()] == ["step_1"]
    assert content_of(fork.weights_step(1)) == content_of(layout.weights_step(1))


def test_a_damaged_checkpoint_is_not_forked(layout: RunLayout, tmp_path: Path) -> None:
    (layout.checkpoint_step(4) / TRAINER / "state").write_text("another")
    with pytest.raises(CheckpointError, match="trainer/state"):
        choose_fork(RunLayout(tmp_path / "fork"), source=layout.root, resume_step=-1)
