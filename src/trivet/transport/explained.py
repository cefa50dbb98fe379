"""Writes and reads `explained/step_N.msgpack`: what each token of a trained step added to its loss.

`trivet explain` computes it (`trainer.token_shares`) and writes it, so that a second question about the step needs no model and
the page shows it. A run never reads or removes the file: it names the rollouts that it belongs to by a digest, and counts only
while they are the same. Legend: T tokens of a sample.
"""

import hashlib

import msgspec
import numpy as np

from trivet.config.layout import RunLayout
from trivet.errors import MessageRefused
from trivet.storage.durable import write_atomically
from trivet.transport.recording import GROUPS_FILE
from trivet.wire.codec import decode, encode

CLIPPING_LOSSES = ("grpo", "gspo", "luspo", "gmpo", "clip_cov", "cispo", "aipo", "importance")
"""Losses that bound a token by a clip of its ratio. The others mask it."""


class SampleShares(msgspec.Struct, frozen=True, kw_only=True):
    """One sample, a value for each of its tokens: NaN or false where the loss did not see the token."""

    logprobs_T: np.ndarray
    """float64: log-probability under the policy that the step started from, temperature applied."""
    ratios_T: np.ndarray
    """float64: the probability under that policy, divided by the probability with which the token was sampled."""
    losses_T: np.ndarray
    """float64: what the token added to the step's loss. The sum over the step is the loss."""
    weights_T: np.ndarray
    """float64: derivative of the step's loss with respect to the token's log-probability, samplers and advantages fixed. The
    step's gradient is the sum of the gradients of all log-probabilities, each times this, plus that of an entropy bonus."""
    is_bounded_T: np.ndarray
    """bool: the loss masks the token; or, if it clips ratios, the token is at a bound of the clip."""

    @property
    def loss(self) -> float:
        """The sample's part of the step's loss: the sum over its tokens."""
        return float(np.nansum(self.losses_T))


class ExplainedStep(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file."""

    rollouts_digest: str
    """SHA-256 of the step's `groups.msgpack.z`."""
    loss_type: str
    """`trainer.loss.type`."""
    rollouts: list[list[SampleShares | None]]
    """For each line of `rollouts.jsonl` its samples; None for a sample without a loss token."""

    @property
    def trained(self) -> list[SampleShares]:
        """The samples with a loss token."""
        return [sample for samples in self.rollouts for sample in samples if sample is not None]

    @property
    def loss(self) -> float:
        """The sum of the shares of all tokens: the step's loss."""
        return sum(sample.loss for sample in self.trained)


def digest_rollouts(layout: RunLayout, step: int) -> str:
    """Return the digest of the step's recorded groups. Raises OSError if there are none."""
    return hashlib.sha256((layout.rollouts_step(step) / GROUPS_FILE).read_bytes()).hexdigest()


def write_explained(layout: RunLayout, step: int, explained: ExplainedStep) -> None:
    """Write the file, whole or not at all."""
    write_atomically(layout.explained_step(step), encode(explained))


def read_explained(layout: RunLayout, step: int) -> ExplainedStep | None:
    """Return what was computed for the step; None if there is no file, or one of other rollouts or of another version."""
    try:
        explained = decode(layout.explained_step(step).read_bytes(), ExplainedStep)
        return explained if explained.rollouts_digest == digest_rollouts(layout, step) else None
    except (OSError, MessageRefused):
        return None
