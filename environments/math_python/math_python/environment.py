"""Makes an environment of the problems with one tool, `python`. Every call starts a new process: no state is kept."""

import asyncio
import os
import re

import verifiers as vf
from datasets import Dataset

from math_python.problems import Problem, make_problems
from math_python.sandbox import Limits, Sandbox, SandboxFailed, choose_sandbox, run_python

SYSTEM_PROMPT = (
    "Solve the problem. You may compute with the tool python; every call starts afresh. "
    "When you know the answer, give it as a number in \\boxed{}."
)
_BOXED = re.compile(r"\\boxed\s*\{\s*([+-]?[\d,_ ]+)\s*\}")


def extract_number(text: str) -> str:
    """Return the integer in the last \\boxed{} that has one, without separators; empty without any."""
    boxes = _BOXED.findall(text)
    return re.sub(r"[,_ +]", "", boxes[-1]) if boxes else ""


class PythonTool:
    """Runs code within `limits`, at most one process per core at a time; the others wait for their turn."""

    def __init__(self, limits: Limits, *, sandbox: Sandbox, max_processes: int) -> None:
        self._limits = limits
        self._sandbox = sandbox
        self._slots = asyncio.Semaphore(max_processes)

    async def python(self, code: str) -> str:
        """Run Python code and return what it prints.

        Args:
            code: Python source; the value of a last line that is an expression is printed too.
        """
        async with self._slots:
            return await run_python(code, limits=self._limits, sandbox=self._sandbox)


def make_rubric(parser: vf.Parser) -> vf.Rubric:
    """Make the rubric: a right number, and a little for a boxed one."""

    def correct(completion: vf.Messages, answer: str) -> float:
        """Return 1 when the boxed number of the last answer is the right one, else 0."""
        given = parser.parse_answer(completion) or ""
        return float(bool(given) and int(given) == int(answer))

    def boxed(completion: vf.Messages) -> float:
        """Return 1 when the last answer has a boxed number, right or wrong, else 0."""
        return float(bool(parser.parse_answer(completion)))

    return vf.Rubric(funcs=[correct, boxed], weights=[1.0, 0.1], parser=parser)


def make_dataset(problems: list[Problem]) -> Dataset:
    """Return a data set of `problems`."""
    return Dataset.from_list([{"question": problem.question, "answer": str(problem.answer)} for problem in problems])


def load_environment(
    num_examples: int = 2000,
    num_eval_examples: int = 200,
    max_turns: int = 6,
    timeout_s: float = 5.0,
    cpu_s: int = 5,
    memory_mib: int = 512,
    output_chars: int = 2000,
    max_processes: int | None = None,
    require_isolation: bool = False,
    seed: int = 0,
    system_prompt: str = SYSTEM_PROMPT,
) -> vf.Environment:
    """Return a tool environment over generated problems. Its evaluation set shares no problem with its training set.

    Args:
        max_turns: model turns in a rollout; a rollout also ends with the first turn that calls no tool.
        timeout_s, cpu_s, memory_mib, output_chars: limits of one call of the tool.
        max_processes: calls that run at the same time; None: one per core.
        require_isolation: refuse to load where the kernel gives the code no namespaces of its own; False: warn, and run it as
            the user of the run.
        seed: another seed gives other problems.
    """
    held_out = make_problems(num_eval_examples, seed=f"{seed}/eval")
    problems = make_problems(num_examples, seed=f"{seed}/train", exclude={problem.question for problem in held_out})
    limits = Limits(timeout_s=timeout_s, cpu_s=cpu_s, memory_mib=memory_mib, output_chars=output_chars)
    sandbox = choose_sandbox(require_isolation=require_isolation)
    tool = PythonTool(limits, sandbox=sandbox, max_processes=max_processes or os.cpu_count() or 1)
    parser = vf.MaybeThinkParser(extract_fn=extract_number)

    return vf.ToolEnv(
        tools=[tool.python],
        stop_errors=[SandboxFailed],
        dataset=make_dataset(problems),
        eval_dataset=make_dataset(held_out),
        system_prompt=system_prompt or None,
        parser=parser,
        rubric=make_rubric(parser),
        max_turns=max_turns,
    )
