"""Compare the compiled arithmetic of the head with the eager one, and count its graphs."""

from functools import partial
from typing import Any

import pytest
import torch

from trivet.trainer.model.logprobs import _compile, score_tokens

H, V = 16, 40


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """The graphs that are compiled, in order, by a backend that runs them as they are."""
    found: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        found.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=keep))
    torch._dynamo.reset()
    _compile.cache_clear()
    return found


def score_and_differentiate(*, num_tokens: int, uses_entropies: bool, **options: Any) -> list[torch.Tensor]:
    """Return the scores of `num_tokens` tokens in chunks of 5, and the gradients with respect to hidden states and weight."""
    generator = torch.Generator().manual_seed(num_tokens)
    hidden_NH, weight_VH = (
        torch.randn(rows, H, generator=generator, dtype=torch.float64).requires_grad_() for rows in (num_tokens, V)
    )
    scores = score_tokens(
        hidden_NH,
        weight_VH,
        targets_N=torch.randint(0, V, (num_tokens,), generator=generator),
        temperatures_N=torch.rand(num_tokens, generator=generator, dtype=torch.float64) + 0.5,
        chunk_size=5,
        **options,
    )
    loss = scores.logprobs_N.square().sum() + (0.3 * scores.entropies_N.sum() if uses_entropies else 0.0)
    return [*scores, *torch.autograd.grad(loss, (hidden_NH, weight_VH))]


@pytest.mark.filterwarnings("ignore")  # Dynamo looks at what warns, and hides the warnings in vain
@pytest.mark.parametrize(("softcap", "uses_entropies"), [(None, False), (3.0, True)])
def test_each_direction_is_one_graph_for_chunks_of_any_size_and_equals_the_eager_results(
    softcap: float | None, uses_entropies: bool, graphs: list[torch.fx.GraphModule]
) -> None:
    for num_tokens in (23, 12, 5):  # the last chunk of a row has another size
        options = {"num_tokens": num_tokens, "uses_entropies": uses_entropies, "softcap": softcap}
        found, expected = (score_and_differentiate(is_compiled=is_compiled, **options) for is_compiled in (True, False))
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert len(graphs) == 2


@pytest.mark.filterwarnings("ignore")
def test_no_gradient_of_a_compiled_chunk_is_scattered(graphs: list[torch.fx.GraphModule]) -> None:
    """A scatter is a kernel of its own on a GPU: all gradients would go through memory once more."""
    score_and_differentiate(is_compiled=True, num_tokens=12, uses_entropies=True)
    assert len(graphs) == 2
    assert not [node for graph in graphs for node in graph.graph.nodes if "scatter" in str(node.target)]


def test_the_gradient_agrees_with_finite_differences_where_logits_are_capped() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden_NH, weight_VH = (torch.randn(rows, H, generator=generator, dtype=torch.float64) for rows in (4, 8))

    def loss(hidden_NH: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
        scores = score_tokens(
            hidden_NH,
            weight_VH,
            targets_N=torch.arange(4),
            temperatures_N=torch.linspace(0.5, 2.0, 4, dtype=torch.float64),
            chunk_size=3,
            softcap=3.0,
        )
        return scores.logprobs_N + 0.3 * scores.entropies_N

    assert torch.autograd.gradcheck(loss, (hidden_NH.requires_grad_(), weight_VH.requires_grad_()))
