"""Defines the messages between a pool of environment workers and one worker: orders to it, answers and heartbeats (pulses) from it.

Orders travel in one direction of a connection, answers and pulses in the other. `codec.decode` takes a struct, not a union of
structs, so the two envelopes `WorkerOrder` and `WorkerAnswer` hold the unions.

The two sides may be of different releases: a worker runs in a virtual environment of its own. So the first message of a worker is
its `WorkerHello`, which states the version of this protocol that it speaks. A pool refuses every other version.
"""

from typing import Any, Literal

import msgspec

from trivet.wire.groups import EnvironmentInfo, Example, GroupRequest, ServerAccess, Split
from trivet.wire.rollouts import Rollout

PROTOCOL = 9
"""Version of these messages and of every struct in them. Raise it whenever one changes; a test compares their schema with it."""
PULSE_INTERVAL_S = 1.0
"""Seconds between two pulses of a worker."""


class HostSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings with which a worker loads one environment and runs its groups (`environments.apis`)."""

    env_id: str
    name: str
    """The environment's name in logs, metrics and requests."""
    args: dict[str, Any]
    model_name: str
    servers: ServerAccess
    python: str = ""
    """Interpreter of the worker; empty: the one that runs the pool."""
    trajectory_strategy: Literal["interleaved", "branching"] = "interleaved"
    hash_keys: list[str] = []
    """Fields that an example's hash covers; empty: no hash is computed."""
    on_reward_error: Literal["drop", "zero"] = "drop"
    env_vars: list[str] = []
    """Environment variables to pass on although their names look secret; other variables of such names are withheld."""
    rollout_timeout_s: float | None = None
    """Seconds for a whole group, from its first request to its last score. The name is that of the user's key."""
    is_plain: bool = False
    """The servers are not trivet's and return text without tokens: rollouts are scored, but have no samples to train on."""
    log_level: str = "info"


class WorkerHello(msgspec.Struct, frozen=True, kw_only=True):
    """The first message of a worker, sent before it reads any.

    A pool of any release can read it: fields may be added, never changed.
    """

    protocol: int
    """The `PROTOCOL` that the worker speaks."""
    worker: str
    """Name and version of the distribution that it runs from, such as `trivet-worker 0.1.0`."""
    python: str
    """Version of its interpreter."""
    verifiers: str
    """Version of verifiers in it; empty when there is none."""


class LoadEnvironment(msgspec.Struct, frozen=True, tag=True):
    """The first order: load the environment."""

    settings: HostSettings


class RunGroupOrder(msgspec.Struct, frozen=True, tag=True):
    """Order to run a group."""

    call_id: int
    """Chosen by the pool; the answer repeats it."""
    request: GroupRequest


class AskExample(msgspec.Struct, frozen=True, tag=True):
    """Order to return an example."""

    call_id: int
    env: str
    """The environment's name in the configuration."""
    split: Split
    example_id: int


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Order to stop a call, whose answer nobody needs any more."""

    call_id: int


CallOrder = RunGroupOrder | AskExample | Cancel
"""The orders of a call, which a worker and the pool of another node take alike."""


class WorkerOrder(msgspec.Struct, frozen=True):
    """Envelope of an order."""

    body: LoadEnvironment | CallOrder


class EnvironmentLoaded(msgspec.Struct, frozen=True, tag=True):
    """Answer to `LoadEnvironment`."""

    info: EnvironmentInfo
    api: str = ""
    """Generation of the verifiers API that the environment is written for: `v0` or `v1`."""
    package: str = ""
    """Version of the distribution that has the name of the environment; empty when there is none."""


class EnvironmentLoadFailed(msgspec.Struct, frozen=True, tag=True):
    """Answer to `LoadEnvironment` that ends the worker."""

    message: str


class GroupDone(msgspec.Struct, frozen=True, tag=True):
    """Answer to `RunGroupOrder`."""

    call_id: int
    rollouts: list[Rollout]


class ExampleFound(msgspec.Struct, frozen=True, tag=True):
    """Answer to `AskExample`."""

    call_id: int
    example: Example


class CallFailed(msgspec.Struct, frozen=True, tag=True):
    """Answer to a call that raised."""

    call_id: int
    kind: str
    """Name of the error's type."""
    message: str
    is_infrastructure: bool = False
    """A server or the network failed; nothing that the policy did is the cause."""
    is_lost: bool = False
    """The worker ended while it ran the call, which may be made again. Only the pool of another node can say so."""


CallAnswer = GroupDone | ExampleFound | CallFailed


class Pulse(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Sent by a thread of the worker about once a second once the environment is loaded, whatever the event loop does."""

    loop_age_s: float
    """Seconds since the event loop last ran a callback."""
    num_generating: int
    num_scoring: int
    scoring_for_s: float
    """Age of the oldest group that is being scored."""
    lags_s: list[float]
    """Lateness of the event loop, for each time it was measured since the last pulse."""


class WorkerAnswer(msgspec.Struct, frozen=True):
    """Envelope of an answer or a pulse: every message of a worker after its hello."""

    body: EnvironmentLoaded | EnvironmentLoadFailed | CallAnswer | Pulse
