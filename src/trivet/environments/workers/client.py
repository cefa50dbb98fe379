"""Starts one worker process, sends it calls, receives its answers and pulses, and ends it. `workers.pool` restarts it.

The worker leads a session of its own, and has its own directory for temporary files. It runs the interpreter that the settings
name, which may be one of another virtual environment. A worker with another version of the protocol is refused, and a worker that
sends an invalid message is ended.
"""

import asyncio
import math
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from trivet.environments.settings import worker_environment
from trivet.environments.workers.calls import PendingCalls, find_fault
from trivet.environments.workers.channel import Channel
from trivet.environments.workers.containers import SCOPE
from trivet.environments.workers.limits import WorkerDirectory, WorkerLog
from trivet.errors import EnvironmentLoadError, MessageRefused, RolloutFailed, WaitTimeout, WorkerLost
from trivet.exits import describe_exit
from trivet.process.lifetime import end_session, module_command, tied_command
from trivet.process.signals import STACKS_SIGNAL, STACKS_WITHIN_S
from trivet.shown_text import printable
from trivet.wire.events import EnvLoad
from trivet.wire.groups import EnvironmentInfo, Example, GroupRequest, Split
from trivet.wire.rollouts import Rollout
from trivet.wire.status import WorkerStatus
from trivet.wire.workers import (
    PROTOCOL,
    PULSE_INTERVAL_S,
    AskExample,
    CallFailed,
    EnvironmentLoaded,
    EnvironmentLoadFailed,
    ExampleFound,
    GroupDone,
    HostSettings,
    LoadEnvironment,
    Pulse,
    RunGroupOrder,
    WorkerAnswer,
    WorkerHello,
    WorkerOrder,
)

_EXIT_TIMEOUT_S = 10.0
"""Longest time between the end of the channel and the end of the process, whichever comes first."""
_BLOCKED_AFTER_S = 3 * PULSE_INTERVAL_S
"""A worker counts as blocked when no pulse came, or its event loop ran nothing, for longer than this. It is several pulses, because
one late pulse is common on a busy machine."""


