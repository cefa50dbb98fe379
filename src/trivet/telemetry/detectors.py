"""Detects from the metrics of each step that a run learns nothing or is about to break.

A detector gets the metrics of one role, step by step, and says what is wrong when its condition has held for some steps.
Detectors remember earlier steps, and have no other effect: `telemetry.telemetry` calls them and warns or ends the run.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from trivet.algorithms.arithmetic import are_equal
from trivet.config.schema.shared import DetectorsConfig
from trivet.key_names import key_name, list_keys

Metrics = Mapping[str, float]

_REFERENCE_STEPS = 5
"""Steps whose median is the normal level of a metric: the fewest for which two outliers do not change the median much."""
_RECENT_STEPS = 20
"""Steps with whose median a spike is compared: enough that spikes do not raise it, few enough that it follows a slow change."""

Condition = Callable[[Metrics], str | None]
"""A function that returns what is wrong in a step, or None. It may remember earlier steps."""


@dataclass(slots=True, kw_only=True)
class Detector:
    """Counts the steps in a row for which a condition has held."""

    name: str
    """The detector's key in `[detectors]`."""
    reaction: str
    """The key's value: `warn` or `stop`."""
    condition: Condition
    patience: int
    """Steps in a row that the condition must hold."""
    remedy: str
    _num_steps_held: int = field(default=0, init=False)

    def check(self, metrics: Metrics) -> str | None:
        """Check the metrics of one step. After each `patience` steps in a row for which the condition held, describe it.

        The text has the observation, the number of steps for which it held, and the remedy.
        """
        observation = self.condition(metrics)
        self._num_steps_held = self._num_steps_held + 1 if observation else 0
        if observation is None or self._num_steps_held % self.patience:
            return None
        duration = f" for {self._num_steps_held} steps" if self._num_steps_held > 1 else ""
        return f"{observation}{duration}; {self.remedy}"


def make_detectors(config: DetectorsConfig) -> list[Detector]:
    """Return the detectors that are not off, ready for a fresh run."""

    def make(name: str, condition: Condition, remedy: str, *, patience: int = config.patience) -> Detector:
        return Detector(name=name, reaction=getattr(config, name), condition=condition, patience=patience, remedy=remedy)

    detectors = [
        make(
            "equal_rewards",
            _find_equal_rewards,
            "the task is too hard or too easy for the model, or the reward function returns the same value for every answer: "
            "look at rollouts/, "
            "raise sampling.temperature, or take other examples",
        ),
        make(
            "zero_advantages",
            lambda metrics: (
                "every group of the batch has advantage 0" if metrics.get("batch/effective_batch_size") == 0.0 else None
            ),
            "the rollouts of every group have equal rewards, so nothing is learnt: raise rollouts_per_example or "
            "sampling.temperature, or "
            "set orchestrator.buffer.online_difficulty_filtering = true",
        ),
        make(
            "failed_rollouts",
            lambda metrics: _find_high_share(metrics, "error/mean", config.failed_share, "of the groups failed"),
            "the first error of each is in logs/orchestrator.stdout and logs/env_workers/",
        ),
        make(
            "truncated",
            lambda metrics: _find_high_share(
                metrics, "is_truncated/mean", config.truncated_share, "of the rollouts are cut off"
            ),
            f"raise {list_keys('orchestrator.sampling.max_tokens', 'seq_len', 'max_model_len')}, or reward shorter answers",
        ),
        make(
            "entropy_collapse",
            _find_fall("entropy/mean", share=config.entropy_share),
            "the policy hardly varies its answers any more: lower optim.lr, raise sampling.temperature, or stop here",
        ),
        make(
            "mismatch_drift",
            lambda metrics: _find_excess(metrics, "mismatch_kl/mean", config.mismatch_kl),
            "trainer and server disagree about the same tokens: lower max_off_policy_steps or optim.lr, and check that both "
            "use the same dtype and that sampling is not cut (top_p, top_k, min_p, penalties)",
        ),
        make(
            "gradient_spike",
            _find_spike("optim/grad_norm", factor=config.gradient_factor),
            "a single one is clipped by optim.max_norm; if they repeat, lower optim.lr and look at the rollouts of the step",
            patience=1,
        ),
        make(
            "stuck_policy",
            _find_standstill("progress/ckpt_step"),
            "batches are filled from an old policy: see whether the servers refuse new weights (logs/inference.stdout)",
            patience=config.stuck_policy_steps,
        ),
        make(
            "no_loss_tokens",
            lambda metrics: "no token to train on" if metrics.get("batch/loss_tokens") == 0.0 else None,
            f"every completion was empty, masked or cut at {key_name('seq_len')}: raise "
            f"{list_keys('seq_len', 'orchestrator.sampling.max_tokens')}, check the filters",
            patience=1,
        ),
    ]
    return [detector for detector in detectors if detector.reaction != "off"]


def _find_equal_rewards(metrics: Metrics) -> str | None:
    low, high = metrics.get("reward/min"), metrics.get("reward/max")
    if low is None or high is None or not are_equal(np.array([low, high])):
        return None
    return f"every rollout of the batch has reward {low:g}"


def _find_high_share(metrics: Metrics, name: str, limit: float, predicate: str) -> str | None:
    """Return what is wrong if the metric `name`, a share of something that `predicate` completes, is at least `limit`."""
    value = metrics.get(name)
    return f"{value:.0%} {predicate} ({name}, limit {limit:.0%})" if value is not None and value >= limit else None


def _find_excess(metrics: Metrics, name: str, limit: float) -> str | None:
    """Return what is wrong if the metric `name` is above `limit`."""
    value = metrics.get(name)
    return f"{name} is {value:.3g}, above {limit:g}" if value is not None and value > limit else None


def _find_fall(name: str, *, share: float) -> Condition:
    """Return the condition that a metric has fallen below a share of its median over the first steps."""
    first_values: list[float] = []

    def find(metrics: Metrics) -> str | None:
        value = metrics.get(name)
        if value is None:
            return None
        if len(first_values) < _REFERENCE_STEPS:
            first_values.append(value)
            return None
        level = median(first_values)
        if value >= share * level:
            return None
        return f"{name} is {value:.3g}, less than {share:.0%} of its level at the start ({level:.3g})"

    return find


def _find_spike(name: str, *, factor: float) -> Condition:
    """Return the condition that a metric is more than `factor` times its median over the last steps."""
    recent: deque[float] = deque(maxlen=_RECENT_STEPS)

    def find(metrics: Metrics) -> str | None:
        value = metrics.get(name)
        if value is None:
            return None
        level = median(recent) if len(recent) >= _REFERENCE_STEPS else None
        recent.append(value)
        if not level or value <= factor * level:
            return None
        return f"{name} is {value:.3g}, {value / level:.0f} times its recent median ({level:.3g})"

    return find


def _find_standstill(name: str) -> Condition:
    """Return the condition that a policy version has the same value as in the step before."""
    previous: float | None = None

    def find(metrics: Metrics) -> str | None:
        nonlocal previous
        value = metrics.get(name)
        is_same, previous = value == previous, value
        return f"the servers hold policy {value:.0f}" if value is not None and is_same else None

    return find
