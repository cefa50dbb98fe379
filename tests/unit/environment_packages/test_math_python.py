import asyncio
import math
import os
import re
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import psutil
import pytest

from math_python import load_environment
from math_python.environment import extract_number
from math_python.problems import KINDS, make_problems
from math_python.sandbox import MAX_FILE_BYTES, Limits, choose_sandbox, run_python
from support.processes import wait_until
from support.scripted_policy import play, said, tool_call


def run(code: str, **limits: float) -> str:
    allowed = Limits(**{"timeout_s": 20.0, **limits})  # pyright: ignore[reportArgumentType]
    return asyncio.run(run_python(code, limits=allowed, sandbox=choose_sandbox(require_isolation=False)))


def processes_with(marker: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["cmdline"]) if marker in " ".join(process.info["cmdline"] or ())]


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("print(6 * 7)", "42"),
        ("x = 6\nx * 7", "42"),
        ("print('a')\n'b'", "a\n'b'"),
        ("import math\nmath.comb(10, 3)", "120"),
        ("x = 1", "(no output)"),
        ("None", "(no output)"),
        ("", "(no output)"),
        ("print('é' * 3)", "ééé"),
    ],
)
def test_code_says_what_it_prints_and_the_value_of_its_last_line(code, output):
    assert run(code) == output


def test_errors_are_shown_without_the_lines_of_the_program_that_runs_the_code():
    assert run("print(1)\n1 / 0") == (
        '1\nTraceback (most recent call last):\n  File "<code>", line 2, in <module>\nZeroDivisionError: division by zero'
    )
    assert run("def f(:").splitlines()[:2] == ["Traceback (most recent call last):", '  File "<code>", line 1']


def test_an_endless_loop_ends_when_its_computing_time_is_used_up():
    assert run("while True: pass", cpu_s=1) == "(ended: more than 1 s of computing)"


def test_waiting_ends_with_the_time_limit_and_what_was_printed_is_kept():
    code = "import time\nprint('before')\ntime.sleep(3600)"
    for limit_s in (1.0, 5.0, 25.0):  # a busy machine starts the code late
        text = run(code, timeout_s=limit_s)
        if text.startswith("before"):
            break
    assert text == f"before\n(ended: no end within {limit_s:g} s)"


def test_memory_is_limited():
    assert run("x = [0] * 10**9", memory_mib=256).endswith("MemoryError")


def test_endless_output_is_cut_and_ends_the_code():
    output = run("while True: print('x' * 1000)", output_chars=500)
    assert output.startswith("x" * 500)
    assert len(output) < 600


def test_files_are_limited_and_gone_afterwards():
    code = f"import os\nopen('big', 'w').write('x' * {3 * MAX_FILE_BYTES})"
    assert "File too large" in run(code)
    directory = run("import os\nopen('kept', 'w').write('x')\nprint(os.getcwd())").splitlines()[0]
    assert not Path(directory, "kept").exists()


def test_a_call_that_is_cancelled_leaves_no_process_behind():
    marker = f"32.{os.getpid()}"

    async def cancel() -> None:
        code = f"import time\nname = '{marker}'\nimport subprocess\nsubprocess.run(['sleep', '{marker}'])"
        sandbox = choose_sandbox(require_isolation=False)
        task = asyncio.create_task(run_python(code, limits=Limits(timeout_s=60), sandbox=sandbox))
        started = partial(processes_with, f"sleep {marker}")
        await asyncio.to_thread(wait_until, started, timeout_s=15, waiting_for="the code to start")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    wait_until(lambda: not processes_with(f"sleep {marker}"), timeout_s=10, waiting_for="the code to end")


def test_the_tool_is_called_and_its_output_is_given_to_the_model():
    env = load_environment(num_examples=1, num_eval_examples=1)
    example = {**env.get_dataset()[0], "answer": "5050"}
    state = play(env, [tool_call("python", code="sum(range(101))"), "It is \\boxed{5,050}."], example=example)
    assert said(state, "tool") == ["5050"]
    assert state["reward"] == pytest.approx(1.1)
    assert state["metrics"]["python_calls"] == 1


