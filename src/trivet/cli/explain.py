"""`trivet explain OUTPUT_DIR --step N`: why each token of a step was trained or not, and how much.

The model of the step is loaded once and scores the step's samples; the result is kept in `explained/`. Nothing is trained.
"""

import argparse
import math
import sys
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trivet.algorithms.packing import PackItem
from trivet.config.layout import RunLayout
from trivet.config.load import load_config
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.schema.trainer import TrainerConfig
from trivet.errors import BatchError, ConfigError
from trivet.shown_text import one_line, printable
from trivet.telemetry.metrics import read_metrics
from trivet.transport.explained import ExplainedStep, digest_rollouts, read_explained, write_explained
from trivet.transport.recording import GROUPS_FILE, read_groups
from trivet.view.explanation import RolloutExplanation, count_reasons, describe_step, explain_rollout
from trivet.view.files import NotServed
from trivet.view.run import ViewedRun, open_run
from trivet.wire.versions import Step

_NUM_SHOWN = 8
"""Rollouts that are listed without --rollout: those that add most to the loss, in absolute value."""
_PIPED_WIDTH = 140
"""Width of a table, in characters, if stdout is not a terminal."""


class StepReport(msgspec.Struct, kw_only=True):
    """The object that `--json` prints without --rollout."""

    step: int
    policy: int
    loss: float
    recorded_loss: float | None
    loss_type: str
    num_loss_tokens: int
    num_samples: int
    rollouts: list[float]
    """What each rollout added to the loss, in the order of `rollouts.jsonl`."""


