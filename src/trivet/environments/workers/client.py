"""One worker as its pool sees it: started, asked, listened to, ended. Knows nothing of other workers or of restarts.

It joins three parts: the operating system's process (`process`), the calls in flight (`calls`) and the pulses (`pulses`). A worker
that speaks another version of the protocol is refused, and one that sends what it must not is ended.
"""

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any

from trivet.environments.workers.calls import PendingCalls
from trivet.environments.workers.channel import Channel
from trivet.environments.workers.process import WorkerProcess
from trivet.environments.workers.pulses import PulseMonitor
from trivet.environments.workers.worker_log import WorkerLog
from trivet.errors import EnvironmentLoadError, MessageRefused, WaitTimeout, WorkerLost
from trivet.shown_text import printable
from trivet.wire.groups import EnvironmentInfo, GroupRequest, Split
from trivet.wire.rollouts import Rollout
from trivet.wire.status import WorkerStatus
from trivet.wire.workers import (
    PROTOCOL,
    AskPrompt,
    CallFailed,
    EnvironmentLoaded,
    EnvironmentLoadFailed,
    GroupDone,
    HostSettings,
    LoadEnvironment,
    PromptFound,
    RunGroupOrder,
    WorkerAnswer,
    WorkerHello,
    WorkerOrder,
)

_EXIT_TIMEOUT_S = 10.0
"""Longest time from the end of the channel to the end of the process, or the other way round."""


