"""One of two ranks of tests/integration/test_trainer_ranks.py: rank 1 fails while rank 0 waits for it in a collective.

Ending a process group waits for the other ranks here, as NCCL's shutdown does and gloo's does not.
"""

import torch
import torch.distributed as dist

from trivet.trainer.ranks.world import open_world, sum_over_ranks

TIMEOUT_S = 600
"""As long as the timeout of a collective in a run, by default."""


def main() -> None:
    dist.destroy_process_group = dist.barrier
    with open_world(device="cpu", timeout_s=TIMEOUT_S) as world:
        if world.rank == 1:
            raise RuntimeError("this rank has failed")
        sum_over_ranks(world, torch.ones(1))
