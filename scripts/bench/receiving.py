"""Provides a process that acknowledges batches and throws them away, and free ports. Used by the benchmarks of the orchestrator."""

import multiprocessing
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.schema.shared import TransportConfig
from trivet.process.lifetime import die_with_parent
from trivet.secret import RunSecret
from trivet.transport.zeromq import ZmqReceiver
from trivet.wire.versions import Step

SECRET = RunSecret(bytes(32))
"""The secret of both processes. Its value does not affect the time."""


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def drain(config: TransportConfig, num_steps: int, ready: Connection) -> None:
    """Acknowledge every batch, in another process."""
    die_with_parent()
    receiver = ZmqReceiver(config, secret=SECRET, run=OrchestratorConfig().run)
    ready.send(True)
    for step in range(1, num_steps + 1):
        receiver.receive(Step(step))
    ready.poll(60)  # a receiver that closes at once may take the last acknowledgement with it
    receiver.close()


@contextmanager
def draining(config: TransportConfig, num_steps: int) -> Iterator[None]:
    """Run `drain` in a process for as long as the block runs."""
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=drain, args=(config, num_steps, there))
    child.start()
    try:
        if not here.poll(120):
            raise TimeoutError("the receiving process was not ready after 120 s")
        yield
        here.send(True)
        child.join(60)
    finally:
        if child.is_alive():
            child.terminate()
