"""Ties the programs that verifiers starts on this machine to this process: harnesses, their setup, and tool servers.

verifiers gives each a session of its own and ends it when its rollout is over. A worker that is killed cannot do that.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from verifiers.v1.runtimes.subprocess import SubprocessRuntime

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


def _tied(start: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def start_tied(self: SubprocessRuntime, argv: list[str], *args: Any, **kwargs: Any) -> Any:
        return await start(self, tied_command(argv), *args, **kwargs)

    setattr(start_tied, _TIED, True)
    return start_tied
