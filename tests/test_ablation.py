"""The ablation's table and claims on frames small enough to calculate by hand."""

import math

import pandas as pd
import pytest

from rstar2lab import ablation, runs

ERRORS = "eval_tool_error_rate_when_correct"
TOKENS = "eval_mean_response_tokens_when_correct"


def frame(**values_by_arm) -> pd.DataFrame:
    """One row per arm and seed; each value is a dict of columns to one value per seed."""
    rows = []
    for arm, columns in values_by_arm.items():
        count = len(next(iter(columns.values())))
        for seed in range(count):
            row = {"arm": arm, "run_seed": seed, "step": 30}
            row |= dict.fromkeys(ablation.MEASURES, math.nan)
            rows.append(row | {column: values[seed] for column, values in columns.items()})
    return pd.DataFrame(rows)


FIVE = frame(
    dapo_no_tool={"eval_accuracy": [0.05, 0.04, 0.06, 0.05, 0.05]},
    grpo_tool={
        "eval_accuracy": [0.70, 0.72, 0.74, 0.76, 0.78],
        ERRORS: [0.20, 0.22, 0.18, 0.20, 0.20],
        TOKENS: [60.0, 62.0, 61.0, 60.0, 62.0],
    },
    grpo_roc={
        "eval_accuracy": [0.71, 0.72, 0.76, 0.75, 0.81],
        ERRORS: [0.06, 0.07, 0.05, 0.06, 0.06],
        TOKENS: [59.0, 63.0, 60.0, 61.0, 61.0],
    },
)


def test_the_interval_over_five_seeds_is_student_s():
    """0.70 … 0.78: mean 0.74, s = 0.0316, t(4) = 2.776, half-width 2.776 · 0.0316 / √5 = 0.0393."""
    found = ablation.table(FIVE)
    row = found[(found.arm == "grpo_tool") & (found.measure == "accuracy")].iloc[0]
    assert row["mean"] == pytest.approx(0.74) and row.n == 5
    assert row.low == pytest.approx(0.74 - 0.03926, abs=1e-4)
    assert row.high == pytest.approx(0.74 + 0.03926, abs=1e-4)


def test_the_table_has_a_row_per_arm_and_measured_column_in_the_paper_s_order():
    found = ablation.table(FIVE.sample(frac=1, random_state=0))
    assert list(found.arm.unique()) == ["dapo_no_tool", "grpo_tool", "grpo_roc"]
    assert list(found[found.arm == "dapo_no_tool"].measure) == ["accuracy"]  # no call, no error
    assert list(found[found.arm == "grpo_roc"].measure) == [
        "accuracy", "failed calls in correct", "tokens in correct"
    ]  # fmt: skip


def test_differences_are_taken_seed_by_seed():
    """0.01, 0, 0.02, −0.01, 0.03: mean 0.01, s = 0.0158, half-width 2.776 · s / √5 = 0.0196."""
    found = ablation.paired(FIVE, "eval_accuracy", "grpo_roc", "grpo_tool")
    assert found.mean == pytest.approx(0.01) and found.n == 5
    assert (found.low, found.high) == pytest.approx((0.01 - 0.01963, 0.01 + 0.01963), abs=1e-4)


def test_only_seeds_that_both_arms_have_are_compared():
    missing = FIVE.drop(FIVE[(FIVE.arm == "grpo_roc") & (FIVE.run_seed == 4)].index)
    found = ablation.paired(missing, "eval_accuracy", "grpo_roc", "grpo_tool")
    assert found.n == 4 and found.mean == pytest.approx(0.005)
    assert ablation.paired(FIVE, "eval_accuracy", "grpo_roc", "grpo_tool_2g_uniform") is None


def verdicts(final: pd.DataFrame) -> dict[str, str]:
    found = ablation.claims(final)
    return dict(zip(found.claim, found.holds, strict=True))


def test_a_claim_holds_when_its_whole_interval_agrees():
    found = verdicts(FIVE)
    assert found["(a) grpo_tool − dapo_no_tool: accuracy ≥ +0.40"] == "yes"
    assert found["(b) grpo_roc − grpo_tool: failed calls in correct < 0"] == "yes"
    assert found["(b) grpo_roc ÷ grpo_tool: failed calls in correct ≤ 0.5"] == "yes"  # 0.28–0.32
    assert found["(c) grpo_roc − grpo_tool: accuracy ≥ −0.05"] == "yes"
    # tokens differ by −1, 1, −1, 1, −1: mean −0.2 but the interval crosses 0
    assert found["(c) grpo_roc − grpo_tool: tokens in correct ≤ 0"] == "no"
    assert not any("2g_uniform" in claim for claim in found)  # an arm that is not there


