"""Lists the policies that `eval` evaluates: the start model, the published steps, and those that are published later."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trivet.config.layout import STABLE
from trivet.config.schema.environment import EvalEnvConfig
from trivet.config.schema.evaluation import EvalConfig
from trivet.errors import ConfigError
from trivet.step_directories import list_steps
from trivet.wire.versions import START_VERSION

logger = logging.getLogger(__name__)

_POLL_INTERVAL_S = 1.0
_MAX_LISTED = 40
"""The most steps that a message lists."""


@dataclass(frozen=True, slots=True)
class Target:
    """A policy to evaluate; `directory` is None for the start model."""

    step: int
    directory: Path | None

    @property
    def name(self) -> str:
        """The step, or `base`, for logs and bars."""
        return "base" if self.directory is None else str(self.step)


BASE = Target(START_VERSION, None)


def present_targets(config: EvalConfig, envs: Sequence[EvalEnvConfig]) -> list[Target]:
    """Return the policies that can be evaluated now, oldest first.

    Raises:
        ConfigError: there is nothing to evaluate, or a named step is missing and `watcher` does not wait for it.
    """
    if config.weights_dir is None:
        _require_base_alone(config)
        return [BASE]
    complete = complete_steps(config.weights_dir)
    if not config.watcher:
        missing = [step for step in config.steps or [] if step not in complete]
        if missing or not complete:
            raise ConfigError(
                f"{config.weights_dir} holds no complete step {', '.join(map(str, missing)) or 'at all'}; "
                f"complete steps there: {_listed(sorted(complete))}. A run keeps the newest policies, those of checkpoints, and "
                "with ckpt.weights.interval = N every N-th"
            )
    found = [Target(step, complete[step]) for step in sorted(complete) if is_wanted(config, step, envs)]
    targets = [*([BASE] if config.eval_base else []), *found]
    if not targets and not config.watcher:
        raise ConfigError(
            f"no step in {config.weights_dir} is a multiple of interval ({config.interval}) and eval_base is false; complete steps "
            f"there: {_listed(sorted(complete))}"
        )
    return targets


def complete_steps(weights_dir: Path) -> dict[int, Path]:
    """Map each step that was published completely to its absolute directory, ascending."""
    return list_steps(weights_dir.absolute(), marker=STABLE)


def is_wanted(config: EvalConfig, step: int, envs: Sequence[EvalEnvConfig]) -> bool:
    """Return whether any of `envs` is to be evaluated on the policy of `step`."""
    return step in config.steps if config.steps is not None else any(is_due(config, step, env) for env in envs)


def is_due(config: EvalConfig, step: int, env: EvalEnvConfig) -> bool:
    """Return whether `env` is to be evaluated on the policy of `step`; on named steps every environment is."""
    return config.steps is not None or step % (env.interval or config.interval) == 0


async def follow_targets(
    config: EvalConfig,
    present: Sequence[Target],
    *,
    envs: Sequence[EvalEnvConfig],
    max_steps: int | None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> AsyncIterator[Target]:
    """Yield `present`, and with `watcher` what is published later, each once.

    It ends after the last of `steps`, or after `max_steps`, or when nothing new came for `watcher_timeout`.

    Args:
        max_steps: the number of steps of the run that publishes; None: unknown.
    """
    for target in present:
        yield target
    if not config.watcher or config.weights_dir is None:
        return
    seen = {target.step for target in present}
    last = max(config.steps) if config.steps else max_steps
    logger.info("watching %s: %s", config.weights_dir, _end_rule(config, last))
    newest, changed_at = max(seen, default=0), clock()
    while True:
        for step, directory in sorted(complete_steps(config.weights_dir).items()):
            if step > newest:
                newest, changed_at = step, clock()
            if step not in seen and is_wanted(config, step, envs):
                seen.add(step)
                yield Target(step, directory)
                changed_at = clock()
        if last is not None and newest >= last:
            if missed := sorted(set(config.steps or ()) - seen):
                logger.warning("steps that were never published or removed before: %s", ", ".join(map(str, missed)))
            return
        if clock() - changed_at >= config.watcher_timeout:
            logger.warning(
                "nothing was published in %s for %.0f s (watcher_timeout): watching ends after step %s",
                *(config.weights_dir, config.watcher_timeout, newest),
            )
            return
        await sleep(_POLL_INTERVAL_S)


def _end_rule(config: EvalConfig, last: int | None) -> str:
    until = f"until step {last}" if last is not None else "until Ctrl-C"
    return f"{until}, or nothing new for {config.watcher_timeout:.0f} s"


def _require_base_alone(config: EvalConfig) -> None:
    for key, is_given in {"steps": config.steps is not None, "watcher": config.watcher}.items():
        if is_given:
            raise ConfigError(
                f"{key} is about directories inside weights_dir, which is not set: add --weights-dir outputs/weights"
            )
    if not config.eval_base:
        raise ConfigError(
            "nothing to evaluate: eval_base is false and weights_dir is not set; add --weights-dir outputs/weights"
        )


def _listed(steps: Sequence[int]) -> str:
    if not steps:
        return "none"
    shown = ", ".join(map(str, steps[-_MAX_LISTED:]))
    return shown if len(steps) <= _MAX_LISTED else f"…, {shown}"
