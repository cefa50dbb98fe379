"""`trivet bisect OUTPUT_DIR --metric NAME`: after which batch a metric or a held-out score broke.

The real trainer trains on the recorded batches again, from a commit, in a temporary directory. A metric of the trainer is that of
the replay; a held-out score comes from `eval` on a server that loads the replayed policies. Then the trainer goes through the
batches without the suspected one: if the metric still breaks, that batch alone was not the cause. The run's directory is not
changed.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from trivet.checkpoints.commit import committed_steps
from trivet.cli.quickstart import Children
from trivet.cli.reports import print_json
from trivet.config.dump import to_toml
from trivet.config.layout import BATCH_SUFFIX, SECRET_FILE, RunLayout, step_name
from trivet.config.load import load_config
from trivet.config.schema.shared import CkptConfig, CkptWeightsConfig, TrackingConfig
from trivet.config.schema.trainer import TrainerConfig, TrainerDataConfig
from trivet.errors import ConfigError, RoleFailed
from trivet.process.signals import Interrupts
from trivet.storage.durable import write_private
from trivet.telemetry.metrics import read_metrics
from trivet.transport.recording import read_recorded, recorded_steps
from trivet.view.evaluations import find_evaluations
from trivet.view.picture import Panel, write_picture
from trivet.view.run import open_run
from trivet.wire.versions import Step

_SCORE = "eval/"
"""Prefix of a held-out score: `eval/NAME` is the mean reward on the environment NAME."""
_NUM_EXAMPLES = 64
"""Examples of a held-out score."""
_PATIENCE = 3
"""Values in a row that must be broken, or all up to the end: one may be chance."""
_LOG_LINES = 15
_READY_TIMEOUT_S = 900


class BisectReport(msgspec.Struct, kw_only=True):
    """The object that `--json` prints."""

    metric: str
    limit: float
    is_upper: bool
    """Values above the limit are broken; false: values below it."""
    values: dict[int, float]
    """The metric of each replayed step."""
    broken_at: int | None
    """The first step from which the metric stays broken; None if it never does."""
    suspect: int | None = None
    """The batch whose update comes right before; None if it lies before the replay."""
    group_ids: list[int] = []
    """Its groups."""
    values_without: dict[int, float] = {}
    """The metric of a replay without that batch, by the steps of the recorded run."""
    broken_without: int | None = None
    """The first step from which that replay stays broken."""


def configure_bisect(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this tool."""
    parser.add_argument("output_dir", type=Path, metavar="OUTPUT_DIR", help="a run with trainer.data.record = true")
    parser.add_argument(
        "--metric", required=True, metavar="NAME", help=f"of metrics/trainer.jsonl, or {_SCORE}ENV: a held-out score"
    )
    limit = parser.add_mutually_exclusive_group()
    limit.add_argument("--above", type=float, metavar="X", help="broken above X; default: between first and last values")
    limit.add_argument("--below", type=float, metavar="X", help="broken below X")
    parser.add_argument("--from-step", type=int, default=0, metavar="N", help="a committed step; default: the start model")
    parser.add_argument("--to-step", type=int, metavar="N", help="the last step to replay; default: the last that was recorded")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the metric with and without the suspected batch")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run_bisect(arguments: argparse.Namespace) -> int:
    """Find the break and print it. Return the exit code."""
    layout, metric = open_run(arguments.output_dir), arguments.metric
    steps = _choose_steps(layout, arguments.from_step, arguments.to_step)
    with tempfile.TemporaryDirectory(prefix="trivet-bisect-") as scratch, Interrupts(clock=time.monotonic) as interrupts:
        children = Children(environ={**os.environ, SECRET_FILE: str(layout.secret)}, interrupts=interrupts)
        replays = Replays(layout, Path(scratch), from_step=arguments.from_step, metric=metric, children=children)
        values = replays.measure("whole", steps)
        limit, is_upper = (arguments.above, True) if arguments.above is not None else (arguments.below, False)
        if limit is None:
            limit, is_upper = derive_limit(values)
        broken_at = find_break(values, limit, is_upper=is_upper)
        report = BisectReport(metric=metric, limit=limit, is_upper=is_upper, values=values, broken_at=broken_at)
        # A metric of step n is computed on batch n with policy n-1; the score of policy n follows batch n.
        suspect = None if broken_at is None else broken_at - (not metric.startswith(_SCORE))
        if suspect in steps:
            report.suspect = suspect
            report.group_ids = list(map(int, read_recorded(layout, Step(suspect)).group_ids))
            if rest := [step for step in steps if step != suspect]:
                report.values_without = replays.measure("without", rest)
                report.broken_without = find_break(report.values_without, limit, is_upper=is_upper)
    if arguments.svg is not None:
        curves = {"replay": [list(report.values.items())]}
        if report.values_without:
            curves[f"without batch {report.suspect}"] = [list(report.values_without.items())]
        write_picture(arguments.svg, metric, [Panel(across="step", curves=curves, level=limit)])
    if arguments.json:
        print_json(report)
    else:
        print("\n".join(describe_report(report)))
    return 0


