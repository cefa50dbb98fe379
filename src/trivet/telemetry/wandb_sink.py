"""Writes metrics to Weights & Biases: both roles write to one run, named after ours. Imported only when [wandb] is set."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import wandb

from trivet.config.schema.shared import WandbConfig
from trivet.errors import ConfigError
from trivet.telemetry.console import conversation_text
from trivet.wire.rollouts import Rollout

_PRIMARY_ROLE = "trainer"
"""The one that ends the shared run."""
_MAX_CELL_CHARS = 20_000
"""Characters of a prompt or completion in a table: a longer one is cut."""
_COLUMNS: list[str | int] = ["step", "prompt", "completion", "reward", "advantage", "turns"]


class WandbSink:
    """Writes one role's part of the shared W&B run."""

    def __init__(self, config: WandbConfig, *, role: str, run_id: str, output_dir: Path) -> None:
        """Start or join the run.

        Raises:
            ConfigError: W&B refused to start, for example without a login.
        """
        settings = wandb.Settings(console="off", silent=True, x_label=role, x_primary=role in (_PRIMARY_ROLE, "sft", "eval"))
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
        except (wandb.Error, OSError) as exc:  # the latter of requests, for a proxy that it cannot use
            raise ConfigError(
                f"[wandb] cannot start project {config.project!r}: {exc}; log in with `uv run wandb login`, set "
                "wandb.offline = true, or leave [wandb] out"
            ) from exc
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write a step's metrics, with the role in front of each name: both roles have a `time/step`."""
        numbers = {f"{self._role}/{name}": value for name, value in values.items() if math.isfinite(value)}
        self._run.log({"step": step, **numbers})

    def write_eval(self, version: int, values: Mapping[str, float]) -> None:
        """Write scores under their own names: `eval/<env>/…`."""
        self._run.log({"step": version, **values})

    def write_rollouts(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Write a table and histograms, in the steps that `log_extras.interval` names."""
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
        """End this role's part of the run, and wait until it is on disk."""
        self._run.finish()
        # `finish` returns before an offline run is on disk; the end of W&B's own process is what comes after that.
        wandb.teardown()
