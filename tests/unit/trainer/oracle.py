"""The trainer's arithmetic, written a second time: float64, one sample at a time, full logits, plain transformers."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from trivet.config.schema.losses import DefaultLossConfig
from trivet.wire.batches import MicroBatch


@dataclass(frozen=True)
class Example:
    token_ids: list[int]
    is_trained: list[bool]
    sampler_logprobs: list[float]
    advantage: float
    temperature: float


def make_examples(*, count: int, vocab_size: int, seed: int = 0, prompt_length: int = 0) -> list[Example]:
    """Make samples of 3 to 23 tokens; with a `prompt_length`, two in three begin with one of two prompts of so many more."""
    rng = np.random.default_rng(seed)
    prompts = [*rng.integers(0, vocab_size, (2, prompt_length)).tolist(), []]
    examples = []
    for number in range(count):
        prompt = prompts[number % 3]
        length = int(rng.integers(3, 24))
        start = int(rng.integers(1, length))
        mask = [t >= start and bool(rng.random() < 0.9) for t in range(length)]
        mask[-1] = True
        examples.append(
            Example(
                token_ids=prompt + rng.integers(0, vocab_size, length).tolist(),
                is_trained=[False] * len(prompt) + mask,
                sampler_logprobs=np.float32(
                    [*(0.0 for _ in prompt), *(rng.normal(0, 1.2, length) - np.log(vocab_size))]
                ).tolist(),
                advantage=float(np.float32(rng.normal())),
                temperature=float(rng.choice([0.5, 1.0, 1.5])),
            )
        )
    return examples


def make_row(examples: list[Example]) -> MicroBatch:
    lengths = [len(example.token_ids) for example in examples]
    return MicroBatch(
        token_ids_T=np.array([token for e in examples for token in e.token_ids], dtype=np.int32),
        position_ids_T=np.array([t for length in lengths for t in range(length)], dtype=np.int32),
        loss_mask_T=np.array([m for e in examples for m in e.is_trained], dtype=np.bool_),
        logprobs_T=np.array([lp for e in examples for lp in e.sampler_logprobs], dtype=np.float32),
        advantages_T=np.repeat(np.array([e.advantage for e in examples], dtype=np.float32), lengths),
        temperatures_T=np.repeat(np.array([e.temperature for e in examples], dtype=np.float32), lengths),
        sequence_lengths_S=np.array(lengths, dtype=np.int32),
    )


def layouts(examples: list[Example]) -> dict[str, list[MicroBatch]]:
    """Return the same samples, packed differently."""
    backwards = examples[::-1]
    return {
        "one row": [make_row(examples)],
        "one row, backwards": [make_row(backwards)],
        "a row each": [make_row([example]) for example in examples],
        "uneven rows": [make_row(backwards[:1]), make_row(backwards[1:4]), make_row(backwards[4:])],
    }


def load_model(directory: Path, *, adapter: Path | None = None, attention: str = "eager") -> Any:
    """Load by plain transformers and PEFT, in float64. With an adapter, only the adapter is trainable."""
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, attn_implementation=attention, experts_implementation="eager"
    )
    return model if adapter is None else PeftModel.from_pretrained(model, str(adapter), is_trainable=True).base_model.model


def loss_and_gradients(
    model_dir: Path,
    examples: list[Example],
    config: DefaultLossConfig | None,
    *,
    adapter: Path | None = None,
    attention: str = "eager",
) -> tuple[Any, dict[str, Any]]:
    """Return the policy loss of `config`, or without one the mean cross-entropy, and its gradients by parameter name."""
    model = load_model(model_dir, adapter=adapter, attention=attention)
    num_tokens = sum(sum(example.is_trained) for example in examples)
    total = torch.zeros((), dtype=torch.float64)
    for example in examples:
        logits = model(input_ids=torch.tensor([example.token_ids])).logits[0].double() / example.temperature
        logprobs = torch.log_softmax(logits, dim=-1)
        chosen = {t: logprobs[t - 1, example.token_ids[t]] for t, trained in enumerate(example.is_trained) if trained}
        if config is None:
            total = total - torch.stack(list(chosen.values())).sum() / num_tokens
        else:
            divisor = num_tokens if config.ratio_type == "token" else len(examples) * len(chosen)
            total = total + _policy_loss(chosen, example, config) / divisor
    total.backward()
    return total.item(), {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}


def _policy_loss(chosen: dict[int, torch.Tensor], example: Example, config: DefaultLossConfig) -> torch.Tensor:
    log_ratios = {t: logprob.item() - example.sampler_logprobs[t] for t, logprob in chosen.items()}
    ratios = {t: math.exp(d) for t, d in log_ratios.items()}
    geometric = math.exp(sum(log_ratios.values()) / len(log_ratios))
    is_sample_masked = (
        not config.geo_mask_low <= geometric <= config.geo_mask_high
        or min(ratios.values()) < config.sequence_mask_low
        or max(ratios.values()) > config.sequence_mask_high
    )
    loss = torch.zeros((), dtype=torch.float64)
    for t, logprob in chosen.items():
        if is_sample_masked or not config.token_mask_low <= ratios[t] <= config.token_mask_high:
            continue
        rho = ratios[t]
        if config.ratio_type == "sequence":
            rho = min(math.exp(min(sum(log_ratios.values()), 10.0)), config.sequence_clip_high)
        loss = loss - rho * (config.adv_tau * example.advantage - config.kl_tau * log_ratios[t]) * logprob
    return loss


def gradient_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the distance of two gradients over the whole model, relative to the length of the expected one."""
    assert found.keys() == expected.keys()
    distance = torch.stack([(found[name].double() - expected[name].double()).norm() for name in expected]).norm()
    return float(distance / torch.stack([gradient.double().norm() for gradient in expected.values()]).norm())


def largest_parameter_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    return max(gradient_error({name: found[name]}, {name: expected[name]}) for name in expected)
