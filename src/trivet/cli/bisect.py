"""`trivet bisect OUTPUT_DIR --metric NAME`: after which batch a metric or a held-out score broke.

The real trainer trains on the recorded batches again, from a commit, in a scratch directory. A metric of the trainer is that of the
replay; a held-out score comes from `eval` on a server that loads the replayed policies. Then the trainer goes through the batches
without the suspected one: if the metric still breaks, that batch alone was not the cause. The run's directory is not changed.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from trivet.checkpoints.commit import committed_steps
from trivet.cli.quickstart import stop
from trivet.config.dump import to_toml
from trivet.config.layout import BATCH_SUFFIX, SECRET_FILE, RunLayout, step_name
from trivet.config.load import load_config
from trivet.config.schema.shared import CkptConfig, CkptWeightsConfig, TrackingConfig
from trivet.config.schema.trainer import TrainerConfig, TrainerDataConfig
from trivet.errors import ConfigError, RoleFailed
from trivet.history.breaks import Threshold, derive_threshold, find_break
from trivet.process.lifetime import module_command, tied_command
from trivet.process.sockets import ReservedPorts
from trivet.storage.durable import write_private
from trivet.telemetry.metrics import read_metrics
from trivet.transport.recording import read_recorded, recorded_steps
from trivet.view.evaluations import find_evaluations
from trivet.view.run import open_run
from trivet.wire.versions import Step

_SCORE = "eval/"
"""Prefix of a held-out score: `eval/NAME` is the mean reward on the environment NAME."""
_LOG_LINES = 15
_READY_TIMEOUT_S = 900


class BisectReport(msgspec.Struct, kw_only=True):
    """The object that `--json` prints."""

    metric: str
    threshold: str
    from_step: int
    values: dict[int, float]
    """The metric of each replayed step."""
    broken_at: int | None
    """The first step from which the metric stays broken; None if it never does."""
    suspect: int | None = None
    """The batch whose update comes right before."""
    group_ids: list[int] = []
    """Its groups."""
    without_suspect: int | None = None
    """The step at which the metric breaks without that batch, as the recorded run counts steps; None if it does not break."""


def configure_bisect(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this tool."""
    parser.add_argument("output_dir", type=Path, metavar="OUTPUT_DIR", help="a run with trainer.data.record = true")
    parser.add_argument(
        "--metric", required=True, metavar="NAME", help=f"of metrics/trainer.jsonl, or {_SCORE}ENV: a held-out score"
    )
    bound = parser.add_mutually_exclusive_group()
    bound.add_argument(
        "--above", type=float, metavar="X", help="broken above X; default: derived from the first and last values"
    )
    bound.add_argument("--below", type=float, metavar="X", help="broken below X")
    parser.add_argument("--from-step", type=int, metavar="N", help="a committed step, or 0; default: 0, the start model")
    parser.add_argument("--to-step", type=int, metavar="N", help="the last step to replay; default: the last that was recorded")
    parser.add_argument("--num-examples", type=int, default=64, metavar="N", help="examples of a held-out score (64)")
    parser.add_argument("--scratch", type=Path, metavar="DIR", help="keep the replays in this new directory; default: removed")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run_bisect(arguments: argparse.Namespace) -> int:
    """Find the break and print it. Return the exit code."""
    layout = open_run(arguments.output_dir)
    from_step, to_step = _choose_range(layout, arguments.from_step, arguments.to_step)
    with tempfile.TemporaryDirectory(prefix="trivet-bisect-") as made:
        scratch = arguments.scratch or Path(made)
        scratch.mkdir(parents=True, exist_ok=True)
        bisection = Bisection(
            layout, scratch, metric=arguments.metric, from_step=from_step, num_examples=arguments.num_examples
        )
        values = bisection.measure("whole", to_step=to_step)
        given = arguments.above if arguments.above is not None else arguments.below
        threshold = derive_threshold(values) if given is None else Threshold(value=given, is_upper=arguments.above is not None)
        report = BisectReport(
            metric=arguments.metric,
            threshold=str(threshold),
            from_step=from_step,
            values=values,
            broken_at=find_break(values, threshold),
        )
        # A metric of step n is computed on batch n with policy n-1; the score of policy n follows batch n.
        suspect = None if report.broken_at is None else report.broken_at - (not arguments.metric.startswith(_SCORE))
        if suspect is not None and suspect > from_step:
            report.suspect = suspect
            report.group_ids = list(map(int, read_recorded(layout, Step(suspect)).group_ids))
            if to_step - 1 > from_step:
                without = bisection.measure("without", to_step=to_step - 1, skipped=suspect)
                moved = find_break(without, threshold)
                report.without_suspect = None if moved is None else moved + (moved >= suspect)
    if arguments.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=1).decode() + "\n")
    else:
        print("\n".join(describe_report(report)))
    return 0


