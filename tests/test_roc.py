"""Penalties against the paper's equations, quotas exhaustively, draws against their weights."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from rstar2lab import roc
from rstar2lab.types import StopReason, ToolCall, ToolResult, ToolStatus, Trajectory, Turn

ANSWER = r"<answer>\boxed{42}</answer>"


def rng(seed=0):
    return np.random.default_rng(seed)


def trajectory(texts, results=(), stop=StopReason.ANSWERED):
    """Turns with these texts; the first ones made a call with these results."""
    results = list(results) + [None] * (len(texts) - len(results))
    turns = tuple(
        Turn(
            text,
            np.zeros(1, np.int32),
            np.zeros(1, np.float32),
            call=None if result is None else ToolCall("python", "…"),
            result=result,
        )
        for text, result in zip(texts, results, strict=True)
    )
    empty = np.zeros(0, np.int32)
    return Trajectory(
        "p", 0, empty, empty, empty.astype(bool), empty.astype(np.float32), None, turns, stop
    )


def result(status=ToolStatus.OK, stdout="", stderr=""):
    return ToolResult(status, stdout, stderr)


OK, ERROR = result(stdout="42"), result(ToolStatus.ERROR, stderr="NameError: name 'x'")

# the table of §3.2: trajectory, release p_err / p_format, paper p_err / p_format
PENALTY_TABLE = {
    "one turn, no tool, one good answer": (trajectory([ANSWER]), (0.5, 1), (0.5, 0)),
    "one clean call, one answer": (trajectory(["…", ANSWER], [OK]), (0, 0), (0, 0)),
    "call timed out": (trajectory(["…", ANSWER], [result(ToolStatus.TIMEOUT)]), (0, 0), (1, 0)),
    "malformed JSON": (
        trajectory(["…", ANSWER], [result(ToolStatus.MALFORMED, stderr="JSON error at 3")]),
        (0, 0),
        (1, 0),
    ),
    "unknown tool": (
        trajectory(["…", ANSWER], [result(ToolStatus.UNKNOWN_TOOL)]), (1, 0), (1, 0)
    ),
    "NameError and the like": (trajectory(["…", ANSWER], [ERROR]), (1, 0), (1, 0)),
    "success that prints the word error": (
        trajectory(["…", ANSWER], [result(stdout="max abs Error = 0")]), (1, 0), (0, 0)
    ),
    "2 answers, 2 turns": (trajectory([ANSWER, ANSWER], [OK]), (0, 1), (0, 0.5)),
    "3 answers, 2 turns": (trajectory([ANSWER * 2, ANSWER], [OK]), (0, 1), (0, 1)),
    "boxed result without the tag": (trajectory(["…", r"\boxed{42}"], [OK]), (0, 1), (0, 1)),
}


@pytest.mark.parametrize("name", PENALTY_TABLE)
def test_penalties_equal_the_table_of_section_3_2(name):
    recorded, release, paper = PENALTY_TABLE[name]
    assert roc.penalty_terms(recorded, "release") == release
    assert roc.penalty_terms(recorded, "paper") == paper
    assert roc.penalties(recorded) == sum(paper)
    assert roc.penalties(recorded, mode="release") == sum(release)


def test_release_reads_tags_and_responses_from_the_text():
    unequal = trajectory(["<answer>", ANSWER], [OK])
    assert roc.penalty_terms(unequal, "release").format == 1
    crossed = trajectory(["</answer> <answer>", "…"], [OK])
    assert roc.penalty_terms(crossed, "release").format == 1
    dropped = trajectory(["…", "…"], [OK, ERROR], stop=StopReason.CONTEXT)
    assert roc.penalty_terms(dropped, "release").error == 0
    assert roc.penalty_terms(dropped, "paper").error == 0.5


def test_service_failures_are_nobodys_error():
    void = trajectory(["…", "…", ANSWER], [OK, result(ToolStatus.SERVICE_FAILURE)])
    assert roc.penalties(void) == 0


def test_equations_4_and_5_by_hand():
    assert roc.tool_error_ratio(0, 0) == 0.5
    assert roc.tool_error_ratio(1, 4) == 0.25
    assert roc.format_penalty(0, 3) == 1
    assert roc.format_penalty(0, 0) == 1
    assert roc.format_penalty(1, 1) == 0
    assert roc.format_penalty(2, 4) == 0.25
    assert roc.format_penalty(9, 2) == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda: roc.tool_error_ratio(2, 1),
        lambda: roc.tool_error_ratio(-1, 1),
        lambda: roc.format_penalty(1, 0),
        lambda: roc.format_penalty(-1, 1),
        lambda: roc.penalties(trajectory([ANSWER]), mode="rlease"),
    ],
)
def test_impossible_counts_and_modes_are_refused(call):
    with pytest.raises(ValueError, match="expected"):
        call()


# --- selection -----------------------------------------------------------------------------------


def group(num_successes, size):
    """Rewards with the successes spread over the group."""
    rewards = np.zeros(size)
    rewards[rng(size).permutation(size)[:num_successes]] = 1
    return rewards


def kept_counts(rewards, indices):
    successes = int((rewards[indices] > 0).sum())
    return successes, len(indices) - successes


def test_release_keeps_the_counts_of_section_3_3():
    table = {1: (1, 15), 2: (2, 14), 3: (2, 14), 4: (2, 14), 5: (2, 14), 16: (8, 8), 17: (8, 8)}
    table |= {n: (14, 2) for n in range(27, 31)} | {31: (15, 1)}
    for successes, expected in table.items():
        rewards = group(successes, 32)
        indices = roc.SELECTORS["roc_release"](rewards, np.zeros(32), 16, rng(), None)
        assert kept_counts(rewards, indices) == expected, successes


def test_release_sorts_successes_and_takes_the_first_failures():
    rewards = np.array([0, 1, 0, 1, 0, 1, 0, 1])
    penalties = np.array([2, 1.0, 2, 0.5, 0, 0.5, 0, 0.0])
    kept = roc.SELECTORS["roc_release"](rewards, penalties, 4, rng(), None)
    assert kept.tolist() == [0, 2, 3, 7]  # failures 0, 2 in order; successes 7, then the tie 3


def test_paper_halves_every_class_for_a_group_of_32():
    for successes in range(33):
        rewards = group(successes, 32)
        kept = roc.resample_on_correct(rewards, np.zeros(32), 16, rng())
        failures = (32 - successes) // 2
        assert kept_counts(rewards, kept) == (16 - failures, failures)


def groups_up_to_64():
    """(successes, failures, keep) of every group of 1 to 64 rollouts."""
    for size in range(1, 65):
        for keep in range(1, size + 1):
            for successes in range(size + 1):
                yield successes, size - successes, keep


@pytest.mark.parametrize("floors", [(0, 0), (2, 2), (5, 0), (0, 7), (40, 40)])
def test_quotas_sum_to_keep_inside_the_group_for_every_size(floors):
    for successes, failures, keep in groups_up_to_64():
        quota = roc.failure_quota(successes, failures, keep, floors)
        assert 0 <= quota <= failures and 0 <= keep - quota <= successes


def test_the_release_s_quotas_sum_to_keep_inside_the_group_for_every_size():
    for successes, failures, keep in groups_up_to_64():
        quota = roc._release_failure_quota(successes, failures, keep)
        assert 0 <= quota <= failures and 0 <= keep - quota <= successes


def test_floors_hold_whenever_the_group_allows():
    for size in range(4, 65):
        for keep in range(4, size + 1):
            for successes in range(size + 1):
                failures = size - successes
                kept_failures = roc.failure_quota(successes, failures, keep, (2, 2))
                assert kept_failures >= min(2, failures)
                assert keep - kept_failures >= min(2, successes)


@pytest.mark.parametrize("name", ["roc_paper", "roc_release", "uniform"])
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_selectors_return_keep_ascending_distinct_indices(name, data):
    size = data.draw(st.integers(1, 40))
    keep = data.draw(st.integers(1, size))
    rewards = np.array(data.draw(st.lists(st.sampled_from([0, 1]), min_size=size, max_size=size)))
    penalties = rng(size).random(size) * 2
    kept = roc.SELECTORS[name](rewards, penalties, keep, rng(1), None)
    assert len(kept) == keep == len(set(kept.tolist()))
    assert (np.diff(kept) > 0).all() and kept[0] >= 0 and kept[-1] < size
    assert kept.dtype.kind == "i"


def test_selectors_are_exactly_the_six_of_the_contract():
    names = {"roc_paper", "roc_release", "uniform", "gfpo_length", "gfpo_efficiency", "all"}
    assert set(roc.SELECTORS) == names


def test_keeping_everything_returns_everything():
    rewards = group(3, 10)
    for name in ("roc_paper", "roc_release", "uniform", "all"):
        kept = roc.SELECTORS[name](rewards, np.zeros(10), 10, rng(), None)
        assert kept.tolist() == list(range(10)), name


def test_a_draw_of_one_follows_the_inverse_penalty():
    penalties = np.array([0, 0.25, 0.5, 1.0, 2.0])
    weights = 1 / (0.05 + penalties)
    generator = rng()
    drawn = [roc.inverse_penalty_choice(penalties, 1, generator)[0] for _ in range(10_000)]
    counts = np.bincount(drawn, minlength=5)
    assert chisquare(counts, 10_000 * weights / weights.sum()).pvalue > 1e-3


def test_a_draw_of_two_follows_successive_sampling():
    weights = 1 / (0.05 + np.array([0.0, 0.5, 1.0]))
    share = weights / weights.sum()
    pairs = {(0, 1): 0.0, (0, 2): 0.0, (1, 2): 0.0}
    for i, j in pairs:
        pairs[i, j] = share[i] * share[j] / (1 - share[i]) + share[j] * share[i] / (1 - share[j])
    generator, counts = rng(), dict.fromkeys(pairs, 0)
    for _ in range(10_000):
        drawn = roc.inverse_penalty_choice([0.0, 0.5, 1.0], 2, generator)
        counts[tuple(sorted(drawn.tolist()))] += 1
    assert chisquare(list(counts.values()), 10_000 * np.array(list(pairs.values()))).pvalue > 1e-3


def test_failures_are_kept_uniformly_whatever_their_penalties():
    rewards = np.array([1, 1, 1, 1, 0, 0, 0, 0])
    penalties = np.array([0, 0, 0, 0, 0, 0.5, 1, 2.0])
    generator, counts = rng(), np.zeros(4)
    for _ in range(5_000):
        kept = roc.resample_on_correct(rewards, penalties, 4, generator)
        counts[kept[kept >= 4] - 4] += 1
    assert chisquare(counts).pvalue > 1e-3


@pytest.mark.parametrize("name", ["roc_paper", "roc_release"])
def test_permuting_penalties_of_failures_changes_nothing(name):
    rewards, penalties = group(9, 24), rng(5).random(24)
    permuted = penalties.copy()
    failures = np.flatnonzero(rewards == 0)
    permuted[failures] = rng(6).permutation(penalties[failures])
    unknown = np.where(rewards == 0, np.nan, penalties)
    for seed in range(50):
        kept = roc.SELECTORS[name](rewards, penalties, 12, rng(seed), None)
        for other in (permuted, unknown):
            assert (kept == roc.SELECTORS[name](rewards, other, 12, rng(seed), None)).all()


def test_successes_with_fewer_errors_are_kept_more_often():
    rewards = np.array([1] * 8 + [0] * 8)
    penalties = np.array([0.0] * 4 + [1.0] * 4 + [0.0] * 8)
    generator, kept = rng(), np.zeros(16)
    for _ in range(1_000):
        kept[roc.resample_on_correct(rewards, penalties, 8, generator)] += 1
    assert kept[:4].min() > 3 * kept[4:8].max()


def test_choice_and_floors_are_arguments():
    rewards, penalties = np.array([1] * 4 + [0]), np.array([0.5, 0, 1, 0, 0])
    lowest = roc.resample_on_correct(
        rewards, penalties, 2, rng(), choose=roc.lowest_penalty_choice, floors=(0, 1)
    )
    assert lowest.tolist() == [1, 4]
    flat = partial(roc.inverse_penalty_choice, softening=1e9)
    generator = rng()
    drawn = np.concatenate([flat(penalties[:4], 1, generator) for _ in range(4_000)])
    assert chisquare(np.bincount(drawn, minlength=4)).pvalue > 1e-3


def test_same_seed_same_selection_and_inputs_stay_untouched():
    rewards, penalties = group(7, 16), rng(3).random(16)
    copies = rewards.copy(), penalties.copy()
    first, second = (roc.resample_on_correct(rewards, penalties, 8, rng(4)) for _ in range(2))
    assert (first == second).all()
    assert (rewards == copies[0]).all() and (penalties == copies[1]).all()


def test_gfpo_keeps_the_shortest_or_the_best_reward_per_token():
    rewards, lengths = np.array([1, 0, 1, 1]), [400, 10, 100, 200]
    for info in (lengths, {"lengths": lengths}):
        short = roc.SELECTORS["gfpo_length"](rewards, np.zeros(4), 2, rng(), info)
        assert short.tolist() == [1, 2]
        efficient = roc.SELECTORS["gfpo_efficiency"](rewards, np.zeros(4), 2, rng(), info)
        assert efficient.tolist() == [2, 3]
    with pytest.raises(ValueError, match="GFPO needs"):
        roc.SELECTORS["gfpo_length"](rewards, np.zeros(4), 2, rng(), None)
    with pytest.raises(ValueError, match="one length per rollout"):
        roc.SELECTORS["gfpo_efficiency"](rewards, np.zeros(4), 2, rng(), [1, 2])


def test_uniform_ignores_rewards():
    generator, counts = rng(), np.zeros(6)
    for _ in range(4_000):
        counts[roc.SELECTORS["uniform"](group(1, 6), np.zeros(6), 3, generator, None)] += 1
    assert chisquare(counts).pvalue > 1e-3


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match="keep=16 but rewards_N holds only 12 rollouts"):
        roc.resample_on_correct(np.ones(12), np.zeros(12), 16, rng())
    with pytest.raises(ValueError, match="no reward"):
        roc.resample_on_correct([1, None], np.zeros(2), 1, rng())
    with pytest.raises(ValueError, match="one penalty per rollout"):
        roc.resample_on_correct(np.ones(3), np.zeros(2), 1, rng())
    with pytest.raises(ValueError, match=r"shape \[N\], found \(2, 3\)"):
        roc.resample_on_correct(np.ones((2, 3)), np.zeros(3), 1, rng())
    with pytest.raises(ValueError, match="at least 1"):
        roc.resample_on_correct(np.ones(3), np.zeros(3), 0, rng())
    with pytest.raises(ValueError, match="softening"):
        roc.inverse_penalty_choice(np.zeros(3), 1, rng(), softening=0)


def test_constant_groups_are_rejected():
    assert roc.is_rejected([0, 0, 0]) and roc.is_rejected([1.0, 1.0]) and roc.is_rejected([1])
    assert not roc.is_rejected([0, 1])
