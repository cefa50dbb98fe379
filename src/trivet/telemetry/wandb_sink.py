"""Writes metrics to Weights & Biases. Both roles write to one W&B run, whose id is the run's. Imported only when [wandb] is set."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import wandb

from trivet.config.schema.shared import WandbConfig
from trivet.errors import ConfigError
from trivet.telemetry.console import conversation_text
from trivet.telemetry.sinks import Sink
from trivet.wire.rollouts import Rollout

_PRIMARY_ROLE = "trainer"
"""The role that ends the shared W&B run."""
_MAX_CELL_CHARS = 20_000
"""Limit of characters of a prompt or completion in a table. A longer text is cut."""
_COLUMNS: list[str | int] = ["step", "prompt", "completion", "reward", "advantage", "turns"]


class WandbSink(Sink):
    """Writes one role's part of the shared W&B run."""

    def __init__(self, config: WandbConfig, *, role: str, run_id: str, output_dir: Path) -> None:
        """Start or join the W&B run.

        Raises:
            ConfigError: W&B refused to start, for example without a login.
        """
        settings = wandb.Settings(console="off", silent=True, x_label=role, x_primary=role in (_PRIMARY_ROLE, "sft", "eval"))
        output_dir.mkdir(parents=True, exist_ok=True)
        self._role = role
        self._extras = config.log_extras
        try:
            self._run = wandb.init(
                project=config.project,
                name=config.name,
                id=run_id,
                dir=output_dir,
                mode="offline" if config.offline else "shared",
                settings=settings,
            )
        except (wandb.Error, OSError) as exc:  # `requests` raises OSError for a proxy that it cannot use
            raise ConfigError(
                f"[wandb] cannot start project {config.project!r}: {exc}; log in with `uv run wandb login`, set "
                "wandb.offline = true, or leave [wandb] out"
            ) from exc
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float], *, time: float) -> None:
        """Write the metrics of a step. W&B takes the time itself."""
        self._run.log({"step": step, **values})

    def write_rollouts(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Write a table of rollouts and histograms, in every `log_extras.interval`-th step."""
        extras = self._extras
        if extras is None or step % extras.interval or not rollouts:
            return
        values: dict[str, object] = {}
        if extras.samples:
            table = wandb.Table(columns=_COLUMNS)
            for rollout in rollouts[: extras.max_samples]:
                texts = (conversation_text(part, max_chars=_MAX_CELL_CHARS) for part in (rollout.prompt, rollout.completion))
                table.add_data(step, *texts, rollout.reward, rollout.advantage, rollout.num_turns)
            values[f"{self._role}/samples"] = table
        if extras.distributions:
            columns = {
                "reward": [rollout.reward for rollout in rollouts],
                "advantage": [rollout.advantage for rollout in rollouts],
                "completion_len": [sum(sample.num_loss_tokens for sample in rollout.samples) for rollout in rollouts],
            }
            values |= {f"{self._role}/distributions/{name}": wandb.Histogram(column) for name, column in columns.items()}
        self._run.log({"step": step, **values})

    def close(self) -> None:
        """End this role's part of the W&B run, and wait until it is on disk."""
        self._run.finish()
        # `finish` returns before an offline run is on disk. W&B's own process ends after it is, and `teardown` waits for that.
        wandb.teardown()
