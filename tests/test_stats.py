"""Estimators against enumeration and closed forms; intervals against their coverage."""

import math
from itertools import combinations

import numpy as np
import pandas as pd
import pytest

from rstar2lab import stats


def rng(seed=0):
    return np.random.default_rng(seed)


def test_pass_at_k_literals():
    assert stats.pass_at_k(4, 2, 2) == pytest.approx(5 / 6)
    assert stats.pass_at_k(32, 8, 1) == 0.25
    assert stats.pass_at_k(5, 0, 5) == 0 and stats.pass_at_k(5, 1, 5) == 1
    assert 0 < stats.pass_at_k(100_000, 1, 10) == pytest.approx(1e-4)


def test_pass_at_k_equals_enumeration():
    for n in range(1, 7):
        for c in range(n + 1):
            for k in range(1, n + 1):
                draws = list(combinations([1] * c + [0] * (n - c), k))
                expected = sum(any(draw) for draw in draws) / len(draws)
                assert stats.pass_at_k(n, c, k) == pytest.approx(expected)


@pytest.mark.parametrize("counts", [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0), (0, 0, 1)])
def test_pass_at_k_refuses_impossible_counts(counts):
    with pytest.raises(ValueError, match="expected 0 <= num_correct"):
        stats.pass_at_k(*counts)


def test_avg_at_k_weighs_problems_equally():
    assert stats.avg_at_k(np.array([[1, 0], [1, 1]])) == 0.75
    assert stats.avg_at_k([[True], [False, False, False]]) == 0.5
    with pytest.raises(ValueError, match="at least one"):
        stats.avg_at_k([[1], []])


def test_bootstrap_approaches_the_normal_interval():
    values = rng().normal(3, 2, 400)
    found = stats.bootstrap_interval(values, rng=rng(1))
    half = 1.96 * values.std() / 20
    assert found.n == 400 and found.mean == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - half, abs=0.03)
    assert found.high == pytest.approx(values.mean() + half, abs=0.03)


def test_bootstrap_covers_the_truth_about_as_often_as_it_says():
    generator = rng()
    samples = (generator.random((300, 40)) < 0.3).astype(float)
    found = [stats.bootstrap_interval(s, resamples=500, rng=generator) for s in samples]
    coverage = np.mean([i.low <= 0.3 <= i.high for i in found])
    assert 0.89 <= coverage <= 0.98


def test_levels_nest_and_seeds_repeat():
    values = rng().random(30)
    wide = stats.bootstrap_interval(values, level=0.99, rng=rng(2))
    narrow = stats.bootstrap_interval(values, level=0.8, rng=rng(2))
    assert wide.low < narrow.low < narrow.mean < narrow.high < wide.high
    assert wide == stats.bootstrap_interval(values, level=0.99, rng=rng(2))


def test_blocks_do_not_change_the_draws(monkeypatch):
    values = rng().random(30)
    whole = stats.bootstrap_interval(values, resamples=1000, rng=rng(2))
    monkeypatch.setattr(stats, "_BLOCK_DRAWS", 30 * 7)
    assert stats.bootstrap_interval(values, resamples=1000, rng=rng(2)) == whole


def test_clusters_widen_the_interval_of_dependent_samples():
    solved = (rng().random(30) < 0.5).astype(float)
    values, problems = np.repeat(solved, 16), np.repeat(np.arange(30), 16)
    naive = stats.bootstrap_interval(values, rng=rng(1))
    clustered = stats.bootstrap_clustered(values, problems, rng=rng(1))
    assert clustered.n == 30 and clustered.mean == naive.mean == solved.mean()
    ratio = (clustered.high - clustered.low) / (naive.high - naive.low)
    assert ratio == pytest.approx(4, rel=0.2)  # √16


def test_clusters_of_one_are_the_plain_bootstrap():
    values = rng().random(20)
    names = [f"p{i:02d}" for i in range(20)]
    plain = stats.bootstrap_interval(values, rng=rng(1))
    assert stats.bootstrap_clustered(values, names, rng=rng(1)) == plain


