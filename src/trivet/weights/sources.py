"""Reads files of published policies from the sources that have them, and decides which source is asked next.

A source is the origin, which serves `weights/` next to the trainer, an inference server that has the policy, or a directory.
"""

import random
import ssl
from collections.abc import Generator, Mapping, Sequence
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import httpx

from trivet.backoff import backoff_s
from trivet.config.layout import step_name
from trivet.process.proxies import is_direct
from trivet.wire.versions import FetchablePolicy

CHUNK_BYTES = 1 << 20
"""Bytes that are read or sent at one time."""
_TIMEOUT = httpx.Timeout(20.0, connect=5.0)
"""A source that sends nothing for this long, in seconds, is left: its machine may be lost."""
_MAX_PEERS_ASKED = 7
"""The most sources besides the origin that a round asks. A hundred readers that ask each other would send 10,000 requests."""
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 2.0


class Problem(StrEnum):
    """The ways in which a source does not give a file."""

    BUSY = "serves others first"
    ABSENT = "does not have it"
    BROKEN = "cannot be read"
    """The connection failed or broke. What arrived before is kept."""
    WRONG = "is not usable"
    """It gave other bytes than were published, or refuses the run's secret. It is not asked again."""


class SourceProblem(Exception):
    """Raised when a source does not give a file, or not all of it."""

    def __init__(self, problem: Problem, detail: object = "") -> None:
        super().__init__(f"{problem}: {detail}" if detail else str(problem))
        self.problem = problem


class PolicySource(Protocol):
    """A place from which files of a policy can be read."""

    def read(self, policy: FetchablePolicy, name: str, *, start: int) -> Generator[bytes]:
        """Yield the bytes of a file of the policy from byte `start` on. The reader verifies them.

        Raises:
            SourceProblem: the source does not give them.
        """
        ...


class DirectorySource:
    """A directory that has policies as `weights/` of an output directory has them."""

    def __init__(self, weights: Path) -> None:
        self._weights = weights

    def read(self, policy: FetchablePolicy, name: str, *, start: int) -> Generator[bytes]:
        """Read the file `step_N/name`."""
        try:
            with (self._weights / step_name(policy.version) / name).open("rb") as file:
                file.seek(start)
                while chunk := file.read(CHUNK_BYTES):
                    yield chunk
        except FileNotFoundError as exc:
            raise SourceProblem(Problem.ABSENT) from exc
        except OSError as exc:
            raise SourceProblem(Problem.BROKEN, exc) from exc


class HttpSource:
    """A process with the route of `weights.serve`."""

    def __init__(self, url: str, *, token: str, environ: Mapping[str, str]) -> None:
        """Ask nothing yet.

        Args:
            token: the run's secret.
            environ: may name a proxy (`process.proxies`).
        """
        self._url = url
        self._token = token
        self._is_direct = is_direct(url, environ)

    def read(self, policy: FetchablePolicy, name: str, *, start: int) -> Generator[bytes]:
        """Request the file, and without compression: bytes are counted as they are in the file."""
        url = f"{self._url}/weights/{policy.version}/{policy.digest}/{name}"
        headers = {"Authorization": f"Bearer {self._token}", "Accept-Encoding": "identity"}
        headers |= {"Range": f"bytes={start}-"} if start else {}
        options: dict[str, Any] = {"timeout": _TIMEOUT, "trust_env": not self._is_direct, "verify": _ssl_context()}
        try:
            with httpx.stream("GET", url, headers=headers, **options) as response:
                if (status := response.status_code) != (206 if start else 200):
                    known = {404: Problem.ABSENT, 503: Problem.BUSY, 401: Problem.WRONG, 403: Problem.WRONG}
                    raise SourceProblem(known.get(status, Problem.BROKEN), f"it answers with status {status}")
                yield from response.iter_raw()
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise SourceProblem(Problem.BROKEN, f"{type(exc).__name__}: {exc}") from exc


@cache
def _ssl_context() -> ssl.SSLContext:
    """Make the context of all connections. Reading the certificates takes longer than a request."""
    return httpx.create_ssl_context()


class SourceChoice:
    """Decides which source is asked next for a file of one policy. Pure: it neither waits nor reads a clock.

    A round asks the origin and some of the others in random order. So readers spread over the sources that have the policy, and
    since each reader that has it becomes a source, the time grows with the logarithm of the number of readers.

    >>> choice = SourceChoice(["http://origin:5556"], rng=random.Random(0))
    >>> choice.next()
    'http://origin:5556'
    """

    def __init__(self, sources: Sequence[str], *, rng: random.Random) -> None:
        """Begin the first round. The first of `sources` is the origin."""
        self.usable = list(sources)
        """The sources that may be asked."""
        self.problems: dict[str, SourceProblem] = {}
        """The last problem of each source that had one."""
        self._rng = rng
        self._num_rounds = 0
        self._round = self._draw()

    def next(self) -> str | None:
        """Return the source to ask now; None when all of this round were asked. Wait for `pause_s` then."""
        if self._round:
            return self._round.pop()
        self._num_rounds += 1
        self._round = self._draw()
        return None

    @property
    def pause_s(self) -> float:
        """Seconds before the next round. They differ between readers, so that not all ask at the same moment."""
        return backoff_s(self._num_rounds, first_s=_FIRST_PAUSE_S, max_s=_MAX_PAUSE_S) * self._rng.uniform(0.5, 1.0)

    def succeed(self, source: str) -> None:
        """Note that `source` gave a file. It is asked next too, because it has a transfer free now."""
        self._num_rounds = 0
        self._round.append(source)

    def fail(self, source: str, problem: SourceProblem) -> None:
        """Note that `source` did not give a file."""
        self.problems[source] = problem
        if problem.problem is Problem.WRONG:
            self.usable.remove(source)
            self._round = [other for other in self._round if other != source]

    def _draw(self) -> list[str]:
        peers = self.usable[1:]
        drawn = [*self.usable[:1], *self._rng.sample(peers, min(_MAX_PEERS_ASKED, len(peers)))]
        self._rng.shuffle(drawn)
        return drawn
