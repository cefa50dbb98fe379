from pathlib import Path

import msgspec

from trivet.config.layout import RunLayout
from trivet.launcher.plan import report_files
from trivet.launcher.reports import forget_reports, read_reports
from trivet.wire.status import ProcessReport


def write_report(layout: RunLayout, rank: int) -> None:
    layout.reports.mkdir(exist_ok=True)
    report = ProcessReport(role="trainer", rank=rank, pid=1, time=0, since=0)
    layout.report_file("trainer", rank).write_bytes(msgspec.json.encode(report))


def test_each_rank_has_its_stamp_and_a_missing_report_has_none(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    write_report(layout, 1)
    reports = read_reports(report_files(layout, "trainer", num_ranks=2))
    assert reports.stamps["trainer rank 0 of 2"] is None
    assert reports.stamps["trainer rank 1 of 2"] is not None
    assert [report.rank for report in reports.readable] == [1]


def test_a_report_that_cannot_be_read_is_still_a_sign_of_life(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    layout.reports.mkdir()
    layout.report_file("trainer").write_text("{")
    reports = read_reports(report_files(layout, "trainer"))
    assert reports.stamps["trainer"] is not None
    assert reports.readable == ()


def test_reports_are_forgotten_before_a_restart(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    write_report(layout, 0)
    write_report(layout, 1)
    forget_reports(report_files(layout, "trainer", num_ranks=2))
    assert list(layout.reports.iterdir()) == []
