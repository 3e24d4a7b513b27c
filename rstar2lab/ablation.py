"""The ablation's results (§5.3, Fig 9 and 4): run folders → table and claims with intervals.

The unit is the seed: every interval is Student's t over RL seeds, at 95 %. Evaluation is on
held-out problems, so a selection that only flatters its own training set shows nothing here.
"""

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from . import runs, stats

ARMS = ("dapo_no_tool", "grpo_tool", "grpo_tool_2g_uniform", "grpo_roc")
MEASURES = {
    "eval_accuracy": "accuracy",
    "eval_tool_error_rate_when_correct": "failed calls in correct",
    "eval_mean_response_tokens_when_correct": "tokens in correct",
    "eval_calls_per_trajectory": "calls per trajectory",
    "eval_truncated_rate": "truncated",
}


def final_rows(path: str | Path) -> pd.DataFrame:
    """The last evaluation of every finished run in `path`: one row per arm and seed.

    Raises:
        runs.RunError: there is no finished run.
    """
    frame = runs.metrics_frame(path)
    if len(frame):
        done = [
            (runs.RunFolder(Path(path) / f"{arm}-s{seed}")).is_done
            for arm, seed in zip(frame.arm, frame.run_seed, strict=True)
        ]
        frame = frame[np.asarray(done)]
    if not len(frame):
        raise runs.RunError(
            f"no finished run in {path}: expected run folders <arm>-s<seed> with DONE.json in "
            "it, as in experiments/results/ablation; make some with `rstar2lab reproduce`"
        )
    evaluated = frame[frame.eval_accuracy.notna()]
    return evaluated.loc[evaluated.groupby(["arm", "run_seed"]).step.idxmax()].reset_index(
        drop=True
    )


def table(final: pd.DataFrame) -> pd.DataFrame:
    """One row per arm and measure: mean and 95 % interval over seeds, n seeds."""
    seeds = stats.seed_table(final, list(MEASURES)).drop_duplicates(["metric", "arm"])
    found = seeds.assign(measure=seeds.metric.map(MEASURES))
    order = found.arm.map({arm: place for place, arm in enumerate(ARMS)})
    found = found.assign(order=order).sort_values("order", kind="stable")
    return found[["arm", "measure", "mean", "low", "high", "n"]].reset_index(drop=True)


def paired(
    final: pd.DataFrame,
    column: str,
    first: str,
    second: str,
    compare: Callable[[pd.Series, pd.Series], pd.Series] = pd.Series.sub,
) -> stats.Interval | None:
    """first − second (or another comparison) over the seeds of both arms; None without one."""
    values = _by_seed(final, column, first, second, compare)
    return stats.t_interval(values.to_numpy(float)) if len(values) else None


def _by_seed(final: pd.DataFrame, column: str, first: str, second: str, compare) -> pd.Series:
    """The comparison for every seed that both arms have a value of, indexed by seed."""
    wide = final.pivot(index="run_seed", columns="arm", values=column)
    wide = wide.reindex(columns=[first, second])
    return compare(wide[first], wide[second]).replace(np.inf, np.nan).dropna()


def variants(
    final: pd.DataFrame, first: str = "grpo_roc", second: str = "grpo_tool"
) -> pd.DataFrame:
    """first − second of every variant `<arm>_<label>`: one row per seed, interval over seeds.

    Columns label, metric, run_seed, value, mean, low, high, n. Only seeds of both arms count.
    """
    prefix, tables = f"{first}_", []
    labels = sorted(a.removeprefix(prefix) for a in set(final.arm) if a.startswith(prefix))
    for label, metric in itertools.product(labels, list(MEASURES)[:3]):
        values = _by_seed(final, metric, prefix + label, f"{second}_{label}", pd.Series.sub)
        if len(values):
            interval = asdict(stats.t_interval(values.to_numpy(float)))
            rows = values.rename("value").reset_index()
            tables.append(rows.assign(label=label, metric=metric, **interval))
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


@dataclass(frozen=True)
class Claim:
    """A finding of the paper as a bound on a comparison of two arms, seed by seed."""

    text: str
    column: str
    first: str
    second: str
    holds: Callable[[stats.Interval], bool]
    compare: Callable[[pd.Series, pd.Series], pd.Series] = pd.Series.sub


_ERROR, _TOKENS = list(MEASURES)[1:3]
CLAIMS = (
    *(
        Claim(f"(a) {arm} − dapo_no_tool: accuracy ≥ +0.40", "eval_accuracy", arm, ARMS[0],
              lambda i: i.low >= 0.40)
        for arm in ARMS[1:]
    ),
    Claim("(b) grpo_roc ÷ grpo_tool: failed calls in correct ≤ 0.5", _ERROR, ARMS[3], ARMS[1],
          lambda i: i.high <= 0.5, pd.Series.div),
    *(
        Claim(f"(b) grpo_roc − {other}: failed calls in correct < 0", _ERROR, ARMS[3], other,
              lambda i: i.high < 0)
        for other in ARMS[1:3]
    ),
    Claim("(c) grpo_roc − grpo_tool: accuracy ≥ −0.05", "eval_accuracy", ARMS[3], ARMS[1],
          lambda i: i.low >= -0.05),
    Claim("(c) grpo_roc − grpo_tool: tokens in correct ≤ 0", _TOKENS, ARMS[3], ARMS[1],
          lambda i: i.high <= 0),
)  # fmt: skip


def claims(final: pd.DataFrame) -> pd.DataFrame:
    """The paper's findings as comparisons with intervals over seeds, and whether they hold here.

    (a) a tool is worth ≥ 40 points of accuracy; (b) RoC at least halves the failed calls in correct
    trajectories, and the selection does it, not the extra rollouts; (c) without losing more than 5
    points of accuracy, and without longer correct responses. "yes" means that the whole interval
    agrees; with one seed there is no interval.
    """
    rows = []
    for claim in CLAIMS:
        found = paired(final, claim.column, claim.first, claim.second, claim.compare)
        if found is not None:
            verdict = "one seed" if found.n < 2 else "yes" if claim.holds(found) else "no"
            rows.append({"claim": claim.text, "value": found.mean, "low": found.low,
                         "high": found.high, "n": found.n, "holds": verdict})  # fmt: skip
    return pd.DataFrame(rows)


def format_table(found: pd.DataFrame) -> str:
    """The table as text, one line per arm: `mean [low, high]`."""

    def cell(row) -> str:
        digits = 1 if row.measure.startswith("tokens") else 3
        if np.isnan(row.low):
            return f"{row['mean']:.{digits}f}"
        return f"{row['mean']:.{digits}f} [{row.low:.{digits}f}, {row.high:.{digits}f}]"

    cells = found.assign(cell=found.apply(cell, axis=1)) if len(found) else found
    wide = (
        cells.pivot(index="arm", columns="measure", values="cell")
        .reindex(
            index=[a for a in ARMS if a in set(found.arm)],
            columns=[m for m in MEASURES.values() if m in set(found.measure)],
        )
        .fillna("–")
    )
    return wide.to_string()
