"""Loads environments in processes of their own, to find what is wrong with them before a run starts.

Commands call `require_loadable`, which starts `probe_program` with each interpreter that workers will have: user code is never
imported into a launcher. The environments of one interpreter are loaded in one process, so what they share is imported once.
"""

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Sequence

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
    infos: dict[str, EnvironmentInfo] = {}
    problems: list[str] = []
    for python in dict.fromkeys(each.settings.python for each in wanted):
        verdict = _ask([each for each in wanted if each.settings.python == python], python, timeout_s=timeout_s)
        infos |= verdict.infos
        problems += verdict.problems
    if problems:
        raise EnvironmentLoadError("\n- ".join(map(_explain_withheld(wanted), problems)))
    return infos


def _ask(wanted: Sequence[ProbeTarget], python: str, *, timeout_s: float) -> ProbeVerdict:
    nonce, executable = secrets.token_hex(), python or sys.executable
    environ = worker_environment(os.environ, settings=[each.settings for each in wanted])
    try:
        done = subprocess.run(
            tied_command(module_command("trivet.environments.packages.probe_program", str(PROTOCOL), python=executable)),
            input=encode(ProbeRequest(list(wanted), nonce)),
            capture_output=True,
            timeout=timeout_s,
            check=False,
            env={**environ, **interpreter_variables(executable, environ)},
            start_new_session=True,
        )
    except subprocess.TimeoutExpired as exc:
        raise EnvironmentLoadError(
            f"environments {_names(wanted)} were not loaded after {timeout_s:.0f} s; raise orchestrator.env_start_timeout_s if "
            "load_environment needs longer"
        ) from exc
    try:
        verdict = decode(done.stdout, ProbeVerdict)
    except MessageRefused as exc:
        args = {each.settings.name: each.settings.args for each in wanted}
        last = "\n  ".join(hide_values(done.stderr.decode(errors="replace"), args).splitlines()[-_STDERR_LINES:])
        raise EnvironmentLoadError(
            f"loading environments {_names(wanted)} ended their process with exit code {done.returncode}:\n  {last}"
        ) from exc
    is_whole = verdict.problems or verdict.infos.keys() == {each.settings.name for each in wanted}
    if verdict.nonce != nonce or not is_whole:
        raise EnvironmentLoadError(
            f"loading environments {_names(wanted)} gave an answer that is not the loader's: one of them writes to a file "
            "descriptor that it did not open"
        )
    return verdict


def _explain_withheld(wanted: Sequence[ProbeTarget]) -> Callable[[str], str]:
    """Return what adds to a problem the variables that it names and that the environment was not given."""
    withheld = withheld_variables(os.environ, settings=[each.settings for each in wanted])

    def explain(problem: str) -> str:
        named = sorted(name for name in withheld if name in problem)
        if not named:
            return problem
        return (
            f"{problem}\n  workers do not get {', '.join(named)}, whose name is that of a secret; if that is the reason, add "
            f"env_vars = {json.dumps(named)} to the environment"
        )

    return explain


def _names(wanted: Sequence[ProbeTarget]) -> str:
    return ", ".join(repr(each.settings.name) for each in wanted)
