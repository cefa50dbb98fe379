"""Writes and reads `explained/step_N.msgpack.z`: what each token of a trained step added to its loss.

`trivet explain` computes it (`trainer.token_shares`) and writes it, so that a second question about the step needs no model and
the page shows it. A run never reads or removes the file: it names the rollouts that it belongs to by a digest, and counts only
while they are the same. Legend: L loss tokens of one sample, in order.
"""

import hashlib
import zlib
from pathlib import Path

import msgspec
import numpy as np

from trivet.config.layout import RunLayout
from trivet.errors import MessageRefused
from trivet.storage.durable import write_atomically
from trivet.transport.recording import GROUPS_FILE
from trivet.wire.codec import decode, encode

_MAX_UNPACKED_BYTES = 1 << 33
"""Limit of an unpacked file in bytes, as that of the recorded groups."""
_SCHEMA = 1
"""Increase it when a struct of this module changes. A file of another schema is computed again."""


class SampleShares(msgspec.Struct, frozen=True, kw_only=True):
    """The loss tokens of one sample."""

    logprobs_L: np.ndarray
    """float32: log-probability under the policy that the step started from, temperature applied."""
    ratios_L: np.ndarray
    """float32: the probability under that policy, divided by the probability with which the token was sampled."""
    losses_L: np.ndarray
    """float64: what the token added to the step's loss. The sum over the step is the loss."""
    weights_L: np.ndarray
    """float64: derivative of the step's loss with respect to the token's log-probability, samplers and advantages fixed. The
    step's gradient is the sum of the gradients of all log-probabilities, each times this, plus that of an entropy bonus."""
    is_masked_L: np.ndarray
    """bool: the loss gives the token no gradient."""
    is_low_L: np.ndarray
    """bool: the token is at the lower bound of the loss, by a clip or a mask."""
    is_high_L: np.ndarray
    """bool: the token is at the upper bound of the loss."""


class ExplainedStep(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file."""

    schema: int = _SCHEMA
    rollouts_digest: str
    """SHA-256 of the step's `groups.msgpack.z`."""
    version: int
    """The policy that the step started from."""
    loss_type: str
    """`trainer.loss.type`."""
    num_loss_tokens: int
    num_samples: int
    """Samples with a loss token."""
    rollouts: list[list[SampleShares | None]]
    """For each line of `rollouts.jsonl` its samples; None for a sample without a loss token."""

    @property
    def loss(self) -> float:
        """The sum of the shares of all tokens: the step's loss."""
        return float(sum(sample.losses_L.sum() for samples in self.rollouts for sample in samples if sample is not None))


def digest_rollouts(layout: RunLayout, step: int) -> str:
    """Return the digest of the step's recorded groups. Raises OSError if there are none."""
    return hashlib.sha256((layout.rollouts_step(step) / GROUPS_FILE).read_bytes()).hexdigest()


def write_explained(path: Path, explained: ExplainedStep) -> None:
    """Write the file, whole or not at all."""
    write_atomically(path, zlib.compress(encode(explained), 1))


def read_explained(layout: RunLayout, step: int) -> ExplainedStep | None:
    """Return what was computed for the step; None if there is no file, or one of other rollouts or of another version."""
    try:
        unpacked = zlib.decompressobj().decompress(layout.explained_step(step).read_bytes(), _MAX_UNPACKED_BYTES)
        explained = decode(unpacked, ExplainedStep)
        is_current = explained.schema == _SCHEMA and explained.rollouts_digest == digest_rollouts(layout, step)
    except (OSError, zlib.error, MessageRefused):
        return None
    return explained if is_current else None
