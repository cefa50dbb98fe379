"""Reads a run from its output directory, while it goes on and after: steps, metrics, rollouts and policies.

`trivet.Run` is for programs what `trivet view` is for people. It changes nothing.
"""

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec

from trivet.config.layout import MANIFEST, ROLLOUTS_FILE, STABLE, RunLayout
from trivet.errors import HistoryError, WeightsError
from trivet.step_directories import list_steps
from trivet.storage.durable import DECODE_ERRORS, sync_tree
from trivet.view.files import GrowingLines
from trivet.view.run import open_run
from trivet.view.status import read_status
from trivet.weights.manifest import read_manifest, verify
from trivet.weights.retention import acknowledge, forget_reader
from trivet.wire.rollouts import RolloutRecord
from trivet.wire.status import RunStatus
from trivet.wire.versions import PolicyVersion

_COPY_LIFETIME_S = 600.0
"""For this long a policy that is being copied is kept, if the program is killed meanwhile."""


class RecordedRollout(RolloutRecord):
    """A rollout that was trained on, as `rollouts/step_N/rollouts.jsonl` has it."""

    @property
    def text(self) -> str:
        """The text of the model, turn after turn."""
        turns = [message.get("content") or "" for message in self.completion if message.get("role") == "assistant"]
        return "\n".join(str(turn) for turn in turns)


@dataclass(frozen=True)
class RunStep:
    """A step that every role has finished."""

    number: int
    metrics: Mapping[str, float]
    """Everything that the roles measured in it, by name: `reward/mean`, `loss/mean`, `perf/throughput`, …"""
    directory: Path
    """The directory of its rollouts."""

    @property
    def reward(self) -> float:
        """Mean reward of its rollouts; a HistoryError if it has none, as in supervised fine-tuning."""
        return self._metric("reward/mean")

    @property
    def loss(self) -> float:
        """Mean loss; a HistoryError if it was not measured."""
        return self._metric("loss/mean")

    @cached_property
    def rollouts(self) -> list[RecordedRollout]:
        """The rollouts that were trained on, read when they are asked for; none in supervised fine-tuning."""
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
    """As Hugging Face writes it, with a manifest; of a run with LoRA the adapter. The run may remove it for newer ones."""

    def save(self, path: str | Path) -> Path:
        """Copy the policy to a new directory, which transformers and vLLM load; a WeightsError if it is not new or not complete."""
        target, layout = Path(path), RunLayout(self.directory.parent.parent)
        if target.exists():
            raise WeightsError(
                f"{target} exists already; save the policy under another name, or remove that first. Nothing is lost: the policy "
                f"is in {self.directory}, which trivet.Run({str(layout.root)!r}).policy finds again"
            )
        reader = f"save-{os.getpid()}-{secrets.token_hex(4)}"
        staging = target.absolute().with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        if layout.readers.is_dir():  # the trainer of a live run removes no policy that a reader needs
            acknowledge(layout, reader, PolicyVersion(self.version), lifetime_s=_COPY_LIFETIME_S)
        try:
            verify(self.directory)
            shutil.copytree(self.directory, staging, ignore=shutil.ignore_patterns(MANIFEST, STABLE))
            adapter_config = staging / "adapter_config.json"
            if adapter_config.exists():  # the base is found from any working directory then; a name on the hub stays
                config = json.loads(adapter_config.read_bytes())
                base = config.get("base_model_name_or_path")
                if base and Path(base).is_dir():
                    config["base_model_name_or_path"] = str(Path(base).absolute())
                    adapter_config.write_text(json.dumps(config, indent=2))
            sync_tree(staging)
            staging.rename(target)
        finally:
            forget_reader(layout, reader)
            with suppress(FileNotFoundError):
                shutil.rmtree(staging)
        return target


class Run:
    """A run in its output directory, finished or not."""

    def __init__(self, directory: str | Path) -> None:
        """Read nothing yet; a ConfigError if the directory holds no run."""
        self._layout = open_run(Path(directory))

    @property
    def directory(self) -> Path:
        """The output directory."""
        return self._layout.root

    @property
    def status(self) -> RunStatus:
        """The current state of the run, or its end; a ConfigError if neither its launcher nor a role has reported it."""
        return read_status(self._layout)

    @property
    def steps(self) -> list[RunStep]:
        """The steps that stand, in their order. A step that was taken again is there once, as it was the last time."""
        return StepReader(self._layout).read_new()

    @property
    def policies(self) -> list[Policy]:
        """The policies that are there now, oldest first. The start model is none of them."""
        return [
            Policy(version, path)
            for version, path in sorted(list_steps(self._layout.weights, marker=STABLE).items())
            if version
        ]

    @property
    def policy(self) -> Policy:
        """The newest policy; a WeightsError if none was published yet, or it is not complete."""
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
        """Read nothing yet. Steps that were finished before the unix time `since` are another start's."""
        self._layout = layout
        self._since = since
        self._last = 0
        self._rows: dict[str, dict[int, dict[str, float]]] = {}
        self._files: dict[str, GrowingLines] = {}

    def read_new(self) -> list[RunStep]:
        """Return the steps that were finished since the last call, each number once, in rising order."""
        is_sft = (self._layout.metrics / "sft.jsonl").exists()
        rows = [self._read(role) for role in (("sft",) if is_sft else ("orchestrator", "trainer"))]
        steps: list[RunStep] = []
        for number in sorted(set.intersection(*(set(of_role) for of_role in rows))):
            if number > self._last:
                metrics = {name: value for of_role in rows for name, value in of_role[number].items() if name != "step"}
                steps.append(RunStep(number, metrics, self._layout.rollouts_step(number)))
                self._last = number
        for of_role in rows:
            for number in [number for number in of_role if number <= self._last]:
                del of_role[number]
        return steps

    def _read(self, role: str) -> dict[int, dict[str, float]]:
        """Return the rows of a role that belong to no step yet, by step."""
        if role not in self._files:
            self._files[role] = GrowingLines(self._layout.root, self._layout.metrics / f"{role}.jsonl")
        known = self._rows.setdefault(role, {})
        if self._files[role].was_replaced():  # a role that goes back removes the lines of later steps
            known.clear()
        for line in self._files[role].read_new():
            try:
                row = msgspec.json.decode(line, type=dict[str, float])
            except DECODE_ERRORS:  # `trivet check` reports damaged lines
                continue
            if "step" in row and row.get("time", 0.0) >= self._since:
                known[int(row["step"])] = row
        return known
