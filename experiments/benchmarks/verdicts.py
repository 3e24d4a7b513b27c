"""How many answers per second are read and judged: `python experiments/benchmarks/verdicts.py`.

Integers are compared in the caller's thread; everything else goes to math-verify in a process of
its own. The workload is whole responses of 1,900 characters, so extraction is part of the number.
Prints a table and writes it, with provenance, to `results/verdicts.json` beside this file.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rstar2lab import protocol, rewards, runs, verifier

RESULTS = Path(__file__).parent / "results" / "verdicts.json"
THOUGHT = "<reason>" + "Let me add the terms one by one and check. " * 20 + "</reason>"
EXPRESSIONS = [  # prediction, reference: what a data set beyond integers asks for
    ("0.5", r"\frac{1}{2}"), (r"5\sqrt{2}", r"\sqrt{50}"), ("x^2+1", "1+x^2"),
    (r"\frac{22}{7}", r"\pi"), (r"\{3,1,2\}", r"\{1,2,3\}"), ("(1, 2]", "(1,2]"),
]  # fmt: skip


def response(answer: str) -> str:
    return (
        f"{THOUGHT}{protocol.render_call('print(6*7)')}"
        f"<tool_response>42</tool_response>{THOUGHT}<answer>\\boxed{{{answer}}}</answer>"
    )


def rate(judge: Callable[[int], object], count: int, repeats: int) -> dict:
    """Verdicts per second, `count` in a row: the median of some repeats, and their range."""
    rates = []
    for _ in range(repeats):
        started = time.perf_counter()
        for number in range(count):
            judge(number)
        rates.append(count / (time.perf_counter() - started))
    return {
        "count": count,
        "repeats": repeats,
        "per_second": round(float(np.median(rates)), 1),
        "lowest": round(min(rates), 1),
        "highest": round(max(rates), 1),
    }


def measure(count: int, repeats: int) -> dict[str, dict]:
    """The cases, by name."""
    right, wrong, none = response("1042"), response("-7"), THOUGHT
    expressions = [(response(prediction), gold) for prediction, gold in EXPRESSIONS]
    verifier.check("0.5", r"\frac12")  # starting a process is not part of a verdict
    slow = max(1, count // 100)
    return {
        "integer, right": rate(lambda _: rewards.answer_reward(right, "1042"), count, repeats),
        "integer, wrong": rate(lambda _: rewards.answer_reward(wrong, "1042"), count, repeats),
        "no answer": rate(lambda _: rewards.answer_reward(none, "1042"), count, repeats),
        "integer, bare texts": rate(lambda _: rewards.verify("1,042", "1042"), count, repeats),
        "expression, math-verify": rate(
            lambda n: rewards.answer_reward(*expressions[n % len(expressions)]), slow, repeats
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=5_000, help="verdicts per repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file")
    chosen = parser.parse_args()
    cases = measure(chosen.count, chosen.repeats)
    print(f"{'case':26}{'verdicts/s':>12}{'lowest':>10}{'highest':>10}")
    for name, row in cases.items():
        print(f"{name:26}{row['per_second']:12,.0f}{row['lowest']:10,.0f}{row['highest']:10,.0f}")
    command = "python experiments/benchmarks/verdicts.py"
    about = runs.provenance(command, f"responses of {len(response('1042'))} characters, one thread")
    result = json.dumps({"cases": cases, "provenance": about}, indent=1)
    runs.write_atomic(chosen.out, result + "\n")


if __name__ == "__main__":
    main()
