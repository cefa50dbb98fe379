"""Run the RL loop over a receiver with prepared batches, and check what it publishes, commits, reports and refuses."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from support.prepared_batches import make_batch, make_config, run_loop
from support.processes import find_free_port
from trivet.checkpoints.commit import committed_steps, read_record, verify_checkpoint
from trivet.config.layout import RunLayout
from trivet.config.schema.trainer import TrainerConfig
from trivet.errors import BatchError, ConfigError, DiskFull, Diverged, ResumeError, TrivetError
from trivet.telemetry.events import read_events
from trivet.trainer.loop import check_batch, run, use_experts
from trivet.trainer.main import open_receiver
from trivet.trainer.measurement.fake import fake_rows
from trivet.transport.recording import record_batch, recorded_steps
from trivet.weights.catalog import published_versions
from trivet.weights.manifest import verify
from trivet.wire.batches import Batch, BatchPurpose
from trivet.wire.events import Stop
from trivet.wire.experts import RoutedExperts
from trivet.wire.versions import Step


def metrics_of(layout: RunLayout) -> list[dict[str, float]]:
    return [json.loads(line) for line in (layout.metrics / "trainer.jsonl").read_text().splitlines()]


def test_a_run_publishes_commits_and_reports_every_step(tiny_model: Path, world, make_batches, tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    config = make_config(tiny_model, tmp_path, max_steps=4, max_async_level=1)
    receiver = run_loop(config, world, lambda: make_batches(layout, last=4, parts=(2, 4)))
    assert receiver.is_closed
    assert committed_steps(layout) == [2, 4]
    # 3 is within max_async_level of the newest, 2 belongs to a checkpoint; nobody needs 1.
    assert published_versions(layout) == [2, 3, 4]
    assert verify(layout.weights_step(4)).version == 4
    lines = metrics_of(layout)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    needed = {"loss/mean", "entropy/mean", "mismatch_kl/mean", "optim/lr", "optim/grad_norm", "perf/throughput"}
    assert needed | {"time/step", "time/wait_for_batch", "is_masked/mean"} <= lines[0].keys()
    names = [type(event).__name__ for event in read_events(layout.events)]
    assert names[:4] == ["Start", "ProbeCompared", "Train", "Publish"]
    assert names[-1] == "Stop"
    assert names.count("Commit") == 2
    assert names.count("Retire") == 1


def test_a_resumed_run_ends_with_the_weights_of_an_unbroken_one_and_has_the_same_reference(
    tiny_model: Path, world, make_batches, tmp_path: Path
) -> None:
    whole, broken = RunLayout(tmp_path / "whole"), RunLayout(tmp_path / "broken")
    loss = {"type": "grpo", "beta": 0.5, "reference_update_interval": 2}
    keys = {"loss": loss, "max_async_level": 0, "max_steps": 5}
    run_loop(make_config(tiny_model, whole.root, **keys), world, lambda: make_batches(whole, last=5))
    first = make_config(tiny_model, broken.root, **keys | {"max_steps": 4})
    run_loop(first, world, lambda: make_batches(broken, last=4, parts=(3,)))
    assert published_versions(broken) == [2, 3, 4], "2 is the reference of step 4, and was kept for it"
    (broken.weights_step(3) / "STABLE").unlink()
    resumed = make_config(tiny_model, broken.root, **keys, ckpt={"resume_step": -1}, run={"attempt": 2})

    def prepare() -> dict[int, Batch]:
        # Policy 4 of the first attempt is void. Policy 3, which the servers load first, is whole again.
        assert published_versions(broken) == [2, 3]
        return make_batches(broken, from_step=3, last=5)

    run_loop(resumed, world, prepare)
    assert verify(broken.weights_step(5)).digest == verify(whole.weights_step(5)).digest
    ours, theirs = metrics_of(broken), metrics_of(whole)
    assert [line["step"] for line in ours] == [1, 2, 3, 4, 5]
    for name in ("loss/mean", "ref_kl/mean", "optim/grad_norm", "progress/total_tokens"):
        assert [line[name] for line in ours] == [line[name] for line in theirs]
    assert theirs[3]["ref_kl/mean"] > 0.0


def test_several_iterations_update_several_times_on_one_batch(tiny_model: Path, world, make_batches, tmp_path: Path) -> None:
    once, twice = RunLayout(tmp_path / "once"), RunLayout(tmp_path / "twice")
    run_loop(make_config(tiny_model, once.root, max_steps=1), world, lambda: make_batches(once, last=1))
    run_loop(make_config(tiny_model, twice.root, max_steps=1, num_iterations=2), world, lambda: make_batches(twice, last=1))
    assert published_versions(twice) == [1]
    assert verify(twice.weights_step(1)).digest != verify(once.weights_step(1)).digest
    assert metrics_of(twice)[0]["mismatch_kl/mean"] != metrics_of(once)[0]["mismatch_kl/mean"]


@pytest.mark.parametrize(
    ("purpose", "reason"),
    [(BatchPurpose.PREEMPT, "preempted"), (BatchPurpose.END, "exhausted")],
    ids=["preempted", "at its end"],
)
def test_a_run_that_ends_early_commits_the_last_step(
    tiny_model: Path, world, make_batches, tmp_path: Path, purpose: BatchPurpose, reason: str
) -> None:
    layout = RunLayout(tmp_path)

    def prepare() -> dict[int, Batch]:
        batches = make_batches(layout, last=3, parts=(3,))
        batches[3].has_orchestrator_part = False  # it was not due; the part was written when the run was preempted
        return batches | {4: make_batch(4, [], purpose, has_part=True)}

    run_loop(make_config(tiny_model, tmp_path), world, prepare)
    assert committed_steps(layout) == [3]
    assert published_versions(layout)[-1] == 3
    stop = list(read_events(layout.events))[-1]
    assert isinstance(stop, Stop)
    assert (stop.step, stop.reason) == (3, reason)


def test_a_fresh_start_does_not_remove_an_earlier_runs_checkpoints(
    tiny_model: Path, world, make_batches, tmp_path: Path
) -> None:
    layout = RunLayout(tmp_path)
    config = make_config(tiny_model, tmp_path, max_steps=1)
    run_loop(config, world, lambda: make_batches(layout, last=1, parts=(1,)))
    with pytest.raises(ConfigError, match=r"set ckpt\.resume_step = -1"):
        run_loop(config, world, lambda: make_batches(layout, last=1))
    with pytest.raises(ResumeError, match="nothing is left to do"):
        run_loop(config.model_copy(update={"ckpt": config.ckpt.model_copy(update={"resume_step": -1})}), world, dict)
    assert committed_steps(layout) == [1]


def test_disagreement_with_the_server_ends_the_run_before_the_first_step(
    tiny_model: Path, world, make_batches, tmp_path: Path
) -> None:
    layout = RunLayout(tmp_path)

    def prepare() -> dict[int, Batch]:
        batches = make_batches(layout)
        batches[0].micro_batches[0].logprobs_T -= np.float32(1.0)
        return batches

    with pytest.raises(TrivetError, match="the start policy on server 1 of 1 is not the policy"):
        run_loop(make_config(tiny_model, tmp_path), world, prepare)
    assert published_versions(layout) == []
    assert metrics_of(layout) == []


def test_a_step_that_diverges_publishes_nothing(tiny_model: Path, world, make_batches, tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)

    def prepare() -> dict[int, Batch]:
        batches = make_batches(layout)
        batches[2].micro_batches[0].advantages_T[:] = np.nan
        return batches

    with pytest.raises(Diverged, match="step 2"):
        run_loop(make_config(tiny_model, tmp_path), world, prepare)
    assert published_versions(layout) == [1]
    assert [event.reason for event in read_events(layout.events) if type(event).__name__ == "Stop"] == ["failed"]


def test_experts_of_servers_are_used_only_where_they_are_replayed() -> None:
    (row,) = fake_rows(0, seed=0, seq_len=8, vocab_size=50, num_rows=1)
    row.experts_S = [RoutedExperts.compress(np.zeros((7, 1, 1), dtype=np.int64))]
    use_experts([row], TrainerConfig(router_replay=True))
    assert row.experts_S
    use_experts([row], TrainerConfig())
    assert row.experts_S == []


def test_a_batch_that_does_not_fit_the_model_is_refused(oracle) -> None:
    row = oracle.make_row(oracle.make_examples(count=2, vocab_size=100))
    batch = make_batch(5, [row], BatchPurpose.TRAIN)
    with pytest.raises(BatchError, match=r"trainer\.model\.seq_len is 4"):
        check_batch(batch, seq_len=4, vocab_size=100)
    row.token_ids_T[0] = 100
    with pytest.raises(BatchError, match="holds token 100"):
        check_batch(batch, seq_len=2048, vocab_size=100)


def test_a_disk_that_fills_up_ends_the_run_with_the_last_commit_whole(
    tiny_model: Path, world, make_batches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = RunLayout(tmp_path)
    whole = shutil.disk_usage(tmp_path)

    def usage(path: Path) -> object:
        return whole._replace(free=0) if path == layout.checkpoints and committed_steps(layout) else whole

    monkeypatch.setattr(shutil, "disk_usage", usage)
    with pytest.raises(
        DiskFull,
        match=r"not enough free disk space to write the trainer's part of checkpoint 3 in .*checkpoints: .* 0\.0 MiB free",
    ):
        run_loop(make_config(tiny_model, tmp_path), world, lambda: make_batches(layout, parts=(1, 3)))
    assert committed_steps(layout) == [1]
    verify_checkpoint(layout, Step(1))


def test_a_run_that_has_no_room_for_its_first_checkpoint_does_not_start(
    tiny_model: Path, world, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: whole._replace(free=2**20))
    with pytest.raises(DiskFull, match="the first checkpoint and its weights"):
        run_loop(make_config(tiny_model, tmp_path), world, dict)


def test_a_recorded_run_is_replayed_to_the_same_weights(tiny_model: Path, world, make_batches, tmp_path: Path) -> None:
    first, second = RunLayout(tmp_path / "first"), RunLayout(tmp_path / "second")
    batches: dict[int, Batch] = {}

    def prepare() -> dict[int, Batch]:
        batches.update(make_batches(first, last=3, parts=(2, 3)))
        return batches

    run_loop(make_config(tiny_model, first.root, max_steps=3), world, prepare)
    for batch in batches.values():
        if batch.purpose is BatchPurpose.TRAIN:
            record_batch(first, batch)
    config = make_config(tiny_model, second.root, max_steps=3, data={"replay": first.root}, ckpt={"interval": 2})
    run(config, world, make_receiver=lambda from_step: open_receiver(config, from_step, world))
    assert verify(second.weights_step(3)).digest == verify(first.weights_step(3)).digest
    assert committed_steps(second) == [2, 3]
    assert list(read_record(second, Step(3)).parts) == ["trainer"]


def test_a_run_that_goes_back_forgets_the_recorded_batches_after_its_checkpoint(
    tiny_model: Path, world, tmp_path: Path
) -> None:
    layout = RunLayout(tmp_path)
    for batch in (make_batch(step, [], BatchPurpose.TRAIN) for step in (1, 2, 10)):
        record_batch(layout, batch)
    config = make_config(tiny_model, tmp_path, data={"record": True}, rollout_transport={"port": find_free_port()})
    open_receiver(config, Step(1), world).close()
    assert recorded_steps(layout) == [1]
