"""`trivet replay OUTPUT_DIR`: scores saved rollouts with the current reward functions and shows the differences.

The run's directory is not changed, and nothing is generated or trained.
"""

import argparse
import asyncio
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from trivet.cli.reports import print_json, print_table
from trivet.config.layout import RunLayout
from trivet.config.schema.environment import EnvWorkersConfig
from trivet.environments.workers.pool import open_worker_pool
from trivet.errors import ConfigError
from trivet.evaluation.rescoring import (
    EnvironmentChange,
    RescoredRollout,
    SavedFile,
    compare,
    find_evaluated,
    find_trained,
    most_changed,
    read_run_config,
    rescore,
    settings_for,
)
from trivet.process.event_loop import run_until_signalled
from trivet.shown_text import printable
from trivet.storage.durable import write_atomically
from trivet.wire.workers import HostSettings


class ReplayReport(msgspec.Struct, kw_only=True):
    """The object that `--json` prints."""

    output_dir: str
    source: str
    """`rollouts` of training, or `evals`."""
    num_rollouts: int
    num_scored: int
    num_changed: int
    num_not_comparable: int
    environments: list[EnvironmentChange]
    most_changed: list[RescoredRollout]


def configure_replay(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this tool."""
    parser.add_argument(
        "output_dir", type=Path, metavar="OUTPUT_DIR", help="output_dir of a run, or of `uv run eval`; the run may be going on"
    )
    parser.add_argument("--evals", action="store_true", help="the rollouts of a run's evaluations, not those it trained on")
    parser.add_argument("--steps", type=_parse_steps, metavar="A-B", help="these steps alone, or one step; default: all")
    parser.add_argument("--env", metavar="ID", help="this environment alone, by its name or its id; default: all")
    parser.add_argument("--limit", type=int, default=10, metavar="N", help="rollouts to show of those that changed most (10)")
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="write every rollout with its scores before and after, as JSONL"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run_replay(arguments: argparse.Namespace) -> int:
    """Score the rollouts and show the differences. Return 0, 1 if none could be scored, 130 or 143 if a signal ended it."""
    layout = RunLayout(arguments.output_dir)
    if arguments.write is not None and arguments.write.resolve().is_relative_to(layout.root.resolve()):
        raise ConfigError(
            f"--write ({arguments.write}) lies in the run's directory, which is not changed; choose another place"
        )
    trained = [] if arguments.evals else find_trained(layout, arguments.steps)
    files = trained or find_evaluated(layout, arguments.steps)
    if not files:
        raise ConfigError(
            f"{str(layout.root)!r} holds no saved rollouts"
            f"{'' if arguments.steps is None else ' of these steps (--steps)'}: give the output_dir of a run or an evaluation"
        )
    config = read_run_config(layout)
    settings = _select(settings_for(config, files), files, env=arguments.env)
    zeroes = bool(trained) and config is not None and config.zero_truncated_completions
    rescored: list[RescoredRollout] = []

    async def rescore_files() -> int:
        opening = open_worker_pool(list(settings.values()), log_of=log_files.__getitem__, limits=EnvWorkersConfig())
        async with opening as pool, asyncio.TaskGroup() as tasks:
            supervision = tasks.create_task(pool.run(), name="workers")
            for file in files:
                rescored.extend(await rescore(pool, file, envs=settings, zeroes_truncated=zeroes))
            supervision.cancel()
        return 0

    with tempfile.TemporaryDirectory(prefix="trivet-replay-") as logs:  # the run's own directory must not change
        log_files = {name: RunLayout(Path(logs)).eval_worker_log(name) for name in settings}
        for file in log_files.values():
            file.parent.mkdir(parents=True, exist_ok=True)
        if exit_code := asyncio.run(run_until_signalled(rescore_files())):
            return exit_code
    report = make_report(rescored, layout=layout, source="rollouts" if trained else "evals", limit=arguments.limit)
    if arguments.write is not None:
        write_atomically(arguments.write, b"".join(msgspec.json.encode(rollout) + b"\n" for rollout in rescored))
    if arguments.json:
        print_json(report)
    else:
        _show(report)
    return 0 if report.num_scored else 1


def make_report(rescored: Sequence[RescoredRollout], *, layout: RunLayout, source: str, limit: int) -> ReplayReport:
    """Return the report on rescored rollouts, which shows at most `limit` single rollouts."""
    changes = compare(rescored)
    return ReplayReport(
        output_dir=str(layout.root),
        source=source,
        num_rollouts=len(rescored),
        num_scored=sum(change.num_scored for change in changes),
        num_changed=sum(change.num_changed for change in changes),
        num_not_comparable=sum(sum(change.not_comparable.values()) for change in changes),
        environments=changes,
        most_changed=most_changed(rescored, limit=limit),
    )


def _parse_steps(text: str) -> range:
    """Return the steps of an argument `A-B` or `A`."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no step and no range A-B of steps")
    return range(int(match[1]), int(match[2] or match[1]) + 1)


def _select(settings: Mapping[str, HostSettings], files: Sequence[SavedFile], *, env: str | None) -> dict[str, HostSettings]:
    """Return the settings of the environments in the files, or of `env` alone, by name."""
    named = {name for file in files for name, _ in file.groups()}
    if unknown := sorted(name for name in named if name not in settings and env in (None, name)):
        raise ConfigError(
            f"the settings of environment {unknown[0]!r} are unknown: configs/orchestrator.toml names "
            f"{', '.join(sorted(settings)) or 'none'}; give the directory of the run that sampled the rollouts"
        )
    chosen = {name: settings[name] for name in sorted(named) if name in settings and env in (None, name, settings[name].env_id)}
    if not chosen:
        raise ConfigError(f"--env {env!r} names none of the environments of the rollouts: {', '.join(sorted(named))}")
    return chosen


def _show(report: ReplayReport) -> None:
    for change in report.environments:
        print(printable(change.env))
        functions = [
            (f.name, _cell(f.mean_before), _cell(f.mean_after), str(f.num_changed), str(f.num_rollouts))
            for f in change.functions
        ]
        print_table(("reward function", "mean before", "mean after", "changed", "rollouts"), functions)
        for reason, count in sorted(change.not_comparable.items()):
            print(f"not comparable, {printable(reason)}: {count} of {change.num_rollouts} rollouts")
        if change.num_failed:
            failures = f"not scored: {change.num_failed} of {change.num_rollouts} rollouts; the first: {change.first_error}"
            print(printable(failures))
    if report.most_changed:
        print("rollouts that changed most")
        rollouts = [
            (r.env, r.completion, str(r.step), str(r.example_id), str(r.index), _cell(r.reward_before), _cell(r.reward_after))
            for r in report.most_changed
        ]
        print_table(("environment", "completion", "step", "example", "index", "before", "after"), rollouts, num_texts=2)
    print(f"{report.num_changed} of {report.num_scored} scored rollouts have another reward; {report.num_rollouts} were saved")


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
