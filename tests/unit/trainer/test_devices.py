"""The trainer's arithmetic and its levers on every device: the CPU, and with the mark gpu a CUDA device.

What only CUDA has (streams, pinned memory, NCCL, its allocator and its random state) is reached through the same statements.
"""

import gzip
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.shards import write_state
from trivet.config.schema.losses import DefaultLossConfig
from trivet.config.schema.trainer import TrainerConfig
from trivet.errors import OutOfMemory
from trivet.trainer.checkpoint.shard_file import ShardFile
from trivet.trainer.checkpoint.state import TrainerProgress, collect_state, load_part
from trivet.trainer.failures import explaining_memory, explaining_update_memory
from trivet.trainer.losses.formulas import make_policy_loss
from trivet.trainer.measurement.profiling import Profiler
from trivet.trainer.model.export import gather_weights
from trivet.trainer.open_session import make_learner
from trivet.trainer.optim.host_state import keep_state_on_host
from trivet.trainer.ranks.world import World, gather_tensor, open_world, sum_over_ranks
from trivet.trainer.rows import to_tensors
from trivet.trainer.step import Learner, train_step

pytestmark = pytest.mark.device
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used, which may be in an earlier test

LOSS = DefaultLossConfig(kl_tau=0.1)
AC = {"ac": {"mode": "full"}}
EXACT_LEVERS: dict[str, dict[str, Any]] = {
    "checkpointed": AC,
    "activations off-loaded": AC | {"ac_offloading": {"max_inflight_activations": 1}},
    "activations off-loaded, not pinned": AC | {"ac_offloading": {"pin_memory": False}},
    "optimizer state off-loaded": {"optim_cpu_offload": True},
    "gathered once": {"reshard_after_forward": False},
    "reduced once": {"reduce_each_row": False},
}
"""Levers that move data or compute it again, and change no number."""
COMPILED: dict[str, dict[str, Any]] = {
    "compiled": {"compile": {}},
    "compiled and checkpointed": AC | {"compile": {}},
    "compiled, attention kept": {"ac": {"keep": ["attention"]}, "compile": {}},
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device_world(request: pytest.FixtureRequest) -> Iterator[World]:
    """One rank on a device."""
    torch.set_num_threads(1)
    with open_world(device=request.param, timeout_s=60) as world:
        yield world


@pytest.fixture
def _deterministic() -> Iterator[None]:
    """Compute as `deterministic = true` does, so that equal steps give equal bytes on a GPU too."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def learner_of(directory: Path, world: World, *, dtype: str = "float32", lr: float = 1e-2, **levers: Any) -> Learner:
    torch.manual_seed(0)
    model = {"name": str(directory), "compute_dtype": dtype, "fused_lm_head_chunk_size": 7, **levers}
    config = TrainerConfig.model_validate({"model": model, "optim": {"lr": lr, "max_norm": 1.0 if lr else None}})
    learner = make_learner(config, world, loss=make_policy_loss(LOSS), max_steps=None)
    if config.model.optim_cpu_offload:
        keep_state_on_host(learner.optimizer, world.device, part_bytes=10_000)
    return learner


def train(learner: Learner, oracle: Any, steps: range) -> list[float]:
    """Train with two rows a step; return the losses."""
    losses = []
    for step in steps:
        examples = oracle.make_examples(count=5, vocab_size=100, seed=step, prompt_length=6)
        losses.append(train_step(learner, [oracle.make_row(examples[:3]), oracle.make_row(examples[3:])], step=step).loss)
    return losses


def weights_of(learner: Learner) -> list[torch.Tensor]:
    return [gather_tensor(parameter.detach()).clone().cpu() for parameter in learner.model.parameters()]


def assert_equal(ours: Learner, theirs: Learner) -> None:
    for one, other in zip(weights_of(ours), weights_of(theirs), strict=True):
        assert torch.equal(one, other)


def test_loss_and_gradients_are_those_of_float64(any_model: Path, device_world: World, oracle: Any) -> None:
    examples = oracle.make_examples(count=5, vocab_size=100)
    learner = learner_of(any_model, device_world, lr=0.0)
    result = train_step(learner, [oracle.make_row(examples)], step=1)
    expected_loss, expected = oracle.loss_and_gradients(any_model, examples, LOSS)
    assert result.loss == pytest.approx(expected_loss, rel=1e-4)
    named = learner.model.causal_lm.named_parameters()
    found = {name: gather_tensor(parameter.grad).cpu() for name, parameter in named if parameter.grad is not None}
    assert oracle.gradient_error(found, expected) < 1e-4  # the default for products of float32 on a GPU is float32, not TF32


def test_bfloat16_gradients_point_where_those_of_float64_do(tiny_model: Path, device_world: World, oracle: Any) -> None:
    if device_world.device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("this GPU does not compute in bfloat16")
    examples = oracle.make_examples(count=5, vocab_size=100)
    learner = learner_of(tiny_model, device_world, dtype="bfloat16", lr=0.0)
    train_step(learner, [oracle.make_row(examples)], step=1)
    _, expected = oracle.loss_and_gradients(tiny_model, examples, LOSS)
    named = learner.model.causal_lm.named_parameters()
    found = {name: gather_tensor(parameter.grad).cpu() for name, parameter in named if parameter.grad is not None}
    assert oracle.gradient_error(found, expected) < 0.1


@pytest.mark.parametrize(
    "device_world",
    [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)],  # compiling takes minutes
    indirect=True,
)
@pytest.mark.filterwarnings("ignore")  # Dynamo looks at what warns
def test_compiled_blocks_that_keep_attention_compute_the_gradients_of_plain_ones_in_bfloat16(
    tiny_model: Path, device_world: World, oracle: Any
) -> None:
    """In bfloat16 attention on a GPU is one operator inside the compiled block, whose output `ac.keep` keeps."""
    if device_world.device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("this GPU does not compute in bfloat16")
    torch._dynamo.reset()
    examples = oracle.make_examples(count=5, vocab_size=100, prompt_length=6)
    _, expected = oracle.loss_and_gradients(tiny_model, examples, LOSS)
    learner = learner_of(tiny_model, device_world, dtype="bfloat16", lr=0.0, ac={"keep": ["attention"]}, compile={})
    train_step(learner, [oracle.make_row(examples)], step=1)
    named = learner.model.causal_lm.named_parameters()
    found = {name: gather_tensor(parameter.grad).cpu() for name, parameter in named if parameter.grad is not None}
    assert oracle.gradient_error(found, expected) < 0.1


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("lever", EXACT_LEVERS.values(), ids=EXACT_LEVERS.keys())
def test_a_lever_that_moves_data_changes_no_byte(
    lever: dict[str, Any], tiny_model: Path, device_world: World, oracle: Any
) -> None:
    plain, ours = (learner_of(tiny_model, device_world, **options) for options in ({}, lever))
    assert train(ours, oracle, range(1, 4)) == train(plain, oracle, range(1, 4))
    assert_equal(ours, plain)


def test_a_lever_that_computes_elsewhere_changes_only_roundings(tiny_model: Path, device_world: World, oracle: Any) -> None:
    """Off-loaded parameters are updated by the CPU, with other roundings than a GPU's."""
    assert_close_to_plain({"fsdp_cpu_offload": True}, tiny_model, device_world, oracle)


@pytest.mark.parametrize(
    "device_world",
    [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)],  # compiling takes minutes
    indirect=True,
)
@pytest.mark.parametrize("lever", COMPILED.values(), ids=COMPILED.keys())
@pytest.mark.filterwarnings("ignore")  # Dynamo looks at what warns
def test_compiled_blocks_change_only_roundings(
    lever: dict[str, Any], tiny_model: Path, device_world: World, oracle: Any
) -> None:
    torch._dynamo.reset()
    assert_close_to_plain(lever, tiny_model, device_world, oracle)


