"""Prepares the process that starts the engine, and ends the engine's process with it.

On the CPU the engine is forked from the API server, worker included, so vLLM is imported once. By default vLLM starts an engine
process and then a worker process, and each imports everything again: 59 s from start to ready, where this takes about 20. It does
so to give the worker OpenMP's environment; here the API server has that environment from its own start.
"""

import importlib.util
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trivet.errors import InferenceError
from trivet.process.lifetime import die_with_parent
from trivet.process.signals import ignore_stacks_signal, show_stacks_on_signal
from trivet.process.sockets import ServerShard, listen

_END_TIMEOUT_S = 5.0
"""For each child, which has been ended already and only has to exit."""


def restart_with(environment: Mapping[str, str]) -> None:
    """Restart this program in this process with `environment` added. Returns only if it is set already.

    Libraries are preloaded and OpenMP is set up before Python runs.
    """
    if all(os.environ.get(name) == value for name, value in environment.items()):
        return
    sys.stdout.flush()
    sys.stderr.flush()
    ignore_stacks_signal()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **environment})


def end_with_api_server() -> None:
    """Have the engine's process, which calls this, end with the process that started it, even by SIGKILL."""
    die_with_parent()
    show_stacks_on_signal()
    starter = multiprocessing.parent_process()
    if starter is not None and os.getppid() != starter.pid:
        os.kill(os.getpid(), signal.SIGKILL)


def await_children() -> None:
    """Wait until the processes that this one started and ended are gone, at most five seconds for each.

    Until then they have the server's port open, because they were forked with it. vLLM's HTTP server looks up at its end who has
    the port, and fails if that process is just exiting.
    """
    for child in multiprocessing.active_children():
        child.join(_END_TIMEOUT_S)


def count_physical_cores(*, cpus: Iterable[int] | None = None, root: Path = Path("/sys/devices/system/cpu")) -> int:
    """Count the physical cores of `cpus` (None: those this process may use). Two threads of one core share its arithmetic units."""
    cores = set()
    for cpu in os.sched_getaffinity(0) if cpus is None else cpus:
        try:
            cores.add((root / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text())
        except OSError:
            cores.add(str(cpu))
    return len(cores)


def preloaded(libraries: Iterable[str], *, present: str) -> str:
    """Return LD_PRELOAD with `libraries` ahead of those `present` in it."""
    already = present.split(":") if present else []
    return ":".join([*(library for library in libraries if library not in already), *already])


def find_openmp() -> list[str]:
    """Return the OpenMP runtime that torch ships. It must be loaded first, or vLLM's kernels load a second one.

    Source: vllm-project/vllm#27369.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return []
    package = Path(spec.origin).parent
    found = [*package.parent.glob("torch.libs/libgomp*.so*"), *package.glob("lib/libgomp*.so*")]
    return [str(found[0])] if found else []


def open_store(shard: ServerShard) -> Any:
    """Open the store in which the ranks of all shards find each other, at one address of the first shard's node.

    A server over several nodes is started as vLLM does it with `--nnodes`, `--node-rank` and `--headless`. Its first shard is a
    server like any other, whose engine also has the ranks of the other nodes. Every other shard starts the ranks of its node and
    answers no requests. The store closes when the returned object is deleted.

    Raises:
        InferenceError: another program has the port.
    """
    from torch._C._distributed_c10d import TCPStore  # here: torch takes long to import

    try:
        listener = listen(shard.host, shard.port)
    except OSError as exc:
        raise InferenceError(f"the ranks of this server cannot meet at {shard.host}:{shard.port}: {exc.strerror}") from exc
    return TCPStore(
        shard.host,
        shard.port,
        None,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
