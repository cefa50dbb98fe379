"""Test what is done to blocks before they are sharded. tests/integration/test_trainer_levers.py tests that numbers stay."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.distributed.tensor import DTensor
from torch.fx.experimental import _config as symbolic_shapes
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from trivet.config.schema.model import ActivationCheckpointConfig, CompileConfig, TrainerModelConfig
from trivet.errors import ConfigError
from trivet.trainer.attention import packed
from trivet.trainer.model import blocks
from trivet.trainer.model.blocks import find_blocks, prepare_blocks
from trivet.trainer.model.policy_model import PolicyModel, load_policy
from trivet.trainer.ranks.world import World
from trivet.trainer.rows import to_tensors

META = torch.device("meta")


@pytest.fixture(autouse=True)
def _configuration_of_torch() -> Iterator[None]:
    """Restore what compiling sets for the process."""
    with symbolic_shapes.patch(use_duck_shape=True):
        yield


def load(directory: Path, world: World, **levers: Any) -> PolicyModel:
    return load_policy(TrainerModelConfig(name=str(directory), compute_dtype="float32", **levers), world)


def saved_bytes(model: PolicyModel, row: Any, world: World) -> int:
    """Return the bytes that autograd keeps of a forward for the backward pass, parameters aside."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter | DTensor):
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        scores = model(to_tensors(row, device=world.device))
    scores.logprobs_N.sum().backward()
    return sum(kept.values())


def test_checkpointing_keeps_less_and_selective_less_than_nothing(tiny_model: Path, world: World, oracle: Any) -> None:
    row = oracle.make_row(oracle.make_examples(count=12, vocab_size=100))
    kept = {
        name: saved_bytes(load(tiny_model, world, ac=ac), row, world)
        for name, ac in {
            "none": None,
            "norms": ActivationCheckpointConfig(mode="selective"),
            "norms and mlp": ActivationCheckpointConfig(mode="selective", targets=["norm", "mlp"]),
            "every second": ActivationCheckpointConfig(freq=2),
            "full": ActivationCheckpointConfig(),
        }.items()
    }
    assert kept["full"] < kept["every second"] < kept["none"]
    assert kept["full"] < kept["norms and mlp"] < kept["norms"] < kept["none"]


def test_what_is_computed_again_draws_the_same_random_numbers(tiny_model: Path, world: World, oracle: Any) -> None:
    """Models draw them by functions too, where no module says so."""
    model = load(tiny_model, world, ac=ActivationCheckpointConfig())
    drawn: list[torch.Tensor] = []
    mlp = model.causal_lm.model.layers[0].mlp
    original = mlp.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(1)
        drawn.append(noise)
        return original(x) * noise

    mlp.forward = forward
    row = to_tensors(oracle.make_row(oracle.make_examples(count=2, vocab_size=100)), device=world.device)
    model(row).logprobs_N.sum().backward()
    first, again = drawn
    assert torch.equal(first, again)


def test_a_target_that_no_block_has_is_refused_with_those_there_are(tiny_model: Path, world: World) -> None:
    config = ActivationCheckpointConfig(mode="selective", targets=["mla"])
    with pytest.raises(ConfigError, match=r"model\.ac\.targets: 'mla' is no part .* norm, attn, mlp, and .*down_proj"):
        load(tiny_model, world, ac=config)


def test_blocks_are_found_before_and_after_sharding(tiny_model: Path, world: World) -> None:
    model = load(tiny_model, world)
    assert find_blocks(model.causal_lm) == list(model.causal_lm.model.layers)


