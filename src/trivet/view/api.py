"""Answers the page's requests as JSON, with a function for each route over the runs that are looked at.

It opens no socket and takes no path from outside.

A route says from the files' stamps whether anything changed before it reads anything, so that a page that asks every two seconds
costs next to nothing while a run is quiet.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trivet.errors import ConfigError
from trivet.process.lifetime import process_exists
from trivet.view.files import NotServed, stamp_of
from trivet.view.metrics import ALWAYS_READ, SHOWN_FIRST, MetricKey
from trivet.view.run import ViewedRun, read_configs
from trivet.view.status import describe_run, is_over, read_status, standing_error
from trivet.view.timeline import make_timeline

_MAX_POINTS = 5000
"""Points of a curve: more than a screen has pixels across."""
_MAX_ROWS = 200
_MAX_STEPS = 500
_MAX_METRICS = 64
"""Limits of one request: rollouts, steps of a time line, curves. They bound the time of an answer."""
_MAX_DIGITS = 20

Query = Mapping[str, str]


class BadQuery(NotServed):
    """A value of the query has the wrong form."""


@dataclass(frozen=True, slots=True)
class PageAnswer:
    """An answer and the tag of its content."""

    body: bytes
    """JSON; empty when `is_known`."""
    tag: str
    """Identifies the content: equal content has an equal tag."""
    is_known: bool = False
    """Whoever asked has it already."""


Route = Callable[[ViewedRun, Query], object]


class Api:
    """Finds the route and the run of a request."""

    def __init__(self, runs: Sequence[ViewedRun], *, clock: Callable[[], float] = lambda: time.time()) -> None:
        self._runs = runs
        self._clock = clock
        # Each has a function that answers, and one whose value differs when the answer may.
        self._routes: dict[str, tuple[Route, Route]] = {
            "series": (_series, lambda run, _: run.metrics.stamp()),
            "metrics": (lambda run, _: [str(key) for key in run.metrics.measured()], lambda run, _: run.metrics.stamp()),
            "status": (self._status, lambda *_: self._clock()),
            "timeline": (_timeline, lambda run, _: [*run.metrics.stamp(), stamp_of(run.layout.events)]),
            "steps": (lambda run, _: run.rollouts.steps(), lambda run, _: stamp_of(run.rollouts.directory)),
            "rollouts": (_rollouts, lambda run, query: stamp_of(_rollouts_file(run, query))),
            "rollout": (_rollout, lambda run, query: stamp_of(_rollouts_file(run, query))),
            "evals": (
                lambda run, _: [
                    {"step": found.step, "name": found.name, "summary": found.summary, "fault": found.fault}
                    for found in run.evaluations.find()
                    if found.summary or found.fault or found.results.stat().st_size
                ],
                lambda run, _: run.evaluations.stamp(),
            ),
            "config": (
                lambda run, _: read_configs(run.layout),
                lambda run, _: [stamp_of(run.layout.configs), stamp_of(run.layout.run_file)],
            ),
        }

    def answer(self, path: str, query: Query, *, known: str) -> PageAnswer:
        """Answer a request, or say that the answer is known.

        Args:
            known: the tag of the answer that whoever asks has; empty when none.
        """
        if path == "/api/runs":
            body = msgspec.json.encode([{"index": index, "name": run.name} for index, run in enumerate(self._runs)])
            return PageAnswer(body, _digest(body))
        route = self._routes.get(path.removeprefix("/api/"))
        if route is None:
            raise NotServed(f"there is no {path}")
        run = self._runs[_number(query, "run", default=0, high=len(self._runs) - 1)]
        with run.lock:
            answer, stamp = route
            tag = _digest(repr((path, sorted(query.items()), stamp(run, query))).encode())
            if tag == known:
                return PageAnswer(b"", tag, is_known=True)
            return PageAnswer(msgspec.json.encode(answer(run, query)), tag)

    def _status(self, run: ViewedRun, _: Query) -> object:
        if not run.layout.status.exists() and not run.layout.reports.is_dir():
            return {"words": ["It wrote no status: its current state is unknown."], "is_over": False, "num_damaged": 0}
        try:
            status = read_status(run.layout)
        except ConfigError as exc:
            return {"fault": str(exc), "words": [], "is_over": True, "num_damaged": run.metrics.num_damaged()}
        now = run.clock.now(status)
        has_ended = is_over(status, now=now, is_alive=process_exists)
        return {
            "words": list(describe_run(status, layout=run.layout, now=now, is_alive=process_exists)),
            "is_over": has_ended,
            "state": "silent" if has_ended and status.exit_code is None else status.state,
            "run_id": status.run_id,
            "attempt": status.attempt,
            "started": status.started,
            "time": status.time,
            "step": max((report.step for role in status.roles for report in role.reports), default=0),
            "max_steps": status.max_steps,
            "last_commit": status.last_commit,
            "last_error": standing_error(status),
            "num_restarts": len(status.restarts),
            "roles": status.roles,
            "num_damaged": run.metrics.num_damaged() + run.notes.num_damaged,
        }


def _series(run: ViewedRun, query: Query) -> object:
    names = [name for name in query.get("names", "").split(",") if name]
    keys = [MetricKey.parse(name) for name in names[:_MAX_METRICS]] or SHOWN_FIRST
    run.metrics.refresh([*ALWAYS_READ, *keys])
    points = _number(query, "points", default=1000, low=2, high=_MAX_POINTS)
    first, last = _optional(query, "from"), _optional(query, "to")
    curves = {str(key): run.metrics.curve(key, num_points=points, first=first, last=last) for key in keys}
    return {"curves": curves, "num_damaged": run.metrics.num_damaged()}


def _timeline(run: ViewedRun, query: Query) -> object:
    run.metrics.refresh(ALWAYS_READ)
    run.notes.refresh()
    count = _number(query, "steps", default=40, low=1, high=_MAX_STEPS)
    return make_timeline(run.metrics, run.notes.notes, last_step=_optional(query, "last"), num_steps=count)


def _rollouts(run: ViewedRun, query: Query) -> object:
    return run.rollouts.page(
        _rollouts_file(run, query),
        offset=_number(query, "offset", default=0),
        limit=_number(query, "limit", default=50, low=1, high=_MAX_ROWS),
        sort=query.get("sort", "line"),
        env=query.get("env", ""),
        contains=query.get("contains", ""),
    )


def _rollout(run: ViewedRun, query: Query) -> object:
    """Return a rollout, and for each of its samples columns over the tokens, null where the model did not sample."""
    path = _rollouts_file(run, query)
    line = _number(query, "line", default=0)
    record = run.rollouts.record(path, line)
    fault, tables = "", []
    try:
        for sample in run.rollouts.samples(path.parent, line) if "eval" not in query else []:
            token_ids, sampled = sample.token_ids_T.tolist(), sample.masked or sample
            versions = iter([part.version for part in sample.versions for _ in range(part.length)])
            is_sampled, logprobs = sampled.loss_mask_T.tolist(), sampled.logprobs_T.tolist()
            table = {
                "token_ids": token_ids,
                "texts": run.token_text.pieces(token_ids),
                "logprobs": [
                    float(f"{value:.4g}") if known else None for value, known in zip(logprobs, is_sampled, strict=True)
                ],
                "versions": [next(versions, None) if known else None for known in is_sampled],
                "is_masked": sample.masked is not None,
            }
            tables.append(table)
    except NotServed as exc:
        fault = str(exc)
    return {"record": record, "samples": tables, "fault": fault}


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
    # Python refuses to read an integer of thousands of digits; none has more than `high`.
    if not text.isascii() or not text.isdigit() or len(text) > _MAX_DIGITS or not low <= int(text) <= high:
        raise BadQuery(f"{name} must be a number from {low} to {high}, got {text[:40]!r}")
    return int(text)


def _optional(query: Query, name: str) -> int | None:
    return _number(query, name, default=0) if query.get(name) else None


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=12).hexdigest()
