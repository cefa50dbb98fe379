"""Says what a worker is: the first message of every worker, read from the metadata of installed packages."""

import platform
from importlib import metadata

from trivet.wire.workers import PROTOCOL, WorkerHello

DISTRIBUTIONS = ("trivet-worker", "trivet")
"""What a worker runs from: a virtual environment of an environment has the first alone, trivet's own interpreter the second."""


def make_hello() -> WorkerHello:
    """Return what this process is."""
    worker = next((f"{name} {version}" for name in DISTRIBUTIONS if (version := installed_version(name))), "")
    return WorkerHello(
        protocol=PROTOCOL, worker=worker, python=platform.python_version(), verifiers=installed_version("verifiers")
    )


def installed_version(distribution: str) -> str:
    """Return the version of an installed distribution, empty when there is none."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
