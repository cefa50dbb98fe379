"""Defines what an environment produces: samples, the rollout around them, and the group of rollouts of one example.

They cross from environment workers to the orchestrator and into its checkpoint. Legend: T tokens of one sample.
None of them is ever part of a reference cycle, so the garbage collector need not visit the thousands in flight (gc=False).
"""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from trivet.wire.experts import RoutedExperts
from trivet.wire.versions import GroupId, PolicyVersion, VersionRun

MAX_REWARD = 1e12
"""Largest absolute value of a reward. An advantage is about as large as the rewards, and a gradient some powers of ten larger.
Gradients must stay below 1e19, because their norm adds their squares in float32, whose largest number is 3.4e38."""


class MaskedTokens(msgspec.Struct, kw_only=True, gc=False):
    """A sample's loss mask and log-probabilities before a filter cleared them, for people who look at the rollout."""

    loss_mask_T: np.ndarray
    """bool [T]: the sample's loss mask before the filter."""
    logprobs_T: np.ndarray
    """float32 [T]: the sample's log-probabilities before the filter."""


class TurnRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`length` consecutive tokens to train on, sampled in turn `turn` of the rollout, counted from 0."""

    turn: int
    length: int


class Sample(msgspec.Struct, kw_only=True, gc=False):
    """A token sequence that can be trained on."""

    token_ids_T: np.ndarray
    """int32 [T]: prompt and sampled tokens in the order the model saw them."""
    loss_mask_T: np.ndarray
    """bool [T]: true on tokens to train on. Never true at position 0, which follows no token."""
    logprobs_T: np.ndarray
    """float32 [T]: log-probability of each token as sampled, temperature applied; 0 where the mask is false."""
    teacher_logprobs_T: np.ndarray | None = None
    """float32 [T]: the teacher's log-probability of each token to train on, at temperature 1; None without a teacher."""
    versions: list[VersionRun]
    """The policy of each token that the model sampled, in order."""
    temperature: float
    turns: list[TurnRun] = []
    """The turn of each token to train on, in order, before a filter cleared the mask. Empty: all are of the first turn."""
    agent: str = ""
    """The agent that sampled it, in an episode of several agents; else empty."""
    advantages_T: np.ndarray | None = None
    """float32 [T]: the advantage of each token to train on, 0 for others; None: that of its rollout. Set when its group is
    complete."""
    masked: MaskedTokens | None = None
    """The values before a filter cleared `loss_mask_T`; None when none did."""
    is_truncated: bool = False
    """True when a completion in it ended at a length limit, not at a stop token."""
    experts: RoutedExperts | None = None
    """The experts that computed the tokens on the server; None if it did not return them."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the sample, prompt included."""
        return len(self.token_ids_T)

    @property
    def num_loss_tokens(self) -> int:
        """Tokens to train on."""
        return int(np.count_nonzero(self.loss_mask_T))


class Rollout(msgspec.Struct, kw_only=True, gc=False):
    """One attempt at an example, scored."""

    index: int
    """Position in its group, from 0."""
    reward: float
    """The score, from -`MAX_REWARD` to `MAX_REWARD`."""
    samples: list[Sample] = []
    """One for a single turn; one or more for several turns, depending on `trajectory_strategy`."""
    scores: dict[str, float] = {}
    """Value of each reward function and metric of the environment's rubric, by name."""
    prompt: list[dict[str, Any]] = []
    """Messages in the OpenAI chat format."""
    completion: list[dict[str, Any]] = []
    """Messages in the OpenAI chat format."""
    num_turns: int = 1
    turn_rewards: list[float] = []
    """The reward of each turn, where the environment gives them; else empty."""
    ran_out_of_context: bool = False
    """True when it ended because the next prompt was longer than the model's context; the turns before are kept."""
    is_cut: bool = False
    """True when a server that returns no token ids reported that a turn ended at a length limit: then there are no samples that
    could record it."""
    counted_tokens: int = 0
    """Tokens of the completions, as a server that returns no token ids counted them; 0 with other servers."""
    num_retries: int = 0
    """Number of earlier tries that failed because of infrastructure: a server, a sandbox or the network."""
    ended_by: str = ""
    """Error type, when an error in a tool that the policy called ended the rollout, which is scored all the same; else empty."""
    generation_s: float = 0.0
    """Seconds that it took to play the rollout."""
    scoring_s: float = 0.0
    """Seconds that it took to score it."""
    advantage: float = 0.0
    """Set when its group is complete. If its tokens have advantages of their own, their mean."""

    @property
    def is_truncated(self) -> bool:
        """True when a turn ended at a length limit, or the next prompt was longer than the context."""
        return self.ran_out_of_context or self.is_cut or any(sample.is_truncated for sample in self.samples)

    @property
    def num_completion_tokens(self) -> int:
        """Number of tokens that the model sampled. A rollout has samples or `counted_tokens`, never both."""
        return self.counted_tokens + sum(sample.num_loss_tokens for sample in self.samples)


class Group(msgspec.Struct, kw_only=True, gc=False):
    """An example's finished rollouts."""

    group_id: GroupId
    env: str
    """The environment's `name` in the configuration."""
    example_id: int
    rollouts: list[Rollout]

    @property
    def oldest_version(self) -> PolicyVersion:
        """Return the oldest policy of its sampled tokens. Raises ValueError when nothing was sampled."""
        return min(self._versions)

    @property
    def newest_version(self) -> PolicyVersion:
        """Return the newest policy of its sampled tokens. Raises ValueError when nothing was sampled."""
        return max(self._versions)

    @property
    def _versions(self) -> Iterator[PolicyVersion]:
        return (run.version for rollout in self.rollouts for sample in rollout.samples for run in sample.versions)

    @property
    def rewards(self) -> np.ndarray:
        """float64 [rollouts]."""
        return np.array([rollout.reward for rollout in self.rollouts], dtype=np.float64)


class RolloutRecord(msgspec.Struct, kw_only=True):
    """A line of `rollouts.jsonl`. A line of an evaluation's `results.jsonl` has some of these fields, and others besides."""

    env: str = ""
    group_id: GroupId | None = None
    """None in an evaluation."""
    example_id: int
    index: int
    reward: float
    advantage: float | None = None
    scores: dict[str, float] = {}
    num_turns: int = 0
    is_truncated: bool = False
    ran_out_of_context: bool = False
    versions: list[VersionRun] = []
    """Policy versions of the sampled tokens, run-length encoded."""
    prompt: list[dict[str, Any]] = []
    completion: list[dict[str, Any]] = []
