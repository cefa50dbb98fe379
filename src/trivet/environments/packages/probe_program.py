"""The program that loads environments to find what is wrong with them: `python -m trivet.environments.packages.probe_program`.

`probe` starts it, with the interpreter that the environments' workers will have. So it is part of trivet-worker, and imports what
that has. It reads a request from stdin and writes a verdict to stdout.
"""

import os
import sys

import msgspec

from trivet.environments.examples import training_problem
from trivet.errors import EnvironmentLoadError
from trivet.process.imports import without_collections
from trivet.wire.codec import decode, encode
from trivet.wire.groups import EnvironmentInfo
from trivet.wire.workers import PROTOCOL, HostSettings


class ProbeTarget(msgspec.Struct, kw_only=True):
    """An environment to load, and what its data is for."""

    settings: HostSettings
    is_trained: bool
    """Its data must have examples to train on; otherwise, examples to evaluate on."""


class ProbeRequest(msgspec.Struct):
    """The input of the program: the environments to load."""

    environments: list[ProbeTarget]


class ProbeVerdict(msgspec.Struct):
    """The output of the program: the result for each environment."""

    infos: dict[str, EnvironmentInfo] = {}
    problems: list[str] = []


def probe(request: ProbeRequest) -> ProbeVerdict:
    """Load every environment of the request and return what is known of each, and what is wrong."""
    # Late, because it imports verifiers, which the process that asks does not need.
    with without_collections():
        from trivet.environments.apis.load import load_host, traceback_tail

    verdict = ProbeVerdict(infos={}, problems=[])
    for target in request.environments:
        name = target.settings.name
        try:
            info = load_host(target.settings, environ=os.environ).info
        except EnvironmentLoadError as exc:
            verdict.problems.append(f"{exc}{traceback_tail(exc, target.settings.args)}")
            continue
        verdict.infos[name] = msgspec.structs.replace(info, example_hashes=[])
        if target.is_trained and (problem := training_problem(name, info, hash_keys=target.settings.hash_keys)):
            verdict.problems.append(problem)
        elif info.num_examples == info.num_eval_examples == 0:
            verdict.problems.append(f"environment {name!r} has no data to evaluate on; check its args")
    return verdict


def main() -> None:
    """Read a request from stdin and write the verdict to stdout; the argument is the protocol that whoever asks speaks."""
    if sys.argv[1:] != [str(PROTOCOL)]:
        sys.exit(f"it speaks version {PROTOCOL} of the worker's protocol, and this trivet version {' '.join(sys.argv[1:])}")
    request = decode(sys.stdin.buffer.read(), ProbeRequest)
    answer = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what environments print must not end up in the answer
    verdict = probe(request)
    with os.fdopen(answer, "wb") as out:
        out.write(encode(verdict))
    os._exit(0)  # does not wait for threads that the environments have started


if __name__ == "__main__":
    main()
