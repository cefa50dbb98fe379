"""Lets one first node at a time lead a run, by a lease in the output directory.

The leader raises a number in the file every second. A candidate watches the file first: while the number changes, another node
leads, and the candidate is refused. When it has not changed for `lost_after_s`, the lease is free: by then the agents of the old
leader have ended its processes (`launcher.nodes.head_contact`), and a leader that could not renew for three quarters of that time
has ended its run (`launcher.nodes.lease_guard`). Each lease has a higher term than the one before it. A leader that reads a higher
term has lost the lease.

Unlike a lock the lease also holds where the shared file system keeps no locks between machines, and a node that died blocks the
run for `lost_after_s` only. No clocks are compared. What a leader that hung still writes before it reads the file again is not
committed: `checkpoints.run_record`.
"""

import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import msgspec

from trivet.errors import NodesMissing, RunDirectoryBusy
from trivet.launcher.nodes.head_contact import ALONE_SHARE
from trivet.storage.durable import DECODE_ERRORS, is_listed, replace_file

_RENEW_INTERVAL_S = 1.0
_SETTLE_S = 3.0
"""Of two candidates that took a free lease at one moment both know after this time who has it."""
_HELD_SHARE = 0.75
"""Share of `lost_after_s` for which a leader may lead without a renewal; the rest is for the end of its processes."""
_ANSWER_SHARE = _HELD_SHARE - ALONE_SHARE
"""Share of `lost_after_s` for which a leader answers its agents without a renewal. The agents end their processes ALONE_SHARE
of it later, when the leader ends its own."""


class Lease(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """The content of .lease.json. Of two leases the greater one counts."""

    term: int
    """One more than that of the lease before."""
    holder: str
    """A name that no other process has had."""
    node: str
    """Host name of its machine."""
    number: int


def read_lease(path: Path) -> Lease | None:
    """Return the lease of a directory; None when nobody has taken it, or the file is damaged.

    Raises:
        OSError: the file cannot be read now.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Lease) if is_listed(path) else None
    except (FileNotFoundError, *DECODE_ERRORS):
        return None


class HeadLease:
    """This process's right to lead the run of a directory.

    >>> with HeadLease(layout.lease, lost_after_s=30.0) as lease:
    ...     lease.check()
    """

    def __init__(
        self,
        path: Path,
        *,
        lost_after_s: float,
        is_retried: bool = False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Prepare the lease without taking it.

        Args:
            lost_after_s: a lease that has not changed for this long is free.
            is_retried: whether another start is worthwhile when another node leads (`RunDirectoryBusy`).
        """
        self._path = path
        self._lost_after_s = lost_after_s
        self._is_retried = is_retried
        self._clock = clock
        self._sleep = sleep
        self._earlier: Lease | None = None
        """The lease of another node that this one waits for."""
        self._last_term = 0
        self._has_looked = False
        self._looked_at = float("-inf")
        self._watched_since = 0.0
        """When `_earlier` was read first."""
        self._own = Lease(term=0, holder=secrets.token_hex(8), node=os.uname().nodename, number=0)
        self._renewed_at = clock()
        self._successor: Lease | None = None
        self._is_held = False
        self._has_expired = False
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="head-lease", daemon=True)

    def __enter__(self) -> "HeadLease":
        """Wait until the lease is free, and take it.

        Raises:
            RunDirectoryBusy: another node leads.
            OSError: the file cannot be written.
        """
        self.look()
        while not self._is_free:
            self._sleep(_RENEW_INTERVAL_S)
            self.look()
        self._own = msgspec.structs.replace(self._own, term=self._last_term + 1)
        self.renew()
        self._sleep(_SETTLE_S)
        self.renew()
        self.check()
        self._is_held = True
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._is_closing.set()
        self._thread.join()
        found = read_lease(self._path)
        # The agents of a leader whose lease has expired may still be ending their processes: the next leader waits for that.
        if found is not None and found.holder == self._own.holder and not self.has_expired:
            self._path.unlink(missing_ok=True)
        self._is_held = False

    @property
    def is_lost(self) -> bool:
        """True when another node has taken it."""
        return self._successor is not None

    @property
    def has_expired(self) -> bool:
        """True once a held lease was not renewed for so long that another node may take it soon. It stays True. No file is read."""
        self._has_expired |= self._is_held and self._silent_s > _HELD_SHARE * self._lost_after_s
        return self._has_expired

    @property
    def may_answer(self) -> bool:
        """True while agents may be told that this node leads. No file is read.

        Agents that get no answer end their processes, at the latest when this node ends its own.
        """
        return not self.is_lost and not self.has_expired and self._silent_s <= _ANSWER_SHARE * self._lost_after_s

    @property
    def _silent_s(self) -> float:
        return self._clock() - self._renewed_at

    def check(self) -> None:
        """Raise when this node must not lead any more.

        Raises:
            RunDirectoryBusy: another node has taken the lease.
            NodesMissing: it could not be renewed for so long that another may take it.
        """
        if self._successor is not None:
            raise self._refusal(self._successor)
        if self.has_expired:
            raise NodesMissing(
                f"this node could not renew its lease {str(self._path)!r} for {_HELD_SHARE * self._lost_after_s:.0f} s, and another"
                " may lead the run soon:"
                " the shared directory does not answer, or deployment.lost_after_s is too short for it"
            )

    def look(self) -> None:
        """Check, at most once a second, whether another node renews the lease. A candidate calls it while it waits.

        Raises:
            RunDirectoryBusy: another node leads.
            OSError: the file cannot be read at the first look.
        """
        now = self._clock()
        if now - self._looked_at < _RENEW_INTERVAL_S:
            return
        self._looked_at = now
        try:
            found = read_lease(self._path)
        except OSError:
            if not self._has_looked:
                raise
            self._watched_since = self._clock()  # whether it is renewed is unknown: the time begins anew
            return
        if not self._has_looked:
            self._has_looked, self._watched_since = True, self._clock()
            if found is not None:
                print(
                    f"node 0: {found.node} led this run and may do so still; waiting {self._lost_after_s:g} s"
                    " (deployment.lost_after_s)",
                    file=sys.stderr,
                )
        elif found is not None and found != self._earlier:
            raise self._refusal(found)
        self._earlier, self._last_term = found, found.term if found is not None else self._last_term

    @property
    def _is_free(self) -> bool:
        return self._earlier is None or self._clock() - self._watched_since >= self._lost_after_s

    def renew(self) -> None:
        """Raise the number in the file, unless a greater lease is in it.

        Raises:
            OSError: the file cannot be read or written now.
        """
        begun, found = self._clock(), read_lease(self._path)
        if found is not None and found.holder != self._own.holder and found > self._own:
            self._successor = found
            return
        self._own = msgspec.structs.replace(self._own, number=self._own.number + 1)
        replace_file(self._path, msgspec.json.encode(self._own))
        self._renewed_at = begun

    def _keep(self) -> None:
        while not (self.is_lost or self.has_expired or self._is_closing.wait(_RENEW_INTERVAL_S)):
            try:
                self.renew()
            except OSError:
                continue  # `check` says when this has lasted too long

    def _refusal(self, lease: Lease) -> RunDirectoryBusy:
        return RunDirectoryBusy(
            f"another first node, on {lease.node}, leads the run in output_dir {str(self._path.parent)!r}; stop it there, or choose"
            " another output_dir",
            is_retried=self._is_retried,
        )
