"""`trivet env test NAME`: finds out whether an environment is worth training on, and shows it on one screen."""

import argparse
import asyncio
import os
import tempfile
from pathlib import Path

import msgspec

from trivet.cli.reports import print_json, print_table
from trivet.client.inference_client import ask_model_name
from trivet.config.findings import Findings
from trivet.config.load import load_sources
from trivet.config.schema.environment import EnvConfig
from trivet.config.values import Entry, Text
from trivet.errors import ConfigError
from trivet.evaluation.environment_test import EnvironmentTest, run_environment_test
from trivet.evaluation.environment_verdict import Judgement, Verdict, judge
from trivet.process.event_loop import run_until_signalled
from trivet.shown_text import one_line, printable

_COLUMNS = ("policy", "mean reward", "groups without signal", "turns", "s a rollout", "groups", "failed")
_CONNECT_TIMEOUT_S = 60.0


def configure_test(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this action."""
    parser.add_argument("name", metavar="NAME", help="id of an installed environment, or FILE.py:FUNCTION")
    parser.add_argument("--args", default="{}", metavar="JSON", help="arguments of the environment, as a JSON object")
    parser.add_argument("--venv", default="auto", help="its virtual environment (default: the one that it is installed in)")
    parser.add_argument("--examples", type=int, default=16, metavar="N", help="examples to play (16)")
    parser.add_argument("--rollouts", type=int, default=8, metavar="N", help="rollouts per example of a sampling policy (8)")
    parser.add_argument(
        "--base-url", metavar="URL", help="a running server whose model is played too: http://127.0.0.1:8000/v1"
    )
    parser.add_argument("--max-tokens", type=int, default=512, metavar="N", help="tokens per turn of that model (512)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run_test(arguments: argparse.Namespace) -> int:
    """Measure and judge an environment. Return 0 unless it is not worth training on; then 1."""
    if arguments.examples < 1 or arguments.rollouts < 2:
        raise ConfigError(
            f"--examples must be >= 1 and --rollouts >= 2, got {arguments.examples} and {arguments.rollouts}: a group of one "
            "rollout has no signal"
        )
    values = {"id": Text(arguments.name), "args": Text(arguments.args), "venv": Text(arguments.venv)}
    entries = [Entry(path=(key,), value=value, origin="trivet env test") for key, value in values.items()]
    env = load_sources(EnvConfig, [entries], Findings()).config
    tests: list[EnvironmentTest] = []

    async def measure() -> int:
        url: str | None = arguments.base_url
        with tempfile.TemporaryDirectory(prefix="trivet-env-test-") as directory:
            test = await run_environment_test(
                env,
                num_examples=arguments.examples,
                rollouts_per_example=arguments.rollouts,
                log=Path(directory) / "workers.log",
                model=(url, await ask_model_name(url, environ=os.environ, timeout_s=_CONNECT_TIMEOUT_S))
                if url is not None
                else None,
                max_tokens=arguments.max_tokens,
            )
        tests.append(test)
        return 0

    if exit_code := asyncio.run(run_until_signalled(measure())):
        return exit_code
    (test,) = tests
    judgement = judge(test)
    if arguments.json:
        print_json({**msgspec.structs.asdict(test), "judgement": judgement})
    else:
        _show(test, judgement)
    return 1 if judgement.verdict is Verdict.NO else 0


def _show(test: EnvironmentTest, judgement: Judgement) -> None:
    data = f"{test.num_examples} examples, {test.num_eval_examples} for evaluation; {test.num_tested} were played"
    print(f"{printable(test.environment)}: {data}; form of an answer: {one_line(test.answer_form)}")
    rows = [
        (
            result.policy,
            "" if result.mean_reward is None else f"{result.mean_reward:.3f}",
            "" if result.share_without_signal is None else f"{result.share_without_signal:.0%}",
            f"{result.mean_turns:.1f}",
            f"{result.seconds_per_rollout:.3f}",
            str(len(result.rewards) + len(result.errors)),
            str(len(result.errors)),
        )
        for result in test.policies
    ]
    print_table(_COLUMNS, rows)
    for heading, lines in (("problem", judgement.problems), ("note", judgement.notes)):
        for line in lines:
            print(f"{heading}: {printable(line)}")
    print(f"worth training on: {judgement.verdict}")
