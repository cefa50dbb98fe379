"""Serves files of policies over HTTP, read-only: the origin from `weights/`, an inference server from its cache.

`GET /weights/VERSION/DIGEST/NAME`, with `Range: bytes=N-` for the rest of a file. Only the manifest of exactly this policy, the
files that it names and its deltas are served. The caller puts a `Gate` around the route, which requires the run's secret.
"""

import asyncio
import os
import stat
from contextlib import suppress
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from trivet.config.layout import MANIFEST, parse_step, step_name
from trivet.errors import WeightsError
from trivet.gate import refuse
from trivet.weights.fetch import partial_directory
from trivet.weights.manifest import read_manifest_file

MAX_TRANSFERS = 2
"""Files that one process sends at a time; others are told to ask elsewhere. With few transfers the first readers have the policy
soon, and serve it too."""
_SEND_TIMEOUT_S = 30.0
"""A reader that takes no byte for this long is dropped: it would keep others from a transfer."""


class PolicyFiles:
    """Answers requests for files of the policies in one directory."""

    def __init__(self, directory: Path, *, max_transfers: int = MAX_TRANSFERS) -> None:
        """Serve the policies `directory/step_N`, and the verified files of one that is still being fetched there."""
        self._directory = directory
        self._transfers = asyncio.Semaphore(max_transfers)
        self.route = Route("/weights/{version}/{digest}/{name}", self._answer, methods=["GET"])

    async def _answer(self, request: Request) -> Response:
        try:
            path, found = await asyncio.to_thread(self._find, **request.path_params)
        except (WeightsError, OSError):
            return refuse(404, "this policy is not here")
        if "," in request.headers.get("range", ""):
            return refuse(400, "one part of a file can be asked for, not several")
        if self._transfers.locked():
            return refuse(503, "other transfers are under way")
        return _Transfer(path, found, self._transfers)

    def _find(self, version: str, digest: str, name: str) -> tuple[Path, os.stat_result]:
        """Return the path and status of a file that may be served. Raises WeightsError or OSError if there is none."""
        if (number := parse_step(f"step_{version}")) is not None:
            for directory in (self._directory / step_name(number), partial_directory(self._directory, number, digest)):
                if (directory / MANIFEST).exists():
                    manifest = read_manifest_file(directory / MANIFEST)
                    names = (MANIFEST, *manifest.files, *(delta.name for delta in manifest.deltas))
                    if manifest.digest == digest and name in names:
                        found = (directory / name).lstat()
                        if stat.S_ISREG(found.st_mode):
                            return directory / name, found
        raise WeightsError(f"no policy here has version {version}, digest {digest} and a file {name}")


class _Transfer(FileResponse):
    """Sends a file or the rest of it, and drops a reader that is too slow."""

    chunk_size = 1 << 22  # a thread reads each chunk: at 1 MiB, handing chunks over takes nearly as long as copying them

    def __init__(self, path: Path, found: os.stat_result, transfers: asyncio.Semaphore) -> None:
        super().__init__(path, media_type="application/octet-stream", stat_result=found)
        self._transfers = transfers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(_SEND_TIMEOUT_S):
                await send(message)

        async with self._transfers:
            with suppress(OSError):  # also a timeout; the server closes the connection, because the answer is not complete
                await super().__call__(scope, receive, send_in_time)