def test_pairing_removes_the_spread_between_problems():
    difficulty = rng().random(50)
    a, b = difficulty + 0.1, difficulty
    found = stats.paired_difference(a, b, rng=rng())
    assert (found.low, found.mean, found.high) == pytest.approx((0.1, 0.1, 0.1))
    clustered = stats.paired_difference(a, b, clusters=np.arange(50) // 5, rng=rng())
    assert clustered.n == 10 and clustered.mean == pytest.approx(0.1)
    with pytest.raises(ValueError, match="one shape"):
        stats.paired_difference([1, 2], [1], rng=rng())


def test_t_interval_of_five_seeds():
    found = stats.t_interval([1, 2, 3, 4, 5])
    half = 2.7764451 * math.sqrt(2.5 / 5)  # the 97.5 % point of t with 4 degrees, from a table
    assert (found.low, found.mean, found.high) == pytest.approx((3 - half, 3, 3 + half))
    assert found.n == 5


def test_one_unit_has_no_interval():
    for found in (
        stats.t_interval([0.5]),
        stats.bootstrap_interval([0.5], rng=rng()),
        stats.bootstrap_clustered([0.5, 0.5], ["a", "a"], rng=rng()),
    ):
        assert found.mean == 0.5 and found.n == 1
        assert math.isnan(found.low) and math.isnan(found.high)


def test_empty_missing_and_misleveled_input_is_refused():
    with pytest.raises(ValueError, match="at least one value"):
        stats.bootstrap_interval([], rng=rng())
    with pytest.raises(ValueError, match="NaN"):
        stats.t_interval([1, math.nan])
    with pytest.raises(ValueError, match="level"):
        stats.t_interval([1, 2], level=95)
    with pytest.raises(ValueError, match="2 values but 1"):
        stats.bootstrap_clustered([1, 2], ["a"], rng=rng())


# --- tables over seeds ----------------------------------------------------------------------------


def seeds_frame():
    """Two arms; grpo with three seeds at two steps, roc with one; a step that was not evaluated."""
    rows = [
        ("grpo", seed, step, value)
        for seed, values in enumerate([(0.1, 1.0), (0.1, 2.0), (0.1, 3.0)])
        for step, value in zip((0, 10), values, strict=True)
    ]
    rows += [("roc", 0, 0, 0.5), ("roc", 0, 5, float("nan")), ("roc", 0, 10, 0.7)]
    return pd.DataFrame(rows, columns=["arm", "run_seed", "step", "accuracy"])


def test_a_seed_curve_has_the_student_interval_of_the_seeds_at_every_step():
    curve = stats.seed_curve(seeds_frame(), "accuracy").set_index(["arm", "step"])
    assert list(curve.index) == [("grpo", 0), ("grpo", 10), ("roc", 0), ("roc", 10)]
    mean, low, high, n = curve.loc[("grpo", 10)]
    assert (mean, n) == (2.0, 3)
    assert high - mean == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)  # t of 2 degrees, 97.5 %
    assert mean - low == pytest.approx(high - mean)
    assert curve.loc[("grpo", 0)].low == pytest.approx(0.1)
    assert curve.loc[("roc", 10)].n == 1 and math.isnan(curve.loc[("roc", 10)].low)


def test_a_seed_table_takes_the_last_value_of_every_run():
    table = stats.seed_table(seeds_frame(), ["accuracy"])
    assert table[table.arm == "grpo"].value.tolist() == [1.0, 2.0, 3.0]
    assert set(table[table.arm == "grpo"]["mean"]) == {2.0}
    assert table[table.arm == "roc"][["step", "value", "n"]].values.tolist() == [[10, 0.7, 1]]
    df = seeds_frame().assign(errors=float("nan"))
    assert set(stats.seed_table(df, ["errors", "accuracy"]).metric) == {"accuracy"}


def test_an_interval_table_counts_the_units_of_every_combination():
    df = pd.DataFrame({"a": ["y", "x", "x"], "b": [1, 1, 1], "v": [2.0, 1.0, 1.0]})
    df = pd.concat([df, pd.DataFrame({"a": ["x"], "b": [1], "v": [float("nan")]})])
    table = stats.interval_table(df, ["a", "b"], "v", rng=rng())
    assert table[["a", "mean", "n"]].values.tolist() == [["y", 2.0, 1], ["x", 1.0, 2]]
    assert table.low[1] == table.high[1] == 1.0 and math.isnan(table.low[0])


@pytest.mark.parametrize(
    ("df", "message"),
    [
        (pd.DataFrame({"arm": []}), r"missing \['run_seed', 'step', 'accuracy'\]"),
        (pd.concat([seeds_frame(), seeds_frame()[:1]]), "arm grpo, seed 0 has two values"),
    ],
)
def test_seed_tables_refuse_what_is_not_one_value_per_seed_and_step(df, message):
    for table in (stats.seed_curve, lambda df, m: stats.seed_table(df, [m])):
        with pytest.raises(ValueError, match=message):
            table(df, "accuracy")
