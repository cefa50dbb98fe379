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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from trivet.environments.apis.agents.asker import OVERLONG, ServerAsker, open_asker
from trivet.environments.apis.agents.formats import ModelRequest
from trivet.environments.apis.agents.server import AgentServer, read_reward, serve_agents
from trivet.environments.apis.agents.session import AgentSession, RecordedTurn, SessionLimits
from trivet.environments.apis.groups import Stage, StageBoard, limit_time, play_group
from trivet.environments.apis.messages import find_answer, find_example, shorten_messages
from trivet.environments.apis.rewards import require_reward
from trivet.environments.apis.turns import later_seed, rollout_seed, to_samples
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


class AgentArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `args` of an environment of the id `agent`."""

    command: list[str]
    """The program and its arguments."""
    tasks: str
    """A file of JSON lines; each is a task, which the program is given as it is."""
    eval_tasks: str | None = None
    """The same for evaluations."""
    reward: str | None = None
    """A function as `FILE.py:NAME`, called with `task`, `completion` and `directory`. None: the program reports its reward."""
    max_turns: int = 64
    """Answers of the model in one rollout."""
    max_tokens: int = 1_000_000
    """Tokens that the model samples in one rollout."""
    timeout_s: float = 600.0
    """Seconds after which the program is ended. What the model answered before is scored if there is a reward."""
    host: str = "127.0.0.1"
    """The address at which sessions listen. With another one than loopback, programs elsewhere can use a session's key."""


@dataclass(slots=True, kw_only=True)
class _Played:
    """A rollout whose program has ended."""

    session: AgentSession
    log: str
    exit_code: int | None
    """None when it was ended because its time was over."""
    seconds: float
    reward: float
    scores: dict[str, float]


def load(settings: HostSettings, *, environ: Mapping[str, str], stages: StageBoard) -> "AgentHost":
    """Read the tasks and the reward function that `settings` name.

    Raises:
        EnvironmentLoadError: an argument is wrong, or a file cannot be read.
    """
    name = settings.name
    try:
        arguments = msgspec.convert(settings.args, AgentArguments)
    except msgspec.ValidationError as exc:
        raise EnvironmentLoadError(f"environment {name!r}: args: {exc}") from exc
    if not arguments.command:
        raise EnvironmentLoadError(f"environment {name!r}: args.command is empty; name the program and its arguments")
    tasks = {Split.TRAIN: _read_tasks(arguments.tasks, name=name)}
    if arguments.eval_tasks is not None:
        tasks[Split.EVAL] = _read_tasks(arguments.eval_tasks, name=name)
    try:
        reward = None if arguments.reward is None else import_by_path(arguments.reward)
    except Exception as exc:  # user code may raise anything: it is reported with the environment's name
        raise EnvironmentLoadError(f"environment {name!r}: args.reward {arguments.reward!r} cannot be imported: {exc}") from exc
    return AgentHost(settings, arguments, tasks, reward, environ=environ, stages=stages)


def _read_tasks(path: str, *, name: str) -> list[dict[str, Any]]:
    try:
        rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as exc:
        raise EnvironmentLoadError(f"environment {name!r}: the tasks in {path!r} cannot be read: {exc}") from exc
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise EnvironmentLoadError(f"environment {name!r}: {path!r} must have a JSON object on each line, one for each task")
    return rows


