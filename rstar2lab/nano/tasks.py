"""Ten families of integer questions that one line of Python solves.

Each family has several *plans*: code expressions of which the first is right and the others are
natural misreadings (`//` for `%`, an off-by-one range, a count for a sum). Which plan solves which
family is what reinforcement learning has to find; the cold start never says it.
Held-out questions are chosen by a hash of their text, so no seed can leak one into training.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..config import ConfigError
from ..types import Problem

Operands = dict[str, int]
_MOST_MISSES = 20_000  # draws without a new question before a family counts as exhausted


@dataclass(frozen=True)
class Family:
    """A kind of question: wordings, plans (the first is right), how operands are drawn."""

    name: str
    level: str  # "easy" or "hard"
    wordings: tuple[str, ...]
    plans: tuple[str, ...]
    draw: Callable[[np.random.Generator], Operands]
    needs_math: bool = False

    def question(self, operands: Operands, wording: int) -> str:
        return self.wordings[wording].format(**operands)

    def expression(self, operands: Operands, plan: int) -> str:
        """The plan's code with the operands written in."""
        return self.plans[plan].format(**operands)


def _between(**ranges: tuple[int, int]) -> Callable[[np.random.Generator], Operands]:
    """Draw each operand uniformly from its inclusive range."""

    def draw(rng: np.random.Generator) -> Operands:
        return {name: int(rng.integers(low, high + 1)) for name, (low, high) in ranges.items()}

    return draw


def _interval(rng: np.random.Generator) -> Operands:
    low = int(rng.integers(10, 100))
    return {"a": low, "b": low + int(rng.integers(30, 200)), "k": int(rng.integers(3, 13))}


def _common_factor(rng: np.random.Generator) -> Operands:
    factor = int(rng.integers(2, 25))
    return {"a": factor * int(rng.integers(3, 40)), "b": factor * int(rng.integers(3, 40))}


