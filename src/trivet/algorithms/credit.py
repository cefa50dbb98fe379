"""Finds the turns of a rollout's tokens, and gives each token the advantage that was computed for it.

The dispatcher calls it for a finished group before any filter. Sampled tokens are those that the loss mask selects. Their order is
that of the turns, also where a later turn is in an earlier sample, as after an aside that no other turn continues.
"""

import numpy as np

from trivet.wire.rollouts import Rollout, Sample


def _turns_of(rollout: Rollout) -> np.ndarray:
    """Return the turn of each sampled token in the order of the samples, int64 [sampled tokens]."""
    parts = [_turns_of_sample(sample) for sample in rollout.samples]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def _turns_of_sample(sample: Sample) -> np.ndarray:
    if not sample.turns:
        return np.zeros(sample.num_loss_tokens, dtype=np.int64)
    return np.repeat([run.turn for run in sample.turns], [run.length for run in sample.turns]).astype(np.int64)


def count_turn_tokens(rollout: Rollout) -> np.ndarray:
    """Return the number of sampled tokens of each turn, int64 [turns]; 0 for one that was empty or is cut away."""
    return np.bincount(_turns_of(rollout), minlength=rollout.num_turns)


def find_turn_agents(rollout: Rollout) -> list[str]:
    """Return the agent of each turn; empty in an episode of one agent, and for a turn without sampled tokens."""
    agents = [""] * len(count_turn_tokens(rollout))
    for sample in rollout.samples:
        for turn in np.unique(_turns_of_sample(sample)):
            agents[turn] = sample.agent
    return agents


def collect_token_ids(rollout: Rollout) -> np.ndarray:
    """Return the sampled tokens turn by turn, int32 [sampled tokens]."""
    parts = [sample.token_ids_T[sample.loss_mask_T] for sample in rollout.samples]
    order = np.argsort(_turns_of(rollout), kind="stable")
    return np.concatenate(parts)[order] if parts else np.zeros(0, dtype=np.int32)


def set_advantages(rollout: Rollout, advantages: float | np.ndarray) -> None:
    """Set the advantage of the rollout, and those of its tokens if each has its own.

    Args:
        advantages: one number, or float64 [sampled tokens], turn by turn.
    """
    if not isinstance(advantages, np.ndarray):
        rollout.advantage = float(advantages)
        for sample in rollout.samples:
            sample.advantages_T = None
        return
    rollout.advantage = float(advantages.mean()) if len(advantages) else 0.0
    in_samples = np.empty_like(advantages)
    in_samples[np.argsort(_turns_of(rollout), kind="stable")] = advantages
    start = 0
    for sample in rollout.samples:
        sample.advantages_T = np.zeros(sample.num_tokens, dtype=np.float32)
        sample.advantages_T[sample.loss_mask_T] = in_samples[start : start + sample.num_loss_tokens]
        start += sample.num_loss_tokens


def advantages_of(rollout: Rollout) -> np.ndarray:
    """Return every advantage of the rollout: those of its sampled tokens, or else the only one. A filter may have cleared masks."""
    masks = [sample.loss_mask_T if sample.masked is None else sample.masked.loss_mask_T for sample in rollout.samples]
    parts = [
        sample.advantages_T[mask_T]
        for sample, mask_T in zip(rollout.samples, masks, strict=True)
        if sample.advantages_T is not None and mask_T.any()
    ]
    return np.concatenate(parts) if parts else np.array([rollout.advantage])
