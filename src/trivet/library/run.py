"""Reads a run from its output directory, during the run and after it: steps, metrics, rollouts and policies.

`trivet.Run` gives programs what `trivet view` shows people. It changes nothing in the run.
"""

import json
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from trivet.config.layout import NOT_OF_POLICY, ROLLOUTS_FILE, STABLE, RunLayout
from trivet.errors import HistoryError, WeightsError
from trivet.library.hub import upload, write_card
from trivet.process.lifetime import module_command
from trivet.step_directories import list_steps
from trivet.storage.durable import DECODE_ERRORS, sync_tree
from trivet.view.files import GrowingLines
from trivet.view.run import open_run
from trivet.view.status import read_status
from trivet.weights.adapters import ADAPTER_CONFIG, is_adapter
from trivet.weights.manifest import read_manifest, verify
from trivet.weights.retention import acknowledge, forget_reader
from trivet.wire.rollouts import RolloutRecord
from trivet.wire.status import RunStatus
from trivet.wire.versions import PolicyVersion

if TYPE_CHECKING:
    import pandas

_COPY_LIFETIME_S = 600.0
"""Time for which the run keeps a policy that is being copied, in case that the copying program is killed."""


_MAX_ERROR_CHARS = 2000
"""The end of a failed merge's output that an error shows."""


class RecordedRollout(RolloutRecord):
    """A rollout that was trained on: a line of `rollouts/step_N/rollouts.jsonl`."""

    @property
    def text(self) -> str:
        """The texts that the model wrote in all its turns."""
        turns = [message.get("content") or "" for message in self.completion if message.get("role") == "assistant"]
        return "\n".join(str(turn) for turn in turns)


@dataclass(frozen=True)
class RunStep:
    """A step that all its roles have finished."""

    number: int
    metrics: Mapping[str, float]
    """The metrics of the step from all roles, by name: `reward/mean`, `loss/mean`, `perf/throughput`, …"""
    directory: Path
    """The directory of its rollouts."""

    @property
    def reward(self) -> float:
        """Mean reward of its rollouts. Raises a HistoryError if it has none, as in supervised fine-tuning."""
        return self._metric("reward/mean")

    @property
    def loss(self) -> float:
        """Mean loss. Raises a HistoryError if it was not measured."""
        return self._metric("loss/mean")

    @cached_property
    def rollouts(self) -> list[RecordedRollout]:
        """The rollouts that were trained on, read at the first access; an empty list in supervised fine-tuning."""
        try:
            lines = (self.directory / ROLLOUTS_FILE).read_bytes().splitlines()
            return [msgspec.json.decode(line, type=RecordedRollout) for line in lines]
        except FileNotFoundError:
            return []
        except DECODE_ERRORS as exc:
            raise HistoryError(f"{self.directory / ROLLOUTS_FILE} is damaged: {exc}") from exc

    def _metric(self, name: str) -> float:
        if name not in self.metrics:
            raise HistoryError(f"step {self.number} has no metric {name}; it has: {', '.join(sorted(self.metrics))}")
        return self.metrics[name]


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy that a run published."""

    version: int
    """The step after which it was published."""
    directory: Path
    """The directory in the format of Hugging Face, with a manifest. With LoRA it holds the adapter. The run may remove it later."""

    def save(self, path: str | Path, *, merged: bool = False) -> Path:
        """Copy the policy to a new directory, which transformers and vLLM can load.

        Args:
            merged: write an adapter together with its base model, as one complete model.

        Raises a WeightsError if the directory exists, or if the policy is incomplete or damaged.
        """
        target = Path(path)
        if target.exists():
            raise WeightsError(
                f"{target} exists already; save the policy under another name, or remove that first. Nothing is lost: the policy "
                f"is in {self.directory}, which trivet.Run({str(self._layout.root)!r}).policy finds again"
            )
        staging = target.absolute().with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        try:
            with self._kept():
                verify(self.directory)
                if merged and is_adapter(self.directory):
                    self._merge(staging)
                else:
                    shutil.copytree(self.directory, staging, ignore=shutil.ignore_patterns(*NOT_OF_POLICY))
                    _name_base_absolutely(staging)
            sync_tree(staging)
            staging.rename(target)
        finally:
            with suppress(FileNotFoundError):
                shutil.rmtree(staging)
        return target

    def push_to_hub(self, repo_id: str, *, merged: bool = False, private: bool | None = None, token: str | None = None) -> str:
        """Upload the policy and its model card to the Hugging Face hub; return the address of the commit.

        Args:
            repo_id: `user/name`. A repository that is not there is made.
            merged: as in `save`.
            private: whether a new repository is private; None: the default of the account.
            token: None: that of `hf auth login` or HF_TOKEN.
        """
        with tempfile.TemporaryDirectory(prefix="trivet-push-") as scratch:
            directory = self.save(Path(scratch) / "model", merged=merged)
            write_card(directory, self, name=repo_id.rpartition("/")[2], steps=Run(self._layout.root).steps)
            return upload(directory, repo_id, private=private, token=token, message=f"step {self.version}")

    @property
    def _layout(self) -> RunLayout:
        return RunLayout(self.directory.parent.parent)

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Register a reader of the policy during the block: the trainer of a live run keeps what a reader needs."""
        reader = f"save-{os.getpid()}-{secrets.token_hex(4)}"
        if self._layout.readers.is_dir():
            acknowledge(self._layout, reader, PolicyVersion(self.version), lifetime_s=_COPY_LIFETIME_S)
        try:
            yield
        finally:
            forget_reader(self._layout, reader)

    def _merge(self, target: Path) -> None:
        """Write the adapter and its base model as one model, in a process of its own, which imports torch."""
        command = module_command("trivet.cli.main", "merge", str(self.directory), str(target))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise WeightsError(
                f"{self.directory} cannot be merged into its base model: {done.stderr.strip()[-_MAX_ERROR_CHARS:]}"
            )


