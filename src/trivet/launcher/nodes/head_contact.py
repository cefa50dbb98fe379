"""Decides when a node that hears nothing from the head ends its processes, and when its agent ends. Pure."""

ALONE_SHARE = 0.5
"""Share of `lost_after_s` after which an agent that misses the head ends its processes. They have ended before the head, which
waits for all of it, starts others in their place."""
_STOP_SHARE = 0.25
"""Share of `lost_after_s` that they have for it."""
_LEAVE_FACTOR = 2.0
"""The agent itself ends after this many times `lost_after_s`."""


class HeadContact:
    """Decides from the answers of the head whether it is missed. Pure.

    What counts is when the newest beat was sent that the head has seen: a line that is cut in one direction cuts that too.

    >>> contact = HeadContact(lost_after_s=30.0, now=0.0)
    >>> contact.sent(1, now=0.0)
    >>> contact.seen(1)
    >>> contact.must_end_processes(now=16.0)
    True
    """

    def __init__(self, *, lost_after_s: float, now: float) -> None:
        self.lost_after_s = lost_after_s
        self._sent: dict[int, float] = {}
        self._heard_at = now
        self._lives_at = now

    def sent(self, beat: int, *, now: float) -> None:
        """Note that a beat was sent."""
        self._sent[beat] = now

    def seen(self, beat: int) -> None:
        """Note that the head has seen this beat and those before it."""
        if beat in self._sent:
            self._heard_at = self._sent[beat]
        for old in [number for number in self._sent if number <= beat]:
            del self._sent[old]

    def begin(self, *, sent_at: float) -> None:
        """Note that the head has answered what was sent at that time on a new connection, whose beats are numbered from one."""
        self._sent.clear()
        self._heard_at = sent_at

    def noticed(self, *, now: float) -> None:
        """Note that the head has renewed its lease: it lives, though no message gets through."""
        self._lives_at = now

    def must_end_processes(self, *, now: float) -> bool:
        """Return whether the processes of this node have to end."""
        return now - self._heard_at > ALONE_SHARE * self.lost_after_s

    def must_end_agent(self, *, now: float) -> bool:
        """Return whether this agent has to end: neither a message nor the lease shows that the head lives."""
        return now - max(self._heard_at, self._lives_at) > _LEAVE_FACTOR * self.lost_after_s

    @property
    def stop_timeout_s(self) -> float:
        """How long processes may take to end when the head is missed."""
        return _STOP_SHARE * self.lost_after_s
