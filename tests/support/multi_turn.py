"""Makes environments of the v0 API with conversations of several turns."""

from collections.abc import Sequence
from typing import Any

import verifiers as vf

QUESTION = {"role": "user", "content": "What is two and three?"}


class Interview(vf.MultiTurnEnv):
    """The user says the next of its lines until none is left."""

    def __init__(self, lines: Sequence[str], **arguments: Any) -> None:
        super().__init__(max_turns=len(lines) + 1, **arguments)
        self.lines = lines

    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": self.lines[len(state["trajectory"]) - 1]}]


def add(a: int, b: int) -> str:
    """Adds.

    Args:
        a: one number
        b: the other
    """
    return f"{a} + {b} = {a + b}"
