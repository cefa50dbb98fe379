"""`trivet env test NAME`: finds out whether an environment is worth training on, and shows it on one screen."""

import argparse
import asyncio
import os
import sys
import tempfile
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from trivet.client.inference_client import InferenceClient
from trivet.config.findings import Findings
from trivet.config.load import load_sources
from trivet.config.schema.environment import EnvConfig, EnvWorkersConfig
from trivet.config.schema.inference import ClientConfig
from trivet.config.user_input import parse_json
from trivet.config.values import Entry, flatten
from trivet.environments.settings import host_settings
from trivet.errors import ConfigError
from trivet.evaluation.environment_test import EnvironmentTest, PolicyResult, run_environment_test
from trivet.evaluation.environment_verdict import Judgement, Verdict, judge
from trivet.evaluation.scripted_policies import PolicyKind
from trivet.process.event_loop import run_until_signalled
from trivet.process.proxies import is_direct
from trivet.shown_text import one_line, printable
from trivet.wire.groups import SamplingArguments

_WIDTH = 120
"""Width of the table, in characters, if stdout is not a terminal."""
_CONNECT_TIMEOUT_S = 60.0


class _Row(msgspec.Struct, kw_only=True):
    """A policy in the report."""

    policy: PolicyKind
    mean_reward: float | None
    share_without_signal: float | None
    mean_turns: float
    seconds_per_rollout: float
    num_groups: int
    num_failed: int


class _Report(msgspec.Struct, kw_only=True):
    """The object that `--json` prints."""

    environment: str
    num_examples: int
    num_eval_examples: int
    num_tested: int
    answer_form: str
    policies: list[_Row]
    judgement: Judgement


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
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="longest time for a group, seconds (300)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run_test(arguments: argparse.Namespace) -> int:
    """Measure and judge an environment. Return 0 unless it is not worth training on; then 1."""
    if arguments.examples < 1 or arguments.rollouts < 2:
        raise ConfigError(
            f"--examples must be >= 1 and --rollouts >= 2, got {arguments.examples} and {arguments.rollouts}: a group of one "
            "rollout has no signal"
        )
    try:
        args = parse_json(arguments.args)
    except ValueError as exc:
        raise ConfigError(f"--args is no JSON: {exc}; got {arguments.args!r}") from None
    if not isinstance(args, dict):
        raise ConfigError(f"--args must be a JSON object, got {arguments.args!r}")
    values = {"id": arguments.name, "args": args, "venv": arguments.venv}
    entries = list(flatten(Entry(path=(), value=values, origin="trivet env test")))
    env = load_sources(EnvConfig, [entries], Findings()).config
    test: list[EnvironmentTest] = []
    with tempfile.TemporaryDirectory(prefix="trivet-env-test-") as directory:
        log = Path(directory) / "workers.log"

        async def measure() -> int:
            test.append(await _measure(env, arguments, log=log))
            return 0

        if exit_code := asyncio.run(run_until_signalled(measure())):
            return exit_code
    judgement = judge(test[0])
    report = _make_report(env.label, test[0], judgement)
    if arguments.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=1).decode() + "\n")
    else:
        _show(report)
    return 1 if judgement.verdict is Verdict.NO else 0


async def _measure(env: EnvConfig, arguments: argparse.Namespace, *, log: Path) -> EnvironmentTest:
    timeout_s = arguments.timeout
    model = None
    if arguments.base_url is not None:
        client = ClientConfig(base_url=[arguments.base_url])
        headers = client.request_headers(arguments.base_url, os.environ)
        is_near = is_direct(arguments.base_url, os.environ)
        server = InferenceClient(arguments.base_url, timeout_s=_CONNECT_TIMEOUT_S, headers=headers, is_direct=is_near)
        try:
            await server.wait_ready(_CONNECT_TIMEOUT_S)
            name = await server.model_name()
        finally:
            await server.aclose()
        model = host_settings(env, model_name=name, client=client, rollout_timeout_s=timeout_s, is_plain=True)
    return await run_environment_test(
        host_settings(env, model_name="scripted", client=ClientConfig(), rollout_timeout_s=timeout_s, is_plain=True),
        num_examples=arguments.examples,
        rollouts_per_example=arguments.rollouts,
        log=log,
        limits=EnvWorkersConfig(),
        model=model,
        sampling=SamplingArguments(temperature=1.0, fields={"max_tokens": arguments.max_tokens}),
    )


def _make_report(name: str, test: EnvironmentTest, judgement: Judgement) -> _Report:
    return _Report(
        environment=name,
        num_examples=test.info.num_examples,
        num_eval_examples=test.info.num_eval_examples,
        num_tested=test.num_tested,
        answer_form=test.form,
        policies=[_make_row(policy, result) for policy, result in test.results.items()],
        judgement=judgement,
    )


def _make_row(policy: PolicyKind, result: PolicyResult) -> _Row:
    return _Row(
        policy=policy,
        mean_reward=result.mean,
        share_without_signal=result.share_without_signal,
        mean_turns=result.num_turns,
        seconds_per_rollout=result.seconds,
        num_groups=len(result.rewards) + result.num_failed,
        num_failed=result.num_failed,
    )


def _show(report: _Report) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
    data = f"{report.num_examples} examples, {report.num_eval_examples} for evaluation; {report.num_tested} were played"
    console.print(f"{printable(report.environment)}: {data}; form of an answer: {one_line(report.answer_form)}", markup=False)
    table = Table()
    for column in ("policy", "mean reward", "groups without signal", "turns", "s a rollout", "groups", "failed"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for row in report.policies:
        table.add_row(
            row.policy,
            "" if row.mean_reward is None else f"{row.mean_reward:.3f}",
            "" if row.share_without_signal is None else f"{row.share_without_signal:.0%}",
            f"{row.mean_turns:.1f}",
            f"{row.seconds_per_rollout:.3f}",
            str(row.num_groups),
            str(row.num_failed),
        )
    console.print(table)
    judgement = report.judgement
    for heading, lines in (("problem", judgement.problems), ("note", judgement.notes)):
        for line in lines:
            console.print(f"{heading}: {printable(line)}", markup=False)
    console.print(f"worth training on: {judgement.verdict}", markup=False)
