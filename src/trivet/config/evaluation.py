"""Sections of the command `eval`."""

from pathlib import Path

from pydantic import Field

from trivet.config.base import Section
from trivet.config.client import ClientConfig
from trivet.config.environment import EnvConfig
from trivet.config.sampling import EvalSamplingConfig
from trivet.config.shared import LogConfig


class EvalModelConfig(Section):
    name: str | None = None
    """Model name to ask for; unset: what the server serves."""


class EvalConfig(Section):
    """`uv run eval --client.base-url URL --weights-dir outputs/weights --env.id ID`."""

    client: ClientConfig = ClientConfig()
    model: EvalModelConfig = EvalModelConfig()
    env: list[EnvConfig] = Field(default=[EnvConfig()], min_length=1)
    """Environments to measure on; `--env.id ID` names one."""
    weights_dir: Path | None = None
    """Evaluate every `step_N` in it that is complete. The server must see the same directory."""
    steps: list[int] | None = None
    """Only these steps, e.g. `10,50,100`."""
    eval_base: bool = True
    """Evaluate the start weights first."""
    num_examples: int = Field(default=-1, ge=-1)
    """Examples per environment, from the first; -1 is all."""
    rollouts_per_example: int = Field(default=1, ge=1)
    """Attempts at each example."""
    max_concurrent: int = Field(default=128, ge=1)
    """Rollouts in flight."""
    sampling: EvalSamplingConfig = EvalSamplingConfig()
    output_dir: Path | None = None
    """Results go to evals/step_N/<env>/ in it; unset: the directory that holds weights_dir, else `outputs`."""
    log: LogConfig = LogConfig()
