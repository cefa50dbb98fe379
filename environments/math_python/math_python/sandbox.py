"""Runs Python code that a model wrote, in processes that `confine` builds.

In namespaces of its own the code sees no files but those of Python and of the system's libraries, has no network, and reaches no
process but its own. Where the kernel gives none, it runs with limits and without root's rights: it can then read the files of its
user and open sockets.
"""

import asyncio
import ctypes
import logging
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile

from math_python.confine import ENDED_BY_SIGNAL, NOBODY, NOT_ENDED

logger = logging.getLogger(__name__)

_PROGRAM = """
import gc, sys
gc.disable()
import _ast
sys.path.insert(0, sys.argv[1])
from confine import confine
confine(*map(int, sys.argv[2:]))
gc.enable()
del sys.path[0], sys.argv[1:], confine, sys.modules["confine"]
source = sys.stdin.read()
scope = {"__name__": "__main__"}
tree = compile(source, "<code>", "exec", _ast.PyCF_ONLY_AST)
last = tree.body.pop() if tree.body and isinstance(tree.body[-1], _ast.Expr) else None
exec(compile(tree, "<code>", "exec"), scope)
if last is not None:
    value = eval(compile(_ast.Expression(last.value), "<code>", "eval"), scope)
    if value is not None:
        print(repr(value))
"""
"""Like a console: the value of a last line that is an expression is shown, printed or not. `_ast` has the types of `ast`
and is imported in a tenth of its time."""

MAX_FILE_BYTES = 2**20
"""Largest file that the code may write, its output too; writing more raises OSError there."""
MAX_CHAR_BYTES = 4
"""The longest character in UTF-8."""
_END_TIMEOUT_S = 10.0
"""Longest time from SIGTERM to the end of the supervisor. It takes milliseconds unless the code has stopped the supervisor."""
_TRIAL = b"import math, random, subprocess\nprint(math.comb(10, 3))"
_TRIAL_OUTPUT = "120"
_TRIAL_TIMEOUT_S = 60.0
_PR_SET_DUMPABLE = 4
_SWITCHES = (
    ("/proc/sys/kernel/unprivileged_userns_clone", "0", "1"),
    ("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1", "0"),
    ("/proc/sys/user/max_user_namespaces", "0", "15000"),
)
"""Settings of the kernel that refuse namespaces to users: the file, the value that refuses, a value that does not."""


