import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from trivet.config.layout import RunLayout
from trivet.config.schema.losses import DefaultLossConfig
from trivet.errors import DiskFull, Diverged, OutOfMemory
from trivet.trainer.failures import explaining_memory, explaining_update_memory, naming_last_weights
from trivet.trainer.losses.terms import LossUnit, RowLoss
from trivet.trainer.rows import to_tensors
from trivet.trainer.step import train_step
from trivet.wire.versions import Step

CPU = torch.device("cpu")
UNMASKED = DefaultLossConfig(token_mask_high=1e9, geo_mask_high=1e9, sequence_mask_high=1e9)
PROGRAM = """
import resource, torch
from trivet.trainer.failures import explaining_update_memory
torch.ones(1)
used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
with explaining_update_memory(key_prefix=''):
    torch.empty(1 << 32)
"""


def test_a_loss_that_is_not_finite_names_the_sample_and_what_is_special(tiny_model: Path, make_learner, oracle) -> None:
    rows = [oracle.make_row(oracle.make_examples(count=3, vocab_size=100, seed=seed)) for seed in range(2)]
    second = int(rows[1].sequence_lengths_S[0])
    rows[1].advantages_T[second : second + int(rows[1].sequence_lengths_S[1])] = np.inf
    with pytest.raises(Diverged, match=r"the loss of step 4 is -?(inf|nan) \(row 1 sample 1: the advantage is inf at"):
        train_step(make_learner(tiny_model, loss=UNMASKED), rows, step=Step(4))


@pytest.mark.parametrize(
    ("scale", "advice"),
    [(1e30, "Its largest advantage is -?.*e\\+[23][0-9], which comes from the rewards"), (1.0, "Lower optim.lr")],
)
def test_the_advice_names_the_rewards_where_the_advantages_are_huge(
    tiny_model: Path, make_learner, oracle, scale: float, advice: str
) -> None:
    row = oracle.make_row(oracle.make_examples(count=2, vocab_size=100))
    row.advantages_T *= np.float32(scale)
    learner = make_learner(tiny_model, loss=UNMASKED)
    if scale == 1.0:
        learner.loss = lambda scores, _: RowLoss({LossUnit.TOKEN: scores.logprobs_N.sum() * torch.nan}, {})
    with pytest.raises(Diverged, match=advice) as diverged:
        train_step(learner, [row], step=Step(2))
    assert ("lr" in str(diverged.value)) is (scale == 1.0)


def test_gradients_that_are_not_finite_name_their_parameters(tiny_model: Path, make_learner, oracle) -> None:
    learner = make_learner(tiny_model, lr=1.0)
    # Its value is 0 and its slope 0 times infinity.
    learner.loss = lambda scores, _: RowLoss({LossUnit.TOKEN: (scores.logprobs_N * 0.0).square().sum().sqrt()}, {})
    before = [parameter.detach().clone() for parameter in learner.model.parameters()]
    row = oracle.make_row(oracle.make_examples(count=2, vocab_size=100))
    with pytest.raises(Diverged, match=r"the gradient norm of step 2 is nan \(model\.embed_tokens\.weight; .*, and \d+ more\)"):
        train_step(learner, [row], step=Step(2))
    assert all(torch.equal(a, b) for a, b in zip(before, learner.model.parameters(), strict=True))


def test_the_last_good_weights_are_named(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    with (
        pytest.raises(Diverged, match=r"lost\. Nothing was published .* are the model it started from"),
        naming_last_weights(layout),
    ):
        raise Diverged("lost")
    directory = layout.weights_step(3)
    directory.mkdir(parents=True)
    (directory / "STABLE").touch()
    with pytest.raises(Diverged, match=r"the last good weights are .*step_3"), naming_last_weights(layout):
        raise Diverged("lost")


def test_a_policy_that_cannot_be_written_does_not_hide_the_divergence(tmp_path: Path) -> None:
    def fail() -> None:
        raise DiskFull("not enough free disk space to write policy 3")

    with (
        pytest.raises(
            Diverged,
            match=r"^lost\. .* started from, and the policy .* not be written \(not enough free disk space to write policy 3\)",
        ),
        naming_last_weights(RunLayout(tmp_path), await_policy=fail),
    ):
        raise Diverged("lost")


def test_a_gpu_without_memory_names_the_row_and_three_keys(oracle) -> None:
    examples = oracle.make_examples(count=3, vocab_size=50)
    row = to_tensors(oracle.make_row(examples), device=CPU)
    lengths = row.segments.lengths
    half = max(max(lengths), -(-sum(lengths) // 2))
    with pytest.raises(OutOfMemory) as caught, explaining_memory(row, chunk_size=2048, key_prefix="trainer."):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore lines.")
    message = str(caught.value)
    assert f"a row of {sum(lengths)} tokens (3 samples, the longest of {max(lengths)} tokens" in message
    assert f"trainer.micro_batch_tokens = {half}" in message
    assert "[trainer.model.ac] freq = 1" in message
    assert f"trainer.model.fused_lm_head_chunk_size = {len(row.targets_N) // 2}" in message
    assert "Tried to allocate 2.00 GiB" in message
    assert "More lines" not in message


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), OutOfMemory),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), OutOfMemory),
        (torch.OutOfMemoryError("CUDA out of memory."), OutOfMemory),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), RuntimeError),
    ],
)
def test_memory_that_a_library_of_cuda_lacks_is_told_from_its_other_errors(error: RuntimeError, expected: type) -> None:
    with pytest.raises(expected), explaining_update_memory(key_prefix=""):
        raise error


def test_a_row_of_one_sample_asks_for_a_smaller_seq_len(oracle) -> None:
    row = to_tensors(oracle.make_row(oracle.make_examples(count=1, vocab_size=50)), device=CPU)
    with (
        pytest.raises(OutOfMemory, match=r" a smaller model\.seq_len, such as"),
        explaining_memory(row, chunk_size=4, key_prefix=""),
    ):
        raise MemoryError


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_AS") or sys.platform != "linux", reason="needs a limit on address space")
def test_a_real_failure_of_the_cpus_allocator_is_recognized() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1
    assert "OutOfMemory: memory ran out in the optimizer's update" in done.stderr
    assert "allocate" in done.stderr.splitlines()[-1]
