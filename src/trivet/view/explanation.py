"""Explains why each token of a rollout was trained or not, and how much. For `trivet explain` and the page.

The reasons follow from the recorded rollouts. Ratios, shares of the loss and weights of gradients need the model:
`trivet explain` computes them and keeps them in a file (`transport.explained`), from which they are read here.

Legend: T tokens of a sample.
"""

from enum import StrEnum
from typing import Any

import msgspec
import numpy as np

from trivet.transport.explained import CLIPPING_LOSSES, SampleShares, read_explained
from trivet.view.run import ViewedRun, read_config
from trivet.wire.rollouts import Sample


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
    """One sample, a value for each of its tokens. A number is NaN, in JSON null, where it does not exist or is not computed."""

    token_ids: list[int]
    texts: list[str] | None
    """The text of each token; None if the run has no tokenizer any more."""
    reasons: list[TokenReason]
    versions: list[int | None]
    """The policy that sampled the token; None for one that was read."""
    sampler_logprobs: list[float]
    trainer_logprobs: list[float]
    ratios: list[float]
    losses: list[float]
    """What the token added to the step's loss."""
    weights: list[float]
    """Derivative of the step's loss with respect to the token's log-probability."""


class RolloutExplanation(msgspec.Struct, kw_only=True):
    """One rollout of a step."""

    step: int
    line: int
    """Line of `rollouts.jsonl`, counted from 0."""
    record: dict[str, Any]
    """The line: reward, advantage, messages and so on."""
    samples: list[SampleExplanation]
    loss: float | None
    """What the rollout added to the step's loss; None if nothing is computed for the step."""
    step_loss: float | None
    """The sum over all tokens of the step."""
    missing: str
    """What is missing, and how to get it; empty if nothing is."""


def explain_rollout(run: ViewedRun, *, step: int, line: int) -> RolloutExplanation:
    """Explain one rollout from the files of the run. The run's lock is held.

    Raises:
        NotServed: there is no such rollout.
    """
    directory, seq_len = run.layout.rollouts_step(step), read_config(run.layout, "orchestrator").get("seq_len")
    record = run.rollouts.record(directory / "rollouts.jsonl", line)
    samples = run.rollouts.samples(directory, line)
    explained = read_explained(run.layout, step)
    shares = [None] * len(samples) if explained is None else explained.rollouts[line]
    has_tools = any(message.get("role") == "tool" for message in record.get("completion") or [])
    clips = explained is not None and explained.loss_type in CLIPPING_LOSSES
    parts: list[SampleExplanation] = []
    for sample, own in zip(samples, shares, strict=True):
        # A filter may have cleared the sample's loss mask. `masked` then keeps the mask and log-probabilities from before.
        token_ids, sampled = sample.token_ids_T.tolist(), sample.masked or sample
        versions = iter([part.version for part in sample.versions for _ in range(part.length)])  # of sampled tokens alone
        unknown_T = np.full(len(token_ids), np.nan)
        parts.append(
            SampleExplanation(
                token_ids=token_ids,
                texts=run.token_text.pieces(token_ids),
                reasons=find_reasons(sample, seq_len=seq_len, has_tools=has_tools, shares=own, clips=clips),
                versions=[next(versions, None) if is_sampled else None for is_sampled in sampled.loss_mask_T],
                sampler_logprobs=np.where(sampled.loss_mask_T, sampled.logprobs_T, np.nan).tolist(),
                trainer_logprobs=(own.logprobs_T if own else unknown_T).tolist(),
                ratios=(own.ratios_T if own else unknown_T).tolist(),
                losses=(own.losses_T if own else unknown_T).tolist(),
                weights=(own.weights_T if own else unknown_T).tolist(),
            )
        )
    text = f"ratios, shares of the loss and weights are not computed yet: uv run trivet explain {run.layout.root} --step {step}"
    return RolloutExplanation(
        step=step,
        line=line,
        record=record,
        samples=parts,
        loss=None if explained is None else sum(own.loss for own in shares if own is not None),
        step_loss=None if explained is None else explained.loss,
        missing=text if explained is None else "",
    )


def find_reasons(
    sample: Sample, *, seq_len: int | None, has_tools: bool, shares: SampleShares | None, clips: bool
) -> list[TokenReason]:
    """Return the reason of each token of `sample`.

    Args:
        seq_len: tokens to which the trainer's samples were cut; None if that is unknown.
        has_tools: the rollout called tools.
        shares: the values of the tokens that the loss saw; None if they are unknown, so that no token counts as masked or clipped.
        clips: the loss clips ratios; false: it masks tokens.
    """
    is_sampled_T = (sample.masked or sample).loss_mask_T
    first = int(is_sampled_T.argmax()) if is_sampled_T.any() else len(is_sampled_T)
    read = TokenReason.TOOL_RESULT if has_tools else TokenReason.LATER_TURN
    reasons = [read if index > first else TokenReason.PROMPT for index in range(len(is_sampled_T))]
    for index in np.flatnonzero(is_sampled_T):
        is_cut = seq_len is not None and index >= seq_len
        trained = TokenReason.CUT if is_cut else TokenReason.TRAINED
        reasons[index] = trained if sample.masked is None else TokenReason.FILTERED
    if shares is not None:
        for index in np.flatnonzero(shares.is_bounded_T):
            reasons[index] = TokenReason.CLIPPED if clips else TokenReason.OFF_POLICY_MASK
    return reasons