class AgentHost:
    """Implements `apis.load.EnvironmentHost`."""

    api = "agent"

    def __init__(
        self,
        settings: HostSettings,
        arguments: AgentArguments,
        tasks: Mapping[Split, Sequence[dict[str, Any]]],
        reward: Any,
        *,
        environ: Mapping[str, str],
        stages: StageBoard,
    ) -> None:
        self.name = settings.name
        train, held_out = tasks[Split.TRAIN], tasks.get(Split.EVAL, ())
        keys = [key for key in settings.hash_keys if any(key in task for task in train)]
        self.info = EnvironmentInfo(
            num_examples=len(train),
            num_eval_examples=len(held_out),
            train_digest=digest_records(train),
            eval_digest=digest_records(held_out) if held_out else "",
            example_hashes=hash_fields([[task.get(key) for task in train] for key in keys] or [list(train)])
            if settings.hash_keys
            else [],
        )
        self._settings = settings
        self._arguments = arguments
        self._tasks = tasks
        self._reward = reward
        self._environ = environ
        self._stages = stages
        self._server: AgentServer
        self._asker: ServerAsker

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serve sessions while the worker runs groups."""
        async with (
            serve_agents(self._arguments.host, model=self._settings.model_name) as self._server,
            open_asker(self._settings, self._environ) as self._asker,
        ):
            yield

    def example(self, *, split: Split, example_id: int) -> Example:
        """Return a task as an example."""
        task = self._tasks[split][example_id]
        prompt = task.get("prompt")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or [])
        return Example(prompt=messages, answer=find_answer(task))

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        """Play and score the rollouts of a group; see `EnvironmentHost.run_group`."""
        if request.recorded:
            raise RolloutFailed("the rollouts of an agent cannot be scored again: its work is gone", kind="NotSupported")
        task = find_example(self._tasks.get(request.split), request.example_id)
        async with limit_time(self._settings.rollout_timeout_s, request):
            with self._stages.stage(Stage.GENERATING, num_rollouts=request.num_rollouts):
                played = await play_group(lambda index: self._play(task, request, index), request)
        rollouts: list[Rollout] = []
        for index, (each, num_retries) in enumerate(played):
            rollouts.append(self._to_rollout(each, index, temperature=request.sampling.temperature))
            rollouts[-1].num_retries = num_retries
        return rollouts

    async def _play(self, task: Mapping[str, Any], request: GroupRequest, index: int) -> _Played:
        """Run the program once; raises RolloutFailed if it reports no reward."""
        started = time.monotonic()
        arguments = self._arguments
        seed = rollout_seed(request, index)

        async def complete(asked: ModelRequest, number: int, known: Sequence[int]) -> dict[str, Any]:
            own_seed = None if seed is None else later_seed(seed, "turn", number)
            return await self._asker.complete(asked, request.sampling, base_url=request.base_url, seed=own_seed, known=known)

        session = AgentSession(complete, SessionLimits(max_turns=arguments.max_turns, max_tokens=arguments.max_tokens))
        with tempfile.TemporaryDirectory(prefix="agent-") as folder:
            directory = Path(folder)
            address = self._server.open(session)
            try:
                log, exit_code = await self._run_program(task, session, directory, address=address)
                seconds = time.monotonic() - started
                reward, scores = await self._score(task, session, directory, log=log, exit_code=exit_code)
            finally:
                self._server.close(session)
                await session.aclose()
        return _Played(session=session, log=log, exit_code=exit_code, seconds=seconds, reward=reward, scores=scores)

    async def _run_program(
        self, task: Mapping[str, Any], session: AgentSession, directory: Path, *, address: str
    ) -> tuple[str, int | None]:
        """Run the program to its end; return the end of its output, and its exit code, or None if its time was over."""
        task_file, log_file = directory / "task.json", directory / "output.log"
        task_file.write_text(json.dumps(task), encoding="utf-8")
        variables = {
            "OPENAI_BASE_URL": f"{address}/v1",
            "OPENAI_API_KEY": session.key,
            "ANTHROPIC_BASE_URL": address,
            "ANTHROPIC_API_KEY": session.key,
            "TRIVET_MODEL": self._settings.model_name,
            "TRIVET_TASK_FILE": str(task_file),
            "TRIVET_REWARD_FILE": str(directory / "reward.json"),
            "TRIVET_REWARD_URL": f"{address}/reward",
        }
        with log_file.open("wb") as output:
            program = await asyncio.create_subprocess_exec(
                *tied_command(self._arguments.command),
                env={**self._environ, **variables},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        exit_code = None
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._arguments.timeout_s):
                    exit_code = await program.wait()
        finally:
            await _end(program)
        with log_file.open("rb") as output:
            output.seek(max(0, log_file.stat().st_size - _NUM_LOG_BYTES))
            return output.read().decode(errors="replace"), exit_code

    async def _score(
        self, task: Mapping[str, Any], session: AgentSession, directory: Path, *, log: str, exit_code: int | None
    ) -> tuple[float, dict[str, float]]:
        """Return the reward and the scores of a rollout; raises RolloutFailed without any."""
        file = directory / "reward.json"
        if self._reward is not None:
            completion = _completion(session.delivered())
            if inspect.iscoroutinefunction(self._reward):
                reward = await self._reward(task=task, completion=completion, directory=directory)
            else:
                reward = await asyncio.to_thread(self._reward, task=task, completion=completion, directory=directory)
            found = reward, {}
        elif session.reward is not None:
            found = session.reward, session.scores
        elif file.exists():
            try:
                found = read_reward(json.loads(file.read_text()))
            except ValueError as exc:
                raise RolloutFailed(f"the agent's reward file is wrong: {exc}", kind=_NO_REWARD) from exc
        else:
            end = "its time was over (args.timeout_s)" if exit_code is None else f"it ended with exit code {exit_code}"
            raise RolloutFailed(
                f"the agent reported no reward: {end}; it must post to TRIVET_REWARD_URL or write TRIVET_REWARD_FILE, or set "
                f"args.reward. The end of its output:\n{log}",
                kind=_NO_REWARD,
                is_infrastructure=session.failure is not None and session.failure.is_infrastructure,
            )
        return require_reward(found[0], env=self.name, values=found[1]), found[1]

    def _to_rollout(self, played: _Played, index: int, *, temperature: float | None) -> Rollout:
        turns = played.session.delivered()
        strategy = self._settings.trajectory_strategy
        samples, num_broken = to_samples([recorded.turn for recorded in turns], temperature=temperature, strategy=strategy)
        scores = dict(played.scores)
        if strategy == "interleaved" and len(turns) > 1:
            scores["broken_prefixes"] = float(num_broken)
        return Rollout(
            index=index,
            reward=played.reward,
            samples=samples,
            scores=scores,
            prompt=shorten_messages(turns[0].messages if turns else []),
            completion=shorten_messages(_completion(turns)),
            num_turns=len(turns),
            is_cut=played.session.is_cut or played.exit_code is None,
            ran_out_of_context=played.session.failure is not None and played.session.failure.kind == OVERLONG,
            ended_by="" if not played.exit_code else f"exit code {played.exit_code}",
            generation_s=played.seconds,
        )


def _completion(turns: Sequence[RecordedTurn]) -> list[dict[str, Any]]:
    """Return the messages after the first request: each turn's new messages, then the model's answer."""
    messages: list[dict[str, Any]] = []
    num_seen = len(turns[0].messages) if turns else 0
    for recorded in turns:
        messages += [*recorded.messages[num_seen:], recorded.message]
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
