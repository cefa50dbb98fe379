"""Metrics to Weights & Biases: both roles write to one run, named after ours. Imported only when [wandb] is set."""

import math
from collections.abc import Mapping
from pathlib import Path

import wandb

from trivet.config.shared import WandbConfig
from trivet.errors import ConfigError

_PRIMARY_ROLE = "trainer"
"""The one that ends the shared run."""


class WandbSink:
    """
    >>> sink = WandbSink(config, role="trainer", run_id="20260101-ab12", output_dir=path)
    >>> sink.write(1, {"loss/mean": 0.5})
    >>> sink.close()
    """

    def __init__(self, config: WandbConfig, *, role: str, run_id: str, output_dir: Path) -> None:
        """
        Raises:
            ConfigError: W&B refused to start, for example without a login.
        """
        settings = wandb.Settings(console="off", silent=True, x_label=role, x_primary=role in (_PRIMARY_ROLE, "sft"))
        self._role = role
        try:
            self._run = wandb.init(
                project=config.project,
                name=config.name,
                id=run_id,
                dir=output_dir,
                mode="offline" if config.offline else "shared",
                settings=settings,
            )
        except wandb.Error as exc:
            raise ConfigError(
                f"[wandb] cannot start project {config.project!r}: {exc}; log in with `wandb login`, set wandb.offline = true, "
                "or leave [wandb] out"
            ) from exc
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Names get the role in front: both roles have a `time/step`."""
        numbers = {f"{self._role}/{name}": value for name, value in values.items() if math.isfinite(value)}
        self._run.log({"step": step, **numbers})

    def close(self) -> None:
        self._run.finish()
        # `finish` returns before an offline run is on disk; the end of W&B's own process is what comes after that.
        wandb.teardown()
