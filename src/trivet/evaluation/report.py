"""Makes the table that `eval` prints."""

from collections.abc import Sequence

from rich.table import Table

from trivet.evaluation.scores import Summary


def make_table(summaries: Sequence[Summary]) -> Table:
    """Return a table with a line for each environment and policy."""
    table = Table(title="evaluation")
    for column in ("step", "environment", "avg@k", "95 %", "pass@k", "k", "examples", "failed", "truncated", "tokens", "time"):
        table.add_column(column, justify="left" if column == "environment" else "right")
    for summary in summaries:
        table.add_row(
            "base" if summary.step == 0 else str(summary.step),
            summary.env,
            _number(summary.avg),
            "" if summary.ci95 is None else f"± {summary.ci95:.4f}",
            _number(summary.pass_at_k),
            str(summary.rollouts_per_example),
            str(summary.num_examples),
            str(summary.num_failed),
            "" if summary.truncated is None else f"{summary.truncated:.1%}",
            str(summary.completion_tokens),
            f"{summary.seconds:.1f}s",
        )
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
