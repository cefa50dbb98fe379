"""Compare the chunked head with logits computed at once."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trivet.trainer.model import logprobs
from trivet.trainer.model.logprobs import TokenScores, choose_product_dtype, score_tokens

N, H, V = 23, 16, 40


@pytest.fixture(autouse=True, params=[1, 3, 1000], ids=lambda tokens: f"{tokens} tokens in the cache")
def _cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "_CACHED_LOGITS", request.param * V + 5)


def make_inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(N, H, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight_VH = torch.randn(V, H, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    targets_N = torch.randint(0, V, (N,), generator=generator)
    temperatures_N = torch.rand(N, generator=generator) + 0.5
    return hidden_NH, weight_VH, targets_N, temperatures_N.to(torch.float64 if dtype == torch.float64 else torch.float32)


def at_once(hidden_NH, weight_VH, targets_N, temperatures_N) -> TokenScores:
    logprobs_NV = torch.log_softmax(hidden_NH @ weight_VH.T / temperatures_N[:, None], dim=-1)
    entropies_N = -(logprobs_NV.exp() * logprobs_NV).sum(dim=-1)
    return TokenScores(logprobs_NV.gather(1, targets_N[:, None])[:, 0], entropies_N)


@pytest.mark.parametrize("chunk_size", [1, 5, 23, 100])
def test_values_and_gradients_equal_those_of_full_logits(chunk_size: int) -> None:
    inputs = make_inputs(torch.float64)
    upstream_N = torch.randn(N, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    results = []
    for scores in (
        at_once(*inputs),
        score_tokens(inputs[0], inputs[1], targets_N=inputs[2], temperatures_N=inputs[3], chunk_size=chunk_size),
    ):
        gradients = torch.autograd.grad((scores.logprobs_N * upstream_N).sum(), inputs[:2])
        results.append([*scores, *gradients])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_bf16_inputs_give_float32_scores_and_bf16_gradients() -> None:
    hidden_NH, weight_VH, targets_N, temperatures_N = make_inputs(torch.bfloat16)
    scores = score_tokens(hidden_NH, weight_VH, targets_N=targets_N, temperatures_N=temperatures_N, chunk_size=5)
    scores.logprobs_N.sum().backward()
    exact = at_once(hidden_NH.double(), weight_VH.double(), targets_N, temperatures_N.double())
    assert scores.logprobs_N.dtype == scores.entropies_N.dtype == torch.float32
    # Logits of size 10 have steps of 1/16 in bf16. Temperatures from 0.5 on double that.
    torch.testing.assert_close(scores.logprobs_N.double(), exact.logprobs_N, rtol=0, atol=0.15)
    assert weight_VH.grad is not None
    assert weight_VH.grad.dtype == torch.bfloat16


def test_head_gradient_is_summed_over_chunks_in_float32() -> None:
    hidden_NH = torch.ones(512, 4, dtype=torch.bfloat16)
    weight_VH = torch.zeros(2, 4, dtype=torch.bfloat16, requires_grad=True)
    scores = score_tokens(
        hidden_NH,
        weight_VH,
        targets_N=torch.zeros(512, dtype=torch.int64),
        temperatures_N=torch.ones(512),
        chunk_size=1,
    )
    scores.logprobs_N.sum().backward()
    assert weight_VH.grad is not None
    # The sum is 512 times 0.5. A bf16 sum of halves stands still at 128.
    assert weight_VH.grad[0, 0].item() == 256.0


@pytest.mark.parametrize("chunk_size", [1, 7, 100])
def test_gradient_of_the_entropy_equals_that_of_plain_logits(chunk_size: int) -> None:
    hidden_NH, weight_VH, targets_N, temperatures_N = make_inputs(torch.float64)
    found = score_tokens(hidden_NH, weight_VH, targets_N=targets_N, temperatures_N=temperatures_N, chunk_size=chunk_size)
    expected = at_once(hidden_NH, weight_VH, targets_N, temperatures_N)
    mix = torch.linspace(-1.0, 2.0, len(targets_N), dtype=torch.float64)
    for weights in ((mix, mix.flip(0)), (0.0 * mix, mix)):
        gradients = [
            torch.autograd.grad(
                (weights[0] * scores.logprobs_N + weights[1] * scores.entropies_N).sum(),
                (hidden_NH, weight_VH),
                retain_graph=True,
            )
            for scores in (found, expected)
        ]
        for ours, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


class Questions(TorchDispatchMode):
    """Counts how often a value of a tensor is asked for, which waits for a GPU."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("uses_temperatures", [False, True])
