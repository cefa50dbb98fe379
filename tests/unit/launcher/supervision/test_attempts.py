import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from trivet.checkpoints.commit import ORCHESTRATOR, PARTS, begin_part, commit, finish_part, staging_directory
from trivet.checkpoints.run_record import read_run
from trivet.checkpoints.settings import write_settings
from trivet.config.layout import RunLayout
from trivet.config.load import load_config
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.shared import RunIdentity
from trivet.config.schema.trainer import TrainerConfig
from trivet.errors import CheckpointError
from trivet.launcher.logs import RunLog
from trivet.launcher.plan import Ports, RecoveryUnit, plan
from trivet.launcher.run_directory import RunDirectory, Scratch
from trivet.launcher.supervision.attempts import Attempts
from trivet.machine import Machine
from trivet.telemetry.events import EventWriter, read_events
from trivet.wire.events import Restart, Stop
from trivet.wire.versions import Step

MAX_STEPS = 9


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return RunLayout(tmp_path / "outputs")


@pytest.fixture
def log(tmp_path: Path) -> Iterator[RunLog]:
    with (tmp_path / "rl.log").open("a") as file:
        yield RunLog(sys.stdout, file)


@pytest.fixture
def attempts(layout: RunLayout) -> Iterator[Attempts]:
    """Make a fresh run whose first attempt has begun."""
    output_dir = str(layout.root)
    roles: dict[str, dict[str, object]] = {
        role: {"output_dir": output_dir, "max_steps": MAX_STEPS} for role in ("trainer", "orchestrator")
    }
    roles["orchestrator"] |= {"batch_size": 8, "rollouts_per_example": 4}
    config = RLConfig.model_validate({"output_dir": output_dir, "max_steps": MAX_STEPS, **roles})
    with RunDirectory(layout) as directory, Scratch(layout.scratch_note) as scratch:
        attempts = Attempts(
            config=config,
            directory=directory,
            run=RunIdentity(id="r"),
            from_step=None,
            make_plan=lambda config, run, step: plan(
                config,
                machine=Machine(gpus=(), num_cpus=2),
                python=sys.executable,
                run=run,
                ports=Ports(inference=8001, transport=5556),
                resume_step=step,
            ),
            scratch=scratch,
        )
        attempts.begin()
        EventWriter(layout.events, role="trainer", attempt=1).close()
        yield attempts


def write_commit(layout: RunLayout, step: int) -> None:
    for name in PARTS:
        (begin_part(layout, Step(step), name) / "state").write_text(name)
        finish_part(layout, Step(step), name)
    commit(layout, Step(step))


def read_configs(layout: RunLayout) -> tuple[OrchestratorConfig, TrainerConfig]:
    orchestrator = load_config(OrchestratorConfig, ["@", str(layout.configs / "orchestrator.toml")], environ={}).config
    trainer = load_config(TrainerConfig, ["@", str(layout.configs / "trainer.toml")], environ={}).config
    return orchestrator, trainer


def test_the_next_attempt_goes_back_to_the_newest_checkpoint(attempts: Attempts, layout: RunLayout, log: RunLog) -> None:
    write_commit(layout, 3)
    write_commit(layout, 6)
    server = (layout.configs / "inference.toml").read_text()
    attempts.begin_next(log)
    assert attempts.from_step == 6
    assert (layout.configs / "inference.toml").read_text() == server, "it keeps the configuration that it runs with"
    record = read_run(layout)
    assert record is not None
    assert (record.id, record.attempt) == ("r", 2)
    for config in read_configs(layout):
        assert (config.ckpt.resume_step, config.run.attempt, config.rollout_transport.port) == (6, 2, 5556)


def test_without_a_checkpoint_the_run_starts_again_and_keeps_its_history(
    attempts: Attempts, layout: RunLayout, log: RunLog
) -> None:
    attempts.record(Restart(roles=["trainer"], cause="test", from_step=Step(0)))
    attempts.begin_next(log)
    assert attempts.from_step is None
    assert [config.ckpt.resume_step for config in read_configs(layout)] == [None, None]
    assert [type(event) for event in read_events(layout.events)] == [Restart]


