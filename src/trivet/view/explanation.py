"""Explains why each token of a rollout was trained or not, and how much. For `trivet explain` and the page.

The reasons follow from the recorded rollouts. Ratios, shares of the loss and weights of gradients need the model:
`trivet explain` computes them and keeps them in a file (`transport.explained`), from which they are read here.

Legend: T tokens of a sample.
"""

import tomllib
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np

from trivet.config.layout import RunLayout
from trivet.transport.explained import ExplainedStep, SampleShares, read_explained
from trivet.view.run import ViewedRun
from trivet.wire.rollouts import Sample

_CLIPPING_LOSSES = ("grpo", "gspo", "cispo", "aipo")
"""Losses that bound a token by a clip of its ratio. The others mask it."""
_NOT_COMPUTED = "ratios, shares of the loss and weights are not computed yet: uv run trivet explain {} --step {}"


class TokenReason(StrEnum):
    """Why a token is trained, or is not."""

    PROMPT = "prompt"
    """Read before the first sampled token."""
    TOOL_RESULT = "tool result"
    """Read after a sampled token, in a rollout with tool calls."""
    LATER_TURN = "later turn"
    """Read after a sampled token, in a rollout without tool calls: a message of the environment, or the chat template."""
    CUT = "cut"
    """Sampled, but beyond `seq_len`."""
    FILTERED = "filtered"
    """Sampled, but a filter of rollouts cleared the sample's loss mask."""
    OFF_POLICY_MASK = "off-policy mask"
    """Its probability has moved too far from the sampler's, or that of its sample has: the loss gives it no gradient."""
    CLIPPED = "clipped"
    """Its ratio, or its sample's, is beyond the clip. With PPO's objective it has no gradient; the others bound its weight."""
    TRAINED = "trained"


class SampleExplanation(msgspec.Struct, kw_only=True):
    """One sample, a value for each of its tokens. Numbers are None where the loss did not see the token."""

    token_ids: list[int]
    texts: list[str] | None
    """The text of each token; None if the run has no tokenizer any more."""
    reasons: list[TokenReason]
    sampler_logprobs: list[float | None]
    """None where the model did not sample the token."""
    trainer_logprobs: list[float | None] = []
    """This and the following lists are empty if nothing is computed for the step."""
    ratios: list[float | None] = []
    losses: list[float | None] = []
    """What the token added to the step's loss."""
    weights: list[float | None] = []
    """Derivative of the step's loss with respect to the token's log-probability."""


class RolloutExplanation(msgspec.Struct, kw_only=True):
    """One rollout of a step."""

    step: int
    line: int
    """Line of `rollouts.jsonl`, counted from 0."""
    record: dict[str, Any]
    """The line: reward, advantage, messages and so on."""
    samples: list[SampleExplanation]
    loss: float | None = None
    """What the rollout added to the step's loss."""
    step_loss: float | None = None
    """The sum over all tokens of the step."""
    missing: str = ""
    """What is missing, and how to get it; empty if nothing is."""


def explain_rollout(run: ViewedRun, *, step: int, line: int, seq_len: int | None) -> RolloutExplanation:
    """Explain one rollout from the files of the run. The run's lock is held.

    Args:
        seq_len: tokens to which the trainer's samples were cut; None if that is unknown.

    Raises:
        NotServed: there is no such rollout.
    """
    directory = run.layout.rollouts_step(step)
    record = run.rollouts.record(directory / "rollouts.jsonl", line)
    samples = run.rollouts.samples(directory, line)
    explained = read_explained(run.layout, step)
    shares: Sequence[SampleShares | None] = explained.rollouts[line] if explained is not None else [None] * len(samples)
    has_tools = any(message.get("role") == "tool" for message in record.get("completion") or [])
    clips = explained is not None and explained.loss_type in _CLIPPING_LOSSES
    parts: list[SampleExplanation] = []
    for sample, own in zip(samples, shares, strict=True):
        reasons = find_reasons(sample, seq_len=seq_len, has_tools=has_tools, shares=own, clips=clips)
        token_ids = sample.token_ids_T.tolist()
        parts.append(
            SampleExplanation(
                token_ids=token_ids,
                texts=run.token_text.pieces(token_ids),
                reasons=reasons,
                sampler_logprobs=_spread((sample.masked or sample).logprobs_T, (sample.masked or sample).loss_mask_T),
                **_columns(sample, seq_len=seq_len, shares=own) if explained is not None else {},
            )
        )
    computed = [float(own.losses_L.sum()) for own in shares if own is not None]
    return RolloutExplanation(
        step=step,
        line=line,
        record=record,
        samples=parts,
        loss=sum(computed) if explained is not None else None,
        step_loss=explained.loss if explained is not None else None,
        missing="" if explained is not None else _NOT_COMPUTED.format(run.layout.root, step),
    )


