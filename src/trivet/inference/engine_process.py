"""Prepares the API server's process, which starts the engine, and ends the engine's process together with it.

On the CPU the engine, with its worker, is forked from the API server, so vLLM is imported once: the server is ready after about
20 s. By default vLLM starts a new engine process and then a new worker process. Each imports everything again, and the server is
ready after 59 s. vLLM does so to give the worker the variables that OpenMP reads at its start. Here the API server restarts itself
with these variables (`restart_with_environment`), and the forked engine has them too.
"""

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trivet.errors import InferenceError
from trivet.process.lifetime import die_with_parent
from trivet.process.signals import ignore_stacks_signal, show_stacks_on_signal
from trivet.process.sockets import ServerShard

_EXIT_TIMEOUT_S = 5.0
"""Longest wait for one child process, which has been ended already and only has to exit."""


def restart_with_environment(environment: Mapping[str, str]) -> None:
    """Restart this program in this process with `environment` added. Return only if all of it is set already.

    A restart is needed because the system reads LD_PRELOAD, and OpenMP its variables, before Python runs.
    """
    if all(os.environ.get(name) == value for name, value in environment.items()):
        return
    sys.stdout.flush()
    sys.stderr.flush()
    ignore_stacks_signal()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **environment})


@contextmanager
def skip_unused_imports() -> Iterator[None]:
    """Let vLLM, whose import begins in the block, leave out what a server never uses that compiles nothing.

    For other servers the block changes nothing. vLLM tries to import these modules and goes on without them. Their imports take
    1.3 s of CPU time.
    """
    unused: list[str] = []
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        import torch  # imported late, because torch takes long to import

        # The decorator would import the compiler, and compile nothing afterwards.
        torch.compile = lambda model=None, **_: model if model is not None else lambda function: function
        unused = ["ray", "torch._inductor.lowering"]
    sys.modules.update(dict.fromkeys(unused))  # type: ignore[arg-type]  None makes an import fail
    try:
        yield
    finally:
        for name in unused:
            del sys.modules[name]


def end_with_api_server() -> None:
    """Tie this process, the engine's, to the API server that started it: it ends too, even when SIGKILL ends the API server."""
    die_with_parent()
    show_stacks_on_signal()
    api_server = multiprocessing.parent_process()
    if api_server is not None and os.getppid() != api_server.pid:  # the API server ended before `die_with_parent`
        os.kill(os.getpid(), signal.SIGKILL)


def await_children() -> None:
    """Wait for the exit of the child processes, which have been ended already.

    Until they exit they have the server's port open, because they were forked with it. When vLLM's HTTP server ends, it looks up
    the process that has the port, and fails if that process is exiting.
    """
    for child in multiprocessing.active_children():
        child.join(_EXIT_TIMEOUT_S)


def open_rank_store(shard: ServerShard) -> Any:
    """Open torch's TCP store on the first shard's node. The ranks of all shards find each other through it.

    A server over several nodes has one shard per node, started as vLLM does it with `--nnodes`, `--node-rank` and `--headless`. The
    first shard is a server like any other, whose engine also uses the ranks of the other nodes. Every other shard starts the ranks
    of its node and answers no requests. The store closes when the returned object is deleted.

    Raises:
        InferenceError: another program has the port.
    """
    from trivet.transfer.group import open_store  # imported late, because torch takes long to import

    try:
        return open_store(shard.host, shard.port)
    except OSError as exc:
        raise InferenceError(f"the ranks of this server cannot meet at {shard.host}:{shard.port}: {exc.strerror}") from exc


def import_model_class(model: Path) -> None:
    """Register the class of the model in `model` with vLLM, already imported.

    vLLM would inspect an unregistered class in a new process, to keep CUDA out of this process. That new process would import all
    of vLLM once more. The engine is forked from this process and needs the class anyway.
    """
    from trivet.inference.vllm_names import ModelRegistry

    try:
        architectures = json.loads((model / "config.json").read_bytes()).get("architectures") or []
    except (OSError, ValueError):
        return  # `model` is no local directory or has no valid config.json; vLLM reports it
    for name in architectures:
        if (registered := ModelRegistry.models.get(name)) is not None:
            ModelRegistry.register_model(name, registered.load_model_cls())
