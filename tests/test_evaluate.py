"""Evaluation rows → metrics and a table, by hand."""

import asyncio
import math

import numpy as np
import pandas as pd
import pytest

from rstar2lab import evaluate, protocol
from rstar2lab.engines.scripted import ScriptedEngine
from rstar2lab.protocol import render_call
from rstar2lab.rollout import Actors, RolloutSettings, run_to_end
from rstar2lab.types import Problem

STOP = "<|im_end|>"
ROWS = pd.DataFrame(
    [
        # problem, sample, correct, reason, tokens, calls, failed, truncated
        ("p1", 0, True, "exact_integer", 10, 2, 1, False),
        ("p1", 1, True, "exact_integer", 30, 2, 0, False),
        ("p2", 0, False, "mismatch", 50, 3, 3, False),
        ("p2", 1, False, "truncated", 90, 1, 1, True),
        ("p3", 0, False, "void", 5, 1, 0, False),
        ("p3", 1, True, "equal", 20, 0, 0, False),
    ],
    columns="problem_id sample correct reason tokens calls failed_calls truncated".split(),
).assign(step=4)


def test_metrics_are_pooled_over_the_rows_that_are_not_void():
    found = evaluate.summarize(ROWS)
    assert found == pytest.approx(
        {
            "eval_accuracy": 3 / 5,
            "eval_tool_error_rate": 5 / 8,
            "eval_tool_error_rate_when_correct": 1 / 4,
            "eval_mean_response_tokens": 40.0,
            "eval_mean_response_tokens_when_correct": 20.0,
            "eval_truncated_rate": 1 / 5,
            "eval_calls_per_trajectory": 8 / 5,
            "eval_voided": 1,
        }
    )


def test_without_a_correct_row_or_a_call_a_rate_is_nan_and_not_zero():
    found = evaluate.summarize(ROWS[ROWS.problem_id == "p2"].assign(calls=0, failed_calls=0))
    assert found["eval_accuracy"] == 0
    assert math.isnan(found["eval_tool_error_rate"])
    assert math.isnan(found["eval_tool_error_rate_when_correct"])
    assert math.isnan(found["eval_mean_response_tokens_when_correct"])


def test_the_table_s_unit_is_the_problem_and_its_interval_holds_the_mean():
    found = evaluate.table(ROWS, rng=np.random.default_rng(0))
    assert list(found.index) == ["accuracy", "response tokens"]
    assert found.loc["accuracy", "mean"] == pytest.approx(0.6)
    assert found.loc["response tokens", "mean"] == pytest.approx(40.0)
    assert (found.problems == 3).all()
    assert (found.low <= found["mean"]).all() and (found["mean"] <= found.high).all()
    assert found.loc["accuracy", "low"] == 0 and found.loc["accuracy", "high"] == 1


def script(tokens, request_id: str):
    """Sample 0 stumbles once and is right; sample 1 is wrong; sample 2 never ends."""
    right, wrong = (rf"<answer>\boxed{{{n}}}</answer>{STOP}" for n in (42, 41))
    lines = {
        "0": [render_call("boom") + STOP, render_call("print(42)") + STOP, right],
        "1": [wrong],
        "2": ["<reason>" + "x" * 500],
    }[request_id[-1]]
    return [tokens.encode(line) for line in lines]


def rows_of(tokens, environment) -> pd.DataFrame:
    chat = protocol.chat_format("nano", tools=True, response_chars=60)
    engine = ScriptedEngine(lambda request_id: script(tokens, request_id))
    limits = RolloutSettings(5, 1, 200, 1.0, 1.0, "0/evaluation")
    actors = Actors(engine, environment, tokens, chat)
    return evaluate.evaluate([Problem("p1", "6 * 7?", "42")], 3, actors, limits, step=7)


def test_one_row_per_sample_says_what_happened(tokens, environment):
    rows = rows_of(tokens, environment)
    assert list(rows.columns) == (
        "problem_id sample step correct reason tokens calls failed_calls truncated".split()
    )
    assert rows.drop(columns="tokens").values.tolist() == [
        ["p1", 0, 7, True, "exact_integer", 2, 1, False],
        ["p1", 1, 7, False, "mismatch", 0, 0, False],
        ["p1", 2, 7, False, "truncated", 0, 0, True],
    ]
    assert rows.tokens[2] == 200 > rows.tokens[0] > rows.tokens[1]


def test_evaluation_works_inside_a_running_event_loop_as_in_a_notebook(tokens, environment):
    async def cell():
        return rows_of(tokens, environment)

    assert asyncio.run(cell()).correct.tolist() == [True, False, False]


def test_what_fails_inside_reaches_the_synchronous_caller():
    async def failing():
        raise ValueError("no model")

    async def cell():
        return run_to_end(failing())

    for run in (lambda: run_to_end(failing()), lambda: asyncio.run(cell())):
        with pytest.raises(ValueError, match="no model"):
            run()
