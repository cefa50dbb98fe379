"""Publish policies with a fake exporter, and check which policies are removed."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trivet.checkpoints.commit import commit
from trivet.checkpoints.parts import TRAINER, begin_part, finish_part
from trivet.config.layout import RunLayout
from trivet.config.schema.trainer import TrainerConfig
from trivet.errors import DiskFull, WeightsError
from trivet.trainer import policies as module
from trivet.trainer.policies import Policies
from trivet.weights.catalog import published_versions
from trivet.weights.publish import publish
from trivet.weights.retention import acknowledge
from trivet.wire.events import Publish, Retire
from trivet.wire.versions import PolicyVersion, Step


class FakeExporter:
    def __init__(self, order: list[str]) -> None:
        self.order = order
        self.may_write = threading.Event()
        self.files = ["model.safetensors"]

    def gather(self, *, keep: bool) -> dict[str, torch.Tensor]:
        self.order.append("gather")
        return {"weight": torch.ones(1)} if keep else {}

    def write(self, directory: Path, weights: dict[str, torch.Tensor]) -> None:
        assert self.may_write.wait(30)
        self.order.append("write")
        for name in self.files:
            (directory / name).write_bytes(weights["weight"].numpy().tobytes())


@pytest.fixture
def make_policies(telemetry, tmp_path: Path) -> Iterator:
    made: list[Policies] = []

    def make(*, rank: int = 0, keep_recent: int = 1, from_step: int = 0, reference_interval: int | None = None, **keys: object):
        order: list[str] = []
        policies = Policies(
            config=TrainerConfig.model_validate({"output_dir": tmp_path, **keys}),
            layout=RunLayout(tmp_path),
            learner=SimpleNamespace(
                world=SimpleNamespace(is_main=rank == 0),
                optimizer=SimpleNamespace(zero_grad=lambda set_to_none: order.append("release")),
            ),
            exporter=FakeExporter(order),
            telemetry=telemetry if rank == 0 else None,
            num_bytes=4,
            from_step=Step(from_step),
            keep_recent=keep_recent,
            reference_interval=reference_interval,
        )
        made.append(policies)
        return policies

    yield make
    for policies in made:
        policies.exporter.may_write.set()
        policies.work.close()


@pytest.fixture(autouse=True)
def barriers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    waits: list[str] = []
    monkeypatch.setattr(module, "barrier", lambda world: waits.append("barrier"))
    return waits


def test_a_policy_can_be_read_once_it_was_waited_for(make_policies) -> None:
    policies = make_policies()
    policies.publish(Step(3), probe=None)
    assert published_versions(policies.layout) == []
    policies.exporter.may_write.set()
    policies.wait_on_every_rank()
    assert published_versions(policies.layout) == [3]
    (event,) = policies.telemetry.events
    assert isinstance(event, Publish)
    assert event.version == 3


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("releases", [True, False])
def test_every_rank_releases_its_memory_before_anybody_can_read_the_policy(
    make_policies, rank: int, releases: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies = make_policies(rank=rank, release_gpu_memory=releases)
    order = policies.exporter.order
    monkeypatch.setattr(module, "barrier", lambda world: order.append("barrier"))
    policies.exporter.may_write.set()
    policies.publish(Step(3), probe=None)
    policies.wait_on_every_rank()
    assert order == ["gather", *["release", "barrier"] * releases, *["write"] * (rank == 0), "barrier"]


def test_a_policy_that_could_not_be_written_is_raised_by_the_wait_and_not_published(make_policies) -> None:
    policies = make_policies()
    policies.exporter.files = []
    policies.exporter.may_write.set()
    policies.publish(Step(3), probe=None)
    with pytest.raises(WeightsError, match="nothing was written to publish"):
        policies.wait_on_every_rank()
    assert published_versions(policies.layout) == []
    assert policies.telemetry.events == []


def test_without_room_on_the_disk_nothing_is_begun(make_policies, monkeypatch: pytest.MonkeyPatch) -> None:
    policies = make_policies()
    whole = shutil.disk_usage(policies.layout.root)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: whole._replace(free=0))
    with pytest.raises(DiskFull, match="policy 3"):
        policies.publish(Step(3), probe=None)
    assert policies.work.running is None


@pytest.fixture
def six_policies(tmp_path: Path) -> RunLayout:
    def write(directory: Path) -> None:
        (directory / "weights").write_bytes(b"w")

    layout = RunLayout(tmp_path)
    for version in range(1, 7):
        publish(layout, version=PolicyVersion(version), run_id="run", write=write)
    return layout


@pytest.mark.parametrize(
    ("keys", "committed", "acknowledged", "step", "newest_checkpoint", "expected"),
    [
        pytest.param({}, None, None, 6, None, [1, 2, 3, 4], id="the newest stay"),
        pytest.param({"keep_recent": 3}, None, None, 6, None, [1, 2], id="servers that lag by design"),
        pytest.param({}, None, 3, 6, None, [1, 2], id="everything from the oldest reader on stays"),
        pytest.param({"from_step": 1}, 2, None, 6, 4, [3], id="checkpoints, the one resumed from and the one that is begun"),
        pytest.param({"deterministic": True, "keep_recent": 2}, 4, None, 6, None, [1], id="what a resume samples from"),
        pytest.param({"reference_interval": 2, "keep_recent": 0}, 3, None, 5, None, [1, 5], id="references"),
        pytest.param({"ckpt": {"weights": {"interval": 2}}}, None, None, 6, None, [1, 3], id="the user's interval"),
    ],
)
def test_policies_that_nobody_needs(
    make_policies, six_policies: RunLayout, keys, committed, acknowledged, step, newest_checkpoint, expected
) -> None:
    if committed is not None:
        (begin_part(six_policies, Step(committed), TRAINER) / "state").write_text("x")
        finish_part(six_policies, Step(committed), TRAINER)
        commit(six_policies, Step(committed), parts=(TRAINER,))
    if acknowledged is not None:
        acknowledge(six_policies, "server", PolicyVersion(acknowledged))
    assert make_policies(**keys).find_unneeded(step=step, newest_checkpoint=newest_checkpoint) == expected


def test_what_nobody_needs_is_removed_and_recorded(make_policies, six_policies: RunLayout, telemetry) -> None:
    make_policies().retire_unneeded(step=6, newest_checkpoint=None)
    assert published_versions(six_policies) == [5, 6]
    assert telemetry.events == [Retire(version=PolicyVersion(version)) for version in (1, 2, 3, 4)]
