"""`trivet explain OUTPUT_DIR --step N`: why each token of a step was trained or not, and how much.

The model of the step is loaded once and scores the step's samples; the result is kept in `explained/`. Nothing is trained.
"""

import argparse
import math
import sys
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np

from trivet.algorithms.packing import PackItem
from trivet.cli.reports import print_json, print_table
from trivet.config.layout import RunLayout
from trivet.config.load import load_config
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.schema.trainer import TrainerConfig
from trivet.errors import BatchError, ConfigError
from trivet.shown_text import printable
from trivet.telemetry.metrics import read_metrics
from trivet.transport.explained import ExplainedStep, digest_rollouts, read_explained, write_explained
from trivet.transport.recording import GROUPS_FILE, read_groups
from trivet.view.explanation import RolloutExplanation, explain_rollout
from trivet.view.files import NotServed
from trivet.view.run import ViewedRun, open_run
from trivet.wire.versions import Step

_NUM_SHOWN = 8
"""Rollouts that are listed without --rollout: those that add most to the loss, in absolute value."""


class StepReport(msgspec.Struct, kw_only=True):
    """The object that `--json` prints without --rollout."""

    step: int
    loss: float
    """The sum over all tokens."""
    recorded_loss: float | None
    """`loss/mean` of the trainer's metrics; None if they do not have it."""
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
    explained, missing = read_explained(layout, step), ""
    if explained is None:
        try:
            explained = compute(layout, step)
        except (BatchError, ConfigError) as exc:
            if arguments.rollout is None:
                raise
            missing = str(exc)  # the reasons are known without a model
    if arguments.rollout is None:
        assert explained is not None
        _show_step(layout, explained, step=step, as_json=arguments.json)
        return 0
    try:
        found = explain_rollout(ViewedRun(layout, name=""), step=step, line=arguments.rollout)
    except NotServed as exc:
        raise ConfigError(f"--rollout {arguments.rollout}: {exc}") from exc
    found.missing = missing
    if arguments.json:
        print_json(found)
    else:
        _show_rollout(found)
    return 0


def compute(layout: RunLayout, step: int) -> ExplainedStep:
    """Compute the shares of every token of the step, and keep them in the run's directory.

    Raises:
        BatchError: the run did not record exact log-probabilities.
        ConfigError: the policy that the step started from is gone.
    """
    from trivet.trainer.token_shares import share_tokens  # imports torch

    orchestrator = load_config(OrchestratorConfig, ["@", str(layout.configs / "orchestrator.toml")], environ={}).config
    trainer = load_config(TrainerConfig, ["@", str(layout.configs / "trainer.toml")], environ={}).config
    rollouts = [rollout for group in read_groups(layout.rollouts_step(step) / GROUPS_FILE).groups for rollout in group.rollouts]
    items = [PackItem(sample=sample, advantage=rollout.advantage) for rollout in rollouts for sample in rollout.samples]
    trainer = trainer.model_copy(update={"output_dir": layout.root})  # the run may have been moved
    shares = iter(share_tokens(trainer, items, step=Step(step), seq_len=orchestrator.seq_len))
    explained = ExplainedStep(
        rollouts_digest=digest_rollouts(layout, step),
        loss_type=trainer.loss.type,
        rollouts=[[next(shares) for _ in rollout.samples] for rollout in rollouts],
    )
    try:
        write_explained(layout, step, explained)
    except OSError as exc:
        print(f"notice: {layout.explained} cannot be written ({exc.strerror}): the page will not show this", file=sys.stderr)
    return explained


def _show_step(layout: RunLayout, explained: ExplainedStep, *, step: int, as_json: bool) -> None:
    rows = read_metrics(layout.metrics / "trainer.jsonl").rows
    report = StepReport(
        step=step,
        loss=explained.loss,
        recorded_loss=next((row.get("loss/mean") for row in rows if row["step"] == step), None),
        loss_type=explained.loss_type,
        num_loss_tokens=sum(int((~np.isnan(own.losses_T)).sum()) for own in explained.trained),
        num_samples=len(explained.trained),
        rollouts=[sum(own.loss for own in samples if own is not None) for samples in explained.rollouts],
    )
    if as_json:
        print_json(report)
        return
    print(
        f"step {step} started from policy {step - 1}: its {report.num_loss_tokens:,} loss tokens in {report.num_samples:,} samples "
        f"add up to a loss ({report.loss_type}) of {report.loss:.7g}; the metrics say "
        f"{_cell(report.recorded_loss, '.7g') or 'nothing'}"
    )
    table: list[list[str]] = []
    for line in sorted(range(len(report.rollouts)), key=lambda line: -abs(report.rollouts[line]))[:_NUM_SHOWN]:
        weights = np.concatenate(
            [np.zeros(0), *(own.weights_T[~np.isnan(own.weights_T)] for own in explained.rollouts[line] if own is not None)]
        )
        counts = map(str, (line, len(weights), int((weights == 0).sum())))
        table.append([*counts, f"{report.rollouts[line]:+.3e}", f"{abs(weights).sum():.3e}"])
    print_table(("rollout", "loss tokens", "without gradient", "share of the loss", "sum of |weight|"), table)
    print(f"one rollout token by token: uv run trivet explain {layout.root} --step {step} --rollout I")


def _show_rollout(found: RolloutExplanation) -> None:
    record = found.record
    print(
        f"rollout {found.line} of step {found.step}: group {record.get('group_id')}, rollout {record['index']}, reward "
        f"{record['reward']:.4g}, advantage {_cell(record.get('advantage'))}; it adds {_cell(found.loss) or 'an unknown part'} "
        f"to the step's loss of {_cell(found.step_loss) or 'an unknown size'}"
    )
    counts = Counter(reason for sample in found.samples for reason in sample.reasons)
    print("tokens: " + ", ".join(f"{count:,} {reason}" for reason, count in counts.items()))
    for sample in found.samples:
        texts = map(str, sample.token_ids) if sample.texts is None else sample.texts
        numbers = (sample.sampler_logprobs, sample.trainer_logprobs, sample.ratios, sample.losses, sample.weights)
        rows = [
            [str(index), text, reason, *map(_cell, (math.exp(sampled), math.exp(trained), *others))]
            for index, (text, reason, sampled, trained, *others) in enumerate(zip(texts, sample.reasons, *numbers, strict=True))
        ]
        titles = ("#", "token", "reason", "p sampled", "p trained", "ratio", "share of the loss", "weight")
        print_table(titles, rows, num_texts=3)
    if found.missing:
        print(printable(f"not shown: {found.missing}"))


def _cell(value: float | None, form: str = ".4g") -> str:
    return "" if value is None or math.isnan(value) else format(value, form)
