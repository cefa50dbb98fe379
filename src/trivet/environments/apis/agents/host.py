"""Runs groups with an agent that owns its loop: a program which is given the address of the model, and reports a reward.

Each rollout starts the program once, with a base URL and a key of its own. It reaches the model through `agents.server`; what the
model answers is trained on. The reward comes from a function of the user, from what the program posts, or from a file it writes.
"""

import asyncio
import inspect
import json
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from trivet.environments.apis.agents.completion_client import OVERLONG, CompletionClient
from trivet.environments.apis.agents.server import AgentServer, read_reward
from trivet.environments.apis.agents.session import AgentSession, RecordedTurn, SessionLimits
from trivet.environments.apis.groups import Stage, StageBoard, limit_time, play_group
from trivet.environments.apis.messages import find_answer, find_example, shorten_messages
from trivet.environments.apis.rewards import add_score, require_reward
from trivet.environments.apis.turns import rollout_seed, to_samples
from trivet.environments.examples import digest_records, hash_fields
from trivet.errors import EnvironmentLoadError, RolloutFailed
from trivet.process.imports import import_by_path
from trivet.process.lifetime import tied_command
from trivet.wire.groups import EnvironmentInfo, Example, GroupRequest, Split
from trivet.wire.rollouts import Rollout
from trivet.wire.workers import HostSettings

_NO_REWARD = "NoReward"
"""Kind of the failure of a rollout whose agent ended without a reward."""
_STOP_TIMEOUT_S = 2.0
"""Time between the request to end and the kill of an agent that was told to stop."""
_NUM_LOG_BYTES = 2_000
_REWARD_FILE, _OUTPUT_FILE = "reward.json", "output.log"
"""Files in the directory of a rollout: what the program reports, and what it prints."""