def test_what_the_failed_attempt_did_not_finish_is_cleared_away(attempts: Attempts, layout: RunLayout, log: RunLog) -> None:
    write_commit(layout, 3)
    (begin_part(layout, Step(6), ORCHESTRATOR) / "state").write_text("x")
    with layout.events.open("a") as file:
        file.write('{"event":"train","step":4')
    attempts.begin_next(log)
    assert not staging_directory(layout, Step(6)).exists()
    attempts.record(Restart(roles=["trainer"], cause="test", from_step=Step(3)))
    (event,) = read_events(layout.events)
    assert (event.role, event.attempt) == ("launcher", 2)


def test_a_damaged_checkpoint_is_passed_over_and_nothing_removed_when_none_is_whole(
    attempts: Attempts, layout: RunLayout, log: RunLog, tmp_path: Path
) -> None:
    write_commit(layout, 3)
    write_commit(layout, 6)
    (layout.checkpoint_step(6) / "trainer" / "state").write_text("altered")
    attempts.begin_next(log)
    assert attempts.from_step == 3
    assert "checkpoint of step 6 is passed over" in (tmp_path / "rl.log").read_text()
    (layout.checkpoint_step(3) / "trainer" / "state").write_text("altered")
    with pytest.raises(CheckpointError, match="none of the checkpoints of steps 3, 6 is whole"):
        attempts.begin_next(log)
    assert layout.checkpoint_step(3).exists()


def test_a_resume_says_by_which_settings_a_server_answers_otherwise(attempts: Attempts, layout: RunLayout) -> None:
    for name, config in zip((ORCHESTRATOR, "trainer"), read_configs(layout), strict=True):
        write_settings(begin_part(layout, Step(3), name), config)
        finish_part(layout, Step(3), name)
    commit(layout, Step(3))
    assert attempts.config.inference is not None
    server = attempts.config.inference.model_copy(update={"max_num_seqs": 4, "vllm_args": {"logits_processors": ["a:B"]}})
    resumed = Attempts(
        config=attempts.config.model_copy(update={"inference": server}),
        directory=attempts.directory,
        run=attempts.run.model_copy(update={"attempt": 2}),
        from_step=Step(3),
        make_plan=attempts.make_plan,
        scratch=attempts.scratch,
    )
    resumed.begin()
    (notice,) = resumed.notices
    assert 'inference.vllm_args.logits_processors was unset and is ["a:B"] now' in notice
    assert attempts.notices == []


def test_the_last_step_is_committed_once_its_checkpoint_is_there(attempts: Attempts, layout: RunLayout) -> None:
    assert (attempts.last_commit, attempts.is_last_step_committed) == (None, False)
    write_commit(layout, 3)
    assert (attempts.last_commit, attempts.is_last_step_committed) == (3, False)
    write_commit(layout, MAX_STEPS)
    assert attempts.is_last_step_committed


@pytest.mark.parametrize(
    ("without", "named"),
    [
        ((), "http://a/v1\nhttp://b/v1\n"),
        (("inference",), "http://b/v1\n"),
        (("inference-1", "training"), "http://a/v1\n"),
        (("inference", "inference-1"), "http://a/v1\nhttp://b/v1\n"),
    ],
)
def test_servers_that_failed_are_not_named_while_others_remain(
    attempts: Attempts, tmp_path: Path, without: tuple[str, ...], named: str
) -> None:
    urls = {RecoveryUnit("inference"): ("http://a/v1",), RecoveryUnit("inference-1"): ("http://b/v1",)}
    attempts.planned = replace(attempts.planned, servers_file=tmp_path / "servers", server_urls=urls)
    attempts.name_servers(without=[RecoveryUnit(name) for name in without])
    assert (tmp_path / "servers").read_text() == named


@pytest.mark.parametrize(
    ("role", "stop", "attempt", "expected"),
    [
        ("trainer", Stop(step=Step(MAX_STEPS), reason="done"), 1, True),
        ("trainer", Stop(step=Step(4), reason="done"), 1, False),
        ("trainer", Stop(step=Step(4), reason="exhausted"), 1, True),  # a replay, whose record is used up
        ("trainer", Stop(step=Step(MAX_STEPS), reason="done"), 2, False),
        ("orchestrator", Stop(step=Step(MAX_STEPS), reason="done"), 1, False),
    ],
)
def test_a_role_has_finished_when_it_recorded_the_last_step_in_this_attempt(
    attempts: Attempts, layout: RunLayout, role: str, stop: Stop, attempt: int, expected: bool
) -> None:
    writer = EventWriter(layout.events, role=role, attempt=attempt)
    writer.write(stop)
    writer.close()
    assert attempts.has_completed("trainer") is expected
