"""Loads environments in a process of its own, to find what is wrong with them before a run starts.

Commands call `require_loadable`, which starts `python -m trivet.environments.packages.probe`: user code is never imported into a
launcher. All environments of a run are loaded in one process, so what they share is imported once.
"""

import os
import secrets
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from trivet.config.masking import hide_values
from trivet.environments.examples import training_problem
from trivet.environments.settings import worker_environment
from trivet.errors import EnvironmentLoadError, MessageRefused
from trivet.process.imports import without_collections
from trivet.process.lifetime import module_command, tied_command
from trivet.wire.codec import decode, encode
from trivet.wire.groups import EnvironmentInfo
from trivet.wire.workers import HostSettings

_STDERR_LINES = 15


class ProbeTarget(msgspec.Struct, kw_only=True):
    """An environment to load, and what its data is for."""

    settings: HostSettings
    is_trained: bool
    """Its data must have examples to train on; otherwise, examples to evaluate on."""


class _Request(msgspec.Struct):
    environments: list[ProbeTarget]
    nonce: str
    """Random, and repeated in the verdict, so that nothing an environment prints by accident is read as a verdict."""


class _Verdict(msgspec.Struct):
    nonce: str
    infos: dict[str, EnvironmentInfo] = {}
    problems: list[str] = []


def require_loadable(wanted: Sequence[ProbeTarget], *, timeout_s: float) -> dict[str, EnvironmentInfo]:
    """Load every environment and return what is known of each, by name.

    Raises:
        EnvironmentLoadError: one or more cannot be loaded or have no data; the message names them all.
    """
    nonce = secrets.token_hex()
    try:
        done = subprocess.run(
            tied_command(module_command("trivet.environments.packages.probe")),
            input=encode(_Request(list(wanted), nonce)),
            capture_output=True,
            timeout=timeout_s,
            check=False,
            env=worker_environment(os.environ, settings=[each.settings for each in wanted]),
            start_new_session=True,
        )
    except subprocess.TimeoutExpired as exc:
        raise EnvironmentLoadError(
            f"environments {_names(wanted)} were not loaded after {timeout_s:.0f} s; raise orchestrator.env_start_timeout_s if "
            "load_environment needs longer"
        ) from exc
    try:
        verdict = decode(done.stdout, _Verdict)
    except MessageRefused as exc:
        args = {each.settings.name: each.settings.args for each in wanted}
        last = "\n  ".join(hide_values(done.stderr.decode(errors="replace"), args).splitlines()[-_STDERR_LINES:])
        raise EnvironmentLoadError(
            f"loading environments {_names(wanted)} ended their process with exit code {done.returncode}:\n  {last}"
        ) from exc
    if verdict.problems:
        raise EnvironmentLoadError("\n- ".join(verdict.problems))
    if verdict.nonce != nonce or verdict.infos.keys() != {each.settings.name for each in wanted}:
        raise EnvironmentLoadError(
            f"loading environments {_names(wanted)} gave an answer that is not the loader's: one of them writes to a file "
            "descriptor that it did not open"
        )
    return verdict.infos


def _names(wanted: Sequence[ProbeTarget]) -> str:
    return ", ".join(repr(each.settings.name) for each in wanted)


def _probe(request: _Request) -> _Verdict:
    # Late, because it imports verifiers, which the process that asks does not need.
    with without_collections():
        from trivet.environments.apis import load_host
        from trivet.environments.apis.loading import traceback_tail

    verdict = _Verdict(request.nonce, infos={}, problems=[])
    for each in request.environments:
        name = each.settings.name
        try:
            info = load_host(each.settings, environ=os.environ).info
        except EnvironmentLoadError as exc:
            verdict.problems.append(f"{exc}{traceback_tail(exc, each.settings.args)}")
            continue
        verdict.infos[name] = msgspec.structs.replace(info, example_hashes=[])
        if each.is_trained and (problem := training_problem(name, info, hash_keys=each.settings.hash_keys)):
            verdict.problems.append(problem)
        elif info.num_examples == info.num_eval_examples == 0:
            verdict.problems.append(f"environment {name!r} has no data to evaluate on; check its args")
    return verdict


def main() -> None:
    """Read a request from stdin and write the verdict to stdout."""
    request = decode(sys.stdin.buffer.read(), _Request)
    answer = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what environments print must not end up in the answer
    verdict = _probe(request)
    with os.fdopen(answer, "wb") as out:
        out.write(encode(verdict))
    os._exit(0)  # does not wait for threads that the environments have started


if __name__ == "__main__":
    main()