class SandboxFailed(RuntimeError):
    """The sandbox itself failed: the code did not run, or may still run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one call of the tool."""

    timeout_s: float = 5.0
    """Wall-clock time."""
    cpu_s: int = 5
    """Time on a core."""
    memory_mib: int = 512
    """Address space, the interpreter's own included."""
    output_chars: int = 2000
    """The part of the output that is kept."""

    def __post_init__(self) -> None:
        if self.timeout_s <= 0 or self.cpu_s < 1 or self.memory_mib < 64 or self.output_chars < 1:
            raise ValueError(f"need timeout_s > 0, cpu_s >= 1, memory_mib >= 64 and output_chars >= 1, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """The way in which code is confined on this machine."""

    has_namespaces: bool
    """The code has namespaces of its own for files, network, processes and users."""
    changes_user: bool
    """The code runs as nobody. Needs root."""

    def command(self, limits: Limits) -> list[str]:
        """Return the program whose standard input is the code. It ends with this process, and only this process can use it."""
        numbers = (
            os.getpid(),
            self.has_namespaces,
            self.changes_user,
            limits.memory_mib * 2**20,
            limits.cpu_s,
            MAX_FILE_BYTES,
        )
        here = str(Path(__file__).parent)
        return [sys.executable, "-I", "-S", "-u", "-c", _PROGRAM, here, *(str(int(number)) for number in numbers)]


def choose_sandbox(*, require_isolation: bool) -> Sandbox:
    """Return the strongest sandbox that this machine allows.

    Where it has no namespaces, other processes can no longer read this process's memory and environment after the call, unless they
    are root's.

    Raises:
        SandboxFailed: isolation is required and there are no namespaces, or no code can be run at all.
    """
    sandbox, problem = _find_sandbox()
    if sandbox.has_namespaces:
        return sandbox
    why = f"model-written code cannot be isolated on this machine: {problem}; {_how_to_allow_namespaces()}"
    if require_isolation:
        raise SandboxFailed(f"require_isolation = true, but {why}, or set require_isolation = false")
    logger.warning("%s. Until then it can read the files of its user and open sockets", why)
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise SandboxFailed(f"this process's memory cannot be closed to others: {os.strerror(ctypes.get_errno())}")
    return sandbox


@cache
def _find_sandbox() -> tuple[Sandbox, str]:
    """Return the first sandbox in which code runs, and why there are no namespaces."""
    problem = failure = ""
    for has_namespaces in (True, False):
        for changes_user in (True, False) if os.geteuid() == 0 else (False,):
            sandbox = Sandbox(has_namespaces=has_namespaces, changes_user=changes_user)
            failure = _try(sandbox)
            if not failure:
                return sandbox, problem
            if has_namespaces:
                problem = failure
    raise SandboxFailed(f"no Python code can be run in a process of its own: {failure}")


def _try(sandbox: Sandbox) -> str:
    """Run a line of code; return what went wrong, or ""."""
    with tempfile.TemporaryDirectory(prefix="math-python-") as directory:
        try:
            _give_to_code(directory, sandbox)
            done = subprocess.run(
                sandbox.command(Limits()),
                input=_TRIAL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env=_environment(directory, sandbox),
                start_new_session=True,
                timeout=_TRIAL_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"a line of code did not end within {_TRIAL_TIMEOUT_S:g} s"
        except OSError as exc:
            return str(exc)
    output = done.stdout.decode(errors="replace").strip()
    if done.returncode == 0 and output == _TRIAL_OUTPUT:
        return ""
    return output.splitlines()[-1] if output else f"exit code {done.returncode}"


def _how_to_allow_namespaces() -> str:
    for file, refusing, allowing in _SWITCHES:
        with suppress(OSError):
            if Path(file).read_text().strip() == refusing:
                name = file.removeprefix("/proc/sys/").replace("/", ".")
                return f"allow user namespaces (as root: sysctl -w {name}={allowing})"
    return "allow user namespaces; a container needs --cap-add SYS_ADMIN and --security-opt apparmor=unconfined"


async def run_python(code: str, *, limits: Limits, sandbox: Sandbox) -> str:
    """Return everything that the code printed, errors included, and a last line about a limit that it reached.

    Raises:
        SandboxFailed: the code did not run, or could not be ended.
    """
    with (
        tempfile.TemporaryDirectory(prefix="math-python-") as directory,
        TemporaryFile() as source,
        TemporaryFile() as output,
    ):
        _give_to_code(directory, sandbox)
        source.write(code.encode("utf-8", errors="replace"))
        source.seek(0)
        process = await asyncio.create_subprocess_exec(
            *sandbox.command(limits),
            stdin=source,
            stdout=output,  # a file, not a pipe: it is bounded by the limit on files, and nobody can hold it open against us
            stderr=output,
            cwd=directory,
            env=_environment(directory, sandbox),
            start_new_session=True,
        )
        is_late = False
        try:
            async with asyncio.timeout(limits.timeout_s):
                await process.wait()
        except TimeoutError:
            is_late = True
        finally:
            await _end(process)
        output.seek(0)
        printed = output.read(limits.output_chars * MAX_CHAR_BYTES)
    why = _why_ended(process.returncode or 0, printed, limits)
    ended_by = f"no end within {limits.timeout_s:g} s" if is_late else why
    return describe(printed, limits=limits, ended_by=ended_by)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Have the supervisor end the code and all that it started."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(_END_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        logger.error("the supervisor of model-written code did not end within %s s: killed pid=%s", _END_TIMEOUT_S, process.pid)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _give_to_code(directory: str, sandbox: Sandbox) -> None:
    """Make `directory` the code's own, where the code runs as another user and has no directory in a namespace."""
    if sandbox.changes_user and not sandbox.has_namespaces:
        os.chown(directory, NOBODY, NOBODY)


def _environment(directory: str, sandbox: Sandbox) -> dict[str, str]:
    return {"PATH": os.defpath, "HOME": "/tmp" if sandbox.has_namespaces else directory, "LANG": "C.UTF-8"}


def _why_ended(code: int, printed: bytes, limits: Limits) -> str:
    """Return why the code ended, from the exit code of its supervisor; empty when it ran to its end."""
    if code == NOT_ENDED:
        raise SandboxFailed("processes that model-written code started could not be ended")
    if 0 < code < ENDED_BY_SIGNAL:
        raise SandboxFailed(
            f"model-written code could not be run: {printed.decode(errors='replace').strip() or f'exit code {code}'}"
        )
    if code == 0:
        return ""
    ended_by = signal.Signals(code - ENDED_BY_SIGNAL if code > 0 else -code)
    return f"more than {limits.cpu_s} s of computing" if ended_by in (signal.SIGXCPU, signal.SIGKILL) else ended_by.name


def describe(output: bytes, *, limits: Limits, ended_by: str) -> str:
    """Return the output as the model reads it: cut to its limit, tracebacks without the lines of this program."""
    text = _without_own_frames(output.decode("utf-8", errors="replace")).strip()
    if len(text) > limits.output_chars:
        text = f"{text[: limits.output_chars]}\n... (cut)"
    ending = f"(ended: {ended_by})" if ended_by else ""
    return "\n".join(part for part in (text, ending) if part) or "(no output)"


def _without_own_frames(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.startswith('  File "<string>"'))
