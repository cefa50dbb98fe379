"""Starts a container through verifiers' own runtime, as an environment of the v1 API does in a worker, and waits to be killed.

PYTHONPATH=src PYTHON tests/support/container_program.py ENGINE
"""

import asyncio
import os
import sys
import time
from pathlib import Path

from verifiers.v1 import runtimes
from verifiers.v1.errors import SandboxError

from trivet.environments.apis.v1.load import tie_containers


async def start(engine: str) -> None:
    """Start a container. The stand-in for the engine can only run it, so what verifiers does next with it fails."""
    config = {"docker": runtimes.DockerConfig, "podman": runtimes.PodmanConfig}[engine]()
    try:
        await runtimes.make_runtime(config).start()
    except SandboxError:
        return


if __name__ == "__main__":
    tie_containers(Path(os.environ["TMPDIR"]))
    asyncio.run(start(sys.argv[1]))
    print("started", flush=True)
    time.sleep(600)
