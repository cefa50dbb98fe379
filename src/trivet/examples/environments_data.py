"""Write warm-up conversations for the six example environments. A scripted teacher gives answers of the right form, often wrong.

The teacher plays each environment through verifiers' own rollout loop. So tools and games answer in the conversations as they do in
training. A tiny model that is trained on these conversations calls tools and ends its answers. Reinforcement learning then teaches
it right answers.

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

ScriptedReply = Callable[[vf.State, vf.Messages, random.Random], str | vf.ToolCall]
"""Returns the teacher's next turn: a text, or one call of a tool."""


def reverse_text(state: vf.State, _prompt: vf.Messages, generator: random.Random) -> str:
    """Answer in the right form: half of the time with the reversed text, else with the text itself."""
    text = state["answer"] if generator.random() < 0.5 else state["answer"][::-1]
    return f"<reversed_text>{text}</reversed_text>"


def sort_names(state: vf.State, _prompt: vf.Messages, generator: random.Random) -> str:
    """Answer in the right form: half of the time in the right order, else in a random order."""
    lines = state["info"]["expected"][len(state["trajectory"])].splitlines()
    if generator.random() < 0.5:
        generator.shuffle(lines)
    return "<sorted>\n" + "\n".join(lines) + "\n</sorted>"


def box_a_number(state: vf.State, _prompt: vf.Messages, generator: random.Random) -> str:
    """Answer with a number in a box: half of the time the right number, else a random number."""
    number = state["answer"] if generator.random() < 0.5 else generator.randint(1, 50)
    return f"\\boxed{{{number}}}"


def compute(state: vf.State, prompt: vf.Messages, generator: random.Random) -> str | vf.ToolCall:
    """Call the tool once with a random computation, then answer with its output in a box."""
    if not state["trajectory"]:
        left, right = generator.randint(2, 9), generator.randint(2, 9)
        return make_call("python", code=f"print({left} {generator.choice('+*')} {right})")
    return f"\\boxed{{{str(prompt[-1].content).strip()}}}"


def look_up(state: vf.State, _prompt: vf.Messages, _generator: random.Random) -> str | vf.ToolCall:
    """Search for the article, read it, and answer."""
    title = state["info"]["source"]
    replies = [make_call("search", query=title), make_call("read", title=title), f"<answer>{state['answer']}</answer>"]
    return replies[len(state["trajectory"])]


def guess_word(state: vf.State, _prompt: vf.Messages, generator: random.Random) -> str:
    """Guess a random word that fits all feedback so far."""
    secret, guesses = state["answer"], state["guesses"]
    fitting = [word for word in load_words() if all(mark_guess(guess, word) == mark_guess(guess, secret) for guess in guesses)]
    return f"<guess>{generator.choice(fitting)}</guess>"


ENVIRONMENTS: dict[str, tuple[ScriptedReply, dict[str, Any]]] = {
    "reverse-text": (reverse_text, {"min_length": 3, "max_length": 5}),
    "alphabet-sort": (sort_names, {"max_turns": 2, "max_names_per_turn": 2}),
    "gsm8k": (box_a_number, {"dataset": "bundled"}),
    "math-python": (compute, {}),
    "wiki-search": (look_up, {"corpus": "invented"}),
    "wordle": (guess_word, {"max_turns": 3, "any_guess": True}),
}
"""For each environment, the function that makes the teacher's replies, and arguments of `load_environment`."""


def make_call(name: str, **arguments: str) -> vf.ToolCall:
    """Return one call of the tool `name`."""
    return vf.ToolCall(id="call", name=name, arguments=json.dumps(arguments))


class ScriptedTeacher(vf.OpenAIChatCompletionsClient):
    """Replies in place of an inference server: no request leaves this process."""

    def __init__(self, reply: ScriptedReply, generator: random.Random) -> None:
        super().__init__(AsyncOpenAI(base_url="http://127.0.0.1:9", api_key="none"))
        self._reply, self._generator = reply, generator

    async def get_response(
        self, prompt: vf.Messages, model: str, sampling_args: Any, tools: Any = None, **kwargs: Any
    ) -> vf.Response:
        """Return the scripted reply as a response of verifiers."""
        reply = self._reply(kwargs["state"], prompt, self._generator)
        is_text = isinstance(reply, str)
        message = vf.ResponseMessage(
            content=reply if is_text else "",
            tool_calls=None if is_text else [reply],
            finish_reason="stop" if is_text else "tool_calls",
            is_truncated=False,
        )
        return vf.Response(id="teacher", created=0, model=model, message=message)


async def conversations(env_id: str, count: int, *, seed: int) -> list[dict[str, Any]]:
    """Play `count` examples of an environment; return records for `sft`: messages, and the tools that the environment offers."""
    reply, arguments = ENVIRONMENTS[env_id]
    env = vf.load_environment(env_id, num_examples=count, num_eval_examples=1, seed=seed + 1000, **arguments)
    teacher = ScriptedTeacher(reply, random.Random(f"{seed}/{env_id}"))
    dataset = env.get_dataset()
    records = []
    for index in range(count):
        state = await env.rollout(cast(Any, dataset[index % len(dataset)]), teacher, "teacher", {})
        if state["error"]:
            raise state["error"]
        record: dict[str, Any] = {"messages": [as_message(message) for message in [*state["prompt"], *state["completion"]]]}
        if env.tool_defs:
            record["tools"] = [as_tool(tool) for tool in env.tool_defs]
        records.append(record)
    return records


def as_message(message: Any) -> dict[str, Any]:
    """Return a message as chat templates read it: the arguments of a tool call are a table."""
    made = {"role": message.role, "content": message.content or ""}
    if calls := getattr(message, "tool_calls", None):
        made["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": json.loads(call.arguments)}} for call in calls
        ]
    return made


def as_tool(tool: vf.Tool) -> dict[str, Any]:
    """Return a tool in the OpenAI form, as chat templates read it."""
    return {"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters}}


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--examples", type=int, default=60, help="conversations in each environment")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    records = [
        record for env_id in ENVIRONMENTS for record in asyncio.run(conversations(env_id, args.examples, seed=args.seed))
    ]
    args.file.parent.mkdir(parents=True, exist_ok=True)
    args.file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    print(f"wrote {args.file}: {len(records)} conversations in {len(ENVIRONMENTS)} environments")


if __name__ == "__main__":
    main()
