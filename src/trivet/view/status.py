"""Reads a run's status from its files and describes it in sentences. Used by the tools that look at a run; changes nothing.

A run may be on another machine, whose clock differs and whose process ids mean nothing here. Then the age of its status is the time
since this process first saw it, by this machine's clock (`StatusClock`).
"""

import os
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import msgspec

from trivet.checkpoints.commit import committed_steps
from trivet.config.layout import RunLayout
from trivet.errors import ConfigError
from trivet.exits import describe_restart
from trivet.storage.durable import DECODE_ERRORS, open_regular
from trivet.telemetry.process_report import read_report
from trivet.wire.status import ProcessReport, RoleState, RoleStatus, RunState, RunStatus, WorkerStatus

_SILENT_AFTER_S = 15.0
"""A launcher writes its status every two seconds and a role its report every second. Older ones are called silent."""
_READ_INTERVAL_S = 0.5
_MAX_SHOWN_S = 1e9
"""Thirty years. A longer duration means a damaged file."""
_STUCK_WORKER_S = 30.0
"""A worker in the environment's own code for longer than this is named."""


def read_status(layout: RunLayout) -> RunStatus:
    """Return the launcher's status; for roles that were started by hand, one made of their reports."""
    try:
        with open_regular(layout.status) as file:
            return msgspec.json.decode(file.read(), type=RunStatus)
    except FileNotFoundError:
        reports = read_reports(layout)
    except (OSError, *DECODE_ERRORS) as exc:
        raise ConfigError(f"{layout.status} cannot be read: {exc}; it may be of another version of trivet") from exc
    if not reports:
        raise ConfigError(
            f"{str(layout.root)!r} holds no run: neither status.json nor reports of roles; give a run's output_dir"
        )
    reports_by_role: dict[str, list[ProcessReport]] = {}
    for report in sorted(reports, key=lambda report: report.role):
        reports_by_role.setdefault(report.role, []).append(report)
    roles = [
        RoleStatus(name=name, state=RoleState.RUNNING, pid=found[0].pid, reports=found)
        for name, found in reports_by_role.items()
    ]
    return RunStatus(
        run_id="started by hand",
        attempt=max(report.attempt for report in reports),
        pid=0,
        state=RunState.RUNNING,
        started=min(report.since for report in reports),
        time=max(report.time for report in reports),
        last_commit=max(committed_steps(layout), default=None),
        roles=roles,
    )


@dataclass(slots=True, kw_only=True)
class StatusClock:
    """Estimates the present time on the clock of the machine that wrote a status."""

    unix_time: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    _written: float | None = None
    """The time in the newest status of another machine."""
    _seen_at: float = 0.0
    """The time at which that status was seen first."""

    def now(self, status: RunStatus) -> float:
        """Return the Unix time by the clock of the machine that wrote `status`, in seconds.

        A status of another machine counts as just written when it is seen first, and ages until it changes.
        """
        if not is_from_another_machine(status):
            return self.unix_time()
        if status.time != self._written:
            self._written, self._seen_at = status.time, self.monotonic()
        return status.time + self.monotonic() - self._seen_at


def is_from_another_machine(status: RunStatus) -> bool:
    """Return whether the launcher is on another machine. Then its process id and its clock mean nothing here."""
    return status.node not in ("", os.uname().nodename)


def watch_status(layout: RunLayout, clock: StatusClock, *, sleep: Callable[[float], None] = time.sleep) -> RunStatus:
    """Watch the status until it is known whether the launcher still writes it; return the newest one.

    For a run on another machine this takes two seconds, or 15 when nothing is written.
    """
    status = first = read_status(layout)
    while (
        is_from_another_machine(status)
        and status.exit_code is None
        and status.time == first.time
        and clock.now(status) - status.time <= _SILENT_AFTER_S
    ):
        sleep(_READ_INTERVAL_S)
        status = read_status(layout)
    return status


def read_reports(layout: RunLayout) -> list[ProcessReport]:
    """Return the report of every process that has reported in this directory."""
    found: list[ProcessReport] = []
    for path in sorted(layout.reports.glob("*.json")) if layout.reports.is_dir() else []:
        try:
            report = None if path.name.startswith(".") else read_report(path)  # a dot: a report that is being written
        except (OSError, msgspec.DecodeError) as exc:
            raise ConfigError(f"{path} cannot be read: {exc}; it may be of another version of trivet") from exc
        if report is not None:
            found.append(report)
    return found


def describe_run(status: RunStatus, *, layout: RunLayout, now: float, is_alive: Callable[[int], bool]) -> Iterator[str]:
    """Describe the status, line by line.

    Args:
        now: Unix time in seconds, from `StatusClock`.
        is_alive: whether a process of this machine exists.
    """
    step = max((report.step for role in status.roles for report in role.reports), default=0)
    of_max_steps = f" of {status.max_steps}" if status.max_steps is not None else ""
    commit = f"last commit step {status.last_commit}" if status.last_commit is not None else "nothing committed yet"
    state = _describe_state(status, now=now, is_alive=is_alive)
    yield f"run {status.run_id} attempt {status.attempt}: {state}; step {step}{of_max_steps}, {commit}"
    if status.state in (RunState.RUNNING, RunState.PREEMPTED):
        is_here = not is_from_another_machine(status)
        pids = {report.pid for role in status.roles if is_here and not role.node for report in role.reports}
        gone = {pid for pid in pids if not is_alive(pid)}
        for role in status.roles:
            yield from (f"  {line}" for line in describe_role(role, now=now, gone=gone))
        yield from (f"  {line}" for line in _describe_workers(status, gone=gone))
    for record in status.restarts:
        yield f"restart {_format_time(record.time)} {describe_restart(record)}"
    if error := unrecovered_error(status):
        yield "last error:"
        yield from (f"  {line}" for line in error.splitlines())
    if is_over(status, now=now, is_alive=is_alive) and status.state is not RunState.DONE and status.last_commit is not None:
        yield (
            f"go on from step {status.last_commit}: the same command with --ckpt.resume-step -1, "
            f"of vf-rl with --trainer.args.resume-from-checkpoint (output_dir {layout.root})"
        )


