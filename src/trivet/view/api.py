"""Answers the page's requests as JSON, one function per route. Opens no socket and takes no path from outside.

Before a route reads a file, its stamp (size, time of change) is compared with the tag of the answer that the page has. Asking every
two seconds therefore costs next to nothing while a run is quiet. The status is computed each time, because ages change.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from trivet.errors import ConfigError, HistoryError
from trivet.history.selection import measure_selection, read_ended_groups
from trivet.process.lifetime import process_exists
from trivet.step_directories import list_steps
from trivet.view.explanation import explain_rollout
from trivet.view.files import NotServed, stamp_of
from trivet.view.metrics import ALWAYS_READ, SHOWN_FIRST, MetricKey
from trivet.view.run import ViewedRun, read_configs
from trivet.view.status import describe_run, is_over, read_status, unrecovered_error
from trivet.view.timeline import make_timeline

# Limits of one request, which bound the time of an answer.
_MAX_POINTS = 5000
"""Points of a curve: more than a screen has pixels across."""
_MAX_ROLLOUTS = 200
_MAX_STEPS = 500
"""Steps of a time line."""
_MAX_METRICS = 64
"""Curves."""
_MAX_DIGITS = 20
"""Digits of a number in a query."""

Query = Mapping[str, str]


class BadQuery(NotServed):
    """A value of the query has the wrong form."""


@dataclass(frozen=True, slots=True)
class PageAnswer:
    """An answer, and a tag as HTTP's ETag."""

    body: bytes | None
    """JSON; None when the client has the answer already: HTTP's 304."""
    tag: str
    """Digest of the query and of the stamps of the files behind the answer."""


RouteFunction = Callable[[ViewedRun, Query], object]


class Route(NamedTuple):
    """How to answer requests for one path."""

    answer: RouteFunction
    """Returns what is sent as JSON."""
    stamp: RouteFunction
    """Returns a value that differs whenever the answer may differ."""


class Api:
    """Finds the route and the run of a request."""

    def __init__(self, runs: Sequence[ViewedRun]) -> None:
        self._runs = runs
        self._routes = {
            "series": Route(_series, lambda run, _: run.metrics.stamp()),
            "metrics": Route(lambda run, _: [str(key) for key in run.metrics.measured()], lambda run, _: run.metrics.stamp()),
            "status": Route(_status, lambda *_: time.time()),
            "timeline": Route(_timeline, lambda run, _: [*run.metrics.stamp(), stamp_of(run.layout.events)]),
            "steps": Route(lambda run, _: list(list_steps(run.layout.rollouts)), lambda run, _: stamp_of(run.layout.rollouts)),
            "rollouts": Route(_rollouts, lambda run, query: stamp_of(_rollouts_file(run, query))),
            "rollout": Route(
                _rollout,
                lambda run, query: [
                    stamp_of(_rollouts_file(run, query)),
                    stamp_of(run.layout.explained_step(_number(query, "step", default=0))),
                ],
            ),
            "evals": Route(
                lambda run, _: [
                    {"step": found.step, "name": found.name, "summary": found.summary, "fault": found.fault}
                    for found in run.evaluations.find()
                    if found.summary or found.fault or found.results.stat().st_size  # one that has just begun has no line
                ],
                lambda run, _: run.evaluations.stamp(),
            ),
            "selection": Route(_selection, lambda run, _: stamp_of(run.layout.events)),
            "config": Route(
                lambda run, _: read_configs(run.layout),
                lambda run, _: [stamp_of(run.layout.configs), stamp_of(run.layout.run_file)],
            ),
        }

    def answer(self, path: str, query: Query, *, client_tag: str) -> PageAnswer:
        """Answer a request.

        Args:
            client_tag: the tag of the answer that the client has; empty when it has none.
        """
        if path == "/api/runs":
            body = msgspec.json.encode([{"index": index, "name": run.name} for index, run in enumerate(self._runs)])
            return PageAnswer(body, _digest(body))
        route = self._routes.get(path.removeprefix("/api/"))
        if route is None:
            raise NotServed(f"there is no {path}")
        run = self._runs[_number(query, "run", default=0, high=len(self._runs) - 1)]
        with run.lock:
            tag = _digest(repr((path, sorted(query.items()), route.stamp(run, query))).encode())
            return PageAnswer(None if tag == client_tag else msgspec.json.encode(route.answer(run, query)), tag)


