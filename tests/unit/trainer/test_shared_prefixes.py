"""Computing shared tokens once changes neither loss nor gradients: in float64, for every loss and attention, next to rows that
repeat them."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from trivet.config.schema import losses
from trivet.trainer.attention.choice import HeadDims
from trivet.trainer.attention.packed import register_attention
from trivet.trainer.losses.formulas import cross_entropy, make_policy_loss
from trivet.trainer.losses.terms import Loss
from trivet.trainer.model.logprobs import TokenScores
from trivet.trainer.model.policy_model import PolicyModel
from trivet.trainer.model.supported import find_logit_rule
from trivet.trainer.rows import to_tensors

CPU = torch.device("cpu")
TOLERANCE = 1e-10

LOSSES: dict[str, Loss] = {
    "cross-entropy": cross_entropy,
    **{
        config.type: make_policy_loss(config)
        for config in (
            losses.DefaultLossConfig(kl_tau=0.1),
            losses.CispoLossConfig(),
            losses.AipoLossConfig(),
            losses.GrpoLossConfig(),
            losses.GspoLossConfig(),
            losses.DppoLossConfig(),
            losses.IpoLossConfig(),
            losses.LuspoLossConfig(),
            losses.GmpoLossConfig(),
            losses.SapoLossConfig(),
            losses.VespoLossConfig(),
            losses.ImportanceLossConfig(preset="sequence_tis"),
            losses.DecoupledLossConfig(),
        )
    },
}


class ExactNorm(Qwen3RMSNorm):
    """The norm of transformers rounds to float32."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


@pytest.fixture(scope="module")
def model(tiny_models: dict[str, Path]) -> PolicyModel:
    attention = register_attention("sdpa", device=CPU, dtype=torch.float32, heads=HeadDims(query=64, value=64))
    causal_lm = AutoModelForCausalLM.from_pretrained(tiny_models["tied"], dtype=torch.float64, attn_implementation=attention)
    for module in causal_lm.modules():
        if isinstance(module, Qwen3RMSNorm):
            module.__class__ = ExactNorm
    return PolicyModel(causal_lm, chunk_size=7, logit_rule=find_logit_rule(causal_lm, name="tiny"))


def measure(model: PolicyModel, loss: Loss, row, *, shares_prefixes: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    tensors = to_tensors(row, device=CPU, shares_prefixes=shares_prefixes)
    assert (tensors.num_tokens < row.num_tokens) == shares_prefixes
    scores: TokenScores = model(tensors)
    total = torch.stack(list(loss(scores, tensors).terms.values())).sum()
    return total, list(torch.autograd.grad(total, model.trained_parameters))


def branches(oracle) -> list:
    """Two prompts with answers, and a conversation that goes on in two ways after its first answer, which is trained in both."""
    examples = oracle.make_examples(count=9, vocab_size=100, prompt_length=20)
    first = examples[0]
    return examples + [
        oracle.Example(
            token_ids=first.token_ids + more.token_ids,
            is_trained=first.is_trained + more.is_trained,
            sampler_logprobs=first.sampler_logprobs + more.sampler_logprobs,
            advantage=more.advantage,
            temperature=1.0,
        )
        for more in (examples[2], examples[5])
    ]


@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradients_are_those_of_repeated_tokens(model: PolicyModel, oracle, loss: str) -> None:
    row = oracle.make_row(branches(oracle))
    expected, gradients = measure(model, LOSSES[loss], row, shares_prefixes=False)
    found, found_gradients = measure(model, LOSSES[loss], row, shares_prefixes=True)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    error = torch.stack([(a - b).norm() for a, b in zip(found_gradients, gradients, strict=True)]).norm()
    assert norm > 0
    assert error < TOLERANCE * norm