def _name_base_absolutely(directory: Path) -> None:
    """Make an adapter name its base model by an absolute path, which works from anywhere. A name on the hub stays."""
    file = directory / ADAPTER_CONFIG
    if not file.exists():
        return
    config = json.loads(file.read_bytes())
    base = config.get("base_model_name_or_path")
    if base and Path(base).is_dir():
        config["base_model_name_or_path"] = str(Path(base).absolute())
        file.write_text(json.dumps(config, indent=2))


class Run:
    """A run in its output directory, finished or not."""

    def __init__(self, directory: str | Path) -> None:
        """Open a run without reading it. Raises a ConfigError if the directory holds no run."""
        self._layout = open_run(Path(directory))

    @property
    def directory(self) -> Path:
        """The output directory."""
        return self._layout.root

    @property
    def status(self) -> RunStatus:
        """The current state of the run, or its last one. Raises a ConfigError if neither launcher nor roles have reported one."""
        return read_status(self._layout)

    @property
    def steps(self) -> list[RunStep]:
        """The valid steps in rising order. A step that was taken again after a restart is included once, with its last values."""
        return StepReader(self._layout).read_new()

    def rollouts_frame(self) -> "pandas.DataFrame":
        """Return a table with a row for each rollout that was trained on, and a column `score/NAME` for each reward function."""
        import pandas  # here: takes a second to import

        rows: list[dict[str, Any]] = []
        for step in self.steps:
            for rollout in step.rollouts:
                row = {
                    name: value for name, value in msgspec.structs.asdict(rollout).items() if name not in ("scores", "versions")
                }
                scores = {f"score/{name}": value for name, value in rollout.scores.items()}
                rows.append({"step": step.number, **row, "text": rollout.text, **scores})
        return pandas.DataFrame(rows)

    @property
    def policies(self) -> list[Policy]:
        """The policies in the output directory now, oldest first, without the start model."""
        return [
            Policy(version, path)
            for version, path in sorted(list_steps(self._layout.weights, marker=STABLE).items())
            if version
        ]

    @property
    def policy(self) -> Policy:
        """The newest policy. Raises a WeightsError if none was published yet, or if it is incomplete."""
        policies = self.policies
        if not policies:
            raise WeightsError(f"{self._layout.weights} has no policy yet: the first is published after step 1")
        read_manifest(policies[-1].directory)
        return policies[-1]

    def __repr__(self) -> str:
        return f"Run({str(self._layout.root)!r})"


class StepReader:
    """Reads each step of a run once, as soon as all its roles have written it."""

    def __init__(self, layout: RunLayout, *, since: float = 0.0) -> None:
        """Read nothing yet. Steps that were finished before the Unix time `since` belong to an earlier start and are skipped."""
        self._layout = layout
        self._since = since
        self._last = 0
        self._unfinished: dict[str, dict[int, dict[str, float]]] = {}
        """The metrics of steps that another role has not finished yet, by role and step."""
        self._files: dict[str, GrowingLines] = {}

    def read_new(self) -> list[RunStep]:
        """Return the steps that were finished since the last call, each number once, in rising order."""
        is_sft = (self._layout.metrics / "sft.jsonl").exists()
        roles = ("sft",) if is_sft else ("orchestrator", "trainer")
        role_metrics = [self._read(role) for role in roles]
        steps: list[RunStep] = []
        for number in sorted(set.intersection(*(set(by_step) for by_step in role_metrics))):
            if number > self._last:
                metrics = {name: value for by_step in role_metrics for name, value in by_step[number].items() if name != "step"}
                steps.append(RunStep(number, metrics, self._layout.rollouts_step(number)))
                self._last = number
        for by_step in role_metrics:
            for number in [number for number in by_step if number <= self._last]:
                del by_step[number]
        return steps

    def _read(self, role: str) -> dict[int, dict[str, float]]:
        """Read the new lines of a role's metrics. Return its metrics, by step, of all steps that were not returned yet."""
        if role not in self._files:
            self._files[role] = GrowingLines(self._layout.root, self._layout.metrics / f"{role}.jsonl")
        by_step = self._unfinished.setdefault(role, {})
        if self._files[role].was_replaced():  # a role that goes back to a checkpoint removes the lines of later steps
            by_step.clear()
        for line in self._files[role].read_new():
            try:
                metrics = msgspec.json.decode(line, type=dict[str, float])
            except DECODE_ERRORS:  # `trivet check` reports damaged lines
                continue
            if "step" in metrics and metrics.get("time", 0.0) >= self._since:
                by_step[int(metrics["step"])] = metrics
        return by_step
