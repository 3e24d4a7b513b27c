"""What counts as a failed call, what a trajectory may hold."""

from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

from rstar2lab.types import (
    Problem,
    StopReason,
    ToolCall,
    ToolResult,
    ToolStatus,
    Trajectory,
    Turn,
)

CALL = ToolCall("python", "print(1)")


def turn(*statuses: ToolStatus | None) -> Turn:
    results = [None if s is None else ToolResult(s) for s in statuses]
    return Turn(
        "…",
        np.zeros(1, np.int32),
        np.zeros(1, np.float32),
        call=CALL if results else None,
        result=results[0] if results else None,
        more_calls=tuple((CALL, result) for result in results[1:]),
    )


def trajectory(*turns: Turn, tokens: int = 3, **changes) -> Trajectory:
    fields = {
        "problem_id": "p",
        "sample": 0,
        "prompt_ids": np.zeros(2, np.int32),
        "response_ids": np.zeros(tokens, np.int32),
        "loss_mask": np.ones(tokens, bool),
        "logprobs": np.zeros(tokens, np.float32),
        "entropies": None,
        "turns": turns,
        "stop": StopReason.ANSWERED,
    }
    return Trajectory(**(fields | changes))


def test_the_words_are_those_of_the_contract():
    assert [s.name for s in ToolStatus] == (
        "OK ERROR TIMEOUT MEMORY OUTPUT_LIMIT MALFORMED UNKNOWN_TOOL SERVICE_FAILURE".split()
    )
    assert [s.name for s in StopReason] == "ANSWERED LENGTH MAX_TURNS CONTEXT VOID".split()


def test_every_status_but_ok_and_service_failure_is_a_tool_error():
    errors = {s.name for s in ToolStatus if s.is_tool_error}
    assert errors == {
        "ERROR", "TIMEOUT", "MEMORY", "OUTPUT_LIMIT", "MALFORMED", "UNKNOWN_TOOL"
    }  # fmt: skip


def test_calls_are_counted_over_all_turns_and_all_calls_of_a_turn():
    t = trajectory(
        turn(ToolStatus.OK, ToolStatus.ERROR), turn(ToolStatus.TIMEOUT), turn(ToolStatus.OK), turn()
    )
    assert (t.num_calls, t.num_tool_errors) == (4, 2)


def test_a_call_that_was_not_executed_is_not_counted():
    t = trajectory(turn(ToolStatus.OK, None, None), turn(None))
    assert (t.num_calls, t.num_tool_errors, len(t.outcomes)) == (1, 0, 1)


def test_a_service_failure_is_neither_a_call_nor_an_error():
    t = trajectory(turn(ToolStatus.ERROR), turn(ToolStatus.SERVICE_FAILURE))
    assert (t.num_calls, t.num_tool_errors) == (1, 1)


@pytest.mark.parametrize("field", ["loss_mask", "logprobs", "entropies"])
def test_per_token_fields_of_another_length_are_refused_with_all_lengths(field):
    with pytest.raises(ValueError, match=rf"response_ids': 3.*{field}': 2"):
        trajectory(**{field: np.zeros(2, np.float32)})


def test_trained_tokens_are_those_of_the_mask():
    assert trajectory(loss_mask=np.asarray([True, False, True])).num_trained_tokens == 2


@pytest.mark.parametrize(
    ("stop", "truncated"),
    [("ANSWERED", False), ("LENGTH", True), ("MAX_TURNS", False), ("CONTEXT", True),
     ("VOID", False)],
)  # fmt: skip
def test_a_trajectory_is_truncated_when_the_token_budget_ended_it(stop, truncated):
    assert trajectory(stop=StopReason[stop]).is_truncated is truncated


def test_only_a_scored_trajectory_with_a_reward_is_correct():
    rewards = (None, 0.0, 1.0)
    assert [trajectory(reward=r).is_correct for r in rewards] == [False, False, True]


def test_the_nouns_are_frozen():
    nouns = {"answer": Problem("p", "q", "1"), "code": CALL, "text": turn(),
             "stdout": ToolResult(ToolStatus.OK), "reward": trajectory()}  # fmt: skip
    for field, noun in nouns.items():
        with pytest.raises(FrozenInstanceError):
            setattr(noun, field, None)
    assert replace(trajectory(), reward=1.0).is_correct
