"""The tools over the directory of one run: status, view, top, evals, check and merge.

They read the files of the run and change nothing; `merge` writes a new directory. Modules that take long to import are imported by
the tool that needs them.
"""

import argparse
import signal
import sys
import threading
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from trivet.cli.reports import print_json, print_table
from trivet.config.layout import RunLayout
from trivet.errors import ConfigError
from trivet.process.lifetime import process_exists
from trivet.shown_text import one_line, printable
from trivet.view.evaluations import FoundEvaluation, find_evaluations
from trivet.view.metrics import ENTROPY, LOSS, MISMATCH, REWARD, STEP_TIME, THROUGHPUT, MetricKey
from trivet.view.run import ViewedRun, name_runs, open_run
from trivet.view.status import StatusClock, describe_run, read_status, watch_status
from trivet.wire.status import RunState

EVALUATION_COLUMNS = ("policy", "environment", "mean reward", "± (95 %)", "pass@k", "k", "examples", "failed")
_END_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_BARS = "▁▂▃▄▅▆▇█"
_CURVE_METRICS = {
    "reward": REWARD,
    "loss": LOSS,
    "entropy": ENTROPY,
    "mismatch KL": MISMATCH,
    "staleness": MetricKey("orchestrator", "batch/off_policy_level/mean"),
    "tokens/s": THROUGHPUT,
    "step time, s": STEP_TIME,
    "waits for batch, s": MetricKey("trainer", "time/wait_for_batch"),
}
_STATE_STYLES = {RunState.DONE: "green", RunState.FAILED: "red", RunState.INTERRUPTED: "yellow", RunState.PREEMPTED: "yellow"}
_ERROR_HEADING = "last error:"


