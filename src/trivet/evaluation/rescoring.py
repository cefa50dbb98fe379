"""Scores saved rollouts with today's reward functions, and compares the new scores with the saved scores. For `trivet replay`.

A run saved the rollouts that it trained on, or an evaluation saved the rollouts that it sampled. Nothing in their directory is
changed.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trivet.config.layout import RESULTS_FILE, ROLLOUTS_FILE, RunLayout
from trivet.config.load import load_config
from trivet.config.masking import HIDDEN, mask_table
from trivet.config.schema.environment import EnvConfig
from trivet.config.schema.inference import ClientConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.environments.apis.messages import EXAMPLE_GONE, PROMPT_DIFFERS
from trivet.environments.port import EnvironmentPool
from trivet.environments.settings import host_settings, run_settings
from trivet.errors import ConfigError, RolloutFailed, WorkerLost
from trivet.evaluation.results import TASK_FILE, TaskRecord
from trivet.step_directories import list_steps
from trivet.storage.durable import DECODE_ERRORS
from trivet.telemetry.console import conversation_text
from trivet.wire.groups import GroupRequest, RecordedConversation, SamplingArguments, Split
from trivet.wire.rollouts import RolloutRecord
from trivet.wire.versions import GroupId
from trivet.wire.workers import HostSettings

REWARD = "reward"
"""The name of the reward itself in a list of reward functions."""
_NOT_COMPARABLE = {EXAMPLE_GONE: "example gone", PROMPT_DIFFERS: "prompt differs"}
"""The reasons for which a rollout cannot be compared, by the kind of the group's failure."""
_TOLERANCE = 1e-6
"""Scores that differ by less, relatively or absolutely, count as equal: some rewards are sums, whose order may differ."""
_MAX_CONCURRENT_GROUPS = 64
"""The most groups that are scored at the same time: judges wait for a service, which limits concurrent requests."""
_PREVIEW_CHARS = 200
"""The most characters of a completion that are kept to be shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """One file of saved rollouts."""

    path: Path
    step: int
    """The training step, or the version of the evaluated policy."""
    task: TaskRecord | None = None
    """The task of the evaluation; None for rollouts that were trained on."""

    def groups(self) -> list[tuple[str, list[RolloutRecord]]]:
        """Return the environment's name and the rollouts of each group, in the order of the file.

        Raises:
            ConfigError: a line cannot be read.
        """
        groups: dict[tuple[str, int | None], list[RolloutRecord]] = {}
        decoder = msgspec.json.Decoder(RolloutRecord)
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    rollout = decoder.decode(line)
                except DECODE_ERRORS as exc:
                    raise ConfigError(f"{self.path}:{number} is no rollout: {exc}") from exc
                key = (rollout.env, rollout.group_id) if self.task is None else (self.task.env, rollout.example_id)
                groups.setdefault(key, []).append(rollout)
        return [(env, sorted(rollouts, key=lambda rollout: rollout.index)) for (env, _), rollouts in groups.items()]


class RescoredRollout(msgspec.Struct, kw_only=True):
    """A saved rollout with its saved scores and its scores of today: a line of the file that `--write` names."""

    step: int
    env: str
    group_id: int
    """-1 in an evaluation."""
    example_id: int
    index: int
    reward_before: float
    reward_after: float | None = None
    """None when the rollout was not scored."""
    scores_before: dict[str, float]
    scores_after: dict[str, float] = {}
    not_comparable: str = ""
    """`example gone` or `prompt differs`: the example of the rollout is not in today's data. Empty: it can be compared."""
    error: str = ""
    """Why scoring failed; empty when it did not."""
    completion: str
    """The beginning of the completion."""

    def pairs(self) -> Iterator[tuple[str, float, float]]:
        """Yield name, saved value and value of today, for the reward and for each function with both values."""
        if self.reward_after is not None:
            yield REWARD, self.reward_before, self.reward_after
        for name in self.scores_before.keys() & self.scores_after.keys():
            yield name, self.scores_before[name], self.scores_after[name]