def derive_limit(values: Mapping[int, float]) -> tuple[float, bool]:
    """Return the middle between the medians of the first and the last values, and whether it is an upper limit.

    Raises:
        ConfigError: the metric ends where it began.
    """
    finite = [values[step] for step in sorted(values) if np.isfinite(values[step])]
    first, last = (float(np.median(part)) if part else 0.0 for part in (finite[:_PATIENCE], finite[-_PATIENCE:]))
    if first == last:
        raise ConfigError("--above or --below is needed: the metric ends where it began, so no limit can be derived")
    return (first + last) / 2, last > first


def find_break(values: Mapping[int, float], limit: float, *, is_upper: bool) -> int | None:
    """Return the first step from which `_PATIENCE` values, or all up to the last, are beyond the limit. NaN always is."""
    steps = sorted(values)
    is_broken = [not (values[step] <= limit if is_upper else values[step] >= limit) for step in steps]
    return next((step for index, step in enumerate(steps) if all(is_broken[index : index + _PATIENCE])), None)


def _choose_steps(layout: RunLayout, from_step: int, to_step: int | None) -> list[int]:
    """Return the steps to replay."""
    recorded, starts = recorded_steps(layout), [0, *committed_steps(layout)]
    steps = list(range(from_step + 1, (recorded[-1] if recorded and to_step is None else to_step or 0) + 1))
    if from_step not in starts or not steps or not set(steps) <= set(map(int, recorded)):
        held = f"{recorded[0]} to {recorded[-1]}" if recorded else "none: record a run with trainer.data.record = true"
        raise ConfigError(
            f"the steps after {from_step} cannot be replayed: {layout.batches} holds the batches {held}; --from-step may be "
            f"{', '.join(map(str, starts))}, and --to-step a later step"
        )
    return steps


