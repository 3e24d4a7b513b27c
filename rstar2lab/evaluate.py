"""k samples per held-out problem → one row per sample → a table with intervals.

Rows are the schema of `eval.parquet`; everything reported is computed from them.
"""

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from . import rollout as rollouts
from . import stats
from .types import Problem, Trajectory


def trajectory_result(trajectory: Trajectory, step: int) -> dict:
    """One row of `eval.parquet`."""
    return {
        "problem_id": trajectory.problem_id,
        "sample": trajectory.sample,
        "step": step,
        "correct": trajectory.is_correct,
        "reason": trajectory.reason,
        "tokens": len(trajectory.response_ids),
        "calls": trajectory.num_calls,
        "failed_calls": trajectory.num_tool_errors,
        "truncated": trajectory.is_truncated,
    }


def evaluate(
    problems: Sequence[Problem],
    samples: int,
    actors: rollouts.Actors,
    settings: rollouts.RolloutSettings,
    *,
    step: int = 0,
    on_done: Callable[[Trajectory], None] | None = None,
) -> pd.DataFrame:
    """Sample every problem `samples` times; void trajectories are rows with reason "void…"."""
    groups = rollouts.run_to_end(
        rollouts.rollout_groups(problems, samples, actors, settings, on_done)
    )
    rows = [trajectory_result(t, step) for group in groups for t in group.trajectories]
    return pd.DataFrame(rows)


def is_void(rows: pd.DataFrame) -> pd.Series:
    return rows.reason.str.startswith("void")


def tool_error_rate(rows: pd.DataFrame) -> float:
    """Failed calls ÷ calls, pooled over the rows; NaN without a call."""
    calls = rows.calls.sum()
    return float(rows.failed_calls.sum() / calls) if calls else float("nan")


def summarize(rows: pd.DataFrame) -> dict[str, float]:
    """The evaluation metrics of one step; correct trajectories also on their own (Fig 4)."""
    void = is_void(rows)
    rows = rows[~void]
    correct = rows[rows.correct]
    return {
        "eval_voided": int(void.sum()),
        "eval_accuracy": float(rows.correct.mean()),
        "eval_tool_error_rate": tool_error_rate(rows),
        "eval_tool_error_rate_when_correct": tool_error_rate(correct),
        "eval_mean_response_tokens": float(rows.tokens.mean()),
        "eval_mean_response_tokens_when_correct": float(correct.tokens.mean()),
        "eval_truncated_rate": float(rows.truncated.mean()),
        "eval_calls_per_trajectory": float(rows.calls.mean()),
    }


def table(rows: pd.DataFrame, *, rng: np.random.Generator, level: float = 0.95) -> pd.DataFrame:
    """Accuracy and mean length with bootstrap intervals clustered by problem; n is problems."""
    rows = rows[~is_void(rows)]
    found = {}
    for name, values in (
        ("accuracy", rows.correct.astype(float)),
        ("response tokens", rows.tokens),
    ):
        found[name] = stats.bootstrap_clustered(
            values.to_numpy(float), rows.problem_id.to_numpy(), level=level, rng=rng
        )
    return pd.DataFrame(
        {
            name: {"mean": i.mean, "low": i.low, "high": i.high, "problems": i.n}
            for name, i in found.items()
        }
    ).T