def _status(run: ViewedRun, _: Query) -> object:
    """Return the status in sentences (`lines`) and as values; without the values when there is no status, or a damaged one."""
    if not run.layout.status.exists() and not run.layout.reports.is_dir():
        return {"lines": ["The run wrote no status: its current state is unknown."], "is_over": False, "num_damaged": 0}
    try:
        status = read_status(run.layout)
    except ConfigError as exc:
        return {"fault": str(exc), "lines": [], "is_over": True, "num_damaged": run.metrics.num_damaged()}
    now = run.clock.now(status)
    has_ended = is_over(status, now=now, is_alive=process_exists)
    return {
        "lines": list(describe_run(status, layout=run.layout, now=now, is_alive=process_exists)),
        "is_over": has_ended,
        "state": "silent" if has_ended and status.exit_code is None else status.state,
        "run_id": status.run_id,
        "attempt": status.attempt,
        "started": status.started,
        "time": status.time,
        "step": max((report.step for role in status.roles for report in role.reports), default=0),
        "max_steps": status.max_steps,
        "last_commit": status.last_commit,
        "last_error": unrecovered_error(status),
        "num_restarts": len(status.restarts),
        "roles": status.roles,
        "num_damaged": run.metrics.num_damaged() + run.notes.num_damaged,
    }


def _series(run: ViewedRun, query: Query) -> object:
    names = [name for name in query.get("names", "").split(",") if name]
    keys = [MetricKey.parse(name) for name in names[:_MAX_METRICS]] or SHOWN_FIRST
    run.metrics.refresh([*ALWAYS_READ, *keys])
    points = _number(query, "points", default=1000, low=2, high=_MAX_POINTS)
    first, last = _optional_number(query, "from"), _optional_number(query, "to")
    curves = {str(key): run.metrics.curve(key, num_points=points, first=first, last=last) for key in keys}
    return {"curves": curves, "num_damaged": run.metrics.num_damaged()}


def _timeline(run: ViewedRun, query: Query) -> object:
    run.metrics.refresh(ALWAYS_READ)
    run.notes.refresh()
    count = _number(query, "steps", default=40, low=1, high=_MAX_STEPS)
    return make_timeline(run.metrics, run.notes.notes, last_step=_optional_number(query, "last"), num_steps=count)


def _rollouts(run: ViewedRun, query: Query) -> object:
    return run.rollouts.page(
        _rollouts_file(run, query),
        offset=_number(query, "offset", default=0),
        limit=_number(query, "limit", default=50, low=1, high=_MAX_ROLLOUTS),
        sort=query.get("sort", "line"),
        env=query.get("env", ""),
        contains=query.get("contains", ""),
    )


def _rollout(run: ViewedRun, query: Query) -> object:
    """Return a rollout with the explanation of its tokens; without it for an evaluation, which keeps no tokens."""
    line = _number(query, "line", default=0)
    record = run.rollouts.record(_rollouts_file(run, query), line)
    if "eval" in query:
        return {"record": record, "samples": []}
    try:
        return explain_rollout(run, step=_number(query, "step", default=0), line=line)
    except NotServed as exc:  # the file of the samples is damaged
        return {"record": record, "samples": [], "fault": str(exc)}


def _selection(run: ViewedRun, _: Query) -> object:
    try:
        return measure_selection(read_ended_groups(run.layout))
    except (ConfigError, HistoryError) as exc:
        return {"fault": str(exc)}


def _rollouts_file(run: ViewedRun, query: Query) -> Path:
    step = _number(query, "step", default=0)
    if "eval" in query:
        for found in run.evaluations.find():
            if (found.step, found.name) == (step, query["eval"]):
                return found.results
        raise NotServed(f"the run has no evaluation {query['eval']!r} of step {step}")
    return run.layout.rollouts_step(step) / "rollouts.jsonl"


def _number(query: Query, name: str, *, default: int, low: int = 0, high: int = 1 << 40) -> int:
    text = query.get(name, "")
    if not text:
        return default
    # The length is checked first, because int() raises for thousands of digits.
    if not text.isascii() or not text.isdigit() or len(text) > _MAX_DIGITS or not low <= int(text) <= high:
        raise BadQuery(f"{name} must be a number from {low} to {high}, got {text[:40]!r}")
    return int(text)


def _optional_number(query: Query, name: str) -> int | None:
    return _number(query, name, default=0) if query.get(name) else None


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=12).hexdigest()