def test_compiling_that_does_not_work_is_refused_before_training(
    tiny_model: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no g++ found")

    monkeypatch.setattr(torch, "compile", fail)
    with pytest.raises(ConfigError, match=r"model\.compile does not work on this machine \(cpu\): no g\+\+ found; install"):
        load(tiny_model, world, compile=CompileConfig())


def attended(device: torch.device, attention: str) -> PreTrainedModel:
    """Return a model of four blocks on `device`, with an attention of `trivet.trainer.attention.packed`."""
    functions = {"varlen": packed.flash_varlen_packed, "by_sample": packed.sdpa_packed}
    AttentionInterface.register(f"trivet_packed_{attention}", functions[attention])
    config = Qwen3Config(
        num_hidden_layers=4, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8
    )
    with device:
        return AutoModelForCausalLM.from_config(config, attn_implementation=f"trivet_packed_{attention}", dtype=torch.bfloat16)


def compiled(
    attention: str, ac: ActivationCheckpointConfig | None, backend: Any, monkeypatch: pytest.MonkeyPatch, **model: Any
) -> PreTrainedModel:
    """Return a model whose blocks are compiled by `backend`. Meta tensors take the attention that only CUDA computes."""
    causal_lm = attended(META, attention)
    monkeypatch.setattr(blocks, "require_compiler", lambda device: None)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    config = TrainerModelConfig(name="meta", compile=CompileConfig(), ac=ac, **model)
    prepare_blocks(causal_lm, config, attention=f"trivet_packed_{attention}", device=META)
    torch._dynamo.reset()
    return causal_lm


def run_row(causal_lm: PreTrainedModel, lengths: list[int], paths: list[list[int]] | None = None) -> None:
    """Run a row of segments of these lengths forward and backward."""
    tokens = torch.zeros(1, sum(lengths), dtype=torch.int64, device=META)
    segments = packed.Segments.from_paths(lengths, paths or [[]] * len(lengths), device=META)
    outputs = causal_lm.base_model(input_ids=tokens, position_ids=tokens, use_cache=False, segments=segments)
    outputs.last_hidden_state.sum().backward()


def operators_in(graph: torch.fx.GraphModule) -> set[str]:
    """Return the operators of a graph and of those in it: what is checkpointed is a graph in a graph."""
    parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
    return {str(node.target) for part in parts for node in part.graph.nodes}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Dynamo looks at what warns, and hides the warnings in vain
@pytest.mark.parametrize(("attention", "expected"), [("varlen", ["whole block"]), ("by_sample", ["around attention"] * 4)])
@pytest.mark.parametrize(
    "ac",
    [
        None,
        ActivationCheckpointConfig(),
        ActivationCheckpointConfig(mode="selective", targets=["mlp"]),
        ActivationCheckpointConfig(keep=["attention"]),
    ],
)
def test_blocks_are_compiled_once_for_all_rows_with_and_without_checkpointing(
    attention: str, expected: list[str], ac: ActivationCheckpointConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[str] = []

    def count(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        has_attention = any("varlen_attn" in name for name in operators_in(graph))
        graphs.append("whole block" if has_attention else "around attention")
        return graph.forward

    causal_lm = compiled(attention, ac, count, monkeypatch)
    for lengths in ([4, 3], [5, 1, 7], [9, 2]):
        run_row(causal_lm, lengths)
        assert graphs == expected


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_rows_of_any_fill_need_one_graph_and_rows_with_shared_prefixes_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first row has as many tokens as the model has features, and one sample fills it."""
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    causal_lm = compiled("varlen", None, count, monkeypatch)
    for lengths, paths, expected in (
        ([32], None, 1),
        ([12, 10, 10], [[], [0], [0]], 2),
        ([16, 15], None, 2),
        ([4, 3, 5, 2], [[], [0], [0], [0, 2]], 2),
        ([6, 2], [[], [0]], 2),
        ([3, 4, 2, 1, 1, 8, 9], None, 2),
    ):
        run_row(causal_lm, lengths, paths)
        assert len(graphs) == expected, lengths


def num_tokens_in(graph: torch.fx.GraphModule) -> list[int | torch.SymInt]:
    """Return the number of tokens of each tensor of hidden states that a graph takes: a number or a symbol."""
    values = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
    return [value.shape[1] for value in values if isinstance(value, torch.Tensor) and value.ndim == 3 and value.shape[2] == 32]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ac", [None, ActivationCheckpointConfig(keep=["attention"])])
@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([[16], [10, 6], [16]], ["full"]),
        ([[16], [7, 3], [5, 2], [16]], ["full", "any"]),
        ([[7, 3], [16], [5, 2]], ["any"]),
    ],
    ids=["full rows", "a full row first", "a full row later"],
)
def test_rows_that_are_all_full_have_one_graph_that_knows_their_length(
    rows: list[list[int]], expected: list[str], ac: ActivationCheckpointConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[str] = []

    def count(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        graphs.append("full" if [type(number) for number in num_tokens_in(graph)] == [int] else "any")
        return graph.forward

    causal_lm = compiled("varlen", ac, count, monkeypatch, seq_len=16)
    for lengths in rows:
        run_row(causal_lm, lengths)
    assert graphs == expected


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("keep", "is_computed_again"), [([], True), (["attention"], False)])
def test_attention_that_is_kept_is_in_no_compiled_backward(
    keep: list[Any], is_computed_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    forwards, backwards = list[set[str]](), list[set[str]]()

    def record(found: list[set[str]]) -> Any:
        def compile_graph(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
            found.append(operators_in(graph))
            return make_boxed_func(graph.forward)

        return compile_graph

    backend = aot_autograd(
        fw_compiler=record(forwards), bw_compiler=record(backwards), partition_fn=min_cut_rematerialization_partition
    )
    causal_lm = compiled(
        "varlen", ActivationCheckpointConfig(mode="selective", targets=["attn"], keep=keep), backend, monkeypatch
    )
    run_row(causal_lm, [4, 3])
    operator = "torch_attn._varlen_attn.default"
    assert [operator in graph for graph in (*forwards, *backwards)] == [True, is_computed_again]


PATHS = {"samples alone": [[], [], []], "a shared prefix": [[], [0], [0]]}


class Operators(TorchDispatchMode):
    """Counts how often each operator runs, by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[function._schema.name] += 1
        return function(*args, **(kwargs or {}))


def train_once(
    paths: list[list[int]], ac: ActivationCheckpointConfig | None, *, is_compiled: bool = False
) -> tuple[list[torch.Tensor | None], Counter[str]]:
    """Return the gradients of a model of four blocks in float64, and the operators that forward and backward ran."""
    torch.manual_seed(0)
    causal_lm = attended(torch.device("cpu"), "by_sample").double()
    config = TrainerModelConfig(name="tiny", ac=ac, compile=CompileConfig() if is_compiled else None)
    prepare_blocks(causal_lm, config, attention="trivet_packed_by_sample", device=torch.device("cpu"))
    segments = packed.Segments.from_paths([4, 3, 5], paths, device=torch.device("cpu"))
    tokens = torch.arange(12)[None]
    with Operators() as operators:
        outputs = causal_lm.base_model(input_ids=tokens, position_ids=tokens, use_cache=False, segments=segments)
        outputs.last_hidden_state.square().sum().backward()
    return [parameter.grad for parameter in causal_lm.base_model.parameters()], operators.counts


@pytest.mark.slow
@pytest.mark.parametrize("paths", PATHS.values(), ids=PATHS.keys())
@pytest.mark.parametrize(
    ("ac", "attention_runs"),
    [
        (ActivationCheckpointConfig(), 2),
        (ActivationCheckpointConfig(keep=["attention"]), 1),
        (ActivationCheckpointConfig(keep=["attention", "products"]), 1),
        (ActivationCheckpointConfig(mode="selective", targets=["attn"]), 2),
        (ActivationCheckpointConfig(mode="selective", targets=["attn"], keep=["attention"]), 1),
    ],
    ids=["full", "full, attention kept", "full, products kept", "selective", "selective, attention kept"],
)
def test_attention_that_is_kept_runs_once_and_gradients_stay(
    paths: list[list[int]], ac: ActivationCheckpointConfig, attention_runs: int
) -> None:
    name = "aten::_scaled_dot_product_flash_attention_for_cpu"
    expected, plain = train_once(paths, None)
    found, counts = train_once(paths, ac)
    assert plain[name] == 4 * 3  # of four blocks three segments
    assert counts[name] == attention_runs * plain[name]
    assert (counts["aten::mm"] > plain["aten::mm"]) == ("products" not in ac.keep)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("paths", PATHS.values(), ids=PATHS.keys())
def test_attention_outside_of_compiled_blocks_is_kept(paths: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    name = "aten::_scaled_dot_product_flash_attention_for_cpu"
    monkeypatch.setattr(blocks, "require_compiler", lambda device: None)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    expected, plain = train_once(paths, None)
    found, counts = train_once(paths, ActivationCheckpointConfig(keep=["attention"]), is_compiled=True)
    assert counts[name] == plain[name]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
