"""An environment of each kind of the v0 API."""

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


class Echo(vf.MultiTurnEnv):
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
            return Echo(dataset=dataset, rubric=vf.Rubric(funcs=[exact]), max_turns=3)
        case _:
            return vf.ToolEnv(tools=[add], dataset=dataset, rubric=vf.Rubric(funcs=[exact]), max_turns=4)
