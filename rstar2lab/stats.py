"""Accuracy over k samples, and intervals that say how far to trust it.

avg@k and pass@k as in the paper's tables; percentile bootstrap, plain and clustered by problem;
paired differences for two systems on the same problems; Student's t for a handful of seeds. Numbers
in, a frozen `Interval` out. No tables and no plots.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # pandas takes half a second to load; only the table functions need it
    import pandas as pd

_BLOCK_DRAWS = 2_000_000  # indices drawn at once; bounds memory at about 32 MB


@dataclass(frozen=True)
class Interval:
    """A mean with its confidence interval; `n` independent units. Bounds are NaN for n = 1."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        bounds = f"[{self.low:+.3f}, {self.high:+.3f}]" if self.n > 1 else "(one unit, no interval)"
        return f"{self.mean:+.3f} {bounds}"


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased chance that at least one of k samples is correct: 1 − C(n−c, k) / C(n, k).

    Exact for any size. Raises: ValueError unless 0 <= num_correct <= num_samples and
    1 <= k <= num_samples.
    """
    if not (0 <= num_correct <= num_samples and 1 <= k <= num_samples):
        raise ValueError(
            "expected 0 <= num_correct <= num_samples and 1 <= k <= num_samples, "
            f"found num_correct={num_correct}, num_samples={num_samples}, k={k}"
        )
    all_draws = math.comb(num_samples, k)
    return (all_draws - math.comb(num_samples - num_correct, k)) / all_draws


def avg_at_k(correct_PK: np.ndarray | Sequence[Sequence[float]]) -> float:
    """avg@k: the mean over problems of the share of correct samples.

    correct_PK: bool or 0/1, [P, k]; rows may have different lengths, each problem weighs the same.

    Raises: ValueError if there is no problem, or one without samples.
    """
    if len(correct_PK) == 0 or any(len(row) == 0 for row in correct_PK):
        raise ValueError("avg@k needs at least one problem and one sample for each")
    return float(np.mean([np.mean(row) for row in correct_PK]))


def bootstrap_interval(
    values: np.ndarray,
    *,
    level: float = 0.95,
    resamples: int = 10_000,
    rng: np.random.Generator,
) -> Interval:
    """Percentile-bootstrap interval of the mean of independent values.

    Raises: ValueError without values, with a NaN, or with `level` outside (0, 1).
    """
    values = _checked(values, level)
    return _bootstrap(values, np.ones(len(values)), level, resamples, rng)


def bootstrap_clustered(
    values: np.ndarray,
    clusters: Sequence,
    *,
    level: float = 0.95,
    resamples: int = 10_000,
    rng: np.random.Generator,
) -> Interval:
    """Bootstrap interval of the mean of all values, resampling whole clusters.

    `clusters` names the cluster of each value: samples of one problem are not independent, so
    resample problems. `n` of the result counts clusters.

    Raises: ValueError as `bootstrap_interval`, or if `clusters` has another length.
    """
    values = _checked(values, level)
    if len(clusters) != len(values):
        raise ValueError(f"found {len(values)} values but {len(clusters)} cluster names")
    _, cluster_of_value = np.unique(np.asarray(clusters), return_inverse=True)
    sums = np.bincount(cluster_of_value, weights=values)
    return _bootstrap(sums, np.bincount(cluster_of_value), level, resamples, rng)


def paired_difference(
    a: np.ndarray,
    b: np.ndarray,
    *,
    clusters: Sequence | None = None,
    level: float = 0.95,
    resamples: int = 10_000,
    rng: np.random.Generator,
) -> Interval:
    """Bootstrap interval of mean(a − b), a and b measured on the same units in the same order.

    With `clusters`, whole clusters are resampled.

    Raises: ValueError if the lengths differ, and as `bootstrap_interval`.
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a.shape != b.shape:
        raise ValueError(f"paired values must have one shape, found {a.shape} and {b.shape}")
    if clusters is None:
        return bootstrap_interval(a - b, level=level, resamples=resamples, rng=rng)
    return bootstrap_clustered(a - b, clusters, level=level, resamples=resamples, rng=rng)


def t_interval(values: np.ndarray, level: float = 0.95) -> Interval:
    """Student-t interval of the mean: mean ± t_{n−1} · s / √n, for a few seeds.

    One value gives NaN bounds: a single seed says nothing about the spread.

    Raises: ValueError as `bootstrap_interval`.
    """
    from scipy.special import stdtrit

    values = _checked(values, level)
    n, mean = len(values), float(values.mean())
    if n == 1:
        return Interval(mean, math.nan, math.nan, 1)
    half = float(stdtrit(n - 1, (1 + level) / 2) * values.std(ddof=1) / math.sqrt(n))
    return Interval(mean, mean - half, mean + half, n)


