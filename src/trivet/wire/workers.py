"""Defines the messages between a pool of environment workers and one worker: orders to it, answers and pulses from it."""

from typing import Any, Literal

import msgspec

from trivet.wire.groups import EnvironmentInfo, GroupRequest, Split
from trivet.wire.rollouts import Rollout
from trivet.wire.servers import ServerAccess

PULSE_INTERVAL_S = 1.0
"""Seconds between two pulses of a worker."""


class HostSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Configures the host of one environment."""

    env_id: str
    name: str
    """The environment's name in logs, metrics and requests."""
    args: dict[str, Any]
    model_name: str
    servers: ServerAccess
    trajectory_strategy: Literal["interleaved", "branching"] = "interleaved"
    hash_keys: list[str] = []
    """Fields that an example's hash covers; empty: hashes are not needed."""
    on_reward_error: Literal["drop", "zero"] = "drop"
    keep_variables: list[str] = []
    """Credentials of the run that stay in the worker's environment."""
    rollout_timeout_s: float | None = None
    """Limit of a group's time, from its first request to its last score."""
    is_plain: bool = False
    """Servers are none of ours and answer text alone: rollouts are scored, and have no samples."""
    log_level: str = "info"


class LoadEnvironment(msgspec.Struct, frozen=True, tag=True):
    """The first order: load the environment."""

    settings: HostSettings


class RunGroupOrder(msgspec.Struct, frozen=True, tag=True):
    """Order to run a group."""

    call_id: int
    """Handed out by the pool; names the answer."""
    request: GroupRequest


class AskPrompt(msgspec.Struct, frozen=True, tag=True):
    """Order to return an example's prompt."""

    call_id: int
    split: Split
    example_id: int


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Order to stop a call: its answer is not wanted any more."""

    call_id: int


class WorkerOrder(msgspec.Struct, frozen=True):
    """Envelope of an order."""

    body: LoadEnvironment | RunGroupOrder | AskPrompt | Cancel


class EnvironmentLoaded(msgspec.Struct, frozen=True, tag=True):
    """Answer to `LoadEnvironment`."""

    info: EnvironmentInfo


class EnvironmentLoadFailed(msgspec.Struct, frozen=True, tag=True):
    """Answer to `LoadEnvironment` that ends the worker."""

    message: str


class GroupDone(msgspec.Struct, frozen=True, tag=True):
    """Answer to `RunGroupOrder`."""

    call_id: int
    rollouts: list[Rollout]


class PromptFound(msgspec.Struct, frozen=True, tag=True):
    """Answer to `AskPrompt`."""

    call_id: int
    messages: list[dict[str, Any]]


class CallFailed(msgspec.Struct, frozen=True, tag=True):
    """Answer to a call that raised."""

    call_id: int
    kind: str
    """Name of the error's type."""
    message: str


class WorkerAnswer(msgspec.Struct, frozen=True):
    """Envelope of an answer."""

    body: EnvironmentLoaded | EnvironmentLoadFailed | GroupDone | PromptFound | CallFailed


class Pulse(msgspec.Struct, frozen=True, kw_only=True):
    """Sent by a thread of the worker, about once a second, whatever its event loop does."""

    loop_age_s: float
    """Seconds since the event loop last turned."""
    num_generating: int
    num_scoring: int
    scoring_for_s: float
    """Age of the oldest group that is being scored."""
    lags_s: list[float]
    """Lateness of the event loop, for each time it was measured since the last pulse."""