FAMILIES: tuple[Family, ...] = (
    Family(
        "remainder",
        "easy",
        (
            "What is the remainder when {a} * {b} + {c} is divided by {m}?",
            "Multiply {a} by {b}, add {c} and give the result modulo {m}.",
        ),
        ("({a}*{b}+{c})%{m}", "{a}*{b}+{c}%{m}", "({a}*{b}+{c})//{m}", "{a}*({b}+{c})%{m}"),
        _between(a=(12, 99), b=(12, 99), c=(10, 99), m=(7, 60)),
    ),
    Family(
        "pens",
        "easy",
        (
            "A shop has {a} boxes with {b} pens each and sells {c} pens. How many pens are left?",
            "There are {a} shelves with {b} books each. {c} books are lent. How many books remain?",
        ),
        ("{a}*{b}-{c}", "{a}*({b}-{c})", "{a}+{b}-{c}", "{a}*{b}+{c}"),
        _between(a=(11, 99), b=(11, 99), c=(10, 99)),
    ),
    Family(
        "gcd",
        "easy",
        (
            "What is the greatest common divisor of {a} and {b}?",
            "Find the largest integer that divides both {a} and {b}.",
        ),
        ("math.gcd({a},{b})", "math.lcm({a},{b})", "{a}%{b}", "min({a},{b})"),
        _common_factor,
        needs_math=True,
    ),
    Family(
        "lcm",
        "easy",
        (
            "What is the least common multiple of {a} and {b}?",
            "Find the smallest positive integer divisible by both {a} and {b}.",
        ),
        ("math.lcm({a},{b})", "math.gcd({a},{b})", "{a}*{b}", "max({a},{b})"),
        _common_factor,
        needs_math=True,
    ),
    Family(
        "power",
        "easy",
        (
            "What is the remainder when {a}^{b} is divided by {m}?",
            "Raise {a} to the power {b} and give the result modulo {m}.",
        ),
        ("{a}**{b}%{m}", "{a}*{b}%{m}", "{a}**{b}//{m}", "{a}**({b}%{m})"),
        _between(a=(3, 29), b=(4, 9), m=(7, 99)),
    ),
    Family(
        "divisor_sum",
        "hard",
        (
            "What is the sum of all positive divisors of {n}?",
            "Add up every positive integer that divides {n}.",
        ),
        (
            "sum(d for d in range(1,{n}+1) if {n}%d==0)",
            "sum(d for d in range(1,{n}) if {n}%d==0)",
            "sum(1 for d in range(1,{n}+1) if {n}%d==0)",
            "sum(d for d in range(2,{n}) if {n}%d==0)",
            "sum(range(1,{n}+1))",
        ),
        _between(n=(100, 999)),
    ),
    Family(
        "divisor_count",
        "hard",
        (
            "How many positive divisors does {n} have?",
            "Count the positive integers that divide {n}.",
        ),
        (
            "sum(1 for d in range(1,{n}+1) if {n}%d==0)",
            "sum(1 for d in range(2,{n}) if {n}%d==0)",
            "sum(d for d in range(1,{n}+1) if {n}%d==0)",
            "sum(1 for d in range(1,{n}) if {n}%d==0)",
            "len(str({n}))",
        ),
        _between(n=(100, 999)),
    ),
    Family(
        "digit_sum",
        "hard",
        (
            "What is the sum of the digits of {a}^{b}?",
            "Raise {a} to the power {b} and add up the digits of the result.",
        ),
        (
            "sum(int(x) for x in str({a}**{b}))",
            "sum(int(x) for x in str({a}*{b}))",
            "len(str({a}**{b}))",
            "{a}**{b}%9",
            "sum(int(x) for x in str({a}))",
        ),
        _between(a=(3, 99), b=(4, 12)),
    ),
    Family(
        "multiples",
        "hard",
        (
            "What is the sum of the multiples of {k} from {a} to {b} inclusive?",
            "Add all integers between {a} and {b} inclusive that are divisible by {k}.",
        ),
        (
            "sum(x for x in range({a},{b}+1) if x%{k}==0)",
            "sum(1 for x in range({a},{b}+1) if x%{k}==0)",
            "sum(range({a},{b}+1))",
            "sum(range({a},{b}+1,{k}))",
            "sum(x//{k} for x in range({a},{b}+1))",
        ),
        _interval,
    ),
    Family(
        "primes",
        "hard",
        ("How many primes are there below {n}?", "Count the prime numbers less than {n}."),
        (
            "sum(all(p%d for d in range(2,p)) for p in range(2,{n}))",
            "sum(any(p%d for d in range(2,p)) for p in range(2,{n}))",
            "sum(p for p in range(2,{n}) if all(p%d for d in range(2,p)))",
            "sum(p%2 for p in range(2,{n}))",
            "sum(all(p%d for d in range(2,p)) for p in range({n}))",
        ),
        _between(n=(30, 400)),
    ),
)


def is_held_out(question: str) -> bool:
    """One question in ten, by a hash of its text: the same split for every seed."""
    return hashlib.sha256(question.encode()).digest()[0] < 26


def draw_instance(rng: np.random.Generator, family: Family) -> tuple[str, Operands]:
    """A question of the family and its operands."""
    operands = family.draw(rng)
    return family.question(operands, int(rng.integers(len(family.wordings)))), operands


def solve(family: Family, operands: Operands) -> int:
    """The reference answer: the right plan, evaluated (our own expression, never a model's)."""
    import math

    return int(eval(family.expression(operands, 0), {"math": math}))  # noqa: S307


def problems(count: int, *, seed: int, held_out: bool, level: str = "all") -> list[Problem]:
    """`count` distinct problems of one side of the split, the level's families in equal shares.

    Raises:
        ConfigError: a family has no further question; 6,700 train and 650 held-out ones exist, of
        the hard level 3,300 and 320.
    """
    families = [family for family in FAMILIES if level in ("all", family.level)]
    rng = np.random.default_rng([seed, int(held_out)])
    found: dict[str, Problem] = {}
    misses = 0
    while len(found) < count:
        family = families[len(found) % len(families)]
        question, operands = draw_instance(rng, family)
        misses += 1
        if misses > _MOST_MISSES:
            raise ConfigError(
                f"family {family.name!r} has no further question for problem {len(found) + 1} of "
                f"{count}; lower problems.{'held_out' if held_out else 'train'}"
            )
        if is_held_out(question) is held_out and question not in found:
            misses, number = 0, len(found)
            found[question] = Problem(
                id=f"nano-{'test' if held_out else 'train'}-{number:05d}",
                question=question,
                answer=str(solve(family, operands)),
                source=f"nano/{family.name}",
                level=family.level,
            )
    return list(found.values())