class Replays:
    """Trains on batches of one recorded run in a scratch directory, and measures the policies."""

    def __init__(self, layout: RunLayout, scratch: Path, *, from_step: int, metric: str, children: Children) -> None:
        self._layout, self._scratch, self._children = layout, scratch, children
        self._from_step, self._metric = from_step, metric
        config = load_config(TrainerConfig, ["@", str(layout.configs / "trainer.toml")], environ={}).config
        # No tracker and no monitoring service must take the replay for the run.
        silent = {"wandb": None, "heartbeat": None, "metrics_server": None, "tracking": TrackingConfig()}
        self._config = config.model_copy(update=silent)

    def measure(self, name: str, batches: Sequence[int]) -> dict[int, float]:
        """Train on `batches`, in this order, and return the metric after each, by the step of the recorded run."""
        replayed = self._replay(name, batches)
        if self._metric.startswith(_SCORE):
            values = self._score(replayed)
        else:
            rows = read_metrics(replayed.metrics / "trainer.jsonl").rows
            values = {row["step"]: float(row[self._metric]) for row in rows if self._metric in row}
        if not values:
            raise ConfigError(
                f"--metric {self._metric!r} is neither in metrics/trainer.jsonl nor {_SCORE} with an environment of the run"
            )
        return {batches[step - self._from_step - 1]: value for step, value in values.items()}

    def _replay(self, name: str, batches: Sequence[int]) -> RunLayout:
        target, source = RunLayout(self._scratch / name), RunLayout(self._scratch / f"{name}-batches")
        source.batches.mkdir(parents=True)
        for step, batch in enumerate(batches, start=self._from_step + 1):
            (source.batches / f"{step_name(step)}{BATCH_SUFFIX}").symlink_to(self._layout.recorded_batch(batch).absolute())
        if self._from_step:
            shutil.copytree(self._layout.checkpoint_step(self._from_step), target.checkpoint_step(self._from_step))
        ckpt = CkptConfig(resume_step=self._from_step or None, allow_changes=["*"], weights=CkptWeightsConfig(interval=1))
        replay = {
            "output_dir": target.root,
            "max_steps": self._from_step + len(batches),
            "data": TrainerDataConfig(replay=source.root),
            "ckpt": ckpt,
        }
        file, log = self._scratch / f"{name}.toml", self._scratch / f"{name}.log"
        write_private(file, to_toml(self._config.model_copy(update=replay)))
        _require_success(self._children.run("trivet.launcher.commands.trainer", "@", str(file), log=log), log)
        return target

    def _score(self, replayed: RunLayout) -> dict[int, float]:
        """Have `eval` load every replayed policy into a server of the start model, and return the mean rewards."""
        replayed.configs.mkdir(exist_ok=True)
        shutil.copyfile(self._layout.configs / "orchestrator.toml", replayed.configs / "orchestrator.toml")

        def make_command(port: int) -> list[str]:
            words = ["trivet.evaluation.main", "--client.base-url", f"http://127.0.0.1:{port}/v1", "--no-eval-base"]
            words += ["--weights-dir", str(replayed.weights), "--num-examples", str(_NUM_EXAMPLES)]
            return [*words, "--client.wait-for-ready-timeout", str(_READY_TIMEOUT_S)]

        log, server_log = self._scratch / "eval.log", self._scratch / "server.log"
        server = ["@", str(self._layout.configs / "inference.toml"), "--output-dir", str(replayed.root)]
        _require_success(self._children.evaluate(server, make_command, server_log=server_log, log=log), log)
        name = self._metric.removeprefix(_SCORE)
        scores = {e.step: e.summary.avg for e in find_evaluations(replayed.root) if e.name == name and e.summary is not None}
        return {step: float("nan") if average is None else average for step, average in scores.items()}


def _require_success(exit_code: int, log: Path) -> None:
    if exit_code:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
        raise RoleFailed(f"a process of the replay ended with exit code {exit_code}; the end of {log.name}:\n{tail}")


def describe_report(report: BisectReport) -> list[str]:
    """Return the lines that are printed."""
    first, last = min(report.values), max(report.values)
    lines = [
        f"{report.metric} in the replay of steps {first} to {last}: {report.values[first]:.6g} first, {report.values[last]:.6g} "
        f"last; broken is {'above' if report.is_upper else 'below'} {report.limit:.6g}"
    ]
    if report.broken_at is None:
        return [*lines, "it does not break"]
    lines.append(f"it breaks at step {report.broken_at}: {report.values[report.broken_at]:.6g}")
    if report.suspect is None:
        return [*lines, "the suspected batch lies before the replay: begin at an earlier --from-step"]
    lines.append(f"the suspect is batch {report.suspect}, with groups {', '.join(map(str, report.group_ids)) or 'unknown'}")
    if report.broken_without is None:
        return [*lines, "without that batch it does not break: the batch is the cause"]
    return [
        *lines,
        f"without that batch it breaks at step {report.broken_without} all the same: the batch is not the only cause",
    ]
