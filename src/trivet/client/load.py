"""Reads how busy a server is from the metrics that vLLM publishes."""

import re
from dataclasses import dataclass, fields

_SAMPLE = re.compile(
    r"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc|num_preemptions_total)(?:\{[^}]*\})? (\S+)$",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """Sums over the engines of one server, its cache's fullest."""

    num_running: int
    """Sequences in the batch being computed."""
    num_waiting: int
    """Requests that have no place in it yet."""
    cache_usage: float
    """Share of the key-value cache in use, 0 to 1."""
    num_preemptions: int
    """Sequences thrown out of the cache since the server started: each is computed again."""


def read_load(text: str) -> ServerLoad | None:
    """Return the load that an answer of `/metrics` describes.

    Args:
        text: an answer of `/metrics` in Prometheus' text form.

    Returns:
        None when a number is missing.
    """
    values: dict[str, list[float]] = {}
    for name, value in _SAMPLE.findall(text):
        values.setdefault(name, []).append(float(value))
    if len(values) < len(fields(ServerLoad)):
        return None
    return ServerLoad(
        num_running=int(sum(values["num_requests_running"])),
        num_waiting=int(sum(values["num_requests_waiting"])),
        cache_usage=max(values["kv_cache_usage_perc"]),
        num_preemptions=int(sum(values["num_preemptions_total"])),
    )