def seed_curve(df: "pd.DataFrame", metric: str, level: float = 0.95) -> "pd.DataFrame":
    """Mean and Student-t interval over seeds for every arm and step: arm step mean low high n.

    df: one row per arm, run_seed and step (`runs.metrics_frame`). Rows without a value (a step not
    evaluated, a rate without a denominator) are left out; `n` counts the seeds that have one.

    Raises: ValueError if a column is missing, or one seed has two values for a step.
    """
    import pandas as pd

    found = _seed_values(df, metric)
    rows = [
        {"arm": arm, "step": step} | asdict(t_interval(part[metric].to_numpy(float), level))
        for (arm, step), part in found.groupby(["arm", "step"])
    ]
    return pd.DataFrame(rows, columns=["arm", "step", "mean", "low", "high", "n"])


def seed_table(
    df: "pd.DataFrame", metrics: Sequence[str], level: float = 0.95
) -> "pd.DataFrame":
    """Last value of every run, with the Student-t interval over the seeds of its arm beside it.

    Columns metric, arm, run_seed, step, value, mean, low, high, n; one row per metric and run. An
    arm whose runs have no value for a metric has no row there.

    Raises: ValueError as `seed_curve`.
    """
    import pandas as pd

    rows = []
    for metric in metrics:
        found = _seed_values(df, metric)
        last = found.loc[found.groupby(["arm", "run_seed"]).step.idxmax()]
        for arm, part in last.groupby("arm"):
            interval = asdict(t_interval(part[metric].to_numpy(float), level))
            rows += [
                {"metric": metric, "arm": arm, "run_seed": seed, "step": step, "value": value}
                | interval
                for seed, step, value in zip(part.run_seed, part.step, part[metric], strict=True)
            ]
    columns = ["metric", "arm", "run_seed", "step", "value", "mean", "low", "high", "n"]
    return pd.DataFrame(rows, columns=columns)


def interval_table(
    df: "pd.DataFrame", by: Sequence[str], value: str, *, level: float = 0.95,
    resamples: int = 10_000, rng: np.random.Generator,
) -> "pd.DataFrame":
    """Bootstrap interval of `value` within every combination of `by`: by…, mean, low, high, n.

    df: one row per independent unit. Rows without a value are left out; groups keep their order.

    Raises: ValueError as `bootstrap_interval`.
    """
    import pandas as pd

    rows = []
    for keys, part in df.dropna(subset=[value]).groupby(list(by), sort=False):
        interval = bootstrap_interval(
            part[value].to_numpy(float), level=level, resamples=resamples, rng=rng
        )
        rows.append(dict(zip(by, keys, strict=True)) | asdict(interval))
    return pd.DataFrame(rows, columns=[*by, "mean", "low", "high", "n"])


def _seed_values(df: "pd.DataFrame", metric: str) -> "pd.DataFrame":
    """The rows that have a value of `metric`, each seed at most one per arm and step."""
    columns = ["arm", "run_seed", "step", metric]
    missing = [name for name in columns if name not in df.columns]
    if missing:
        raise ValueError(f"expected columns {columns}, missing {missing}; is the folder empty?")
    found = df[columns].dropna(subset=[metric]).reset_index(drop=True)
    twice = found[found.duplicated(columns[:3])]
    if len(twice):
        arm, seed, step = twice.iloc[0][columns[:3]]
        raise ValueError(
            f"arm {arm}, seed {seed} has two values of {metric} at step {step}; "
            "read one sweep at a time"
        )
    return found


def _checked(values: np.ndarray, level: float) -> np.ndarray:
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or len(values) == 0:
        raise ValueError(f"expected a list of at least one value, found shape {values.shape}")
    if np.isnan(values).any():
        raise ValueError("a value is NaN; leave it out, or decide what it counts as")
    if not 0 < level < 1:
        raise ValueError(f"expected level in (0, 1), such as 0.95, found {level}")
    return values


def _bootstrap(
    sums: np.ndarray, counts: np.ndarray, level: float, resamples: int, rng: np.random.Generator
) -> Interval:
    """Percentile interval of Σ sums / Σ counts under resampling of units."""
    n, mean = len(sums), float(sums.sum() / counts.sum())
    if n == 1:
        return Interval(mean, math.nan, math.nan, 1)
    block, means = max(1, _BLOCK_DRAWS // n), []
    for start in range(0, resamples, block):
        drawn = rng.integers(n, size=(min(block, resamples - start), n))
        means.append(sums[drawn].sum(1) / counts[drawn].sum(1))
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return Interval(mean, float(low), float(high), n)
