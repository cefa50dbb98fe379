"""Number problems that are tedious by hand and short in Python. Every problem is a function of a random generator."""

import math
import random
from collections.abc import Callable, Set
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """A question with a number as its answer."""

    question: str
    answer: int


def _sum_of_multiples(generator: random.Random) -> Problem:
    a, b = generator.sample(range(3, 20), 2)
    limit = generator.randint(100, 5000)
    answer = sum(number for number in range(1, limit) if number % a == 0 or number % b == 0)
    return Problem(f"What is the sum of all positive integers below {limit} that are multiples of {a} or of {b}?", answer)


def _digit_sum_of_power(generator: random.Random) -> Problem:
    base, exponent = generator.randint(2, 19), generator.randint(20, 120)
    return Problem(f"What is the sum of the decimal digits of {base}^{exponent}?", sum(map(int, str(base**exponent))))


def _power_remainder(generator: random.Random) -> Problem:
    base, exponent, modulus = generator.randint(2, 99), generator.randint(50, 5000), generator.randint(100, 9999)
    return Problem(f"What is the remainder when {base}^{exponent} is divided by {modulus}?", pow(base, exponent, modulus))


def _count_primes(generator: random.Random) -> Problem:
    low = generator.randint(1, 2000)
    high = low + generator.randint(50, 1500)
    answer = sum(_is_prime(number) for number in range(low, high + 1))
    return Problem(f"How many primes are there from {low} to {high}, both included?", answer)


def _count_divisors(generator: random.Random) -> Problem:
    number = math.prod(generator.choices((2, 3, 5, 7, 11, 13), k=generator.randint(4, 9)))
    return Problem(f"How many positive divisors does {number} have?", _divisor_count(number))


def _collatz_steps(generator: random.Random) -> Problem:
    start = value = generator.randint(10, 9999)
    steps = 0
    while value != 1:
        value = 3 * value + 1 if value % 2 else value // 2
        steps += 1
    return Problem(
        f"Start with {start}. Halve an even number; multiply an odd one by 3 and add 1. How many such steps lead to 1?", steps
    )


def _fibonacci_remainder(generator: random.Random) -> Problem:
    index, modulus = generator.randint(30, 400), generator.randint(10, 999)
    a, b = 0, 1
    for _ in range(index):
        a, b = b, a + b
    return Problem(f"Let F(1) = F(2) = 1 and F(n) = F(n-1) + F(n-2). What is F({index}) modulo {modulus}?", a % modulus)


def _common_multiple(generator: random.Random) -> Problem:
    numbers = generator.sample(range(10, 99), 3)
    listed = f"{numbers[0]}, {numbers[1]} and {numbers[2]}"
    return Problem(f"What is the least common multiple of {listed}?", math.lcm(*numbers))


def _palindromes(generator: random.Random) -> Problem:
    limit = generator.randint(500, 20000)
    answer = sum(str(number) == str(number)[::-1] for number in range(1, limit))
    return Problem(f"How many positive integers below {limit} read the same backwards in decimal notation?", answer)


def _coin_ways(generator: random.Random) -> Problem:
    coins = sorted(generator.sample((1, 2, 5, 10, 20, 25, 50), 4))
    amount = generator.randint(30, 150)
    ways = [1] + [0] * amount
    for coin in coins:
        for total in range(coin, amount + 1):
            ways[total] += ways[total - coin]
    listed = f"{', '.join(map(str, coins[:-1]))} and {coins[-1]}"
    return Problem(f"In how many ways can {amount} cents be paid with coins of {listed} cents, in any number?", ways[amount])


KINDS: tuple[Callable[[random.Random], Problem], ...] = (
    _sum_of_multiples,
    _digit_sum_of_power,
    _power_remainder,
    _count_primes,
    _count_divisors,
    _collatz_steps,
    _fibonacci_remainder,
    _common_multiple,
    _palindromes,
    _coin_ways,
)


def make_problems(count: int, *, seed: str, exclude: Set[str] = frozenset()) -> list[Problem]:
    """Return distinct problems, each kind equally likely; the result depends on the arguments alone.

    Args:
        exclude: questions that must not appear.
    """
    generator = random.Random(seed)
    problems: dict[str, Problem] = {}
    while len(problems) < count:
        problem = generator.choice(KINDS)(generator)
        if problem.question not in exclude:
            problems[problem.question] = problem
    return list(problems.values())


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def _divisor_count(number: int) -> int:
    count = 0
    for divisor in range(1, math.isqrt(number) + 1):
        if number % divisor == 0:
            count += 1 if divisor * divisor == number else 2
    return count
