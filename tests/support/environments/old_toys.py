"""An environment of each kind that runs with every release of the v0 API, from verifiers 0.1.2 on."""

import inspect

import verifiers as vf
from datasets import Dataset

ROWS = [{"question": "abc", "answer": "cba"}]


def exact(completion, answer, **kwargs) -> float:
    return float((completion[-1]["content"] or "") == answer)


def broken(completion, **kwargs) -> float:
    raise LookupError("no such answer")


def add(a: int, b: int) -> str:
    """Adds two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return str(a + b)


RETURNS_STATE = "input" not in inspect.signature(vf.Environment.rollout).parameters
"""Until 0.1.7 `env_response` returns the state too, and may not be awaitable."""


class OldEcho(vf.MultiTurnEnv):
    """Says what was said, three turns long."""

    def is_completed(self, messages, state, **kwargs):
        return state["turn"] >= 3

    def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": f"you said {messages[-1]['content']}"}], state


class NewEcho(vf.MultiTurnEnv):
    """Says what was said."""

    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": f"you said {messages[-1]['content']}"}]


def load_environment(kind: str) -> vf.Environment:
    dataset = Dataset.from_list(ROWS)
    match kind:
        case "single":
            return vf.SingleTurnEnv(dataset=dataset, rubric=vf.Rubric(funcs=[exact]))
        case "broken":
            return vf.SingleTurnEnv(dataset=dataset, rubric=vf.Rubric(funcs=[broken]))
        case "multi":
            rubric = vf.Rubric(funcs=[exact])
            return (
                OldEcho(dataset=dataset, rubric=rubric)
                if RETURNS_STATE
                else NewEcho(dataset=dataset, rubric=rubric, max_turns=3)
            )
        case _:
            return vf.ToolEnv(tools=[add], dataset=dataset, rubric=vf.Rubric(funcs=[exact]), max_turns=4)