class FunctionChange(msgspec.Struct, kw_only=True):
    """The change of one reward function, over the rollouts that it scored both times."""

    name: str
    mean_before: float | None
    mean_after: float | None
    num_rollouts: int
    num_changed: int


class EnvironmentChange(msgspec.Struct, kw_only=True):
    """The differences in one environment."""

    env: str
    num_rollouts: int
    num_scored: int
    num_changed: int
    """Rollouts with another reward."""
    functions: list[FunctionChange]
    """The reward first, then the reward functions and metrics by name."""
    not_comparable: dict[str, int]
    """Rollouts by reason."""
    num_failed: int
    first_error: str = ""


def find_trained(layout: RunLayout, steps: range | None) -> list[SavedFile]:
    """Return the files of rollouts that were trained on, ordered by step.

    Args:
        steps: the steps to read; None: all.
    """
    directories = list_steps(layout.rollouts, marker=ROLLOUTS_FILE).items()
    return [SavedFile(path=path / ROLLOUTS_FILE, step=step) for step, path in directories if steps is None or step in steps]


def find_evaluated(layout: RunLayout, steps: range | None) -> list[SavedFile]:
    """Return the files of rollouts that evaluations sampled, ordered by the version of the policy.

    Args:
        steps: the policy versions to read; None: all.

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
            files.append(SavedFile(path=path, step=step, task=task))
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
    # `replay` is removed, because a configuration with it loads no environments.
    return config.model_copy(update={"replay": None})


def settings_for(config: OrchestratorConfig | None, files: Sequence[SavedFile]) -> Mapping[str, HostSettings]:
    """Return the settings of each environment that the files may name, by the environment's name in the files.

    Args:
        config: the configuration of the run that wrote the files; None if there is none.

    Raises:
        ConfigError: the arguments of an environment are unknown.
        EnvironmentLoadError: a virtual environment is not there.
    """
    settings = {} if config is None else dict(run_settings(config))
    envs = [] if config is None else list(config.environments.values())
    for task in (file.task for file in files if file.task is not None):
        # The secrets in a task's arguments are hidden. So the environment is searched in the configuration, which has them.
        env = next((env for env in envs if (env.package, mask_table(env.args)) == (task.env_id, task.env_args)), None)
        if env is None and HIDDEN in str(task.env_args):
            raise ConfigError(
                f"the arguments of environment {task.env_id!r} hold a secret that {TASK_FILE} does not keep, and no configs/"
                "orchestrator.toml has it: its rollouts cannot be scored again"
            )
        task_settings = host_settings(
            env or EnvConfig(id=task.env_id, args=task.env_args), model_name="", client=ClientConfig(), is_plain=True
        )
        settings[task.env] = msgspec.structs.replace(task_settings, name=task.env)
    return settings


async def rescore(
    pool: EnvironmentPool, file: SavedFile, *, envs: Iterable[str], zeroes_truncated: bool
) -> list[RescoredRollout]:
    """Score the rollouts of a file in the workers of their environments.

    Args:
        envs: names of the environments to score; rollouts of other environments are left out.
        zeroes_truncated: the run gave reward 0 to truncated rollouts (`zero_truncated_completions`), and they get it again.
    """
    slots, wanted = asyncio.Semaphore(_MAX_CONCURRENT_GROUPS), set(envs)

    async def score(number: int, env: str, saved: list[RolloutRecord]) -> list[RescoredRollout]:
        rescored = [
            RescoredRollout(
                step=file.step,
                env=env,
                group_id=-1 if rollout.group_id is None else rollout.group_id,
                example_id=rollout.example_id,
                index=rollout.index,
                reward_before=rollout.reward,
                scores_before=rollout.scores,
                completion=conversation_text(rollout.completion, max_chars=_PREVIEW_CHARS),
            )
            for rollout in saved
        ]
        request = GroupRequest(
            group_id=GroupId(number),
            env=env,
            split=Split.TRAIN if file.task is None else file.task.split,
            example_id=saved[0].example_id,
            num_rollouts=len(saved),
            base_url="http://127.0.0.1:9/v1",  # no request is sent; this port discards all data
            sampling=SamplingArguments(temperature=None),
            recorded=[
                RecordedConversation(prompt=rollout.prompt, completion=rollout.completion, is_truncated=rollout.is_truncated)
                for rollout in saved
            ],
        )
        async with slots:
            while True:
                try:
                    scored = await pool.run_group(request)
                    break
                except WorkerLost:  # the third loss raises RolloutFailed instead
                    continue
                except RolloutFailed as exc:
                    for rollout in rescored:
                        rollout.not_comparable = _NOT_COMPARABLE.get(exc.kind, "")
                        rollout.error = "" if rollout.not_comparable else str(exc)
                    return rescored
        for rollout, before, after in zip(rescored, saved, scored, strict=True):
            rollout.reward_after = 0.0 if zeroes_truncated and before.is_truncated else after.reward
            rollout.scores_after = after.scores
        return rescored

    async with asyncio.TaskGroup() as tasks:
        scored = [
            tasks.create_task(score(number, env, saved), name=f"score-{number}")
            for number, (env, saved) in enumerate(file.groups())
            if env in wanted
        ]
    return [rollout for task in scored for rollout in task.result()]


def compare(rescored: Sequence[RescoredRollout]) -> list[EnvironmentChange]:
    """Return the differences by environment, in the order of their names."""
    by_env: dict[str, list[RescoredRollout]] = {}
    for rollout in rescored:
        by_env.setdefault(rollout.env, []).append(rollout)
    changes: list[EnvironmentChange] = []
    for env, rollouts in sorted(by_env.items()):
        scored = [rollout for rollout in rollouts if rollout.reward_after is not None]
        names = {name for rollout in scored for name in rollout.scores_before.keys() | rollout.scores_after.keys()} - {REWARD}
        functions = [_compare_function(name, scored) for name in (REWARD, *sorted(names))]
        errors = [rollout.error for rollout in rollouts if rollout.error]
        change = EnvironmentChange(
            env=env,
            num_rollouts=len(rollouts),
            num_scored=len(scored),
            num_changed=functions[0].num_changed,
            functions=functions,
            not_comparable=dict(Counter(rollout.not_comparable for rollout in rollouts if rollout.not_comparable)),
            num_failed=len(errors),
            first_error=errors[0] if errors else "",
        )
        changes.append(change)
    return changes


def most_changed(rescored: Iterable[RescoredRollout], *, limit: int) -> list[RescoredRollout]:
    """Return at most `limit` changed rollouts: first those whose reward changed most, then whose reward functions did."""

    def change_of(rollout: RescoredRollout) -> tuple[float, float]:
        changes = {name: abs(before - after) for name, before, after in rollout.pairs() if not _is_equal(before, after)}
        return changes.get(REWARD, 0.0), max(changes.values(), default=0.0)

    changed = [rollout for rollout in rescored if rollout.reward_after is not None and change_of(rollout) > (0.0, 0.0)]
    return sorted(changed, key=change_of, reverse=True)[:limit]


def _compare_function(name: str, scored: Sequence[RescoredRollout]) -> FunctionChange:
    pairs = [(before, after) for rollout in scored for pair_name, before, after in rollout.pairs() if pair_name == name]
    # A function that exists only now, or only then, has no pairs. Its mean is over the values that it has.
    before = [pair[0] for pair in pairs] or [rollout.scores_before[name] for rollout in scored if name in rollout.scores_before]
    after = [pair[1] for pair in pairs] or [rollout.scores_after[name] for rollout in scored if name in rollout.scores_after]
    return FunctionChange(
        name=name,
        mean_before=math.fsum(before) / len(before) if before else None,
        mean_after=math.fsum(after) / len(after) if after else None,
        num_rollouts=len(pairs),
        num_changed=sum(not _is_equal(*pair) for pair in pairs),
    )


def _is_equal(before: float, after: float) -> bool:
    return math.isclose(before, after, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
