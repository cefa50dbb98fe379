"""Reads what the processes of a role report of themselves, with a stamp that tells whether a report is new."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from trivet.launcher.plan import ReportFile
from trivet.telemetry.process_report import read_report
from trivet.wire.status import ProcessReport

ReportStamp = tuple[int, int] | None
"""Inode of a report's file and the time when it was written last; None while there is none. Stamps are compared with each other,
never with a clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleReports:
    """The reports of a role's processes."""

    readable: tuple[ProcessReport, ...] = ()
    """Those that could be read."""
    stamps: Mapping[str, ReportStamp] = field(default_factory=dict[str, ReportStamp])
    """A value that changes when a process reports again, by the name of the process."""


def read_reports(files: Sequence[ReportFile]) -> RoleReports:
    """Read the reports of a role's processes. One that cannot be read still has a stamp: its process lives."""
    readable: list[ProcessReport] = []
    stamps: dict[str, ReportStamp] = {}
    for file in files:
        stamps[file.process] = _stamp(file.path)
        try:
            report = read_report(file.path)
        except msgspec.DecodeError:
            continue
        if report is not None:
            readable.append(report)
    return RoleReports(readable=tuple(readable), stamps=stamps)


def forget_reports(files: Sequence[ReportFile]) -> None:
    """Remove what the role's processes said before they are started again."""
    for file in files:
        file.path.unlink(missing_ok=True)


def _stamp(path: Path) -> ReportStamp:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_mtime_ns