def assert_close_to_plain(lever: dict[str, Any], directory: Path, world: World, oracle: Any) -> None:
    plain, ours = (learner_of(directory, world, **options) for options in ({}, lever))
    assert train(ours, oracle, range(1, 4)) == pytest.approx(train(plain, oracle, range(1, 4)), rel=1e-3)
    for one, other in zip(weights_of(ours), weights_of(plain), strict=True):
        # A step of AdamW is at most its learning rate, 1e-2. Where a gradient is nearly zero, a rounding turns a part of it.
        torch.testing.assert_close(one, other, rtol=0, atol=2e-3)


@pytest.mark.usefixtures("_deterministic")
def test_a_deterministic_run_taken_twice_has_the_same_bytes(tiny_model: Path, device_world: World, oracle: Any) -> None:
    first, second = (learner_of(tiny_model, device_world) for _ in range(2))
    assert train(first, oracle, range(1, 5)) == train(second, oracle, range(1, 5))
    assert_equal(first, second)


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("lever", [{}, {"optim_cpu_offload": True}, {"fsdp_cpu_offload": True}])
def test_a_resumed_run_goes_on_with_the_bytes_and_the_random_numbers_of_an_unbroken_one(
    lever: dict[str, Any], tiny_model: Path, device_world: World, oracle: Any, tmp_path: Path
) -> None:
    unbroken = learner_of(tiny_model, device_world, **lever)
    train(unbroken, oracle, range(1, 3))
    write_state(tmp_path, collect_state(unbroken, TrainerProgress(step=2)), device_world)
    drawn = torch.rand(5, device=device_world.device)
    expected = train(unbroken, oracle, range(3, 5))
    resumed = learner_of(tiny_model, device_world, **lever)
    assert load_part(tmp_path, resumed).step == 2
    assert torch.equal(torch.rand(5, device=device_world.device), drawn)
    assert train(resumed, oracle, range(3, 5)) == expected
    assert_equal(resumed, unbroken)


