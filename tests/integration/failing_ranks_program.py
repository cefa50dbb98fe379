"""One rank of tests/integration/test_failing_ranks.py: `failing_ranks_program.py MODEL_DIR OUTPUT_DIR CODE`.

Both ranks meet an error while rank 0 still writes policy and checkpoint of step 1; each looks, as it ends with exit code CODE,
whether they have arrived.
"""

import os
import sys
import threading
from pathlib import Path
from unittest.mock import patch

import torch

from trivet.checkpoints.commit import committed_steps
from trivet.checkpoints.parts import TRAINER
from trivet.config.layout import RunLayout
from trivet.config.schema.sft import SftConfig
from trivet.errors import BatchError
from trivet.trainer.losses.select import cross_entropy
from trivet.trainer.model.export import Exporter
from trivet.trainer.open_session import open_session
from trivet.trainer.ranks.world import open_world
from trivet.trainer.session import Session
from trivet.weights.catalog import published_versions
from trivet.wire.versions import Step

_may_write = threading.Event()
_write = Exporter.write


def write_slowly(exporter: Exporter, directory: Path, weights: dict[str, torch.Tensor]) -> None:
    assert _may_write.wait(240)
    _write(exporter, directory, weights)


def fail_in_step_2(session: Session) -> None:
    session.progress.step = 1
    session.publish(Step(1))
    session.save(Step(1), parts=(TRAINER,))
    with session.failing_together():
        if session.world.is_main:
            assert published_versions(session.layout) == []
        threading.Timer(1.0, _may_write.set).start()
        raise BatchError("step 2")


def main() -> None:
    model_dir, output_dir, code = sys.argv[1:]
    torch.set_num_threads(1)
    config = SftConfig.model_validate(
        {
            "max_steps": 2,
            "output_dir": output_dir,
            "model": {"name": model_dir, "seq_len": 32, "compute_dtype": "float32"},
            "data": {"type": "fake"},
        }
    )
    layout = RunLayout(config.output_dir)
    with open_world(device="cpu", timeout_s=120) as world, patch.object(Exporter, "write", write_slowly):
        try:
            with open_session(config, world, loss=cross_entropy, role="sft", keep_recent=0) as session:
                assert not any(layout.checkpoints.glob(".*")), "what was never committed is still there"
                fail_in_step_2(session)
        except BatchError:
            assert published_versions(layout) == [1]
            assert committed_steps(layout) == [1]
            os._exit(int(code))


if __name__ == "__main__":
    main()
