"""Ties what verifiers starts on this machine to this process: harnesses, their setup, tool servers, and containers.

verifiers gives each program a session of its own and ends it when its rollout is over, and so with containers. A worker that is
killed cannot do that: the kernel ends its programs, and the pool removes its containers (`workers.containers`).
"""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from verifiers.v1 import runtimes
from verifiers.v1.runtimes.subprocess import SubprocessRuntime

from trivet.environments.workers.containers import APPTAINER, note_engine
from trivet.process.lifetime import tied_command

_STARTERS = ("run", "open_process", "run_background")
"""The methods of the runtime that start a program. Their first argument is its command line."""
_TIED = "__trivet_tied__"


def tie_programs() -> None:
    """Have every program that a subprocess runtime starts end with this process. May be called again."""
    for name in _STARTERS:
        start = getattr(SubprocessRuntime, name)
        if not hasattr(start, _TIED):
            setattr(SubprocessRuntime, name, _tied(start))


def tie_containers(directory: Path) -> None:
    """Have every runtime of containers note its engine in `directory`, that of this worker. May be called again."""
    for name in ("DockerRuntime", "ApptainerRuntime"):  # a Podman runtime is one of Docker's with another engine
        runtime: Any = getattr(runtimes, name, None)
        if runtime is not None and not hasattr(runtime.__init__, _TIED):
            runtime.__init__ = _noting(runtime.__init__, directory)


def _noting(make: Callable[..., None], directory: Path) -> Callable[..., None]:
    def make_noted(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        engine = getattr(self, "engine", APPTAINER)
        if engine == APPTAINER:
            self._instance = f"{directory.name}-{self._instance}"
        note_engine(directory, engine)

    setattr(make_noted, _TIED, True)
    return make_noted


def _tied(start: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def start_tied(self: SubprocessRuntime, argv: list[str], *args: Any, **kwargs: Any) -> Any:
        return await start(self, tied_command(argv), *args, **kwargs)

    setattr(start_tied, _TIED, True)
    return start_tied
