"""Write warm-up conversations for the six example environments: the teacher knows every answer's form, and few answers.

The teacher plays each environment through verifiers' own rollout loop. So tools and games say in the conversations what they say
in training. A tiny model that is trained on them calls tools and ends its answers. To be right is left to reinforcement learning.

    uv run python -m trivet.examples.environments_data models/examples/sft.jsonl [--examples 60] [--seed 0]
"""

import argparse
import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import verifiers as vf
from openai import AsyncOpenAI

from wordle.game import load_words, mark_guess

ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "reverse-text": {"min_length": 3, "max_length": 5},
    "alphabet-sort": {"max_turns": 2, "max_names_per_turn": 2},
    "gsm8k": {"dataset": "bundled"},
    "math-python": {},
    "wiki-search": {},
    "wordle": {"max_turns": 3},
}
"""Arguments of each environment beside the number of examples."""

ScriptedReply = Callable[[vf.State, vf.Messages, random.Random], str | vf.ToolCall]
"""What the teacher does next: a text, or one call of a tool."""


def reverse(state: vf.State, _prompt: vf.Messages, generator: random.Random) -> str:
    text = state["answer"] if generator.random() < 0.5 else state["answer"][::-1]
    return f"<reversed_text>{text}</reversed_text>"


def sort_names(state: vf.State, _prompt: vf.Messages, generator: random.Random) -> str:
    lines = state["info"]["expected"][len(state["trajectory"])].splitlines()
    if generator.random() < 0.5:
        generator.shuffle(lines)
    return "<sorted>\n" + "\n".join(lines) + "\n</sorted>"


def box_a_number(state: vf.State, _prompt: vf.Messages, generator: random.Random) -> str:
    number = state["answer"] if generator.random() < 0.5 else generator.randint(1, 50)
    return f"\\boxed{{{number}}}"


def compute(state: vf.State, prompt: vf.Messages, generator: random.Random) -> str | vf.ToolCall:
    if not state["trajectory"]:
        a, b = generator.randint(2, 9), generator.randint(2, 9)
        return call("python", code=f"print({a} {generator.choice('+*')} {b})")
    return f"\\boxed{{{str(prompt[-1].content).strip()}}}"


def look_up(state: vf.State, _prompt: vf.Messages, _generator: random.Random) -> str | vf.ToolCall:
    source = state["info"]["source"]
    steps = [call("search", query=source), call("read", title=source), f"<answer>{state['answer']}</answer>"]
    return steps[len(state["trajectory"])]


def guess(state: vf.State, _prompt: vf.Messages, generator: random.Random) -> str:
    secret, tried = state["answer"], state["guesses"]
    fitting = [word for word in load_words() if all(mark_guess(old, word) == mark_guess(old, secret) for old in tried)]
    return f"<guess>{generator.choice(fitting)}</guess>"


REPLIES: dict[str, ScriptedReply] = {
    "reverse-text": reverse,
    "alphabet-sort": sort_names,
    "gsm8k": box_a_number,
    "math-python": compute,
    "wiki-search": look_up,
    "wordle": guess,
}


def call(name: str, **arguments: str) -> vf.ToolCall:
    return vf.ToolCall(id="call", name=name, arguments=json.dumps(arguments))


class ScriptedTeacher(vf.OpenAIChatCompletionsClient):
    """Stands where a model's server would: no request leaves this process."""

    def __init__(self, reply: ScriptedReply, generator: random.Random) -> None:
        super().__init__(AsyncOpenAI(base_url="http://127.0.0.1:9", api_key="none"))
        self._reply, self._generator = reply, generator

    async def get_response(
        self, prompt: vf.Messages, model: str, sampling_args: Any, tools: Any = None, **kwargs: Any
    ) -> vf.Response:
        said = self._reply(kwargs["state"], prompt, self._generator)
        message = vf.ResponseMessage(
            content=said if isinstance(said, str) else "",
            tool_calls=None if isinstance(said, str) else [said],
            finish_reason="stop" if isinstance(said, str) else "tool_calls",
            is_truncated=False,
        )
        return vf.Response(id="teacher", created=0, model=model, message=message)


async def conversations(env_id: str, count: int, *, seed: int) -> list[dict[str, Any]]:
    """Rows for `sft`: messages, and the tools that the environment offers."""
    env = vf.load_environment(env_id, num_examples=count, num_eval_examples=1, seed=seed + 1000, **ENVIRONMENTS[env_id])
    teacher = ScriptedTeacher(REPLIES[env_id], random.Random(f"{seed}/{env_id}"))
    dataset = env.get_dataset()
    rows = []
    for index in range(count):
        state = await env.rollout(cast(Any, dataset[index % len(dataset)]), teacher, "teacher", {})
        if state["error"]:
            raise state["error"]
        row: dict[str, Any] = {"messages": [as_row(message) for message in [*state["prompt"], *state["completion"]]]}
        if env.tool_defs:
            row["tools"] = [as_tool(tool) for tool in env.tool_defs]
        rows.append(row)
    return rows


def as_row(message: Any) -> dict[str, Any]:
    """A message as chat templates read it: the arguments of a tool call are a table there."""
    row = {"role": message.role, "content": message.content or ""}
    if calls := getattr(message, "tool_calls", None):
        row["tool_calls"] = [
            {"type": "function", "function": {"name": made.name, "arguments": json.loads(made.arguments)}} for made in calls
        ]
    return row


def as_tool(tool: vf.Tool) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--examples", type=int, default=60, help="conversations in each environment")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = [row for env_id in ENVIRONMENTS for row in asyncio.run(conversations(env_id, args.examples, seed=args.seed))]
    args.file.parent.mkdir(parents=True, exist_ok=True)
    args.file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"wrote {args.file}: {len(rows)} conversations in {len(ENVIRONMENTS)} environments")


if __name__ == "__main__":
    main()
