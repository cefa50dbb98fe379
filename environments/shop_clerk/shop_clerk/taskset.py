"""Orders to add up, drawn from a seed, and the environment that plays them: verifiers' `null` harness with the shop's tools."""

import json
import random
import re

import verifiers.v1 as vf

from shop_clerk.goods import PRICES, cost
from shop_clerk.tools import ShopToolset

INSTRUCTION = (
    "You are the clerk of a shop. Look up every price and discount with your tools before you answer. "
    "End with a line that holds the sum in coins and nothing else."
)


class ShopClerkData(vf.TaskData):
    """One order."""

    items: list[str]
    """The two kinds of goods."""
    answer: int
    """What the order costs, in coins."""


class ShopClerkTask(vf.Task[ShopClerkData]):
    """Scores the sum, and whether it was looked up."""

    @vf.reward
    async def right_sum(self, trace: vf.Trace) -> float:
        """Return 1 when the last line of the last reply is the right sum."""
        lines = trace.last_reply.splitlines() or [""]
        numbers = re.findall(r"\d+", lines[-1])
        return float(numbers == [str(self.data.answer)])

    @vf.reward(weight=0.2)
    async def looked_up(self, trace: vf.Trace) -> float:
        """Return 1 when the price of both goods was looked up."""
        asked = {item for message in trace.assistant_messages for item in items_asked(message)}
        return float(asked >= set(self.data.items))


def items_asked(message: vf.AssistantMessage) -> set[str]:
    """Return the goods whose price the calls of a message ask for."""
    found: set[str] = set()
    for call in message.tool_calls or []:
        try:
            arguments = json.loads(call.arguments or "{}")
        except ValueError:
            continue
        if call.name.endswith("price") and isinstance(arguments, dict):
            found.add(str(arguments.get("item")))
    return found


class ShopClerkConfig(vf.TasksetConfig):
    """Which orders are drawn."""

    num_tasks: int = 1000
    """Orders."""
    max_items: int = 9
    """Most of one kind of goods in an order."""
    seed: int = 0
    """Another seed gives other orders; the prices stay."""
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()
    """Where the tools run."""


class ShopClerkTaskset(vf.Taskset[ShopClerkTask, ShopClerkConfig]):
    """Draws orders from a seed: the same configuration always gives the same tasks."""

    def load(self) -> list[ShopClerkTask]:
        """Return the tasks, in order."""
        config = self.config
        generator = random.Random(config.seed)
        tasks: list[ShopClerkTask] = []
        for _ in range(config.num_tasks):
            order = {item: generator.randint(1, config.max_items) for item in generator.sample(sorted(PRICES), 2)}
            wanted = " and ".join(f"{count} x {item}" for item, count in order.items())
            data = ShopClerkData(
                system_prompt=INSTRUCTION,
                prompt=f"I would like {wanted}. What does that cost?",
                items=list(order),
                answer=sum(cost(item, count) for item, count in order.items()),
            )
            tasks.append(ShopClerkTask(data, config.task))
        return tasks

    @classmethod
    def toolsets(cls, config: ShopClerkConfig) -> list[vf.Toolset]:
        """Return the shop's tools: one server for all rollouts of a worker."""
        return [ShopToolset(config.tools)]


HARNESS = vf.HarnessConfig.model_validate({"id": "null"})
"""A chat with tools and without a shell."""


class ShopClerkEnvConfig(vf.EnvConfig):
    """One agent, which holds the conversation."""

    agent: vf.AgentConfig = vf.AgentConfig(harness=HARNESS, max_turns=8)
    """The clerk."""


class ShopClerkEnv(vf.Env[ShopClerkEnvConfig]):
    """Has the clerk serve one customer."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """Play one order."""
        await agents.agent.run(task)


__all__ = ["ShopClerkEnv", "ShopClerkTaskset"]