def test_a_claim_fails_when_the_interval_reaches_over_its_bound():
    worse = FIVE.copy()
    roc = worse.arm == "grpo_roc"
    worse.loc[roc, ERRORS] = [0.10, 0.12, 0.10, 0.05, 0.12]
    worse.loc[roc, "eval_accuracy"] = [0.60, 0.66, 0.70, 0.72, 0.74]
    found = verdicts(worse)
    assert found["(b) grpo_roc ÷ grpo_tool: failed calls in correct ≤ 0.5"] == "no"
    assert found["(b) grpo_roc − grpo_tool: failed calls in correct < 0"] == "yes"
    assert found["(c) grpo_roc − grpo_tool: accuracy ≥ −0.05"] == "no"


def test_with_one_seed_there_is_no_verdict_and_no_interval():
    one = FIVE[FIVE.run_seed == 0]
    found = ablation.claims(one)
    assert set(found.holds) == {"one seed"} and found.low.isna().all()
    assert ablation.table(one).low.isna().all()


def test_the_text_table_shows_intervals_and_a_dash_for_what_was_not_measured():
    lines = ablation.format_table(ablation.table(FIVE)).splitlines()
    tool = next(line for line in lines if line.startswith("grpo_tool"))
    assert "0.740 [0.701, 0.779]" in tool and "61.0 [" in tool
    assert "–" in next(line for line in lines if line.startswith("dapo_no_tool"))
    one = ablation.format_table(ablation.table(FIVE[FIVE.run_seed == 0]))
    assert "0.700" in one and "[" not in one


def write_run(folder, rows, done=True):
    run = runs.RunFolder(folder)
    run.path.mkdir(parents=True)
    for row in rows:
        run.append_row(row)
    if done:
        run.mark_done({})


def test_the_last_evaluation_of_every_finished_run_is_taken(tmp_path):
    rows = [
        {"step": 0, "eval_accuracy": 0.1},
        {"step": 1, "train_accuracy": 0.9},
        {"step": 2, "eval_accuracy": 0.5},
        {"step": 3, "train_accuracy": 0.9},
    ]
    write_run(tmp_path / "grpo_roc-s0", rows)
    write_run(tmp_path / "grpo_roc-s1", [{"step": 4, "eval_accuracy": 0.7}])
    write_run(tmp_path / "grpo_tool-s0", rows, done=False)
    final = ablation.final_rows(tmp_path)
    assert final[["arm", "run_seed", "step", "eval_accuracy"]].values.tolist() == [
        ["grpo_roc", 0, 2, 0.5], ["grpo_roc", 1, 4, 0.7]
    ]  # fmt: skip


def test_without_a_finished_run_it_says_how_to_make_one(tmp_path):
    with pytest.raises(runs.RunError, match="no finished run.*rstar2lab reproduce"):
        ablation.final_rows(tmp_path)
    write_run(tmp_path / "grpo_roc-s0", [{"step": 0, "eval_accuracy": 0.1}], done=False)
    with pytest.raises(runs.RunError, match="no finished run"):
        ablation.final_rows(tmp_path)


def test_variants_are_compared_seed_by_seed_under_their_label():
    """hard: +0.1 and +0.3, mean 0.2; an arm whose partner is missing is no variant."""
    found = ablation.variants(frame(
        grpo_tool_hard={"eval_accuracy": [0.4, 0.5]},
        grpo_roc_hard={"eval_accuracy": [0.5, 0.8]},
        grpo_roc_lonely={"eval_accuracy": [0.5, 0.8]},
        grpo_tool_2g_uniform={"eval_accuracy": [0.5, 0.8]},
    ))  # fmt: skip
    accuracy = found[found.metric == "eval_accuracy"]
    assert list(accuracy.label) == ["hard", "hard"] and set(accuracy.n) == {2}
    assert list(accuracy.value) == pytest.approx([0.1, 0.3])
    assert accuracy["mean"].iloc[0] == pytest.approx(0.2)
