"""Compare the chunked head with logits computed at once."""

import pytest
import torch

from trivet.trainer.model import logprobs
from trivet.trainer.model.logprobs import TokenScores, score_tokens

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


def test_gradient_agrees_with_finite_differences() -> None:
    hidden_NH, weight_VH, targets_N, temperatures_N = make_inputs(torch.float64)

    def logprobs_of(hidden_NH: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
        return score_tokens(
            hidden_NH, weight_VH, targets_N=targets_N[:4], temperatures_N=temperatures_N[:4], chunk_size=3
        ).logprobs_N

    assert torch.autograd.gradcheck(logprobs_of, (hidden_NH[:4].detach().requires_grad_(), weight_VH))


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
