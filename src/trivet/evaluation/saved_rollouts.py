"""Reads the rollouts that a run trained on, or that an evaluation sampled, group by group, and the settings of their environments.

Used by `trivet replay`. Changes nothing in the directory.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from trivet.config.layout import RESULTS_FILE, ROLLOUTS_FILE, RunLayout
from trivet.config.load import load_config
from trivet.config.masking import HIDDEN, mask_table
from trivet.config.schema.environment import EnvConfig
from trivet.config.schema.inference import ClientConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.environments.settings import host_settings, run_settings
from trivet.errors import ConfigError
from trivet.evaluation.results import TASK_FILE, TaskRecord
from trivet.step_directories import list_steps
from trivet.storage.durable import DECODE_ERRORS
from trivet.wire.groups import Split
from trivet.wire.workers import HostSettings


class SavedRollout(msgspec.Struct, kw_only=True):
    """The fields of a line of rollouts.jsonl or results.jsonl that scoring needs or is compared with."""

    env: str = ""
    group_id: int = -1
    example_id: int
    index: int
    reward: float
    scores: dict[str, float] = {}
    is_truncated: bool = False
    prompt: list[dict[str, Any]]
    completion: list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """One file of saved rollouts."""

    path: Path
    step: int
    """The training step, or the version of the evaluated policy."""
    split: Split = Split.TRAIN
    task: TaskRecord | None = None
    """The evaluation; None for rollouts that were trained on."""

    def groups(self) -> Iterator[tuple[str, list[SavedRollout]]]:
        """Yield the environment's name and the rollouts of each group, in the order of the file.

        Raises:
            ConfigError: a line cannot be read.
        """
        groups: dict[tuple[str, int], list[SavedRollout]] = {}
        decoder = msgspec.json.Decoder(SavedRollout)
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    row = decoder.decode(line)
                except DECODE_ERRORS as exc:
                    raise ConfigError(f"{self.path}:{number} is no rollout: {exc}") from exc
                key = (row.env, row.group_id) if self.task is None else (self.task.env, row.example_id)
                groups.setdefault(key, []).append(row)
        for (env, _), rows in groups.items():
            yield env, sorted(rows, key=lambda row: row.index)


def find_trained(layout: RunLayout, steps: range | None) -> list[SavedFile]:
    """Return the files of the rollouts that were trained, by step.

    Args:
        steps: the steps to read; None: all.
    """
    found = list_steps(layout.rollouts, marker=ROLLOUTS_FILE)
    return [SavedFile(path=path / ROLLOUTS_FILE, step=step) for step, path in found.items() if steps is None or step in steps]


def find_evaluated(layout: RunLayout, steps: range | None) -> list[SavedFile]:
    """Return the files of the rollouts that evaluations sampled, by the version of the policy.

    Raises:
        ConfigError: the task of an evaluation cannot be read.
    """
    files: list[SavedFile] = []
    for step, directory in list_steps(layout.evals).items():
        for path in sorted(directory.rglob(RESULTS_FILE)) if steps is None or step in steps else ():
            try:
                task = msgspec.json.decode((path.parent / TASK_FILE).read_bytes(), type=TaskRecord)
            except (OSError, *DECODE_ERRORS) as exc:
                raise ConfigError(f"{path.parent / TASK_FILE} cannot be read, and says what was evaluated: {exc}") from exc
            files.append(SavedFile(path=path, step=step, split=task.split, task=task))
    return files


def read_run_config(layout: RunLayout) -> OrchestratorConfig | None:
    """Return the resolved configuration of the run's orchestrator; None where no run wrote one, as after `uv run eval`.

    Raises:
        ConfigError: it is of another version.
    """
    path = layout.configs / "orchestrator.toml"
    if not path.is_file():
        return None
    config = load_config(OrchestratorConfig, ["@", str(path)], environ={}).config
    return config.model_copy(update={"replay": None})  # a replay loads no environment, and names those of its record


def settings_for(config: OrchestratorConfig | None, files: Sequence[SavedFile]) -> Mapping[str, HostSettings]:
    """Return the settings of each environment that the files may name, by its name in them.

    Raises:
        ConfigError: they are unknown.
        EnvironmentLoadError: a virtual environment is not there.
    """
    settings = {} if config is None else dict(run_settings(config))
    for task in (file.task for file in files if file.task is not None):
        known = None if config is None else _find_env(config, task)
        if known is None and HIDDEN in str(task.env_args):
            raise ConfigError(
                f"the arguments of environment {task.env_id!r} hold a secret that {TASK_FILE} does not keep, and no configs/"
                "orchestrator.toml has it: its rollouts cannot be scored again"
            )
        env = known or EnvConfig(id=task.env_id, args=task.env_args)
        made = host_settings(env, model_name="", client=ClientConfig(), is_plain=True)
        settings[task.env] = msgspec.structs.replace(made, name=task.env)
    return settings


def _find_env(config: OrchestratorConfig, task: TaskRecord) -> EnvConfig | None:
    """Return the run's environment that the task evaluated; the task has its arguments without their secrets."""
    wanted = (task.env_id, task.env_args)
    return next((env for env in config.environments.values() if (env.package, mask_table(env.args)) == wanted), None)