def test_a_wrong_call_is_told_to_the_model_and_the_rollout_goes_on():
    env = load_environment(num_examples=1, num_eval_examples=1)
    state = play(env, [tool_call("python", source="1"), tool_call("shell", code="ls"), "\\boxed{0}"])
    assert "source" in said(state, "tool")[0]
    assert "shell" in said(state, "tool")[1]
    assert state["metrics"]["correct"] == 0.0
    assert state["metrics"]["boxed"] == 1.0


@pytest.mark.parametrize(
    ("text", "number"), [("\\boxed{-12}", "-12"), ("\\boxed{1} \\boxed{2 000}", "2000"), ("\\boxed{x}", ""), ("12", "")]
)
def test_only_a_boxed_number_is_an_answer(text, number):
    assert extract_number(text) == number


def multiples_below(limit: int, number: int) -> int:
    count = (limit - 1) // number
    return number * count * (count + 1) // 2


def sieve(high: int) -> list[bool]:
    is_prime = [False, False] + [True] * (high - 1)
    for number in range(2, high + 1):
        for multiple in range(2 * number, high + 1, number):
            is_prime[multiple] = False
    return is_prime


def collatz(value: int) -> int:
    return 0 if value == 1 else 1 + collatz(3 * value + 1 if value % 2 else value // 2)


@cache
def ways(amount: int, coins: tuple[int, ...]) -> int:
    if amount == 0:
        return 1
    return 0 if amount < 0 or not coins else ways(amount - coins[0], coins) + ways(amount, coins[1:])


SOLUTIONS: dict[str, Callable[..., int]] = {
    r"sum of all positive integers below (\d+) that are multiples of (\d+) or of (\d+)": lambda limit, a, b: (
        multiples_below(limit, a) + multiples_below(limit, b) - multiples_below(limit, math.lcm(a, b))
    ),
    r"sum of the decimal digits of (\d+)\^(\d+)": lambda base, power: sum(int(digit) for digit in str(base**power)),
    r"remainder when (\d+)\^(\d+) is divided by (\d+)": lambda base, power, modulus: base**power % modulus,
    r"How many primes are there from (\d+) to (\d+), both included": lambda low, high: sum(sieve(high)[low:]),
    r"How many positive divisors does (\d+) have": lambda number: math.prod(
        1 + next(power for power in range(99) if number % prime ** (power + 1)) for prime in (2, 3, 5, 7, 11, 13)
    ),
    r"Start with (\d+)\. Halve": collatz,
    r"What is F\((\d+)\) modulo (\d+)": lambda index, modulus: (
        pow(2 << index, index + 1, (4 << 2 * index) - (2 << index) - 1) % (2 << index) % modulus
    ),
    r"least common multiple of (\d+), (\d+) and (\d+)": lambda a, b, c: next(
        number for number in range(a, a * b * c + 1, a) if number % b == number % c == 0
    ),
    r"integers below (\d+) read the same backwards": lambda limit: len(
        [number for number in map(str, range(1, limit)) if number == "".join(reversed(number))]
    ),
    r"can (\d+) cents be paid with coins of (\d+), (\d+), (\d+) and (\d+) cents": lambda amount, *coins: ways(amount, coins),
}
"""For each question, a way to its answer other than the one that made it."""


def test_the_answers_of_all_kinds_are_right():
    solved: Counter[str] = Counter()
    for problem in make_problems(300, seed="any"):
        [(pattern, numbers)] = [(key, match) for key in SOLUTIONS if (match := re.search(key, problem.question))]
        assert SOLUTIONS[pattern](*map(int, numbers.groups())) == problem.answer, problem
        solved[pattern] += 1
    assert set(solved) == set(SOLUTIONS)
    assert len(KINDS) == len(SOLUTIONS)