def _choose_range(layout: RunLayout, from_step: int | None, to_step: int | None) -> tuple[int, int]:
    recorded, committed = recorded_steps(layout), committed_steps(layout)
    if not recorded:
        raise ConfigError(f"{layout.batches} holds no batches: record a run with trainer.data.record = true")
    first, last = from_step or 0, recorded[-1] if to_step is None else to_step
    if first and first not in committed:
        raise ConfigError(f"--from-step {first} is not committed; commits: {', '.join(map(str, committed)) or 'none'}, or 0")
    missing = sorted(set(range(first + 1, last + 1)) - set(map(int, recorded)))
    if missing or last <= first:
        raise ConfigError(
            f"steps {first + 1} to {last} cannot be replayed: {layout.batches} holds {recorded[0]} to {recorded[-1]}; "
            "choose --from-step and --to-step among them"
        )
    return first, last


class Bisection:
    """Replays parts of one recorded run in a scratch directory, and measures them."""

    def __init__(self, layout: RunLayout, scratch: Path, *, metric: str, from_step: int, num_examples: int) -> None:
        self._layout, self._scratch, self._metric = layout, scratch, metric
        self._from_step, self._num_examples = from_step, num_examples
        config = load_config(TrainerConfig, ["@", str(layout.configs / "trainer.toml")], environ={}).config
        # No tracker and no monitoring service must take the replay for the run.
        silent = {"wandb": None, "heartbeat": None, "metrics_server": None, "tracking": TrackingConfig()}
        self._config = config.model_copy(update=silent)

    def measure(self, name: str, *, to_step: int, skipped: int | None = None) -> dict[int, float]:
        """Replay up to `to_step`, and return the metric by step.

        Args:
            skipped: leave out this batch; later batches follow one step earlier.
        """
        replayed = self._replay(name, to_step=to_step, skipped=skipped)
        if self._metric.startswith(_SCORE):
            return self._score(replayed)
        rows = read_metrics(replayed.metrics / "trainer.jsonl").rows
        values = {row["step"]: float(row[self._metric]) for row in rows if self._metric in row}
        if not values:
            known = sorted(name for name in rows[-1] if name.endswith("/mean")) if rows else []
            raise ConfigError(
                f"--metric {self._metric!r} is not in metrics/trainer.jsonl; there are {', '.join(known)} and others"
            )
        return values

    def _replay(self, name: str, *, to_step: int, skipped: int | None) -> RunLayout:
        target, source = RunLayout(self._scratch / name), self._layout.root
        if target.root.exists():
            raise ConfigError(f"--scratch {self._scratch} holds {name}/ already; give a new directory")
        if skipped is not None:
            source = self._scratch / f"{name}-batches"
            RunLayout(source).batches.mkdir(parents=True)
            for step in range(self._from_step + 1, to_step + 1):
                original = self._layout.recorded_batch(step + (step >= skipped))
                shutil.copyfile(original, RunLayout(source).batches / f"{step_name(step)}{BATCH_SUFFIX}")
        if self._from_step:
            shutil.copytree(self._layout.checkpoint_step(self._from_step), target.checkpoint_step(self._from_step))
        config = self._config.model_copy(
            update={
                "output_dir": target.root,
                "max_steps": to_step,
                "data": TrainerDataConfig(replay=source),
                "ckpt": CkptConfig(
                    resume_step=self._from_step or None, allow_changes=["*"], weights=CkptWeightsConfig(interval=1)
                ),
            }
        )
        words = ["@", self._scratch / f"{name}.toml"]
        write_private(self._scratch / f"{name}.toml", to_toml(config))
        self._run("trivet.launcher.commands.trainer", words, log=self._scratch / f"{name}.log")
        return target

    def _score(self, replayed: RunLayout) -> dict[int, float]:
        """Serve the start model, and have `eval` load every replayed policy into that server."""
        name = self._metric.removeprefix(_SCORE)
        replayed.configs.mkdir(exist_ok=True)
        shutil.copyfile(self._layout.configs / "orchestrator.toml", replayed.configs / "orchestrator.toml")
        environ = {SECRET_FILE: str(self._layout.secret)}
        with ReservedPorts() as ports, (self._scratch / "server.log").open("ab") as log:
            port = ports.reserve("127.0.0.1", preferred=8000)
            words = ["@", self._layout.configs / "inference.toml", "--server.port", port]
            server = self._start("trivet.inference.main", words, log=log.fileno(), environ=environ)
            try:
                words = [
                    "--client.base-url",
                    f"http://127.0.0.1:{port}/v1",
                    "--weights-dir",
                    replayed.weights,
                    "--no-eval-base",
                ]
                words += ["--num-examples", self._num_examples, "--client.wait-for-ready-timeout", _READY_TIMEOUT_S]
                self._run("trivet.evaluation.main", words, log=self._scratch / "eval.log", environ=environ)
            finally:
                stop(server)
        found = {e.step: e.summary.avg for e in find_evaluations(replayed.root) if e.name == name and e.summary is not None}
        if not found:
            raise ConfigError(f"--metric {self._metric!r}: no environment of the run is called {name!r}")
        return {step: float("nan") if average is None else average for step, average in found.items()}

    def _run(self, module: str, words: Sequence[object], *, log: Path, environ: dict[str, str] | None = None) -> None:
        with log.open("wb") as file:
            exit_code = self._start(module, words, log=file.fileno(), environ=environ).wait()
        if exit_code:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
            raise RoleFailed(f"{module} ended with exit code {exit_code}; the end of its log:\n{tail}")

    def _start(
        self, module: str, words: Sequence[object], *, log: int, environ: dict[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        command = tied_command(module_command(module, *map(str, words)))
        environ = {**os.environ, **(environ or {})}
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environ, start_new_session=True
        )


def describe_report(report: BisectReport) -> list[str]:
    """Return the lines that are printed."""
    first, last = min(report.values), max(report.values)
    lines = [
        f"{report.metric} in the replay of steps {first} to {last}: {report.values[first]:.6g} first, {report.values[last]:.6g} "
        f"last; broken is {report.threshold}"
    ]
    if report.broken_at is None:
        return [*lines, "it does not break"]
    lines.append(f"it breaks at step {report.broken_at}: {report.values[report.broken_at]:.6g}")
    if report.suspect is None:
        return [*lines, f"the suspected batch lies before the replay, which began after step {report.from_step}: begin earlier"]
    lines.append(f"the suspect is batch {report.suspect}, with groups {', '.join(map(str, report.group_ids)) or 'unknown'}")
    if report.without_suspect is None:
        lines.append("without that batch it does not break: the batch is the cause")
    else:
        lines.append(
            f"without that batch it breaks at step {report.without_suspect} all the same: the batch is not the only cause"
        )
    return lines
