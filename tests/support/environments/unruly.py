"""An environment whose examples misbehave in different ways. The question names the way."""

import asyncio
import os
import re
import sys
import time

import verifiers as vf
from datasets import Dataset

WAYS = [
    "well",
    "raise",
    "nan",
    "none",
    "sys-exit",
    "interrupt",
    "os-exit",
    "hang",
    "slow",
    "block",
    "hold-gil",
    "fork",
    "fork-and-return",
    "big-text",
    "raise-in-setup",
    "exit-in-setup",
]


async def behave(prompt, completion, **kwargs) -> float:
    match prompt[-1]["content"]:
        case "raise":
            raise ValueError("no such answer")
        case "nan":
            return float("nan")
        case "none":
            return None  # type: ignore[return-value]
        case "sys-exit":
            sys.exit(3)
        case "interrupt":
            raise KeyboardInterrupt
        case "os-exit":
            os._exit(7)
        case "hang":
            await asyncio.Event().wait()
        case "slow":
            await asyncio.sleep(2)
        case "block":
            time.sleep(3600)  # noqa: ASYNC251  this is what it is for
        case "hold-gil":
            re.match(r"(a*)*b", "a" * 40)
        case "fork":
            if os.fork() == 0:
                time.sleep(3600)  # noqa: ASYNC251  in the child
        case "fork-and-return":
            os.fork()
    return 1.0


class UnrulyEnv(vf.MultiTurnEnv):
    async def setup_state(self, state: vf.State) -> vf.State:
        match state["prompt"][-1]["content"]:
            case "raise-in-setup":
                raise LookupError("nothing to set up")
            case "exit-in-setup":
                sys.exit(4)
        return state

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs) -> vf.Messages:
        if state["prompt"][-1]["content"] == "big-text":
            return [vf.UserMessage(content="x" * 10_000_000)]
        state["final_env_response"] = [vf.UserMessage(content="bye")]
        return state["final_env_response"]


def load_environment(fails: str = "", takes_s: float = 0.0) -> vf.Environment:
    """
    Args:
        fails: raise this, or `exit`.
        takes_s: to load.
    """
    time.sleep(takes_s)
    if fails == "exit":
        sys.exit(9)
    if fails:
        raise ValueError(fails)
    rows = Dataset.from_list([{"question": way, "answer": ""} for way in WAYS])
    return UnrulyEnv(dataset=rows, rubric=vf.Rubric(funcs=[behave]), max_turns=2)