class WorkerClient:
    """A started worker with its process, its channel and its pulses."""

    def __init__(self, process: WorkerProcess, channel: Channel, pulses: PulseMonitor, *, settings: HostSettings) -> None:
        self.name = settings.name
        """The environment's."""
        self.pulses = pulses
        self.hello: WorkerHello | None = None
        """The worker's description of itself; None before it has sent one."""
        self.api = ""
        """Generation of the verifiers API that its environment uses; empty before it is loaded."""
        self.package = ""
        """Version of the environment's distribution; empty before it is loaded."""
        self._env_id = settings.env_id
        self._process = process
        self._channel = channel
        self._calls = PendingCalls(channel.post)
        self._info: asyncio.Future[EnvironmentInfo] = asyncio.get_running_loop().create_future()
        self._ended = asyncio.Event()
        self._watching = asyncio.create_task(self._watch(), name=f"{self.name}-watch")

    @classmethod
    async def start(
        cls, settings: HostSettings, *, log: WorkerLog, clock: Callable[[], float] = time.monotonic
    ) -> "WorkerClient":
        """Start a worker and have it load its environment.

        Args:
            log: the worker's output is appended to it.
        """
        pool_end, worker_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        pulses, worker_pulses = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with worker_end, worker_pulses:
            process = await WorkerProcess.start(settings, log=log, channel=worker_end, pulses=worker_pulses)
        channel = await Channel.open(pool_end)
        monitor = PulseMonitor(pulses, clock=clock, on_fault=process.end)
        worker = cls(process, channel, monitor, settings=settings)
        channel.post(WorkerOrder(body=LoadEnvironment(settings=settings)))
        return worker

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._process.pid

    @property
    def num_pending(self) -> int:
        """Calls that the worker has not answered."""
        return len(self._calls)

    async def loaded(self, *, timeout_s: float) -> EnvironmentInfo:
        """Wait for the worker to load its environment.

        Raises:
            EnvironmentLoadError: it could not load its environment.
            WorkerLost: it ended first.
            WaitTimeout: it took too long.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._info)
        except TimeoutError as exc:
            raise WaitTimeout(
                f"environment {self.name!r} was not loaded after {timeout_s:.0f} s; raise env_start_timeout_s if "
                f"its load_environment needs longer.{self.last_lines()}"
            ) from exc

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        """Run a group. Cancelling the caller cancels the group.

        Raises:
            RolloutFailed: as the worker says.
            WorkerLost: it ended first.
        """
        return (await self._calls.call(lambda call_id: RunGroupOrder(call_id=call_id, request=request), GroupDone)).rollouts

    async def prompt(self, *, split: Split, example_id: int) -> list[dict[str, Any]]:
        """Return the messages that an example starts with.

        Raises:
            RolloutFailed: as the worker says.
            WorkerLost: it ended first.
        """

        def make_order(call_id: int) -> AskPrompt:
            return AskPrompt(call_id=call_id, split=split, example_id=example_id)

        return (await self._calls.call(make_order, PromptFound)).messages

    async def ended(self) -> str:
        """Wait until the process is gone; return how it ended, as the end of a sentence.

        It returns before the calls in flight fail, so that the pool gives no retry of theirs to this worker.
        """
        await self._ended.wait()
        return self._process.describe_end()

    def status(self, *, num_restarts: int) -> WorkerStatus:
        """Return what the worker does now, as far as its last pulse tells.

        Args:
            num_restarts: of the worker's slot, which the worker itself does not know.
        """
        return WorkerStatus(
            env=self.name,
            pid=self.pid,
            is_alive=self._process.is_running,
            num_pending=self.num_pending,
            num_generating=self.pulses.num_generating,
            num_scoring=self.pulses.num_scoring,
            scoring_for_s=self.pulses.scoring_for_s(),
            blocked_for_s=self.pulses.blocked_for_s(),
            num_restarts=num_restarts,
        )

    def end(self, cause: str) -> None:
        """End the worker at once.

        Args:
            cause: why, as the end of a sentence; `ended` returns it.
        """
        self._process.end(cause)

    async def kill(self, cause: str) -> None:
        """End the worker after it has written its stacks to its log.

        Args:
            cause: why, as the end of a sentence; `ended` returns it.
        """
        await self._process.kill(cause)

    async def aclose(self, *, timeout_s: float) -> None:
        """Let the worker finish by itself for `timeout_s`, then end it and everything that it left. May be called again."""
        await self._channel.aclose()
        await self._process.wait_or_end(timeout_s=timeout_s)
        await self._watching

    def last_lines(self) -> str:
        """Return the end of the worker's output, for an error message; empty when it wrote nothing."""
        return self._process.last_lines()

    async def _watch(self) -> None:
        """Wait for the process to exit, then fail every pending call."""
        listening = asyncio.create_task(self._listen(), name=f"{self.name}-listen")
        exiting = asyncio.create_task(self._process.wait(), name=f"{self.name}-exit")
        both = {listening, exiting}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(both, timeout=_EXIT_TIMEOUT_S)
        listening.cancel()  # still open only when something that the worker left behind holds the other end
        self._process.end()
        await exiting
        await self._channel.aclose()
        self.pulses.close()
        await asyncio.to_thread(self._process.clean_up)  # in a thread, because an engine of containers may take its time
        self._ended.set()
        loss = f"the worker of environment {self.name!r} (pid {self.pid}) {self._process.describe_end()}"
        self._calls.fail_all(loss)
        if not self._info.done():
            self._info.set_exception(WorkerLost(loss))
        self._info.exception()  # marks it as retrieved: nobody may have waited for it

    async def _listen(self) -> None:
        try:
            self.hello = await self._channel.receive(WorkerHello)
            if self.hello is None or not self._speaks_our_protocol(self.hello):
                return
            while (answer := await self._channel.receive(WorkerAnswer)) is not None:
                self._handle(answer)
        except MessageRefused as exc:
            self._process.end(f"sent what is not an answer: {exc}")

    def _speaks_our_protocol(self, hello: WorkerHello) -> bool:
        if hello.protocol == PROTOCOL:
            return True
        problem = (
            f"runs {printable(hello.worker)}, which speaks version {hello.protocol} of the worker's protocol, and this trivet "
            f"speaks version {PROTOCOL}; update its virtual environment with: uv run trivet env install {self._env_id}"
        )
        self._info.set_exception(EnvironmentLoadError(f"the worker of environment {self.name!r} {problem}"))
        self._process.end(problem)
        return False

    def _handle(self, answer: WorkerAnswer) -> None:
        match answer.body:
            case EnvironmentLoaded() | EnvironmentLoadFailed() if self._info.done():
                raise MessageRefused("a second answer to the order to load the environment")
            case EnvironmentLoaded(info=info, api=api, package=package):
                self.api, self.package = printable(api), printable(package)
                self.pulses.expect()
                self._info.set_result(info)
            case EnvironmentLoadFailed(message=message):
                self._info.set_exception(EnvironmentLoadError(message))
            case GroupDone() | PromptFound() | CallFailed() as done:
                self._calls.resolve(done)
