"""One worker as its pool sees it: started, asked, listened to, ended. Knows nothing of other workers or of restarts."""

import asyncio
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trivet.environments.settings import worker_environment
from trivet.environments.workers.channel import Channel
from trivet.errors import EnvironmentLoadError, MessageRefused, RolloutFailed, WaitTimeout, WorkerLost
from trivet.exits import describe_exit
from trivet.lifetime import end_session, module_command, tied_command
from trivet.stacks import STACKS_SIGNAL, STACKS_WITHIN_S
from trivet.wire.codec import decode
from trivet.wire.groups import EnvironmentInfo, GroupRequest, Split
from trivet.wire.rollouts import Rollout
from trivet.wire.status import WorkerStatus
from trivet.wire.workers import (
    PULSE_INTERVAL_S,
    AskPrompt,
    CallFailed,
    Cancel,
    EnvironmentLoaded,
    EnvironmentLoadFailed,
    GroupDone,
    HostSettings,
    LoadEnvironment,
    PromptFound,
    Pulse,
    RunGroupOrder,
    WorkerAnswer,
    WorkerOrder,
)

_PULSE_BYTES = 65_536
_LATE_S = 3 * PULSE_INTERVAL_S
"""Without a pulse, or with a loop that did not turn, for longer than this a worker counts as blocked."""
_EXIT_TIMEOUT_S = 10.0
"""From the end of the channel to the end of the process, or the other way round."""
_LOG_TAIL_BYTES = 8_192
_LOG_TAIL_LINES = 20
_MAX_LAGS = 36_000


