"""Gradients added up in place equal those that autograd adds up, whoever adds at the same time."""

from concurrent.futures import ThreadPoolExecutor

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from trivet.trainer.kernels.cpu import speed_up_on_cpu
from trivet.trainer.model.logprobs import score_tokens
from trivet.trainer.optim.master_weights import MasterWeights

VOCAB, PADDING = 50, 3


def gradients(*, sums_gradients: bool, tied: bool) -> dict[str, torch.Tensor]:
    """Return gradients of two rows in bf16. Tokens come several times, and padding is among others."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    config = LlamaConfig(vocab_size=VOCAB, pad_token_id=PADDING, tie_word_embeddings=tied, **sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    masters = speed_up_on_cpu(model, dtype=torch.bfloat16)
    assert masters is not None
    masters.sums_gradients = sums_gradients
    for seed in (1, 2):
        ids_1T = torch.randint(0, 9, (1, 40), generator=torch.Generator().manual_seed(seed))
        hidden = model.base_model(input_ids=ids_1T, use_cache=False).last_hidden_state[0]
        scores = score_tokens(
            hidden,
            model.lm_head.weight,
            targets_N=ids_1T[0].roll(-1),
            temperatures_N=torch.ones(40),
            chunk_size=16,
            masters=masters,
        )
        scores.logprobs_N.mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_they_are_those_of_autograd() -> None:
    for tied in (True, False):
        found, expected = (gradients(sums_gradients=sums, tied=tied) for sums in (True, False))
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            assert gradient.any(), name
            assert (found[name] - gradient).norm() <= 1e-6 * gradient.norm(), name
    padding = found["model.embed_tokens.weight"][PADDING]
    assert not padding.any(), "padding is not trained"


def test_threads_that_add_at_once_lose_nothing() -> None:
    masters, weight = MasterWeights(), torch.nn.Parameter(torch.zeros(700, 500))
    masters.sums_gradients = True
    part, rows = torch.ones(700, 500, dtype=torch.bfloat16), torch.tensor([5, 5, 699])

    def add(_: int) -> None:
        masters.add_gradient(weight, part)
        assert masters.add_to_rows(weight, rows, torch.ones(3, 500, dtype=torch.bfloat16)) is None

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(40)))
    expected = torch.full((700, 500), 40.0)
    expected[5], expected[699] = 120.0, 80.0
    assert torch.equal(weight.grad, expected)  # type: ignore[reportArgumentType]


def test_a_frozen_head_gets_no_gradient() -> None:
    masters = MasterWeights()
    masters.sums_gradients = True
    head, hidden = torch.nn.Parameter(torch.randn(VOCAB, 8), requires_grad=False), torch.randn(5, 8, requires_grad=True)
    scores = score_tokens(hidden, head, targets_N=torch.arange(5), temperatures_N=torch.ones(5), chunk_size=2, masters=masters)
    scores.logprobs_N.sum().backward()
    assert head.grad is None
    assert hidden.grad is not None
    assert hidden.grad.any()