class WorkerClient:
    """A worker that was started: its process, its channel, the calls in flight, and its pulses."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        channel: Channel,
        *,
        settings: HostSettings,
        log: WorkerLog,
        log_offset: int = 0,
        directory: WorkerDirectory | None = None,
        clock: Callable[[], float] = time.monotonic,
        end_session: Callable[[int], object] = end_session,
    ) -> None:
        """Take over a started process and the channel to it.

        Args:
            log_offset: position in `log` at which the worker's output begins, in bytes.
            directory: has its temporary files; it is removed after the process has ended.
            end_session: kills every process of the session whose leader has the given pid.
        """
        self.name = settings.name
        """The environment's name."""
        self.pid = process.pid
        self.pulses = PulseMonitor(clock)
        self.load_event: EnvLoad | None = None
        """Describes the worker and its environment; None before the environment is loaded."""
        self._env_id = settings.env_id
        self._process = process
        self._channel = channel
        self._log, self._log_offset = log, log_offset
        self._directory = directory
        self._end_session = end_session
        self._end_cause = ""
        """Why the pool ended the worker, as the end of a sentence; empty if the pool did not."""
        self._calls = PendingCalls(lambda order: channel.post(WorkerOrder(body=order)))
        self._loading: asyncio.Future[EnvironmentInfo] = asyncio.get_running_loop().create_future()
        self._ended = asyncio.Event()
        self._watching = asyncio.create_task(self._watch(), name=f"{self.name}-watch")

    @classmethod
    async def start(
        cls, settings: HostSettings, *, log: WorkerLog, clock: Callable[[], float] = time.monotonic
    ) -> "WorkerClient":
        """Start a worker and order it to load its environment. Its output is appended to `log`."""
        log.path.parent.mkdir(parents=True, exist_ok=True)
        python = settings.python or sys.executable
        environ = worker_environment(os.environ, python=python, settings=settings)
        directory = WorkerDirectory()
        pool_end, worker_end = socket.socketpair()
        with worker_end, log.path.open("ab") as output:
            command = module_command("trivet.environments.workers.main", "--channel", str(worker_end.fileno()), python=python)
            process = await asyncio.create_subprocess_exec(
                *tied_command(command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[worker_end.fileno()],
                env={**environ, "TMPDIR": str(directory.path), SCOPE: directory.path.name},
                start_new_session=True,
            )
            log_offset = output.tell()
        channel = await Channel.open(pool_end)
        worker = cls(process, channel, settings=settings, log=log, log_offset=log_offset, directory=directory, clock=clock)
        channel.post(WorkerOrder(body=LoadEnvironment(settings=settings)))
        return worker

    @property
    def num_pending(self) -> int:
        """Calls that the worker has not answered."""
        return len(self._calls.ids)

    async def wait_loaded(self, *, timeout_s: float) -> EnvironmentInfo:
        """Wait for the worker to load its environment.

        Raises:
            EnvironmentLoadError: the environment could not be loaded, or the worker has another version of the protocol.
            WorkerLost: the worker ended first.
            WaitTimeout: loading took longer than `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._loading)
        except WorkerLost as exc:
            raise WorkerLost(f"{exc}.{self.last_lines()}") from exc
        except TimeoutError as exc:
            raise WaitTimeout(
                f"environment {self.name!r} was not loaded after {timeout_s:.0f} s; raise env_start_timeout_s if "
                f"its load_environment needs longer.{self.last_lines()}"
            ) from exc

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        """Run a group. Cancelling the caller cancels the group.

        Raises:
            RolloutFailed: the worker reports a failure, or its answer is invalid.
            WorkerLost: the worker ended first.
        """
        done = await self._calls.call(RunGroupOrder(call_id=self._calls.next_id(), request=request), GroupDone)
        if fault := find_fault(done.rollouts, request):
            raise RolloutFailed(
                f"the worker of environment {self.name!r} (pid {self.pid}): its answer for group {request.group_id} (example "
                f"{request.example_id}) {fault}; it is not used",
                kind="AnswerRefused",
            )
        return done.rollouts

    async def example(self, *, split: Split, example_id: int) -> Example:
        """Return an example of the data. Raises as `run_group`."""
        order = AskExample(call_id=self._calls.next_id(), env=self.name, split=split, example_id=example_id)
        return (await self._calls.call(order, ExampleFound)).example

    async def ended(self) -> str:
        """Wait until the process has ended; return how it ended, as the end of a sentence.

        This method returns before the calls in flight fail. So the pool cannot send a retry of such a call to this worker.
        """
        await self._ended.wait()
        return self._describe_end()

    def status(self, *, num_restarts: int) -> WorkerStatus:
        """Return the state of the worker, by its last pulse. The pool's slot counts `num_restarts`."""
        return WorkerStatus(
            env=self.name,
            pid=self.pid,
            is_alive=self._process.returncode is None,
            num_pending=self.num_pending,
            num_generating=self.pulses.newest.num_generating,
            num_scoring=self.pulses.newest.num_scoring,
            scoring_for_s=self.pulses.scoring_for_s(),
            blocked_for_s=self.pulses.blocked_for_s(),
            num_restarts=num_restarts,
        )

    def end(self, cause: str = "", *, with_stacks: bool = False) -> None:
        """End the worker and every process that it started.

        Args:
            cause: why, as the end of a sentence; `ended` returns it. If it is empty, an earlier cause stays.
            with_stacks: let the worker first write its stacks to its log.
        """
        is_ending, self._end_cause = bool(self._end_cause), cause or self._end_cause
        if not with_stacks:
            self._end_session(self.pid)
        elif not is_ending and self._process.returncode is None:
            self._process.send_signal(STACKS_SIGNAL)
            asyncio.get_running_loop().call_later(STACKS_WITHIN_S, self.end)

    async def aclose(self, *, timeout_s: float) -> None:
        """Give the worker `timeout_s` to end by itself, then end it and every process that it started. May be called again."""
        await self._channel.aclose()
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            self.end()
        await self._watching

    def last_lines(self) -> str:
        """Return the end of the worker's output, for an error message; empty when it wrote nothing."""
        return self._log.last_lines(since=self._log_offset)

    def _describe_end(self) -> str:
        """Return how the process ended, or why the pool ended it, as the end of a sentence."""
        exit_code, description = self._process.returncode, describe_exit(self._process.returncode)
        return self._end_cause or (f"was {description}" if exit_code is not None and exit_code < 0 else description)

    async def _watch(self) -> None:
        """Wait for the process to exit, then fail every pending call."""
        listening = asyncio.create_task(self._listen(), name=f"{self.name}-listen")
        exiting = asyncio.create_task(self._process.wait(), name=f"{self.name}-exit")
        both: set[asyncio.Task[Any]] = {listening, exiting}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(both, timeout=_EXIT_TIMEOUT_S)
        listening.cancel()  # still running only when a process that the worker started has the other end of the channel
        self.end()
        await exiting
        await self._channel.aclose()
        if self._directory is not None:
            await asyncio.to_thread(self._directory.remove)  # in a thread, because removing containers may take long
        self._ended.set()
        loss = f"the worker of environment {self.name!r} (pid {self.pid}) {self._describe_end()}"
        self._calls.fail_all(loss)
        if not self._loading.done():
            self._loading.set_exception(WorkerLost(loss))
        self._loading.exception()  # marks the exception as retrieved, in case nobody waited for the load

    async def _listen(self) -> None:
        """Receive the worker's messages until the channel ends; end a worker that sends an invalid one."""
        try:
            hello = await self._channel.receive(WorkerHello)
            if hello is None:
                return
            if hello.protocol != PROTOCOL:
                problem = (
                    f"runs {printable(hello.worker)}, which speaks version {hello.protocol} of the worker's protocol, "
                    f"and this trivet speaks version {PROTOCOL}; update its virtual environment with: "
                    f"uv run trivet env install {self._env_id}"
                )
                self._loading.set_exception(EnvironmentLoadError(f"the worker of environment {self.name!r} {problem}"))
                self.end(problem)
                return
            while (answer := await self._channel.receive(WorkerAnswer)) is not None:
                match answer.body:
                    case Pulse() as pulse:
                        self.pulses.receive(pulse)
                    case EnvironmentLoaded() | EnvironmentLoadFailed() if self._loading.done():
                        raise MessageRefused("a second answer to the order to load the environment")
                    case EnvironmentLoaded() as loaded:
                        self.load_event = EnvLoad(
                            env=self.name,
                            package=loaded.package,
                            api=loaded.api,
                            verifiers=hello.verifiers,
                            python=hello.python,
                            worker=hello.worker,
                        )
                        self.pulses.expect()
                        self._loading.set_result(loaded.info)
                    case EnvironmentLoadFailed(message=message):
                        self._loading.set_exception(EnvironmentLoadError(message))
                    case GroupDone() | ExampleFound() | CallFailed() as call_answer:
                        self._calls.resolve(call_answer)
        except MessageRefused as exc:
            self.end(f"sent what is not an answer: {exc}")


class PulseMonitor:
    """Keeps the newest pulse of one worker and its time, and computes how long the worker's event loop has been blocked."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.newest = Pulse(loop_age_s=0.0, num_generating=0, num_scoring=0, scoring_for_s=0.0, lags_s=[])
        self._clock = clock
        self._silent_since: float | None = None
        """Monotonic seconds. None while the worker loads its environment, and need not send pulses."""
        self._lags: list[float] = []

    def receive(self, pulse: Pulse) -> None:
        """Record a pulse. Raises MessageRefused for a pulse whose times are not finite numbers."""
        if not all(map(math.isfinite, (pulse.loop_age_s, pulse.scoring_for_s, *pulse.lags_s))):
            raise MessageRefused("a pulse whose times are no numbers")
        self.newest = pulse
        self._lags.extend(pulse.lags_s)
        self.expect()

    def expect(self) -> None:
        """Count the worker's silence from now: it has sent a pulse or loaded, or the pool was suspended and could not receive."""
        self._silent_since = self._clock()

    def scoring_for_s(self) -> float:
        """Return the age of the oldest group that is being scored, in seconds."""
        return self.newest.scoring_for_s + self._silent_for_s() if self.newest.num_scoring else 0.0

    def blocked_for_s(self) -> float:
        """Return for how many seconds the worker's event loop has run nothing; 0 if it is not blocked, and while it loads."""
        silent_s, loop_age_s = self._silent_for_s(), self.newest.loop_age_s
        return loop_age_s + silent_s if max(silent_s, loop_age_s) > _BLOCKED_AFTER_S else 0.0

    def take_lags(self) -> list[float]:
        """Return by how many seconds the worker's event loop was late, for each measurement since the last call."""
        lags, self._lags = self._lags, []
        return lags

    def _silent_for_s(self) -> float:
        return 0.0 if self._silent_since is None else self._clock() - self._silent_since
