"""Runs one environment in a worker process: many groups at a time on its own event loop.

`workers.client` starts it as `python -m trivet.environments.workers.main --channel FD` and ties it to the pool's process. The
interpreter may be one of a virtual environment that has only the distribution `trivet-worker`. So this module, and every module
that it imports, may use msgspec and numpy, but no other dependency of trivet. The first message has the release of the worker. A
thread sends the answers and the pulses, so pulses go on while the event loop is blocked. The process ends when the pool closes the
channel. With `--check MODULE …` it only imports modules, for `packages.discovery`.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import platform
import queue
import resource
import selectors
import socket
import sys
import threading
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from trivet.environments.apis.groups import Stage, StageBoard
from trivet.environments.workers.channel import Channel, pack_message
from trivet.errors import EnvironmentLoadError, MessageRefused, RolloutFailed
from trivet.process.event_loop import LoopLag, show_tasks_on_signal
from trivet.process.imports import importing, quiet_noisy_loggers
from trivet.process.lifetime import tie_forks
from trivet.process.signals import show_stacks_on_signal
from trivet.shown_text import printable
from trivet.wire.workers import (
    PROTOCOL,
    PULSE_INTERVAL_S,
    AskExample,
    CallFailed,
    Cancel,
    EnvironmentLoaded,
    EnvironmentLoadFailed,
    ExampleFound,
    GroupDone,
    LoadEnvironment,
    Pulse,
    RunGroupOrder,
    WorkerAnswer,
    WorkerHello,
    WorkerOrder,
)

if TYPE_CHECKING:
    from trivet.environments.apis.load import EnvironmentHost

logger = logging.getLogger(__name__)

_MAX_PULSE_LAGS = 100
"""The most measurements of the event loop's lag in one pulse. Ten are made a second; older measurements are dropped."""
_SEND_TIMEOUT_S = 3600.0
"""Longest time for a message to be sent. The end of the pool's process is noticed at once; this limit is for a suspended pool."""
_MAX_OPEN_FILES = 16_384
"""The most open files of a worker and of each process that it starts. A rollout in flight has one or two connections. A leak of one
file per group reaches the limit within a day. Then the worker's groups fail, and the machine's file table does not overflow."""
_OOM_SCORE = "500"
"""Added to the kernel's out-of-memory score, from 0 to 1000. When the machine has no memory left, the kernel then ends a worker,
which is restarted, and not the trainer."""
_DISTRIBUTIONS = ("trivet-worker", "trivet")
"""Distributions with a worker's code: environments' virtual environments have the first, trivet's interpreter the second."""


class Outbox:
    """Sends answers, and a pulse about once a second, from a thread of its own. So pulses go on while the event loop is blocked."""

    def __init__(self, sock: socket.socket, *, lag: LoopLag, stages: StageBoard) -> None:
        """Begin to send over `sock`, from which the event loop reads meanwhile."""
        self._sock = sock.dup()
        self._sock.settimeout(_SEND_TIMEOUT_S)  # makes Python wait, although the event loop has made the socket non-blocking
        self._lag = lag
        self._stages = stages
        self._messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._send, name="outbox", daemon=True).start()

    def fileno(self) -> int:
        """Return the file descriptor of the socket over which messages are sent."""
        return self._sock.fileno()

    def put(self, answer: WorkerAnswer) -> None:
        """Queue `answer` for sending. Raises MessageRefused when it is too large."""
        self._messages.put(pack_message(answer))

    def _send(self) -> None:
        """Send messages and pulses until the socket fails, because the pool's process has ended."""
        next_pulse = time.monotonic()
        with contextlib.suppress(OSError):
            while True:
                try:
                    data = self._messages.get(timeout=max(0.0, next_pulse - time.monotonic()))
                except queue.Empty:
                    pulse = Pulse(
                        loop_age_s=time.monotonic() - self._lag.last_turn,
                        num_generating=self._stages.num_rollouts(Stage.GENERATING),
                        num_scoring=self._stages.num_rollouts(Stage.SCORING),
                        scoring_for_s=self._stages.scoring_for_s(),
                        lags_s=self._lag.take()[-_MAX_PULSE_LAGS:],
                    )
                    data = pack_message(WorkerAnswer(body=pulse))
                    next_pulse = time.monotonic() + PULSE_INTERVAL_S
                self._sock.sendall(data)


