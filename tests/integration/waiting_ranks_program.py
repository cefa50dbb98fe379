"""One rank of tests/integration/test_waiting_ranks.py: the batch comes long after the ranks' connection has timed out."""

import sys
import time
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from trivet.trainer.loop import extend_wait_of_ranks, receive
from trivet.trainer.ranks.world import World, open_world
from trivet.wire.batches import Batch, BatchPurpose
from trivet.wire.rollouts import GroupId
from trivet.wire.versions import Step

TIMEOUT_S = 5.0
BATCH = Batch(step=Step(3), purpose=BatchPurpose.TRAIN, micro_batches=[], group_ids=[GroupId(7)], num_rollouts=1)


class LateBatch:
    """A BatchReceiver that waits as the real one does."""

    def __init__(self, world: World) -> None:
        self._world = world

    def receive(self, step: Step) -> Batch:
        until = time.monotonic() + 1.5 * TIMEOUT_S
        while time.monotonic() < until:
            time.sleep(TIMEOUT_S / 10)
            extend_wait_of_ranks(self._world)
        return BATCH

    def close(self) -> None:
        pass


def main() -> None:
    with open_world(device="cpu", timeout_s=120) as world:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_S))
        assert isinstance(group, dist.ProcessGroup)
        world = replace(world, control=group)
        assert receive(world, LateBatch(world) if world.is_main else None, Step(3)) == BATCH


if __name__ == "__main__":
    sys.exit(main())
