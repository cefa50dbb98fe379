import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trivet.config.layout import RunLayout
from trivet.errors import DiskFull, WeightsError
from trivet.trainer import policy_publisher
from trivet.trainer.background import Background
from trivet.trainer.policy_publisher import PolicyPublisher
from trivet.trainer.ranks.world import World
from trivet.weights.catalog import published_versions
from trivet.wire.events import Publish
from trivet.wire.versions import Step


class FakeExporter:
    def __init__(self, order: list[str] | None = None) -> None:
        self.order = order if order is not None else []
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
def publisher(world, telemetry, tmp_path: Path) -> Iterator[PolicyPublisher]:
    publisher = PolicyPublisher(
        layout=RunLayout(tmp_path),
        world=world,
        exporter=FakeExporter(),
        run_id="run",
        num_bytes=4,
        telemetry=telemetry,
        work=Background("publisher"),
    )
    yield publisher
    publisher.exporter.may_write.set()
    publisher.work.close()


def test_a_policy_can_be_read_once_it_was_waited_for(publisher: PolicyPublisher) -> None:
    publisher.publish(Step(3), probe=None)
    assert published_versions(publisher.layout) == []
    publisher.exporter.may_write.set()
    publisher.wait_on_every_rank()
    assert published_versions(publisher.layout) == [3]
    (event,) = publisher.telemetry.events
    assert isinstance(event, Publish)
    assert event.version == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_releases_its_memory_before_anybody_can_read_the_policy(
    publisher: PolicyPublisher, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr(policy_publisher, "barrier", lambda world: order.append("barrier"))
    releasing = replace(
        publisher,
        world=replace(publisher.world, rank=rank, size=2),
        exporter=FakeExporter(order),
        release_memory=lambda: order.append("release"),
    )
    releasing.exporter.may_write.set()
    releasing.publish(Step(3), probe=None)
    releasing.wait_on_every_rank()
    assert order == ["gather", "release", "barrier", *(["write"] if rank == 0 else []), "barrier"]


def test_ranks_that_keep_their_memory_do_not_wait_for_each_other(
    publisher: PolicyPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[World] = []
    monkeypatch.setattr(policy_publisher, "barrier", waits.append)
    publisher.exporter.may_write.set()
    publisher.publish(Step(3), probe=None)
    assert waits == []


def test_a_policy_that_could_not_be_written_is_raised_by_the_wait_and_not_published(publisher: PolicyPublisher) -> None:
    publisher.exporter.files = []
    publisher.exporter.may_write.set()
    publisher.publish(Step(3), probe=None)
    with pytest.raises(WeightsError, match="nothing was written to publish"):
        publisher.wait_on_every_rank()
    assert published_versions(publisher.layout) == []
    assert publisher.telemetry.events == []


def test_without_room_on_the_disk_nothing_is_begun(publisher: PolicyPublisher, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = shutil.disk_usage(publisher.layout.root)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: whole._replace(free=0))
    with pytest.raises(DiskFull, match="policy 3"):
        publisher.publish(Step(3), probe=None)
    assert publisher.work.running is None
