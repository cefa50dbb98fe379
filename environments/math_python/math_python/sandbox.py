"""Runs Python code that a model wrote: in a process of its own, with limits, in an empty directory that is removed afterwards.

The limits keep mistakes from harming the run: endless loops, huge lists, endless output, forgotten children. They are no wall
against an attacker: the code runs as this user and could open files and sockets.
"""

import asyncio
import os
import signal
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from tempfile import TemporaryFile

_PROGRAM = """
import ast, ctypes, resource, signal, sys

memory_bytes, cpu_s, file_bytes = map(int, sys.argv[1:4])
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends with the environment, however that ends
for limit, value in (
    (resource.RLIMIT_AS, memory_bytes),
    (resource.RLIMIT_CPU, cpu_s),
    (resource.RLIMIT_FSIZE, file_bytes),
    (resource.RLIMIT_NOFILE, 64),
    (resource.RLIMIT_CORE, 0),
):
    resource.setrlimit(limit, (value, value))
source = sys.stdin.read()
scope = {"__name__": "__main__"}
tree = compile(source, "<code>", "exec", ast.PyCF_ONLY_AST)
last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
exec(compile(tree, "<code>", "exec"), scope)
if last is not None:
    value = eval(compile(ast.Expression(last.value), "<code>", "eval"), scope)
    if value is not None:
        print(repr(value))
"""
"""Like a console: the value of a last line that is an expression is shown, printed or not."""

MAX_FILE_BYTES = 2**20
"""Largest file that the code may write, its output too; writing more raises OSError there."""
MAX_CHAR_BYTES = 4
"""Of a character in UTF-8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    timeout_s: float = 5.0
    """Wall-clock time."""
    cpu_s: int = 5
    """Time on a core."""
    memory_mib: int = 512
    """Address space, the interpreter's own included."""
    output_chars: int = 2000
    """What is kept of the output."""

    def __post_init__(self) -> None:
        if self.timeout_s <= 0 or self.cpu_s < 1 or self.memory_mib < 64 or self.output_chars < 1:
            raise ValueError(f"need timeout_s > 0, cpu_s >= 1, memory_mib >= 64 and output_chars >= 1, got {self}")


async def run_python(code: str, *, limits: Limits) -> str:
    """Everything the code printed, errors included, and a last line about a limit that it ran into."""
    arguments = (limits.memory_mib * 2**20, limits.cpu_s, MAX_FILE_BYTES)
    with tempfile.TemporaryDirectory(prefix="math-python-") as directory, TemporaryFile() as source, TemporaryFile() as output:
        source.write(code.encode("utf-8", errors="replace"))
        source.seek(0)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-I", "-S", "-u", "-c", _PROGRAM),
            *map(str, arguments),
            stdin=source,
            stdout=output,  # a file, not a pipe: it is bounded by the limit on files, and nobody can hold it open against us
            stderr=output,
            cwd=directory,
            env={"PATH": os.defpath, "HOME": directory, "LANG": "C.UTF-8"},
            start_new_session=True,
        )
        is_late = False
        try:
            async with asyncio.timeout(limits.timeout_s):
                await process.wait()
        except TimeoutError:
            is_late = True
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what the code started and left behind
            await process.wait()
        output.seek(0)
        printed = output.read(limits.output_chars * MAX_CHAR_BYTES)
    ended_by = f"no end within {limits.timeout_s:g} s" if is_late else _why_ended(process.returncode, limits)
    return describe(printed, limits=limits, ended_by=ended_by)


def _why_ended(returncode: int | None, limits: Limits) -> str:
    if returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"more than {limits.cpu_s} s of computing"
    if returncode is not None and returncode < 0:
        return f"{signal.Signals(-returncode).name}"
    return ""


def describe(output: bytes, *, limits: Limits, ended_by: str) -> str:
    """The output as the model reads it: cut to its limit, tracebacks without the lines of this program."""
    text = _without_own_frames(output.decode("utf-8", errors="replace")).strip()
    if len(text) > limits.output_chars:
        text = f"{text[: limits.output_chars]}\n... (cut)"
    ending = f"(ended: {ended_by})" if ended_by else ""
    return "\n".join(part for part in (text, ending) if part) or "(no output)"


def _without_own_frames(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.startswith('  File "<string>"'))