def find_reasons(
    sample: Sample, *, seq_len: int | None, has_tools: bool, shares: SampleShares | None, clips: bool
) -> list[TokenReason]:
    """Return the reason of each token of `sample`.

    Args:
        has_tools: the rollout called tools.
        shares: the values of the tokens that the loss saw; None if they are unknown, so that no token counts as masked or clipped.
        clips: the loss clips ratios; false: it masks tokens.
    """
    is_sampled_T = (sample.masked or sample).loss_mask_T
    first = int(is_sampled_T.argmax()) if is_sampled_T.any() else len(is_sampled_T)
    read = TokenReason.TOOL_RESULT if has_tools else TokenReason.LATER_TURN
    reasons = [read if index > first else TokenReason.PROMPT for index in range(len(is_sampled_T))]
    for index in np.flatnonzero(is_sampled_T):
        reasons[index] = TokenReason.TRAINED if sample.masked is None else TokenReason.FILTERED
        if seq_len is not None and index >= seq_len and sample.masked is None:
            reasons[index] = TokenReason.CUT
    if shares is not None:
        bounded_L = shares.is_masked_L | (shares.is_low_L | shares.is_high_L if clips else False)
        for index in _trained_positions(sample, seq_len=seq_len)[bounded_L]:
            reasons[index] = TokenReason.CLIPPED if clips else TokenReason.OFF_POLICY_MASK
    return reasons


def read_seq_len(layout: RunLayout) -> int | None:
    """Return the tokens to which the run's orchestrator cuts samples; None if its configuration cannot be read."""
    try:
        value = tomllib.loads((layout.configs / "orchestrator.toml").read_text(encoding="utf-8")).get("seq_len")
    except (OSError, ValueError):
        return None
    return value if isinstance(value, int) else None


def count_reasons(explanation: RolloutExplanation) -> dict[TokenReason, int]:
    """Return how many tokens of the rollout have each reason that occurs."""
    reasons = [reason for sample in explanation.samples for reason in sample.reasons]
    return {reason: reasons.count(reason) for reason in TokenReason if reason in reasons}


def describe_step(explained: ExplainedStep, *, recorded_loss: float | None) -> str:
    """Return one sentence that compares the sum over all tokens with the loss in the metrics."""
    text = (
        f"step started from policy {explained.version}: its {explained.num_loss_tokens:,} loss tokens in "
        f"{explained.num_samples:,} samples add up to a loss ({explained.loss_type}) of {explained.loss:.7g}"
    )
    if recorded_loss is None:
        return f"{text}; the metrics have none to compare with"
    return f"{text}; the metrics say {recorded_loss:.7g}, a difference of {abs(explained.loss - recorded_loss):.1e}"


def _trained_positions(sample: Sample, *, seq_len: int | None) -> np.ndarray:
    """Return the positions of the loss tokens that the trainer got."""
    return np.flatnonzero(sample.loss_mask_T[:seq_len])


def _columns(sample: Sample, *, seq_len: int | None, shares: SampleShares | None) -> dict[str, list[float | None]]:
    is_trained_T = np.zeros(sample.num_tokens, dtype=np.bool_)
    if shares is not None:
        is_trained_T[_trained_positions(sample, seq_len=seq_len)] = True
    names = {"trainer_logprobs": "logprobs_L", "ratios": "ratios_L", "losses": "losses_L", "weights": "weights_L"}
    columns: dict[str, list[float | None]] = {}
    for name, source in names.items():
        values_T = np.zeros(sample.num_tokens)
        if shares is not None:
            values_T[is_trained_T] = getattr(shares, source)
        columns[name] = _spread(values_T, is_trained_T)
    return columns


def _spread(values_T: np.ndarray, is_set_T: np.ndarray) -> list[float | None]:
    return [float(value) if is_set else None for value, is_set in zip(values_T, is_set_T, strict=True)]
