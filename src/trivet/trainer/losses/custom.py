"""Loads a loss that the user wrote: a function of one sample, found by its import path. Called by `trainer.losses.formulas`."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch

from trivet.config.schema.losses import CustomLossConfig
from trivet.errors import ConfigError
from trivet.process.imports import import_by_path
from trivet.trainer.losses.terms import Loss, LossUnit, RowLoss, common_values, make_ratios
from trivet.trainer.model.logprobs import TokenScores
from trivet.trainer.rows import RowTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleInputs:
    """The argument of a custom loss: the loss tokens of one sample, in order. Legend: L loss tokens."""

    trainer_logprobs_L: torch.Tensor
    """float32, with gradient."""
    sampler_logprobs_L: torch.Tensor
    """float32: the log-probabilities with which the tokens were sampled."""
    entropies_L: torch.Tensor
    """float32, nats."""
    advantages_L: torch.Tensor
    """float32: the rollout's advantage at every token."""
    teacher_logprobs_L: torch.Tensor | None = None
    """float32: the teacher's log-probabilities; None if the run has no teacher."""


class SampleLoss(NamedTuple):
    """The result of a custom loss."""

    loss: torch.Tensor
    """Scalar: the sample's sum. The step divides the sum over all samples by the count that `trainer.loss.unit` names."""
    metrics: dict[str, torch.Tensor] = {}
    """Values of any shape by metric name; detached."""


SampleFunction = Callable[..., SampleLoss]
"""Called as function(inputs, **kwargs)."""


def load_custom_loss(config: CustomLossConfig) -> Loss:
    """Import the function that `config` names and make a loss of rows from it."""
    path = config.import_path
    try:
        imported = import_by_path(path)
    except (ImportError, AttributeError) as exc:
        raise ConfigError(
            f"trainer.loss.import_path {path!r} cannot be imported: {exc}; is the module on PYTHONPATH or installed?"
        ) from exc
    if not callable(imported):
        raise ConfigError(f"trainer.loss.import_path {path!r} is {type(imported).__name__}, not a function")
    function = cast("SampleFunction", imported)
    try:
        inspect.signature(function).bind(None, **config.kwargs)
    except TypeError as exc:
        raise ConfigError(
            f"trainer.loss.import_path {path!r} is called with the inputs of a sample and the keyword arguments "
            f"{sorted(config.kwargs)}: {exc}; change trainer.loss.kwargs or the function"
        ) from exc

    def compute(scores: TokenScores, row: RowTensors) -> RowLoss:
        lengths = list(row.num_loss_tokens_S)
        columns = (scores.logprobs_N, row.sampler_logprobs_N, scores.entropies_N.detach(), row.advantages_N)
        samples = zip(*(column.split(lengths) for column in columns), strict=True)
        teachers = [None] * len(lengths) if row.teacher_logprobs_N is None else row.teacher_logprobs_N.split(lengths)
        results: list[SampleLoss] = []
        for (trainer, sampler, entropies, advantages), teacher in zip(samples, teachers, strict=True):
            inputs = SampleInputs(
                trainer_logprobs_L=trainer,
                sampler_logprobs_L=sampler,
                entropies_L=entropies,
                advantages_L=advantages,
                teacher_logprobs_L=teacher,
            )
            result = function(inputs, **config.kwargs)
            if not isinstance(result, tuple) or not isinstance(result[0], torch.Tensor) or result[0].ndim != 0:
                raise ConfigError(
                    f"trainer.loss.import_path {path!r} returned {type(result).__name__}; it must return "
                    "trivet.trainer.losses.custom.SampleLoss(loss, metrics) with a scalar tensor as loss"
                )
            results.append(SampleLoss(*result))
        losses_S = torch.stack([result.loss for result in results])
        ratios = make_ratios(scores, row)
        none_N = torch.zeros_like(ratios.d_N, dtype=torch.bool)
        names = sorted({name for result in results for name in result.metrics})
        values = {
            "loss": losses_S.detach() / (ratios.lengths_S if config.unit == "token" else 1.0),
            **common_values(scores, row, ratios, low_N=none_N, high_N=none_N, masked_N=none_N),
            **{
                name: torch.cat([result.metrics[name].detach().reshape(-1) for result in results if name in result.metrics])
                for name in names
            },
        }
        unit, tokens_N = LossUnit(config.unit), (losses_S.detach() / ratios.lengths_S)[row.samples_N]
        return RowLoss({unit: losses_S.sum()}, values, {unit: tokens_N})

    return compute
