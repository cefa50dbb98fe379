"""Count a letter in a word: a taskset of the verifiers v1 API with one turn, and a model of what such a package looks like."""

import random
import re

import httpx
import verifiers.v1 as vf

LETTERS = "abcdefgh"
MAX_COUNT = 5
"""The highest answer. Every answer up to it is as frequent, so that no number is right more often than a guess."""
INSTRUCTION = "Answer with a number alone."


class CountLettersData(vf.TaskData):
    """One word and a letter to count in it."""

    answer: int
    """How often the letter occurs."""


class CountLettersTask(vf.Task[CountLettersData]):
    """Scores the number in the last reply."""

    @vf.reward
    async def closeness(self, trace: vf.Trace) -> float:
        """Return 1 for the right number, 0.5 for one that is off by one, 0 otherwise."""
        given = read_number(trace.last_reply)
        if given is None:
            return 0.0
        return {0: 1.0, 1: 0.5}.get(abs(given - self.data.answer), 0.0)

    @vf.metric
    async def is_number(self, trace: vf.Trace) -> float:
        """Return 1 when the reply is a number and nothing else."""
        return float(read_number(trace.last_reply) is not None)


def read_number(reply: str) -> int | None:
    """Return the number that a reply consists of; None when it says anything else."""
    found = re.fullmatch(r"\s*(\d{1,3})\.?\s*", reply)
    return int(found.group(1)) if found else None


class CountLettersConfig(vf.TasksetConfig):
    """Which words are drawn."""

    num_tasks: int = 2000
    """Words, each with a letter to count."""
    min_length: int = 5
    """Letters of the shortest word."""
    max_length: int = 12
    """Letters of the longest word."""
    seed: int = 0
    """Another seed gives other words."""


class CountLettersTaskset(vf.Taskset[CountLettersTask, CountLettersConfig]):
    """Draws words from a seed: the same configuration always gives the same tasks."""

    def load(self) -> list[CountLettersTask]:
        """Return the tasks, in order."""
        config = self.config
        generator = random.Random(config.seed)
        tasks: list[CountLettersTask] = []
        for _ in range(config.num_tasks):
            length = generator.randint(config.min_length, config.max_length)
            letter, answer = generator.choice(LETTERS), generator.randint(0, min(MAX_COUNT, length))
            letters = letter * answer + "".join(generator.choices(LETTERS.replace(letter, ""), k=length - answer))
            word = "".join(generator.sample(letters, k=length))
            data = CountLettersData(
                system_prompt=INSTRUCTION,
                prompt=f'How often does the letter "{letter}" occur in "{word}"?',
                answer=answer,
            )
            tasks.append(CountLettersTask(data, config.task))
        return tasks


class OneReplyHarness(vf.Harness[vf.HarnessConfig]):
    """Asks the model once, inside this process: a program of its own would take a second to start for each rollout."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Send the task's prompt to the interception endpoint, which records the reply on the trace."""
        system, prompt = self.resolve_text_prompt(data)
        said = {"system": system, "user": prompt}
        messages = [{"role": role, "content": text} for role, text in said.items() if text]
        async with httpx.AsyncClient(timeout=None) as client:  # the request's own limit is the server's
            response = await client.post(
                f"{endpoint}/chat/completions",
                headers={"Authorization": f"Bearer {secret}"},
                json={"model": ctx.model, "messages": messages},
            )
        return vf.ProgramResult(exit_code=int(response.is_error), stdout="", stderr=response.text if response.is_error else "")


__all__ = ["CountLettersTaskset", "OneReplyHarness"]