class Worker:
    """Carries out the orders of the pool until the pool closes the channel."""

    def __init__(self, host: "EnvironmentHost", outbox: Outbox, *, lag: LoopLag) -> None:
        self._host = host
        self._outbox = outbox
        self._lag = lag
        self._running: dict[int, asyncio.Task[None]] = {}
        self._pid = os.getpid()

    async def serve(self, channel: Channel) -> None:
        """Answer every order that comes over `channel`, each in a task of its own, until the pool closes it."""
        show_tasks_on_signal()
        async with asyncio.TaskGroup() as background_tasks:
            measuring = background_tasks.create_task(self._lag.run(), name="loop-lag")
            async with self._host.serving(), asyncio.TaskGroup() as calls:
                while (order := await channel.receive(WorkerOrder)) is not None:
                    match order.body:
                        case RunGroupOrder() | AskExample() as call:
                            task = calls.create_task(self._answer(call), name=f"call-{call.call_id}")
                            self._running[call.call_id] = task
                            task.add_done_callback(lambda _, call_id=call.call_id: self._running.pop(call_id))
                        case Cancel(call_id=call_id):
                            if (task := self._running.get(call_id)) is not None:
                                task.cancel()
                        case LoadEnvironment():
                            raise MessageRefused("a second environment was sent to a worker that has one")
                self._exit_if_forked()
                for task in self._running.values():
                    task.cancel()
            measuring.cancel()

    async def _answer(self, call: RunGroupOrder | AskExample) -> None:
        """Carry out a call of the pool and send the answer; after an error send its failure."""
        try:
            if isinstance(call, AskExample):
                example = self._host.example(split=call.split, example_id=call.example_id)
                answer = ExampleFound(call_id=call.call_id, example=example)
            else:
                answer = GroupDone(call_id=call.call_id, rollouts=await self._host.run_group(call.request))
        except (Exception, SystemExit, KeyboardInterrupt) as exc:  # an error of the user's code fails only its own group
            if not isinstance(exc, RolloutFailed):
                logger.exception("call failed")  # each line begins with the name of the environment
            answer = _make_failure(call.call_id, exc)
        self._exit_if_forked()
        try:
            self._outbox.put(WorkerAnswer(body=answer))
        except MessageRefused as exc:
            self._outbox.put(WorkerAnswer(body=_make_failure(call.call_id, exc)))

    def _exit_if_forked(self) -> None:
        """End this process if user code has forked it and then returned into the worker's code. The parent process goes on."""
        if os.getpid() != self._pid:
            os._exit(0)


def _make_failure(call_id: int, error: BaseException) -> CallFailed:
    if not isinstance(error, RolloutFailed):
        kind = type(error).__name__
        error = RolloutFailed(f"{kind}: {error}", kind=kind)
    return CallFailed(
        call_id=call_id,
        kind=printable(error.kind),
        message=printable(str(error)),
        is_infrastructure=error.is_infrastructure,
    )


def make_hello() -> WorkerHello:
    """Return the first message to the pool: the versions of the worker, of Python and of verifiers."""
    worker = next((f"{name} {version}" for name in _DISTRIBUTIONS if (version := installed_version(name))), "")
    return WorkerHello(
        protocol=PROTOCOL, worker=worker, python=platform.python_version(), verifiers=installed_version("verifiers")
    )