def test_no_value_is_asked_for_and_what_the_caller_says_of_temperatures_is_taken(uses_temperatures: bool) -> None:
    hidden_NH, weight_VH, targets_N, _ = make_inputs(torch.float64)
    ones_N = torch.ones(N, dtype=torch.float64)
    expected = at_once(hidden_NH, weight_VH, targets_N, ones_N)
    with Questions() as questions:
        found = score_tokens(
            hidden_NH, weight_VH, targets_N=targets_N, temperatures_N=ones_N, chunk_size=5, uses_temperatures=uses_temperatures
        )
        found.logprobs_N.sum().backward()
    assert questions.count == 0
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_every_product_rounds_to_the_dtype_that_is_multiplied_but_on_gpus_that_can_do_better() -> None:
    found = {
        (device_type, capability, has_wide_products, dtype): choose_product_dtype(
            dtype, device_type=device_type, capability=capability, has_wide_products=has_wide_products
        )
        for device_type, capability, has_wide_products, dtype in (
            ("cuda", (9, 0), True, torch.bfloat16),
            ("cuda", (8, 0), True, torch.bfloat16),
            ("cuda", (7, 5), True, torch.bfloat16),
            ("cuda", (9, 0), False, torch.bfloat16),
            ("cuda", (9, 0), True, torch.float32),
            ("cuda", (9, 0), True, torch.float64),
            ("cpu", None, True, torch.bfloat16),
            ("meta", None, True, torch.bfloat16),
        )
    }
    wide = [case for case, dtype in found.items() if dtype != case[-1]]
    assert wide == [("cuda", (9, 0), True, torch.bfloat16), ("cuda", (8, 0), True, torch.bfloat16)]
    assert {found[case] for case in wide} == {torch.float32}


@pytest.fixture
def _wide_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have products of bfloat16 give float32 as on a GPU. The CPU's product has no `out_dtype`: a stand-in multiplies."""
    multiply = torch.mm

    def stand_in(left: torch.Tensor, right: torch.Tensor, *, out_dtype: torch.dtype) -> torch.Tensor:
        assert left.dtype == right.dtype == torch.bfloat16
        return multiply(left.to(out_dtype), right.to(out_dtype))

    monkeypatch.setattr(torch, "mm", stand_in)
    monkeypatch.setattr(logprobs, "_product_dtype", lambda device, dtype: torch.float32)


@pytest.mark.usefixtures("_wide_products")
def test_logits_and_the_sum_of_the_heads_gradient_are_not_rounded_where_products_give_float32() -> None:
    hidden_NH, weight_VH, targets_N, temperatures_N = make_inputs(torch.bfloat16)
    weight_VH = weight_VH.detach().float().requires_grad_()  # a master weight, whose gradient is wide
    scores = score_tokens(hidden_NH, weight_VH, targets_N=targets_N, temperatures_N=temperatures_N, chunk_size=5)
    scores.logprobs_N.sum().backward()
    exact_hidden, exact_weight = (each.detach().double().requires_grad_() for each in (hidden_NH, weight_VH))
    exact = at_once(exact_hidden, exact_weight, targets_N, temperatures_N.double())
    exact.logprobs_N.sum().backward()
    # A logit of size 20 has steps of 2e-6 in float32, of 0.125 in bf16.
    torch.testing.assert_close(scores.logprobs_N.double(), exact.logprobs_N, rtol=0, atol=2e-5)
    torch.testing.assert_close(scores.entropies_N.double(), exact.entropies_N, rtol=0, atol=2e-5)
    # The gradient of the logits is multiplied in bf16, whose numbers are 1/256 apart.
    assert weight_VH.grad is not None
    assert hidden_NH.grad is not None
    torch.testing.assert_close(weight_VH.grad.double(), exact_weight.grad, rtol=0, atol=0.02)
    torch.testing.assert_close(hidden_NH.grad.double(), exact_hidden.grad, rtol=0.02, atol=0.05)