def configure_explain(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this tool."""
    parser.add_argument("output_dir", type=Path, metavar="OUTPUT_DIR", help="the run's output_dir; the run may be going on")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="a step that was trained")
    parser.add_argument("--rollout", type=int, metavar="I", help="one rollout: its line in rollouts.jsonl, counted from 0")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run_explain(arguments: argparse.Namespace) -> int:
    """Print the explanation of a step, or of one of its rollouts. Return the exit code."""
    layout, step = open_run(arguments.output_dir), arguments.step
    if not (layout.rollouts_step(step) / "rollouts.jsonl").exists():
        raise ConfigError(f"--step {step}: {layout.rollouts} holds no step_{step}; give a step that the run has trained")
    orchestrator = load_config(OrchestratorConfig, ["@", str(layout.configs / "orchestrator.toml")], environ={}).config
    trainer = load_config(TrainerConfig, ["@", str(layout.configs / "trainer.toml")], environ={}).config
    trainer = trainer.model_copy(update={"output_dir": layout.root})
    explained, missing = read_explained(layout, step), ""
    if explained is None:
        try:
            explained = compute(layout, trainer, step=step, seq_len=orchestrator.seq_len)
        except (BatchError, ConfigError) as exc:
            if arguments.rollout is None:
                raise
            missing = str(exc)  # the reasons are known without a model
    recorded = _find_recorded_loss(layout, step) if trainer.num_iterations == 1 else None
    if arguments.rollout is None:
        assert explained is not None
        _show_step(layout, explained, step=step, recorded_loss=recorded, as_json=arguments.json)
        return 0
    try:
        found = explain_rollout(ViewedRun(layout, name=""), step=step, line=arguments.rollout, seq_len=orchestrator.seq_len)
    except NotServed as exc:
        raise ConfigError(f"--rollout {arguments.rollout}: {exc}") from exc
    found.missing = missing or found.missing
    if arguments.json:
        _print_json(found)
        return 0
    if explained is not None:
        print(describe_step(explained, recorded_loss=recorded))
    _show_rollout(found)
    return 0


def compute(layout: RunLayout, config: TrainerConfig, *, step: int, seq_len: int) -> ExplainedStep:
    """Compute the shares of every token of the step, and keep them in the run's directory.

    Raises:
        BatchError: the run did not record exact log-probabilities.
        ConfigError: the policy that the step started from is gone.
    """
    from trivet.trainer.token_shares import share_tokens  # imports torch

    digest = digest_rollouts(layout, step)
    rollouts = [rollout for group in read_groups(layout.rollouts_step(step) / GROUPS_FILE).groups for rollout in group.rollouts]
    items = [PackItem(sample=sample, advantage=rollout.advantage) for rollout in rollouts for sample in rollout.samples]
    shares = iter(share_tokens(config, items, step=Step(step), seq_len=seq_len))
    by_rollout = [[next(shares) for _ in rollout.samples] for rollout in rollouts]
    trained = [sample for samples in by_rollout for sample in samples if sample is not None]
    explained = ExplainedStep(
        rollouts_digest=digest,
        version=step - 1,
        loss_type=config.loss.type,
        num_loss_tokens=sum(len(sample.losses_L) for sample in trained),
        num_samples=len(trained),
        rollouts=by_rollout,
    )
    try:
        write_explained(layout.explained_step(step), explained)
    except OSError as exc:
        print(f"notice: {layout.explained} cannot be written ({exc.strerror}): the page will not show this", file=sys.stderr)
    return explained


def _find_recorded_loss(layout: RunLayout, step: int) -> float | None:
    rows = read_metrics(layout.metrics / "trainer.jsonl").rows
    return next((row["loss/mean"] for row in rows if row["step"] == step and "loss/mean" in row), None)


def _show_step(layout: RunLayout, explained: ExplainedStep, *, step: int, recorded_loss: float | None, as_json: bool) -> None:
    totals = [sum(float(own.losses_L.sum()) for own in samples if own is not None) for samples in explained.rollouts]
    if as_json:
        report = StepReport(
            step=step,
            policy=explained.version,
            loss=explained.loss,
            recorded_loss=recorded_loss,
            loss_type=explained.loss_type,
            num_loss_tokens=explained.num_loss_tokens,
            num_samples=explained.num_samples,
            rollouts=totals,
        )
        _print_json(report)
        return
    print(describe_step(explained, recorded_loss=recorded_loss))
    table = Table(box=None, pad_edge=False, title=f"rollouts of step {step} that add most to its loss")
    for column in ("rollout", "loss tokens", "without gradient", "share of the loss", "sum of |weight|"):
        table.add_column(column, justify="right", no_wrap=True)
    for line in sorted(range(len(totals)), key=lambda line: -abs(totals[line]))[:_NUM_SHOWN]:
        trained = [own for own in explained.rollouts[line] if own is not None]
        num_tokens, num_masked = sum(len(own.losses_L) for own in trained), sum(int(own.is_masked_L.sum()) for own in trained)
        weight = sum(float(abs(own.weights_L).sum()) for own in trained)
        table.add_row(*map(str, (line, num_tokens, num_masked)), f"{totals[line]:+.3e}", f"{weight:.3e}")
    _console().print(table)
    print(f"one of them token by token: uv run trivet explain {layout.root} --step {step} --rollout I")


def _show_rollout(found: RolloutExplanation) -> None:
    record = found.record
    advantage = record.get("advantage")
    share = "" if found.loss is None else f"; it adds {found.loss:+.3e} to the step's loss"
    print(
        f"rollout {found.line} of step {found.step}: group {record.get('group_id')}, rollout {record['index']}, reward "
        f"{record['reward']:.4g}, advantage {'unknown' if advantage is None else format(advantage, '+.4g')}{share}"
    )
    print("tokens: " + ", ".join(f"{count:,} {reason}" for reason, count in count_reasons(found).items()))
    if not found.samples:
        print(f"the run kept no tokens of this step: {GROUPS_FILE} is missing")
    for sample in found.samples:
        table = Table(box=None, pad_edge=False)
        for column in ("#", "token", "reason", "p sampled", "p trained", "ratio", "share of the loss", "weight"):
            table.add_column(column, justify="left" if column in ("token", "reason") else "right", no_wrap=True)
        numbers = (sample.trainer_logprobs, sample.ratios, sample.losses, sample.weights)
        for index, reason in enumerate(sample.reasons):
            text = str(sample.token_ids[index]) if sample.texts is None else one_line(sample.texts[index])
            logprob, ratio, loss, weight = ((values or [None] * (index + 1))[index] for values in numbers)
            cells = (_probability(sample.sampler_logprobs[index]), _probability(logprob), _cell(ratio, ".4f"))
            table.add_row(str(index), Text(text), reason, *cells, _cell(loss, "+.3e"), _cell(weight, "+.3e"))
        _console().print(table)
    if found.missing:
        print(printable(f"not shown: {found.missing}"))


def _probability(logprob: float | None) -> str:
    return "" if logprob is None else f"{math.exp(logprob):.4f}"


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=_PIPED_WIDTH)


def _print_json(report: msgspec.Struct) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=1).decode() + "\n")
