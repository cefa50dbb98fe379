"""Serves files of policies over HTTP, read-only: the origin from `weights/`, an inference server from its cache.

`GET /weights/VERSION/DIGEST/NAME`, with `Range: bytes=N-` for the rest of a file. Only the manifest of exactly this policy, the
files that it names and its delta are served. The caller puts a `Gate` around the route, which requires the run's secret.
"""

import asyncio
import os
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from trivet.config.layout import DELTA, MANIFEST, parse_step, step_name
from trivet.errors import WeightsError
from trivet.storage.durable import open_regular
from trivet.weights.fetch import partial_directory
from trivet.weights.manifest import read_manifest_file
from trivet.weights.sources import CHUNK_BYTES

MAX_TRANSFERS = 2
"""Files that one process sends at a time; others are told to ask elsewhere. With few transfers the first readers have the policy
soon, and serve it too."""
_SEND_TIMEOUT_S = 30.0
"""A reader that takes no byte for this long is dropped: it would keep others from a transfer."""
_RANGE = re.compile(r"bytes=([0-9]{1,18})-")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class PolicyFiles:
    """Answers requests for files of the policies in one directory."""

    def __init__(self, directory: Path, *, max_transfers: int = MAX_TRANSFERS) -> None:
        """Serve the policies `directory/step_N`, and the verified files of one that is still being fetched there."""
        self._directory = directory
        self._free_transfers = max_transfers
        self.route = Route("/weights/{version}/{digest}/{name}", self._answer, methods=["GET"])

    async def _answer(self, request: Request) -> Response:
        try:
            path = await asyncio.to_thread(self._find, **request.path_params)
            file = await asyncio.to_thread(open_regular, path)
        except (WeightsError, OSError):
            return JSONResponse({"status": "error", "reason": "this policy is not here"}, status_code=404)
        found = _RANGE.fullmatch(request.headers.get("range", ""))
        start, size = int(found[1]) if found else 0, os.fstat(file.fileno()).st_size
        if found is not None and start >= size:
            file.close()
            return JSONResponse({"status": "error", "reason": f"the file has {size} bytes"}, status_code=416)
        if not self._free_transfers:
            file.close()
            return JSONResponse({"status": "error", "reason": "other transfers are under way"}, status_code=503)
        self._free_transfers -= 1
        file.seek(start)
        headers = {"Content-Length": str(size - start)}
        if found is not None:
            headers["Content-Range"] = f"bytes {start}-{size - 1}/{size}"
        return _Transfer(file, headers=headers, is_part=found is not None, on_end=self._release)

    def _release(self) -> None:
        self._free_transfers += 1

    def _find(self, version: str, digest: str, name: str) -> Path:
        """Return the path of a file that may be served. Raises WeightsError if there is none."""
        number = parse_step(f"step_{version}")
        if number is not None and _DIGEST.fullmatch(digest):
            for directory in (self._directory / step_name(number), partial_directory(self._directory, number, digest)):
                if (directory / MANIFEST).exists():
                    manifest = read_manifest_file(directory / MANIFEST)
                    if manifest.digest == digest and name in (MANIFEST, DELTA, *manifest.files):
                        return directory / name
        raise WeightsError(f"no policy here has version {version}, digest {digest} and a file {name}")


class _Transfer(StreamingResponse):
    """Sends the rest of an open file, and drops a reader that is too slow."""

    def __init__(self, file: BinaryIO, *, headers: dict[str, str], is_part: bool, on_end: Callable[[], None]) -> None:
        self._file = file
        self._on_end = on_end
        super().__init__(
            self._chunks(), status_code=206 if is_part else 200, headers=headers, media_type="application/octet-stream"
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(_SEND_TIMEOUT_S):
                await send(message)

        try:
            with suppress(
                TimeoutError, ClientDisconnect
            ):  # the server closes the connection, because the answer is not complete
                await super().__call__(scope, receive, send_in_time)
        finally:
            self._file.close()
            self._on_end()

    async def _chunks(self) -> AsyncGenerator[bytes]:
        while chunk := await asyncio.to_thread(self._file.read, CHUNK_BYTES):
            yield chunk