@pytest.mark.gpu
@pytest.mark.device
def test_the_heads_products_on_a_gpu_are_those_of_float64_and_are_not_rounded_to_bfloat16() -> None:
    """Products of bfloat16 numbers are exact in float32; their sums over 1,024 features are rounded by about 1e-6."""
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU does not multiply bfloat16")
    generator = torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(300, 1024, generator=generator).to("cuda", torch.bfloat16).requires_grad_()
    weight_VH = (0.1 * torch.randn(700, 1024, generator=generator)).to("cuda", torch.bfloat16).float().requires_grad_()
    targets_N, temperatures_N = torch.arange(300, device="cuda"), torch.ones(300, device="cuda")
    product = logprobs._multiply(hidden_NH.detach(), weight_VH.detach().bfloat16().T, dtype=torch.float32)
    exact_product = hidden_NH.detach().double() @ weight_VH.detach().double().T
    assert product.dtype == torch.float32
    assert float((product - exact_product).abs().max() / exact_product.abs().max()) < 1e-5
    scores = score_tokens(hidden_NH, weight_VH, targets_N=targets_N, temperatures_N=temperatures_N, chunk_size=128)
    scores.logprobs_N.sum().backward()
    exact_hidden, exact_weight = (each.detach().double().requires_grad_() for each in (hidden_NH, weight_VH))
    exact = at_once(exact_hidden, exact_weight, targets_N, temperatures_N.double())
    exact.logprobs_N.sum().backward()
    assert float((scores.logprobs_N - exact.logprobs_N).abs().max()) < 1e-4  # rounded logits would differ by 0.02
    for found, expected in ((weight_VH.grad, exact_weight.grad), (hidden_NH.grad, exact_hidden.grad)):
        assert found is not None
        assert expected is not None
        assert float((found - expected).norm() / expected.norm()) < 1e-2  # the gradient of the logits is multiplied in bfloat16


@pytest.mark.parametrize("uses_entropies", [False, True])
def test_a_gpu_is_never_waited_for_and_its_logits_are_float32(uses_entropies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meta tensors stand in for those of a GPU; to ask one for a value is an error."""
    monkeypatch.setattr(logprobs, "_product_dtype", lambda device, dtype: torch.float32)
    meta = torch.device("meta")
    hidden_NH = torch.empty(N, H, dtype=torch.bfloat16, device=meta, requires_grad=True)
    weight_VH = torch.empty(V, H, dtype=torch.bfloat16, device=meta, requires_grad=True)
    scores = score_tokens(
        hidden_NH,
        weight_VH,
        targets_N=torch.empty(N, dtype=torch.int64, device=meta),
        temperatures_N=torch.empty(N, device=meta),
        chunk_size=5,
        softcap=30.0,
    )
    loss = scores.logprobs_N.sum() + (scores.entropies_N.sum() if uses_entropies else 0.0)
    with Products() as products:
        loss.backward()
    assert {scores.logprobs_N.dtype, scores.entropies_N.dtype} == {torch.float32}
    assert hidden_NH.grad is not None
    assert weight_VH.grad is not None
    # Of each chunk: its logits, the gradient of its hidden states, and its part of the weight's gradient.
    assert products.dtypes == [torch.float32, torch.bfloat16, torch.float32] * 5


class Products(TorchDispatchMode):
    """Records the dtype of what every matrix product gives."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten.mm.default, torch.ops.aten.mm.dtype):
            self.dtypes.append(result.dtype)
        return result