class AgentArguments(SessionLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `args` of an environment of the id `agent`. After `timeout_s`, what the model answered before is scored if there is a
    reward.
    """

    command: Annotated[list[str], msgspec.Meta(min_length=1)]
    """The program and its arguments."""
    tasks: str
    """A file of JSON lines; each is a task, which the program is given as it is."""
    eval_tasks: str | None = None
    """The same for evaluations."""
    reward: str | None = None
    """A function as `FILE.py:NAME`, called with `task`, `completion` and `directory`. None: the program reports its reward."""

    host: str = "127.0.0.1"
    """The address at which sessions listen. With another one than loopback, programs elsewhere can use a session's key."""


def load(settings: HostSettings, *, environ: Mapping[str, str], stages: StageBoard) -> "AgentHost":
    """Read the tasks and the reward function that `settings` name.

    Raises:
        EnvironmentLoadError: an argument is wrong, or a file cannot be read.
    """
    name = settings.name
    try:
        arguments = msgspec.convert(settings.args, AgentArguments)
        reward = None if arguments.reward is None else import_by_path(arguments.reward)
    except msgspec.ValidationError as exc:
        raise EnvironmentLoadError(f"environment {name!r}: args: {exc}") from exc
    except Exception as exc:  # user code may raise anything: it is reported with the environment's name
        raise EnvironmentLoadError(
            f"environment {name!r}: args.reward {settings.args['reward']!r} cannot be imported: {exc}"
        ) from exc
    files = {Split.TRAIN: arguments.tasks, Split.EVAL: arguments.eval_tasks}
    tasks = {split: _read_tasks(path, name=name) for split, path in files.items() if path is not None}
    train, held_out = tasks[Split.TRAIN], tasks.get(Split.EVAL, [])
    columns = [[task.get(key) for task in train] for key in settings.hash_keys if any(key in task for task in train)]
    info = EnvironmentInfo(
        num_examples=len(train),
        num_eval_examples=len(held_out),
        train_digest=digest_records(train),
        eval_digest=digest_records(held_out) if held_out else "",
        example_hashes=hash_fields(columns or [train]) if settings.hash_keys else [],
    )
    return AgentHost(
        settings=settings, arguments=arguments, tasks=tasks, reward=reward, info=info, environ=environ, stages=stages
    )


def _read_tasks(path: str, *, name: str) -> list[dict[str, Any]]:
    try:
        rows = msgspec.json.Decoder(dict[str, Any]).decode_lines(Path(path).read_bytes())
    except (OSError, msgspec.DecodeError) as exc:
        raise EnvironmentLoadError(
            f"environment {name!r}: the tasks in {path!r} cannot be read: {exc}; each line must be a JSON object, one for each task"
        ) from exc
    if not rows:
        raise EnvironmentLoadError(f"environment {name!r}: there are no tasks in {path!r}")
    return rows


@dataclass(slots=True, kw_only=True)
class AgentHost:
    """Implements `apis.load.EnvironmentHost`."""

    settings: HostSettings
    arguments: AgentArguments
    tasks: Mapping[Split, Sequence[dict[str, Any]]]
    reward: Any
    """The function that returns the reward; None: the program reports it."""
    info: EnvironmentInfo
    environ: Mapping[str, str]
    stages: StageBoard
    api: str = "agent"
    _server: AgentServer = field(init=False)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serve sessions while the worker runs groups."""
        self._server = AgentServer(self.arguments.host, model=self.settings.model_name)
        async with self._server.listening():
            yield

    def example(self, *, split: Split, example_id: int) -> Example:
        """Return a task as an example."""
        task = self.tasks[split][example_id]
        prompt = task.get("prompt")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or [])
        return Example(prompt=messages, answer=find_answer(task))

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        """Play and score the rollouts of a group; see `EnvironmentHost.run_group`."""
        if request.recorded:
            raise RolloutFailed("the rollouts of an agent cannot be scored again: its work is gone", kind="NotSupported")
        task = find_example(self.tasks.get(request.split), request.example_id)
        async with limit_time(self.settings.rollout_timeout_s, request):
            with self.stages.stage(Stage.GENERATING, num_rollouts=request.num_rollouts):
                played = await play_group(lambda index: self._play(task, request, index), request)
        for rollout, num_retries in played:
            rollout.num_retries = num_retries
        return [rollout for rollout, _ in played]

    async def _play(self, task: Mapping[str, Any], request: GroupRequest, index: int) -> Rollout:
        """Run the program once; raises RolloutFailed if it reports no reward."""
        started = time.monotonic()
        completions = CompletionClient(
            settings=self.settings,
            environ=self.environ,
            sampling=request.sampling,
            base_url=request.base_url,
            seed=rollout_seed(request, index),
        )
        session = AgentSession(completions.complete, self.arguments)
        with tempfile.TemporaryDirectory(prefix="agent-") as folder:
            directory = Path(folder)
            async with self._server.serving(session) as address:
                exit_code = await self._run_program(task, session, directory, address=address)
                seconds = time.monotonic() - started
                reward, scores = await self._score(task, session, directory, exit_code=exit_code)
        turns = session.delivered()
        strategy = self.settings.trajectory_strategy
        samples, num_broken = to_samples(
            [recorded.turn for recorded in turns], temperature=request.sampling.temperature, strategy=strategy
        )
        if strategy == "interleaved" and len(turns) > 1:
            add_score(scores, "broken_prefixes", num_broken, env=self.settings.name)
        return Rollout(
            index=index,
            reward=reward,
            samples=samples,
            scores=scores,
            prompt=shorten_messages(turns[0].messages if turns else []),
            completion=shorten_messages(_completion(turns)),
            num_turns=len(turns),
            is_cut=session.is_cut or exit_code is None,
            ran_out_of_context=session.failure is not None and session.failure.kind == OVERLONG,
            ended_by="" if not exit_code else f"exit code {exit_code}",
            generation_s=seconds,
        )

    async def _run_program(
        self, task: Mapping[str, Any], session: AgentSession, directory: Path, *, address: str
    ) -> int | None:
        """Run the program to its end, with its output in a file; return its exit code, or None if its time was over."""
        task_file = directory / "task.json"
        task_file.write_text(json.dumps(task), encoding="utf-8")
        variables = {
            "OPENAI_BASE_URL": f"{address}/v1",
            "OPENAI_API_KEY": session.key,
            "ANTHROPIC_BASE_URL": address,
            "ANTHROPIC_API_KEY": session.key,
            "TRIVET_MODEL": self.settings.model_name,
            "TRIVET_TASK_FILE": str(task_file),
            "TRIVET_REWARD_FILE": str(directory / _REWARD_FILE),
            "TRIVET_REWARD_URL": f"{address}/reward",
        }
        with (directory / _OUTPUT_FILE).open("wb") as output:
            program = await asyncio.create_subprocess_exec(
                *tied_command(self.arguments.command),
                env={**self.environ, **variables},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            async with asyncio.timeout(session.limits.timeout_s):
                return await program.wait()
        except TimeoutError:
            return None
        finally:
            await _end(program)

    async def _score(
        self, task: Mapping[str, Any], session: AgentSession, directory: Path, *, exit_code: int | None
    ) -> tuple[float, dict[str, float]]:
        """Return the reward and the scores of a rollout; raises RolloutFailed without any."""
        reward, scores, file = session.reward, session.scores, directory / _REWARD_FILE
        if self.reward is not None:
            completion = _completion(session.delivered())
            reward = await asyncio.to_thread(self.reward, task=task, completion=completion, directory=directory)
            reward, scores = (await reward if inspect.isawaitable(reward) else reward), {}
        elif reward is None and file.exists():
            try:
                reward, scores = read_reward(msgspec.json.decode(file.read_bytes()))
            except (ValueError, RecursionError) as exc:
                raise RolloutFailed(f"the agent's reward file is wrong: {exc}", kind=_NO_REWARD) from exc
        elif reward is None:
            end = "its time was over (args.timeout_s)" if exit_code is None else f"it ended with exit code {exit_code}"
            with (directory / _OUTPUT_FILE).open("rb") as output:
                output.seek(max(0, output.seek(0, os.SEEK_END) - _NUM_LOG_BYTES))
                tail = output.read().decode(errors="replace")
            raise RolloutFailed(
                f"the agent reported no reward: {end}; it must post to TRIVET_REWARD_URL or write TRIVET_REWARD_FILE, or set "
                f"args.reward. The end of its output:\n{tail}",
                kind=_NO_REWARD,
                is_infrastructure=session.failure is not None and session.failure.is_infrastructure,
            )
        return require_reward(reward, env=self.settings.name, values=scores), scores


def _completion(turns: Sequence[RecordedTurn]) -> list[dict[str, Any]]:
    """Return the messages after the first request: each turn's new messages, then the model's answer."""
    messages: list[dict[str, Any]] = []
    num_seen = len(turns[0].messages) if turns else 0
    for recorded in turns:
        messages += [*recorded.messages[num_seen:], recorded.reply.message]
        num_seen = max(num_seen, len(recorded.messages) + 1)
    return messages


async def _end(program: asyncio.subprocess.Process) -> None:
    """End a program and what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGTERM)
    with suppress(TimeoutError):
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await program.wait()
    with suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    await program.wait()
