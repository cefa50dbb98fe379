"""Tries environments in processes of their own, since user code is never imported into a launcher or a tool.

`EnvironmentProbe` loads each in a worker, as a run will, to find what is wrong with it before anything is trained. A run starts its
inference server meanwhile. `check_imports` imports the modules of installed environments with `import_program`.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from trivet.config.masking import hide_values
from trivet.environments.examples import training_problem
from trivet.environments.settings import interpreter_variables, withheld_variables, worker_environment
from trivet.environments.workers.client import WorkerClient
from trivet.environments.workers.limits import WorkerLog
from trivet.errors import EnvironmentLoadError, WaitTimeout, WorkerLost
from trivet.process.lifetime import module_command, tied_command
from trivet.wire.groups import EnvironmentInfo
from trivet.wire.workers import HostSettings

_IMPORT_TIMEOUT_S = 120.0
"""For all modules of one process. verifiers alone takes 5 to 20 s on two busy cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTarget:
    """An environment to load, and what its data is for."""

    settings: HostSettings
    is_trained: bool
    """Its data must have examples to train on; otherwise, examples to evaluate on."""


def require_loadable(wanted: Sequence[ProbeTarget], *, timeout_s: float) -> dict[str, EnvironmentInfo]:
    """Load every environment and return what is known of each, by name. Raises as `EnvironmentProbe.wait`."""
    with EnvironmentProbe(wanted, timeout_s=timeout_s) as probe:
        return probe.wait()


class EnvironmentProbe:
    """Loads environments while its owner does something else; at the end of the block no process of it is left."""

    def __init__(self, wanted: Sequence[ProbeTarget], *, timeout_s: float) -> None:
        self._wanted = wanted
        self._timeout_s = timeout_s
        self._loop = asyncio.new_event_loop()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="probe-environments")

    def __enter__(self) -> Self:
        """Start to load."""
        self._task = self._loop.create_task(self._load_all())
        self._found = self._thread.submit(self._loop.run_until_complete, self._task)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.shutdown()
        self._loop.close()

    @property
    def is_over(self) -> bool:
        """True when `wait` returns or raises at once."""
        return self._found.done()

    def wait(self) -> dict[str, EnvironmentInfo]:
        """Return what is known of each environment, by name.

        Raises:
            EnvironmentLoadError: one or more cannot be loaded or have no data; the message names them all.
        """
        found = self._found.result()
        if problems := [problem for problem in found.values() if isinstance(problem, str)]:
            raise EnvironmentLoadError("\n- ".join(problems))
        return {name: info for name, info in found.items() if not isinstance(info, str)}

    async def _load_all(self) -> dict[str, EnvironmentInfo | str]:
        """Return what is known of each environment, or what is wrong with it."""
        found = await asyncio.gather(*(_load(target, timeout_s=self._timeout_s) for target in self._wanted))
        return {target.settings.name: result for target, result in zip(self._wanted, found, strict=True)}


async def _load(target: ProbeTarget, *, timeout_s: float) -> EnvironmentInfo | str:
    settings = target.settings
    with tempfile.TemporaryDirectory(prefix="trivet-probe-") as directory:
        worker = await WorkerClient.start(settings, log=WorkerLog(Path(directory) / "log"))
        try:
            info = await worker.wait_loaded(timeout_s=timeout_s)
        except (EnvironmentLoadError, WaitTimeout) as exc:
            return _explain_withheld(hide_values(str(exc), settings.args), settings)
        except WorkerLost as exc:
            return _explain_withheld(hide_values(f"{exc}.{worker.last_lines()}", settings.args), settings)
        finally:
            await worker.aclose(timeout_s=0.0)
    if target.is_trained and (problem := training_problem(settings.name, info, hash_keys=settings.hash_keys)):
        return problem
    if info.num_examples == info.num_eval_examples == 0:
        return f"environment {settings.name!r} has no data to evaluate on; check its args"
    return info


def _explain_withheld(problem: str, settings: HostSettings) -> str:
    """Add to a problem the variables that it names and that the environment was not given."""
    named = sorted(name for name in withheld_variables(os.environ, settings=[settings]) if name in problem)
    if not named:
        return problem
    return (
        f"{problem}\n  workers do not get {', '.join(named)}, whose name is that of a secret; if that is the reason, add "
        f"env_vars = {json.dumps(named)} to the environment"
    )


def check_imports(
    modules: Sequence[str], *, python: str = sys.executable, timeout_s: float = _IMPORT_TIMEOUT_S
) -> dict[str, str]:
    """Return the problem of each module in one line, by module; "" for one that loads.

    The modules share one process, so what they share is imported once. If a module ends that process or exceeds the time, it gets
    the blame, and a new process takes the rest.
    """
    problems: dict[str, str] = {}
    remaining = list(modules)
    while remaining:
        answers, ending = _import_in_process(remaining, python, timeout_s=timeout_s)
        problems |= answers
        remaining = [module for module in remaining if module not in problems]
        if remaining:
            problems[remaining.pop(0)] = ending
    return problems


def _import_in_process(modules: Sequence[str], python: str, *, timeout_s: float) -> tuple[dict[str, str], str]:
    """Return the answers, and how the process ended, for the module that it was at."""
    environ = worker_environment(os.environ)
    with tempfile.TemporaryDirectory(prefix="trivet-import-") as directory:
        answers = Path(directory) / "answers.jsonl"
        try:
            done = subprocess.run(
                tied_command(
                    module_command("trivet.environments.packages.import_program", str(answers), *modules, python=python)
                ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=timeout_s,
                check=False,
                env={**environ, **interpreter_variables(python, environ)},
                start_new_session=True,
            )
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            ending = f"importing it ended the process with exit code {done.returncode}{f': {lines[-1]}' if lines else ''}"
        except subprocess.TimeoutExpired:
            ending = f"importing it took more than {timeout_s:.0f} s"
        found = answers.read_text().splitlines() if answers.exists() else []
    return dict(json.loads(line) for line in found), ending
