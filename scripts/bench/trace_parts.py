"""On which operations does a training step spend its time, by the trace of `--bench --trace-path`?

Prints the operations with the largest shares of the time: kernels and copies where the trace has a GPU's, otherwise operators of
the CPU, each without those that it calls. `busy_percent` is the share of the traced time in which the GPU computes or copies (on a
CPU: in which any thread computes). Its ceiling is 100; the rest is waiting.

    uv run trainer --model.name MODEL --bench --trace-path traces
    uv run python scripts/bench/trace_parts.py traces/trace.rank_0.json.gz

The last line is one JSON object.
"""

import argparse
import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_GPU_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
_NUM_SHOWN = 25
_MAX_NAME = 100
"""Characters of an operation's name: those of templates are hundreds long."""

Event = dict[str, Any]
"""A complete event of a trace: `name`, `cat`, start `ts` and length `dur` in microseconds, `pid` and `tid`."""


def own_times(events: Sequence[Event]) -> Iterator[tuple[str, float]]:
    """Yield name and microseconds of each event, without the events inside it on the same thread or stream."""
    lanes: dict[tuple[Any, Any], list[Event]] = defaultdict(list)
    for event in events:
        lanes[event["pid"], event["tid"]].append(event)
    for lane in lanes.values():
        open_events: list[list[Any]] = []  # name, end, own time
        for event in sorted(lane, key=lambda each: (each["ts"], -each["dur"])):
            while open_events and open_events[-1][1] <= event["ts"]:
                name, _, own = open_events.pop()
                yield name, own
            if open_events:
                open_events[-1][2] -= event["dur"]
            open_events.append([event["name"], event["ts"] + event["dur"], event["dur"]])
        yield from ((name, own) for name, _, own in open_events)


def busy_time(events: Sequence[Event]) -> float:
    """Return the microseconds in which at least one event goes on."""
    total, until = 0.0, float("-inf")
    for event in sorted(events, key=lambda each: each["ts"]):
        end = event["ts"] + event["dur"]
        total += max(end - max(event["ts"], until), 0.0)
        until = max(until, end)
    return total


def summarize(events: Sequence[Event]) -> dict[str, Any]:
    """Return the shares of the operations, and how busy the device was."""
    complete = [event for event in events if event.get("ph") == "X" and "dur" in event]
    chosen = [event for event in complete if event.get("cat") in _GPU_KINDS]
    kind = "gpu" if chosen else "cpu"
    chosen = chosen or [event for event in complete if event.get("cat") == "cpu_op"]
    if not chosen:
        return {"bench": "trace", "of": None, "operations": []}
    times: dict[str, list[float]] = defaultdict(list)
    for name, own in own_times(chosen):
        times[name[:_MAX_NAME]].append(own)
    whole = sum(map(sum, times.values())) or 1.0
    span = max(event["ts"] + event["dur"] for event in chosen) - min(event["ts"] for event in chosen)
    largest = sorted(times.items(), key=lambda item: -sum(item[1]))[:_NUM_SHOWN]
    return {
        "bench": "trace",
        "of": kind,
        "span_ms": round(span / 1e3, 2),
        "busy_percent": round(100 * busy_time(chosen) / span, 1) if span else None,
        "operations": [
            {"name": name, "percent": round(100 * sum(own) / whole, 2), "ms": round(sum(own) / 1e3, 3), "calls": len(own)}
            for name, own in largest
        ],
    }


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    trace = parser.parse_args().trace
    print(json.dumps(summarize(json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"])))


if __name__ == "__main__":
    main()
