"""Keeps the turns that were served in episodes that are not over, by their trace and by the message that each one sampled."""

from typing import Any

from trivet.environments.apis.trajectories import Turn


class ServedTurns:
    """The tokens behind the sampled messages of running episodes.

    verifiers puts the message object of an answer into its graph as it is, so the object itself names the turn. A message that an
    environment has rewritten is another object: its text was not sampled, and is not trained on.
    """

    def __init__(self) -> None:
        self._turns: dict[str, dict[int, tuple[Any, Turn]]] = {}
        self._numbers: dict[str, int] = {}

    def begin(self, trace_id: str, *, number: int) -> None:
        """Note that a trace is the `number`-th of its episode, from 0."""
        self._numbers[trace_id] = number

    def number(self, trace_id: str) -> int:
        """Return which trace of its episode it is, from 0. Each needs seeds of its own."""
        return self._numbers.get(trace_id, 0)

    def record(self, trace_id: str, message: Any, turn: Turn) -> None:
        """Keep `turn`, which sampled `message`."""
        # Holding the message keeps its id from being given to another object.
        self._turns.setdefault(trace_id, {})[id(message)] = (message, turn)

    def find(self, trace_id: str, message: Any) -> Turn | None:
        """Return the turn that sampled `message`; None when none did."""
        found = self._turns.get(trace_id, {}).get(id(message))
        return None if found is None else found[1]

    def forget(self, trace_id: str) -> None:
        """Drop the turns of a trace. May be called again."""
        self._turns.pop(trace_id, None)
        self._numbers.pop(trace_id, None)

    def __len__(self) -> int:
        """Return the number of traces that are kept."""
        return len(self._turns.keys() | self._numbers.keys())
