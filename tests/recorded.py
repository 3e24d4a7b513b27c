"""Stand-in for a recorded run: the real file schema, made-up trajectories of a known shape."""

import json
from pathlib import Path

import numpy as np
import pandas as pd

from rstar2lab import roc, runs
from rstar2lab.types import StopReason, ToolCall, ToolResult, ToolStatus, Trajectory, Turn

ANSWER = r"<answer>\boxed{42}</answer>"
STATUSES = (ToolStatus.ERROR, ToolStatus.MALFORMED, ToolStatus.TIMEOUT)


def recorded_trajectory(problem_id: str, sample: int, rng: np.random.Generator) -> Trajectory:
    """0–3 failed calls, then mostly one that works, then an answer; right in two of three cases."""
    failed = [STATUSES[i] for i in rng.integers(len(STATUSES), size=rng.choice([0, 0, 0, 1, 1, 2]))]
    statuses = failed + [ToolStatus.OK] * int(rng.random() < 0.9)
    lengths = rng.integers(8, 25, size=len(statuses) + 1)
    turns = tuple(
        Turn("<reason>…</reason>", np.zeros(length, np.int32), np.zeros(length, np.float32),
             call=ToolCall("python", "…", raw="{…}"), result=ToolResult(status, stdout="42"))
        for length, status in zip(lengths, statuses, strict=False)
    )
    last = ANSWER * (1 + int(rng.random() < 0.15))
    turns += (Turn(last, np.zeros(lengths[-1], np.int32), np.zeros(lengths[-1], np.float32)),)
    num_tool = 6 * len(statuses)
    mask = np.r_[np.ones(lengths.sum(), bool), np.zeros(num_tool, bool)]
    is_correct = rng.random() < 0.67
    return Trajectory(
        problem_id, sample, np.zeros(5, np.int32), np.zeros(len(mask), np.int32), mask,
        np.zeros(len(mask), np.float32), np.zeros(len(mask), np.float32), turns,
        StopReason.ANSWERED, reward=float(is_correct),
        reason="exact_integer" if is_correct else "mismatch",
    )


def write_recorded_run(
    folder: str | Path, *, groups: int = 12, size: int = 16, seed: int = 0
) -> Path:
    """A run folder with `trajectories.parquet` and `provenance.json`, as the trainer leaves it."""
    rng, rows = np.random.default_rng(seed), []
    for number in range(groups):
        found = [recorded_trajectory(f"p{number}", i, rng) for i in range(size)]
        rewards_N = np.asarray([t.reward for t in found])
        penalties_N = np.asarray([roc.penalties(t) for t in found])
        kept = roc.resample_on_correct(rewards_N, penalties_N, size // 2, rng)
        kept = () if roc.is_rejected(rewards_N) else kept
        rows += [
            runs.trajectory_row(
                t, question="What is 6 · 7?", answer="42", step=1 + 10 * (number // 4),
                arm="grpo_roc", penalty=float(penalties_N[i]), kept=i in kept,
            )
            for i, t in enumerate(found)
        ]
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_parquet(folder / "trajectories.parquet", index=False)
    (folder / "provenance.json").write_text(json.dumps({"scale": "stand-in data, no model"}))
    return folder