class WorkerProcess:
    """
    >>> worker = await WorkerProcess.start(settings, log=path)
    >>> info = await worker.loaded(timeout_s=600)
    >>> rollouts = await worker.run_group(request)
    >>> await worker.aclose(timeout_s=5)
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        channel: Channel,
        pulses: socket.socket,
        *,
        name: str,
        log: Path,
        log_offset: int,
        clock: Callable[[], float],
    ) -> None:
        self.name = name
        """The environment's."""
        self._process = process
        self._channel = channel
        self._pulses = pulses
        self._log = log
        self._log_offset = log_offset
        self._clock = clock
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._next_call = 0
        self._info: asyncio.Future[EnvironmentInfo] = asyncio.get_running_loop().create_future()
        self._pulse: Pulse | None = None
        self._pulse_at = 0.0
        self._lags: list[float] = []
        self._cause = ""
        self._ended = asyncio.Event()
        self._watching = asyncio.create_task(self._watch(), name=f"{name}-watch")
        asyncio.get_running_loop().add_reader(pulses.fileno(), self._on_pulse)

    @classmethod
    async def start(cls, settings: HostSettings, *, log: Path, clock: Callable[[], float] = time.monotonic) -> "WorkerProcess":
        """
        Args:
            log: its output is appended to this file.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        pulses, their_pulses = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pulses.setblocking(False)
        with theirs, their_pulses, log.open("ab") as output:
            descriptors = ("--channel", str(theirs.fileno()), "--pulse", str(their_pulses.fileno()))
            process = await asyncio.create_subprocess_exec(
                *tied_command(module_command("trivet.environments.workers.main", *descriptors)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(), their_pulses.fileno()),
                env=worker_environment(os.environ, settings=[settings]),
                start_new_session=True,
            )
            log_offset = output.tell()
        channel = await Channel.open(ours)
        worker = cls(process, channel, pulses, name=settings.name, log=log, log_offset=log_offset, clock=clock)
        channel.post(WorkerOrder(body=LoadEnvironment(settings=settings)))
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def num_pending(self) -> int:
        return len(self._calls)

    async def loaded(self, *, timeout_s: float) -> EnvironmentInfo:
        """
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
        """Cancelling the caller cancels the group.

        Raises:
            RolloutFailed: as the worker says.
            WorkerLost: it ended first.
        """
        return (await self._call(lambda call_id: RunGroupOrder(call_id=call_id, request=request))).rollouts

    async def prompt(self, *, split: Split, example_id: int) -> list[dict[str, Any]]:
        """
        Raises:
            WorkerLost: it ended first.
        """
        return (await self._call(lambda call_id: AskPrompt(call_id=call_id, split=split, example_id=example_id))).messages

    async def ended(self) -> str:
        """Waits until the process is gone; how it ended, in words."""
        await self._ended.wait()
        return self._describe_end()

    def blocked_for_s(self) -> float:
        """How long its event loop has not turned, as far as one can tell; 0 while it is well, and while it loads."""
        if self._pulse is None:
            return 0.0
        silent_s = self._clock() - self._pulse_at
        stuck_s = self._pulse.loop_age_s + silent_s
        return stuck_s if silent_s > _LATE_S or self._pulse.loop_age_s > _LATE_S else 0.0

    def forgive(self) -> None:
        """The pool itself did not run for a while, so silence says nothing."""
        self._pulse_at = self._clock()

    def status(self, *, num_restarts: int) -> WorkerStatus:
        pulse = self._pulse
        silent_s = self._clock() - self._pulse_at
        return WorkerStatus(
            env=self.name,
            pid=self.pid,
            is_alive=self._process.returncode is None,
            num_pending=self.num_pending,
            num_generating=pulse.num_generating if pulse else 0,
            num_scoring=pulse.num_scoring if pulse else 0,
            scoring_for_s=pulse.scoring_for_s + silent_s if pulse and pulse.num_scoring else 0.0,
            blocked_for_s=self.blocked_for_s(),
            num_restarts=num_restarts,
        )

    def take_lags(self) -> list[float]:
        """Seconds that its event loop was late, since the last call."""
        lags, self._lags = self._lags, []
        return lags

    async def kill(self, cause: str) -> None:
        """End it at once, after it has written where it is.

        Args:
            cause: in words, for whoever asks how it ended.
        """
        self._cause = cause
        if self._process.returncode is None:
            self._process.send_signal(STACKS_SIGNAL)
            await asyncio.sleep(STACKS_WITHIN_S)
        end_session(self.pid)

    async def aclose(self, *, timeout_s: float) -> None:
        """Let it finish by itself, then end it and everything that it left. May be called again."""
        await self._channel.aclose()
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            end_session(self.pid)
        await self._watching

    def last_lines(self) -> str:
        """The end of its output, for an error message; empty when it wrote nothing."""
        with self._log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_offset, size - _LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        shown = lines[-_LOG_TAIL_LINES:]
        return "\n  ".join([f" Last lines of {self._log}:", *shown]) if shown else ""

    async def _call(self, make: Callable[[int], RunGroupOrder | AskPrompt]) -> Any:
        if self._ended.is_set():
            raise WorkerLost(self._lost())
        call_id, self._next_call = self._next_call, self._next_call + 1
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._channel.post(WorkerOrder(body=make(call_id)))
            return await future
        except asyncio.CancelledError:
            self._channel.post(WorkerOrder(body=Cancel(call_id=call_id)))
            raise
        finally:
            self._calls.pop(call_id, None)

    async def _watch(self) -> None:
        """Until the process is gone; then tells every caller."""
        listening = asyncio.create_task(self._listen(), name=f"{self.name}-listen")
        exiting = asyncio.create_task(self._process.wait(), name=f"{self.name}-exit")
        both = {listening, exiting}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(both, timeout=_EXIT_TIMEOUT_S)
        listening.cancel()  # still open only when something that it left behind holds the other end
        end_session(self.pid)
        await exiting
        await self._channel.aclose()
        self._stop_pulses()
        self._ended.set()
        for future in (self._info, *self._calls.values()):
            if not future.done():
                future.set_exception(WorkerLost(self._lost()))
        self._info.exception()  # nobody may have waited for it

    async def _listen(self) -> None:
        try:
            while (answer := await self._channel.receive(WorkerAnswer)) is not None:
                self._take(answer)
        except MessageRefused as exc:
            self._cause = f"sent what is not an answer: {exc}"
            end_session(self.pid)

    def _take(self, answer: WorkerAnswer) -> None:
        match answer.body:
            case EnvironmentLoaded(info=info):
                self._info.set_result(info)
            case EnvironmentLoadFailed(message=message):
                self._info.set_exception(EnvironmentLoadError(message))
            case GroupDone() | PromptFound() as done:
                self._resolve(done.call_id, done)
            case CallFailed(call_id=call_id, kind=kind, message=message):
                self._resolve(call_id, RolloutFailed(message, kind=kind))

    def _resolve(self, call_id: int, result: Any) -> None:
        future = self._calls.get(call_id)
        if future is None or future.done():
            return  # its caller was cancelled
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)

    def _on_pulse(self) -> None:
        try:
            data = self._pulses.recv(_PULSE_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._stop_pulses()
            return
        self._pulse = decode(data, Pulse)
        self._pulse_at = self._clock()
        self._lags.extend(self._pulse.lags_s[: _MAX_LAGS - len(self._lags)])

    def _stop_pulses(self) -> None:
        if self._pulses.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._pulses.fileno())
            self._pulses.close()

    def _lost(self) -> str:
        return f"the worker of environment {self.name!r} (pid {self.pid}) {self._describe_end()}"

    def _describe_end(self) -> str:
        code = self._process.returncode
        verb = "is " if code is None else "was " if code < 0 else ""
        return self._cause or verb + describe_exit(code)
