import logging
from io import StringIO

from rich.console import Console

from trivet.evaluation.progress import ProgressView


def test_without_a_terminal_a_line_is_written_now_and_then_and_at_the_end(caplog):
    now = 0.0
    with caplog.at_level(logging.INFO), ProgressView(Console(file=StringIO()), has_bars=False, clock=lambda: now) as view:
        advance = view.begin("10 letters", total=30)
        for _ in range(30):
            now += 1.0
            advance()
    assert [record.getMessage() for record in caplog.records] == [
        f"evaluating 10 letters: {done} of 30 examples" for done in (10, 20, 30)
    ]


def test_on_a_terminal_there_is_a_bar_for_each_environment_and_no_line(caplog):
    out = StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    with caplog.at_level(logging.INFO), ProgressView(console, has_bars=True) as view:
        for advance in (view.begin("10 a", total=2), view.begin("10 b", total=1)):
            advance()
    assert "10 a" in out.getvalue()
    assert "1/2" in out.getvalue()
    assert "1/1" in out.getvalue()
    assert not caplog.records
