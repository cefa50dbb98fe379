"""Defines the load of one inference server, and reads it from the server's `/metrics`."""

import re
from dataclasses import dataclass, fields

from trivet.algorithms.dispatching import has_capacity

_LOAD_LINE = re.compile(
    r"^vllm:(num_requests_running|num_requests_waiting|num_preemptions_total|kv_cache_usage_perc)(?:\{[^}]*\})? (\S+)$",
    re.MULTILINE,
)
"""A line of `/metrics` with one number of one engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """The load of one server: sums over its engines."""

    num_running: int
    """Sequences in the batch that is being computed."""
    num_waiting: int
    """Requests that have no place in that batch yet."""
    num_preemptions: int
    """Sequences that were removed from the KV cache since the server started. Each is computed again."""
    kv_usage: float
    """Used share of the KV cache, from 0 to 1, in the engine whose cache is fullest."""

    @property
    def has_capacity(self) -> bool:
        """True when the server can compute more sequences."""
        return has_capacity(num_running=self.num_running, num_waiting=self.num_waiting, kv_usage=self.kv_usage)


def read_load(text: str) -> ServerLoad | None:
    """Return the load in an answer of `/metrics`, which has Prometheus' text form; None when a number is missing."""
    values: dict[str, float] = {}
    for name, value in _LOAD_LINE.findall(text):
        before = values.get(name, 0.0)
        values[name] = max(before, float(value)) if name == "kv_cache_usage_perc" else before + float(value)
    if len(values) < len(fields(ServerLoad)):
        return None
    return ServerLoad(
        num_running=int(values["num_requests_running"]),
        num_waiting=int(values["num_requests_waiting"]),
        num_preemptions=int(values["num_preemptions_total"]),
        kv_usage=values["kv_cache_usage_perc"],
    )