def configure_status(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trivet status`."""
    parser.add_argument("output_dir", type=Path, metavar="OUTPUT_DIR", help="the run's output_dir")
    parser.add_argument("--json", action="store_true", help="print the status as the run wrote it")


def run_status(arguments: argparse.Namespace) -> int:
    """Print the current activity of the run, or how it ended. Return the exit code."""
    layout = RunLayout(arguments.output_dir)
    if arguments.json:
        print_json(read_status(layout))
        return 0
    clock = StatusClock()
    status = watch_status(layout, clock)
    for line in describe_run(status, layout=layout, now=clock.now(status), is_alive=process_exists):
        print(printable(line))
    return 0


def configure_view(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trivet view`."""
    parser.add_argument(
        "output_dirs", type=Path, nargs="+", metavar="OUTPUT_DIR", help="a run's output_dir; several are compared"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine alone)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: a free one is found)")
    parser.add_argument("--open", action="store_true", help="open the page in the browser of this machine")


def run_view(arguments: argparse.Namespace) -> int:
    """Serve runs as a web page until SIGINT, SIGTERM or SIGHUP. Return the exit code."""
    layouts = [open_run(directory) for directory in arguments.output_dirs]
    runs = [ViewedRun(layout, name=name) for layout, name in zip(layouts, name_runs(arguments.output_dirs), strict=True)]
    from trivet.view.api import Api
    from trivet.view.server import ViewServer

    server = ViewServer(Api(runs), host=arguments.host, port=arguments.port)
    if arguments.open:
        webbrowser.open(server.url)
    # Threads inherit the mask, so it is set before they start: only `sigwait` below may receive these signals.
    signal.pthread_sigmask(signal.SIG_BLOCK, _END_SIGNALS)
    for viewed in runs:
        threading.Thread(target=viewed.warm_up, name=f"warm-up-{viewed.name}", daemon=True).start()
    with server.serving():
        print(f"{', '.join(viewed.name for viewed in runs)} at {server.url} (Ctrl-C ends)", flush=True)
        signal.sigwait(_END_SIGNALS)
    return 0


def configure_check(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trivet check`."""
    parser.add_argument("output_dir", type=Path, metavar="OUTPUT_DIR", help="the run's output_dir; the run may be going on")
    parser.add_argument("--json", action="store_true", help="print the counts and what does not hold as JSON")


def run_check(arguments: argparse.Namespace) -> int:
    """Check the files of a run against what every run must guarantee. Return 0 if all guarantees hold, else 1."""
    from trivet.history.check import check_run, describe_report, report_values

    layout = RunLayout(arguments.output_dir)
    history = check_run(layout)
    if arguments.json:
        print_json(report_values(history))
    else:
        print(printable("\n".join(describe_report(history, events=layout.events))))
    return 1 if history.ledger.breaches else 0


def configure_merge(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trivet merge`."""
    parser.add_argument("adapter", type=Path, metavar="ADAPTER", help="a published weights/step_N, or any adapter of PEFT's")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="the directory to write; it must not be there yet")
    parser.add_argument("--base", metavar="MODEL", help="the base model, where it is elsewhere than when it was trained with")


def run_merge(arguments: argparse.Namespace) -> int:
    """Write an adapter and its base model as one complete model. Return the exit code."""
    from trivet.trainer.model.lora import merge

    base = merge(arguments.adapter, output=arguments.output, base=arguments.base)
    print(f"{arguments.output} is {base} with {arguments.adapter}")
    return 0


def configure_evals(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trivet evals`."""
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="a run's output_dir, or the directory of one evaluation or of several"
    )
    parser.add_argument("--json", action="store_true", help="print the scores of every evaluation as JSON")


def run_evals(arguments: argparse.Namespace) -> int:
    """Browse the evaluations in the terminal, or print their list without one. Return the exit code."""
    found = find_evaluations(arguments.directory)
    if arguments.json:
        print_json([{"policy": item.policy, "env": item.name, "fault": item.fault, "summary": item.summary} for item in found])
        return 0
    if sys.stdin.isatty() and sys.stdout.isatty():
        from trivet.cli.screens import EVALUATIONS, TerminalApp

        return TerminalApp(arguments.directory, first=EVALUATIONS).show()
    print_table(EVALUATION_COLUMNS, map(evaluation_cells, found), num_texts=2)
    return 0


def evaluation_cells(evaluation: FoundEvaluation) -> Sequence[str]:
    """Return the cells of an evaluation for `EVALUATION_COLUMNS`, safe to print."""
    names = (one_line(evaluation.policy), one_line(evaluation.name))
    summary = evaluation.summary
    if summary is None:
        state = f"unreadable: {evaluation.fault}" if evaluation.fault else "goes on"
        return (*names, one_line(state), *[""] * (len(EVALUATION_COLUMNS) - 3))
    scores = ("-" if value is None else f"{value:.4f}" for value in (summary.avg, summary.ci95, summary.pass_at_k))
    return (*names, *scores, *map(str, (summary.rollouts_per_example, summary.num_examples, summary.num_failed)))


def configure_top(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trivet top`."""
    parser.add_argument("output_dir", type=Path, metavar="OUTPUT_DIR", help="the run's output_dir")
    parser.add_argument(
        "--once", action="store_true", help="print one picture and end; so it is too where the output is no terminal"
    )


def run_top(arguments: argparse.Namespace) -> int:
    """Show the state of the run, renewed until a key ends it, or once without a terminal. Return the exit code."""
    viewed, console = ViewedRun(open_run(arguments.output_dir), name=arguments.output_dir.name), Console()
    if not arguments.once and console.is_terminal and sys.stdin.isatty():
        from trivet.cli.screens import RUN, TerminalApp

        return TerminalApp(arguments.output_dir, first=RUN).show()
    with suppress(ConfigError):  # the summary shows the error
        watch_status(viewed.layout, viewed.clock)
    console.print(draw_run(viewed, width=console.width))
    return 0


def draw_run(viewed: ViewedRun, *, width: int) -> RenderableType:
    """Return the current state of the run: head line, progress, curves. The last error is at the end, because it may be long."""
    viewed.metrics.refresh(list(_CURVE_METRICS.values()))
    try:
        status = read_status(viewed.layout)
        texts = list(describe_run(status, layout=viewed.layout, now=viewed.clock.now(status), is_alive=process_exists))
    except ConfigError as exc:
        status, texts = None, [str(exc)]
    head, *lines = map(one_line, texts)
    error_at = lines.index(_ERROR_HEADING) if _ERROR_HEADING in lines else len(lines)
    style = "red" if status is None else _STATE_STYLES.get(status.state, "cyan")
    curves = Table("", "now", "least", "greatest", "all steps", box=None, padding=(0, 1), header_style="dim")
    for label, key in _CURVE_METRICS.items():
        values = viewed.metrics.values(key)
        if len(values):
            numbers = (f"{value:.4g}" for value in (values[-1], values.min(), values.max()))
            curves.add_row(label, *numbers, Text(sparkline(values, width=max(8, width - 60)), style="cyan"))
    progress = Text("")
    if status is not None and status.max_steps:
        step = max((report.step for role in status.roles for report in role.reports), default=0)
        num_bars = max(10, width - 24)
        num_filled = round(num_bars * min(1.0, step / status.max_steps))
        bars = ("━" * num_filled, "green"), ("━" * (num_bars - num_filled), "dim")
        progress = Text.assemble(*bars, f" {step}/{status.max_steps} steps")
    no_curves = Text("no step has ended yet: curves appear with the first", style="dim")
    return Group(
        Text(head, style=f"bold {style}"),
        progress,
        *(Text(line) for line in lines[:error_at]),
        curves if curves.row_count else no_curves,
        *(Text(line, style="red") for line in lines[error_at:]),
    )


def sparkline(values: np.ndarray, *, width: int) -> str:
    """Return the values as a line of at most `width` bars. A bar is a mean of consecutive values, scaled from least to greatest."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return ""
    means = np.array([part.mean() for part in np.array_split(finite, min(width, len(finite)))])
    low, high = float(means.min()), float(means.max())
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((float(mean) - low) * scale)] for mean in means)