def test_a_part_that_is_written_during_a_step_is_of_the_step_before(
    tiny_model: Path, device_world: World, oracle: Any, tmp_path: Path
) -> None:
    shards, learner = ShardFile(device_world), learner_of(tiny_model, device_world)
    train(learner, oracle, range(1, 2))
    expected = weights_of(learner)
    shards.copy(tmp_path, collect_state(learner, TrainerProgress(step=1)))
    train(learner, oracle, range(2, 4))
    shards.write(device_world.control)
    assert load_part(tmp_path, learner).step == 1
    for found, weight in zip(weights_of(learner), expected, strict=True):
        assert torch.equal(found, weight)


def test_gathered_weights_are_those_of_the_moment_when_they_were_gathered(
    tiny_model: Path, device_world: World, oracle: Any
) -> None:
    learner = learner_of(tiny_model, device_world)
    train(learner, oracle, range(1, 2))
    expected = {name: gather_tensor(each.detach()).cpu().clone() for name, each in learner.model.causal_lm.named_parameters()}
    gathered = gather_weights(learner.model, dtype=torch.float32, keep=True)
    train(learner, oracle, range(2, 3))
    assert {tensor.device.type for tensor in gathered.values()} == {"cpu"}
    for name, tensor in expected.items():
        assert torch.equal(gathered[name], tensor), name


def test_samples_that_share_a_prompt_score_the_same_as_alone(tiny_model: Path, device_world: World, oracle: Any) -> None:
    row = oracle.make_row(oracle.make_examples(count=6, vocab_size=100, prompt_length=20))
    model = learner_of(tiny_model, device_world).model
    with torch.no_grad():
        shared, alone = (
            model(to_tensors(row, device=device_world.device, shares_prefixes=shares)).logprobs_N for shares in (True, False)
        )
    torch.testing.assert_close(shared, alone, rtol=1e-4, atol=1e-4)


def test_a_rank_alone_sums_and_gathers_over_the_devices_own_backend(device_world: World) -> None:
    device = device_world.device
    assert sum_over_ranks(device_world, torch.tensor(2.0, device=device)).item() == 2.0
    values = torch.ones(3, device=device)
    dist.all_reduce(values, group=device_world.mesh.get_group())
    assert values.tolist() == [1.0] * 3
    backend = dist.group.WORLD._get_backend(device).name() if dist.group.WORLD else ""
    assert backend == ("nccl" if device.type == "cuda" else "gloo")


def test_memory_that_runs_out_is_told_with_what_to_change(device_world: World, oracle: Any) -> None:
    row = to_tensors(oracle.make_row(oracle.make_examples(count=1, vocab_size=100)), device=device_world.device)
    for explained, advice in (
        (explaining_memory(row, chunk_size=8, key_prefix="trainer."), r"trainer\.model\.fused_lm_head_chunk_size"),
        (explaining_update_memory(key_prefix="trainer."), r"trainer\.model\.optim_cpu_offload"),
    ):
        with pytest.raises(OutOfMemory, match=advice), explained:
            torch.empty(1 << 50, dtype=torch.uint8, device=device_world.device)  # 1 PiB


@pytest.mark.gpu
def test_a_rank_takes_no_more_than_its_share_of_a_gpu() -> None:
    with open_world(device="cuda", timeout_s=60, gpu_memory_share=0.05) as world:
        total = torch.cuda.get_device_properties(world.device).total_memory
        torch.empty(int(0.02 * total), dtype=torch.uint8, device=world.device)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(int(0.08 * total), dtype=torch.uint8, device=world.device)
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.gpu
def test_a_gpu_leaves_memory_snapshots_and_its_kernels_in_the_trace(tmp_path: Path) -> None:
    with open_world(device="cuda", timeout_s=60) as world:
        config = TrainerConfig(memory_profiler_path=tmp_path / "memory", trace_path=tmp_path / "traces")
        profiler = Profiler(config, world)
        for step in range(1, 5):
            (torch.ones(step, 8, device=world.device) @ torch.ones(8, 8, device=world.device)).sum()
            profiler.finish_step(step)
        profiler.close()
    assert len(list((tmp_path / "memory").glob("step_*.rank_0.pickle"))) == 4
    assert b'"kernel"' in gzip.decompress((tmp_path / "traces" / "trace.rank_0.json.gz").read_bytes())