def installed_version(distribution: str) -> str:
    """Return the version of an installed distribution, empty when there is none."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def limit_resources() -> None:
    """Limit the open files of this process and its children, and make the kernel end them first when no memory is left.

    Memory is limited by the pool, from outside (`workers.limits`). The kernel's own limits would count address space, and libraries
    reserve many times the address space that they use.
    """
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MAX_OPEN_FILES if hard_limit == resource.RLIM_INFINITY else min(hard_limit, _MAX_OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    with contextlib.suppress(OSError):  # a container may forbid it; the kernel's own choice then stays
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)


def run(sock: socket.socket, selector: selectors.BaseSelector, runner: asyncio.Runner) -> int:
    """Send the release of the worker, load the environment that the first order names, and serve it; return the exit code.

    The environment is loaded outside of `runner`'s event loop, whose selector is `selector`.
    """
    channel = runner.run(Channel.open(sock))
    channel.post(make_hello())
    order = runner.run(channel.receive(WorkerOrder))
    if order is None:
        return 0
    if not isinstance(order.body, LoadEnvironment):
        raise MessageRefused(f"the first order to a worker is to load an environment, not {type(order.body).__name__}")
    settings = order.body.settings
    logging.basicConfig(
        stream=sys.stdout,
        level=settings.log_level.upper(),
        format=f"%(asctime)s {settings.name.replace('%', '%%')} %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
    )
    quiet_noisy_loggers()
    stages = StageBoard()
    with importing():
        from trivet.environments.apis.load import load_host, traceback_tail
    try:
        host = load_host(settings, environ=os.environ, stages=stages)
    except EnvironmentLoadError as exc:
        message = f"{exc}{traceback_tail(exc, settings.args)}"
        print(message, file=sys.stderr)  # noqa: T201
        channel.post(WorkerAnswer(body=EnvironmentLoadFailed(message=message)))
        runner.run(channel.aclose())
        return exc.exit_code
    logger.info("environment loaded env=%s examples=%s pid=%s", settings.name, host.info.num_examples, os.getpid())
    package = installed_version(settings.env_id.rpartition("/")[2])
    lag = LoopLag()
    outbox = Outbox(sock, lag=lag, stages=stages)
    outbox.put(WorkerAnswer(body=EnvironmentLoaded(info=host.info, api=host.api, package=package)))

    def detach_child() -> None:
        """Keep a child that the environment forks from sending messages in the worker's name.

        In the child the worker's sockets are replaced by /dev/null. They are not closed, because that would remove them from the
        poll set, which both processes share.
        """
        null_descriptor = os.open(os.devnull, os.O_RDWR)
        for descriptor in {sock.fileno(), outbox.fileno(), *(key.fd for key in selector.get_map().values())}:
            os.dup2(null_descriptor, descriptor, inheritable=False)
        os.close(null_descriptor)

    os.register_at_fork(after_in_child=detach_child)
    runner.run(Worker(host, outbox, lag=lag).serve(channel))
    return 0


def check_modules(modules: Sequence[str]) -> None:
    """Import modules of environments, print a line of JSON for each, and end the process. `load_environment` is not called.

    A line has the module's name and its problem. It is printed at once, so the module that ends the process is the one without a
    line.
    """
    from trivet.environments.apis.load import find_problem

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the modules' own output must not mix with the answers
    for module in modules:
        print(json.dumps([module, find_problem(module)]), file=answers, flush=True)
    os._exit(0)  # a normal exit would wait for threads that the environments have started


def main() -> int:
    """Run a worker on the socket with the given file descriptor, or with `--check` only import modules; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--channel", type=int)
    parser.add_argument("--check", nargs="+", metavar="MODULE")
    arguments = parser.parse_args()
    if arguments.check:
        check_modules(arguments.check)
    sock = socket.socket(fileno=arguments.channel)
    sock.set_inheritable(False)
    show_stacks_on_signal()
    limit_resources()
    tie_forks()  # processes that the environment forks, for example to score, must end when the worker is killed
    selector = selectors.DefaultSelector()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        return run(sock, selector, runner)


if __name__ == "__main__":
    raise SystemExit(main())
