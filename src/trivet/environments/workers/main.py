"""Runs one environment in a worker process: many groups at a time on its own event loop.

Started by `workers.client` as `python -m trivet.environments.workers.main --channel FD`, tied to the pool's process. The
interpreter may be one that has the distribution `trivet-worker` alone, so this module and all that it imports need msgspec and
numpy, and nothing else of trivet's. The first message says which release this is. A thread sends what goes out: the answers, and
pulses, which go on while the event loop is blocked. The process ends when the pool closes the channel. With `--check MODULE …` it
only imports modules, for `packages.discovery`.
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
    AskPrompt,
    CallFailed,
    Cancel,
    EnvironmentLoaded,
    EnvironmentLoadFailed,
    GroupDone,
    LoadEnvironment,
    PromptFound,
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
"""Measurements of lag in one pulse. Ten are made a second; after a longer block the older ones are dropped."""
_SEND_TIMEOUT_S = 3600.0
"""A pool that reads nothing for so long is gone. Its end is noticed at once; this bounds the wait for one that is stopped."""
_MAX_OPEN_FILES = 16_384
"""Open files of a worker and of each process that it starts. A rollout in flight has a connection or two; a leak of one per group
reaches this within a day, and then costs the worker its groups and not the machine its file table."""
_OOM_SCORE = "500"
"""Added to the badness of the process, from 0 to 1000: when the machine runs out of memory the kernel ends a worker, which is
restarted, and not the trainer."""
_DISTRIBUTIONS = ("trivet-worker", "trivet")
"""Distributions with a worker's code: environments' virtual environments have the first, trivet's interpreter the second."""


class Outbox:
    """Sends the worker's answers, and a pulse about once a second whatever its event loop does, from a thread of its own."""

    def __init__(self, sock: socket.socket, *, lag: LoopLag, stages: StageBoard) -> None:
        """Begin to send over `sock`, from which the event loop reads meanwhile."""
        self._sock = sock.dup()
        self._sock.settimeout(_SEND_TIMEOUT_S)  # has Python wait for a socket that the event loop has made non-blocking
        self._lag = lag
        self._stages = stages
        self._messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._send, name="outbox", daemon=True).start()

    def fileno(self) -> int:
        """Return the descriptor that it sends over."""
        return self._sock.fileno()

    def put(self, answer: WorkerAnswer) -> None:
        """Send `answer`; raises MessageRefused when it is too large."""
        self._messages.put(pack_message(answer))

    def _send(self) -> None:
        """Send until the pool is gone."""
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
    """Carries out the orders of the pool until the channel ends."""

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
                        case RunGroupOrder() | AskPrompt() as asked:
                            task = calls.create_task(self._answer(asked), name=f"call-{asked.call_id}")
                            self._running[asked.call_id] = task
                            task.add_done_callback(lambda _, call_id=asked.call_id: self._running.pop(call_id))
                        case Cancel(call_id=call_id):
                            if (task := self._running.get(call_id)) is not None:
                                task.cancel()
                        case LoadEnvironment():
                            raise MessageRefused("a second environment was sent to a worker that has one")
                self._leave_if_forked()
                for task in self._running.values():
                    task.cancel()
            measuring.cancel()

    async def _answer(self, asked: RunGroupOrder | AskPrompt) -> None:
        try:
            if isinstance(asked, AskPrompt):
                messages = self._host.prompt(split=asked.split, example_id=asked.example_id)
                answer = PromptFound(call_id=asked.call_id, messages=messages)
            else:
                answer = GroupDone(call_id=asked.call_id, rollouts=await self._host.run_group(asked.request))
        except (Exception, SystemExit, KeyboardInterrupt) as exc:  # an error of the user's code fails its own group alone
            if not isinstance(exc, RolloutFailed):
                logger.exception("call failed env=%s", self._host.name)
            answer = _failure(asked.call_id, exc)
        self._leave_if_forked()
        try:
            self._outbox.put(WorkerAnswer(body=answer))
        except MessageRefused as exc:
            self._outbox.put(WorkerAnswer(body=_failure(asked.call_id, exc)))

    def _leave_if_forked(self) -> None:
        """End this process if it is a child that user code forked and that returned from there: the parent does its work."""
        if os.getpid() != self._pid:
            os._exit(0)


def _failure(call_id: int, error: BaseException) -> CallFailed:
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
    """Return what this process is."""
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


def confine() -> None:
    """Limit the open files of this process and of what it starts, and offer it to the kernel first when memory runs out.

    The pool limits memory from outside (`workers.limits`): the kernel's limits count address space, of which libraries reserve many
    times what they use.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with contextlib.suppress(OSError):  # a container may forbid it, and the machine then chooses by itself
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)


def run(sock: socket.socket, selector: selectors.BaseSelector, runner: asyncio.Runner) -> int:
    """Say which release this is, load the environment that the first order names, and serve it; return the exit code.

    The event loop of `runner`, which listens with `selector`, stands still while the environment is loaded.
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

    def detach() -> None:
        """Keep a child that the environment forks from speaking for the worker.

        What it would speak over is replaced by /dev/null. It is not closed: that would take it out of the poll set, which both
        processes share.
        """
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in {sock.fileno(), outbox.fileno(), *(key.fd for key in selector.get_map().values())}:
            os.dup2(nowhere, descriptor, inheritable=False)
        os.close(nowhere)

    os.register_at_fork(after_in_child=detach)
    runner.run(Worker(host, outbox, lag=lag).serve(channel))
    return 0


def check_modules(modules: Sequence[str]) -> None:
    """Import modules of environments and print an answer for each, then end the process. No `load_environment` is called.

    An answer is printed at once: a module that ends the process is known by its missing answer.
    """
    from trivet.environments.apis.load import find_problem

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what the modules print is no answer
    for module in modules:
        print(json.dumps([module, find_problem(module)]), file=answers, flush=True)
    os._exit(0)  # does not wait for threads that the environments have started


def main() -> int:
    """Run the worker on the socket that the command line names, or only import modules; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--channel", type=int)
    parser.add_argument("--check", nargs="+", metavar="MODULE")
    arguments = parser.parse_args()
    if arguments.check:
        check_modules(arguments.check)
    sock = socket.socket(fileno=arguments.channel)
    sock.set_inheritable(False)
    show_stacks_on_signal()
    confine()
    tie_forks()  # a scoring pool that the environment forks must not outlive a worker that is killed
    selector = selectors.DefaultSelector()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        return run(sock, selector, runner)


if __name__ == "__main__":
    raise SystemExit(main())
