"""Loads environments in processes of their own, to find what is wrong with them before a run trains.

`probe_program` runs with each interpreter that workers will have: user code is never imported into a launcher. The environments
of one interpreter are loaded in one process, so what they share is imported once. `require_loadable` waits for the result; a run
starts its inference server meanwhile.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import IO, Self

from trivet.config.masking import hide_values
from trivet.environments.packages.probe_program import ProbeRequest, ProbeTarget, ProbeVerdict
from trivet.environments.settings import interpreter_variables, withheld_variables, worker_environment
from trivet.errors import EnvironmentLoadError, MessageRefused
from trivet.process.lifetime import module_command, tied_command
from trivet.wire.codec import decode, encode
from trivet.wire.groups import EnvironmentInfo
from trivet.wire.workers import PROTOCOL

_STDERR_LINES = 15


def require_loadable(wanted: Sequence[ProbeTarget], *, timeout_s: float) -> dict[str, EnvironmentInfo]:
    """Load every environment and return what is known of each, by name.

    Raises:
        EnvironmentLoadError: one or more cannot be loaded or have no data; the message names them all.
    """
    with EnvironmentProbe(wanted, timeout_s=timeout_s) as probe:
        return probe.wait()


class EnvironmentProbe:
    """Loads environments while its owner does something else; at the end of the block no process of it is left."""

    def __init__(self, wanted: Sequence[ProbeTarget], *, timeout_s: float) -> None:
        self._wanted = wanted
        pythons = dict.fromkeys(target.settings.python for target in wanted)
        self._loading = [
            _Loading([target for target in wanted if target.settings.python == python], python, timeout_s=timeout_s)
            for python in pythons
        ]

    def __enter__(self) -> Self:
        """Start to load."""
        for loading in self._loading:
            loading.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for loading in self._loading:
            loading.end()

    @property
    def is_over(self) -> bool:
        """True when `wait` returns or raises at once."""
        return all(loading.is_over for loading in self._loading)

    def wait(self) -> dict[str, EnvironmentInfo]:
        """Return what is known of each environment, by name.

        Raises:
            EnvironmentLoadError: one or more cannot be loaded or have no data; the message names them all.
        """
        verdicts = [loading.wait() for loading in self._loading]
        problems = [problem for verdict in verdicts for problem in verdict.problems]
        if problems:
            raise EnvironmentLoadError("\n- ".join(map(_explain_withheld(self._wanted), problems)))
        return {name: info for verdict in verdicts for name, info in verdict.infos.items()}


class _Loading:
    """The process that loads the environments of one interpreter. Files take its output: a full pipe would stop it."""

    def __init__(self, wanted: Sequence[ProbeTarget], python: str, *, timeout_s: float) -> None:
        self._wanted = wanted
        self._python = python or sys.executable
        self._timeout_s = timeout_s
        self._files = ExitStack()
        self._process: subprocess.Popen[bytes] | None = None
        self._deadline = 0.0

    def start(self) -> None:
        environ = worker_environment(os.environ, settings=[target.settings for target in self._wanted])
        self._answer = self._files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  closed by `end`
        self._errors = self._files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  closed by `end`
        self._deadline = time.monotonic() + self._timeout_s
        self._process = subprocess.Popen(
            tied_command(module_command("trivet.environments.packages.probe_program", str(PROTOCOL), python=self._python)),
            stdin=subprocess.PIPE,
            stdout=self._answer,
            stderr=self._errors,
            env={**environ, **interpreter_variables(self._python, environ)},
            start_new_session=True,
        )
        assert self._process.stdin is not None, "it is a pipe"
        with suppress(BrokenPipeError), self._process.stdin as request:  # `wait` says why it ended
            request.write(encode(ProbeRequest(list(self._wanted))))

    def end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._files.close()

    @property
    def is_over(self) -> bool:
        assert self._process is not None, "it was not started"
        return self._process.poll() is not None or time.monotonic() > self._deadline

    def wait(self) -> ProbeVerdict:
        assert self._process is not None, "it was not started"
        try:
            exit_code = self._process.wait(max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired as exc:
            raise EnvironmentLoadError(
                f"environments {self._names} were not loaded after {self._timeout_s:.0f} s; raise "
                "orchestrator.env_start_timeout_s if load_environment needs longer"
            ) from exc
        try:
            return decode(_read(self._answer), ProbeVerdict)
        except MessageRefused as exc:
            args = {target.settings.name: target.settings.args for target in self._wanted}
            output = hide_values(_read(self._errors).decode(errors="replace"), args).splitlines()
            last = "\n  ".join(output[-_STDERR_LINES:])
            if "of the worker's protocol" in last:
                env_ids = " and ".join(f"uv run trivet env install {target.settings.env_id}" for target in self._wanted)
                last += f"\n  update the virtual environment with: {env_ids}"
            raise EnvironmentLoadError(
                f"loading environments {self._names} ended their process with exit code {exit_code}:\n  {last}"
            ) from exc

    @property
    def _names(self) -> str:
        return ", ".join(repr(target.settings.name) for target in self._wanted)


def _read(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


def _explain_withheld(wanted: Sequence[ProbeTarget]) -> Callable[[str], str]:
    """Return what adds to a problem the variables that it names and that the environment was not given."""
    withheld = withheld_variables(os.environ, settings=[target.settings for target in wanted])

    def explain(problem: str) -> str:
        named = sorted(name for name in withheld if name in problem)
        if not named:
            return problem
        return (
            f"{problem}\n  workers do not get {', '.join(named)}, whose name is that of a secret; if that is the reason, add "
            f"env_vars = {json.dumps(named)} to the environment"
        )

    return explain