def unrecovered_error(status: RunStatus) -> str:
    """Return the run's last error; empty once the run has recovered from it.

    A restart's `down_s` is None until a step is finished after it.
    """
    is_back = all(record.down_s is not None for record in status.restarts)
    is_recovered = status.state is RunState.DONE or (status.state is RunState.RUNNING and bool(status.restarts) and is_back)
    return "" if is_recovered else status.last_error


def describe_role(role: RoleStatus, *, now: float, gone: Collection[int] = ()) -> Iterator[str]:
    """Yield a line for each process that reports: what it does, or who it waits for and how long.

    Args:
        gone: pids of processes of this machine that reported and do not exist any more.
    """
    where = f" (node {role.node})" if role.node else ""
    if role.state is not RoleState.RUNNING:
        yield f"{role.name}{where} {role.state}{f': {role.exit}' if role.exit else ''}"
        return
    if role.stuck:
        yield f"{role.name}{where} is stuck: {role.stuck}"
    if not role.reports:
        yield f"{role.name}{where} is starting (pid {role.pid}); it has not reported yet"
    for report in role.reports:
        name = f"{role.name} rank {report.rank} of {report.num_ranks}" if report.num_ranks > 1 else role.name
        name += where
        if not role.node and report.pid in gone:
            yield f"{name} is gone (pid {report.pid})"
            continue
        for_s = _format_duration(report.time - report.since)
        line = (
            f"{name} has waited {for_s} for {report.activity} (from {report.waits_for})"
            if report.waits_for
            else f"{name} alive, {report.activity} for {for_s}"
        )
        if now - report.time > _SILENT_AFTER_S:
            line += f"; it has not reported for {_format_duration(now - report.time)}"
        if report.policy_version is not None:
            line += f"; policy {report.policy_version} served"
        if report.num_ready is not None:
            line += f"; {report.num_ready} groups ready"
        if report.num_in_flight is not None:
            line += f"; {report.num_in_flight} in flight"
        yield line


def _describe_state(status: RunStatus, *, now: float, is_alive: Callable[[int], bool]) -> str:
    if status.exit_code is not None:
        return f"{status.state} with exit code {status.exit_code} at {_format_time(status.time)} ({status.reason})"
    if now - status.time <= _SILENT_AFTER_S:
        return f"{status.state} for {_format_duration(now - status.started)}"
    age = _format_duration(now - status.time)
    if is_from_another_machine(status):
        launcher = f"its launcher (pid {status.pid} on {status.node})"
        return f"ended without a word, or stopped: {launcher} has written no status for at least {age}"
    if _is_launcher_alive(status, is_alive):
        return f"its launcher (pid {status.pid}) is there but silent: stopped or stuck, last heard of {age} ago"
    if status.pid:
        return f"ended without a word: its launcher was killed, last heard of {age} ago"
    return f"last heard of {age} ago"  # roles that were started by hand have no launcher


def is_over(status: RunStatus, *, now: float, is_alive: Callable[[int], bool]) -> bool:
    """Return whether nothing more is to be expected of the run."""
    is_silent = now - status.time > _SILENT_AFTER_S
    return status.exit_code is not None or (is_silent and not _is_launcher_alive(status, is_alive))


def _is_launcher_alive(status: RunStatus, is_alive: Callable[[int], bool]) -> bool:
    """Return whether the launcher is known to exist. On another machine that is unknown."""
    return bool(status.pid) and not is_from_another_machine(status) and is_alive(status.pid)


def _describe_workers(status: RunStatus, *, gone: Collection[int]) -> Iterator[str]:
    reports = [report for role in status.roles for report in role.reports if role.node or report.pid not in gone]
    by_env: dict[str, list[WorkerStatus]] = {}
    for worker in (worker for report in reports for worker in report.workers):
        by_env.setdefault(worker.env, []).append(worker)
    for env, workers in sorted(by_env.items()):
        total = len(workers)
        problems = {
            "stuck in scoring": sum(worker.scoring_for_s > _STUCK_WORKER_S for worker in workers),
            "blocked in synchronous code": sum(worker.blocked_for_s > _STUCK_WORKER_S for worker in workers),
            "dead": sum(not worker.is_alive for worker in workers),
        }
        found = [f"{count} of {total} workers {what}" for what, count in problems.items() if count]
        parts = found or [f"{total} {'worker' if total == 1 else 'workers'} alive"]
        parts.append(f"{sum(worker.num_pending for worker in workers)} groups pending")
        if restarts := sum(worker.num_restarts for worker in workers):
            parts.append(f"{restarts} restarts")
        yield f"env `{env}`: {', '.join(parts)}"


def _format_duration(seconds: float) -> str:
    """Return a duration as `41 s`, `12 min` or `3 h 5 min`."""
    if not seconds < _MAX_SHOWN_S:  # also for a NaN
        return "an unknown time"
    minutes = int(seconds // 60)
    if minutes < 5:
        return f"{max(0.0, seconds):.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _format_time(unix_s: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))
    except (OverflowError, ValueError, OSError):
        return "an unknown time"
