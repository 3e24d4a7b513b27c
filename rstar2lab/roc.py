"""Resample-on-Correct: which of the N rollouts of one problem are trained on (§2.2.3, Eq 4-5).

RoC is arrays → indices. Every rollout has a reward and a penalty p_total = p_err + p_format;
failures are kept by uniform sampling, successes by a draw that favours few tool errors and a clean
format, and the ratio of the two classes is preserved. Selectors of other methods share the
signature, see `SELECTORS`.

Failure of a tool call is read from `ToolStatus`, never from text; only `penalties(mode="release")`,
which exists for comparison, looks at text as the release does. This module computes no advantages
(`grpo`) and drops no groups: `is_rejected` only says which ones the trainer leaves out.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from . import protocol
from .types import StopReason, ToolResult, ToolStatus, Trajectory

Choice = Callable[[np.ndarray, int, np.random.Generator], np.ndarray]
"""`choose(penalties_N, size, rng)`: positions of the `size` chosen among N."""

Lengths = Sequence[float] | np.ndarray | Mapping[str, Sequence[float]]
Selector = Callable[[np.ndarray, np.ndarray, int, np.random.Generator, Lengths | None], np.ndarray]
"""`select(rewards_N, penalties_N, keep, rng, info_N)`: ascending indices of the rollouts kept."""


class Penalty(NamedTuple):
    """The two terms of p_total, each in [0, 1]."""

    error: float
    format: float


# --- penalties ------------------------------------------------------------------------------------


def tool_error_ratio(num_errors: int, num_calls: int) -> float:
    """Share of failed tool calls, 0.5 for a trajectory without calls (Eq 4).

    p_err = errors / calls, in [0, 1].

    Raises: ValueError if the counts are negative or there are more errors than calls.
    """
    if not 0 <= num_errors <= num_calls:
        raise ValueError(
            f"expected 0 <= num_errors <= num_calls, found {num_errors} errors of {num_calls} calls"
        )
    return num_errors / num_calls if num_calls else 0.5


def format_penalty(num_answers: int, num_turns: int) -> float:
    """Penalty for a missing or repeated answer block (Eq 5).

    p_format = 1 without an answer, else min(1, (answers − 1) / turns), in [0, 1].

    Raises: ValueError if a count is negative or there are answers but no turn.
    """
    if min(num_answers, num_turns) < 0 or (num_answers and not num_turns):
        raise ValueError(
            f"expected counts >= 0 and a turn for every answer, "
            f"found {num_answers} answers in {num_turns} turns"
        )
    return min(1.0, (num_answers - 1) / num_turns) if num_answers else 1.0


def penalties(trajectory: Trajectory, mode: Literal["paper", "release"] = "paper") -> float:
    """p_total = p_err + p_format of one trajectory, in [0, 2] (Eq 4-5); see `penalty_terms`."""
    return float(sum(penalty_terms(trajectory, mode)))


def penalty_terms(trajectory: Trajectory, mode: Literal["paper", "release"] = "paper") -> Penalty:
    """The two penalties of one trajectory.

    "paper" counts structured outcomes: failed calls by `ToolStatus`, closed answer blocks, turns.
    Differs from the release ("release"): a call failed if its response contains the word "error";
    answer tags are counted in the whole text, unequal numbers give 1; turns are one too few.

    Raises: ValueError for another mode.
    """
    if mode == "paper":
        return _paper_penalty(trajectory)
    if mode == "release":
        return _release_penalty(trajectory)
    raise ValueError(f'expected mode "paper" or "release", found {mode!r}')


def _paper_penalty(trajectory: Trajectory) -> Penalty:
    num_answers = sum(len(protocol.parse_turn(turn.text).answers) for turn in trajectory.turns)
    return Penalty(
        tool_error_ratio(trajectory.num_tool_errors, trajectory.num_calls),
        format_penalty(num_answers, len(trajectory.turns)),
    )


def _release_penalty(trajectory: Trajectory) -> Penalty:
    """Penalties as the release reads them from the decoded response."""
    turns = trajectory.turns
    replies = [[_release_reply(result) for _, result in turn.outcomes] for turn in turns]
    if trajectory.stop is StopReason.CONTEXT and replies:
        replies[-1] = []  # a response that did not fit is not in the text, hence not counted
    calls = [reply for turn_replies in replies for reply in turn_replies]
    num_errors = sum("error" in reply.lower() for reply in calls)
    text = "".join(turn.text + "".join(r) for turn, r in zip(turns, replies, strict=True))
    return Penalty(
        tool_error_ratio(num_errors, len(calls)), _release_format_penalty(text, len(turns))
    )


def _release_reply(result: ToolResult) -> str:
    """Text of a tool response as the release words it, where the wording decides."""
    if result.status is ToolStatus.MALFORMED:
        return "Failed to decode tool call"
    if result.status is ToolStatus.UNKNOWN_TOOL:
        return "KeyError"
    return result.stdout + result.stderr


def _release_format_penalty(text: str, num_turns: int) -> float:
    counts = {text.count("<answer>"), text.count("</answer>"), _count_pairs(text)}
    matched_turns = num_turns - 1  # the header of the first turn is part of the prompt
    if len(counts) > 1 or 0 in counts or matched_turns <= 0:
        return 1.0
    return min(1.0, (counts.pop() - 1) / matched_turns)


def _count_pairs(text: str) -> int:
    pairs, rest = 0, text
    while True:
        _, opened, rest = rest.partition("<answer>")
        _, closed, rest = rest.partition("</answer>")
        if not (opened and closed):
            return pairs
        pairs += 1


# --- choosing within a class ----------------------------------------------------------------------


def inverse_penalty_choice(
    penalties_N: np.ndarray, size: int, rng: np.random.Generator, softening: float = 0.05
) -> np.ndarray:
    """Draw `size` of N successes without replacement, weight 1 / (softening + p_total) (§2.2.3).

    penalties_N: p_total, in [0, 2]. The softening ε is ours: the paper leaves 1/0 open. Keep it
    small against 1/calls; 0.5 flattens the effect. To change it pass a `functools.partial`.
    Differs from the release: it sorts instead of drawing; see `lowest_penalty_choice`.

    Raises: ValueError if a weight is not a positive finite number.
    """
    if size == 0:
        return np.zeros(0, np.int64)
    softened_N = softening + np.asarray(penalties_N, np.float64)
    if not (np.isfinite(softened_N).all() and (softened_N > 0).all()):
        raise ValueError(
            "softening + penalty must be finite and > 0 for every success, "
            f"found softening={softening} and penalties {np.asarray(penalties_N).tolist()}"
        )
    weights_N = 1.0 / softened_N
    return rng.choice(len(weights_N), size, replace=False, p=weights_N / weights_N.sum())


def lowest_penalty_choice(
    penalties_N: np.ndarray, size: int, rng: np.random.Generator | None = None
) -> np.ndarray:
    """Take the `size` lowest penalties, ties in rollout order: the release's rule."""
    return np.argsort(np.asarray(penalties_N), kind="stable")[:size]


def uniform_choice(penalties_N: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Draw `size` of N uniformly without replacement; the values of `penalties_N` are not read."""
    return rng.choice(len(penalties_N), size, replace=False) if size else np.zeros(0, np.int64)


# --- selection ------------------------------------------------------------------------------------


def is_rejected(rewards_N: np.ndarray) -> bool:
    """True if all rewards are equal: such a group has no advantage and goes before selection."""
    rewards_N = np.asarray(rewards_N, np.float64)
    return bool((rewards_N == rewards_N[:1]).all())


def failure_quota(
    num_successes: int, num_failures: int, keep: int, floors: tuple[int, int] = (0, 0)
) -> int:
    """Number of failures among the `keep` rollouts; the successes are the rest (§2.2.3).

    ⌊failures · keep / N⌋, that is ⌊|O_neg| / 2⌋ for keep = N/2: the only rounding. Then raised to
    `floors` = (successes, failures) as far as the group allows; the successes' floor goes first.
    """
    quota = num_failures * keep // (num_successes + num_failures)
    return _floored(quota, num_successes, num_failures, keep, floors)


def _release_failure_quota(num_successes: int, num_failures: int, keep: int) -> int:
    """The release's quota: banker's rounding, floors of 2.

    Where its two roundings do not sum to `keep` the release fails; here the successes yield.
    """
    quota = round(num_failures * keep / (num_successes + num_failures))
    return _floored(quota, num_successes, num_failures, keep, (2, 2))


def _floored(
    quota: int, num_successes: int, num_failures: int, keep: int, floors: tuple[int, int]
) -> int:
    floor_successes, floor_failures = floors
    quota = max(quota, min(floor_failures, num_failures))
    quota = min(quota, keep - min(floor_successes, num_successes))
    return int(np.clip(quota, max(0, keep - num_successes), min(num_failures, keep)))


def resample_on_correct(
    rewards_N: np.ndarray,
    penalties_N: np.ndarray,
    keep: int,
    rng: np.random.Generator,
    choose: Choice = inverse_penalty_choice,
    floors: tuple[int, int] = (0, 0),
) -> np.ndarray:
    """Keep `keep` of N rollouts, failures uniformly and successes by `choose` (§2.2.3).

    A reward > 0 is a success. |Ô_neg| = ⌊|O_neg| · keep / N⌋, |Ô_pos| = keep − |Ô_neg|; penalties
    of failures are never read. floors: least (successes, failures) to keep; with (0, 0) a lone
    failure is dropped and the group has zero advantage.
    Returns ascending indices, length `keep`.
    Differs from the release: one rounding and a draw; see `SELECTORS["roc_release"]`.

    Raises: ValueError if `keep` exceeds the group, shapes differ or a reward is missing.
    """
    successes, failures = _split(rewards_N, penalties_N, keep)
    num_failures = failure_quota(len(successes), len(failures), keep, floors)
    kept_failures = failures[uniform_choice(failures, num_failures, rng)]
    success_penalties = np.asarray(penalties_N, np.float64)[successes]
    kept_successes = successes[choose(success_penalties, keep - num_failures, rng)]
    return np.sort(np.concatenate([kept_failures, kept_successes]))


def _split(
    rewards_N: np.ndarray, penalties_N: np.ndarray, keep: int
) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the successes and of the failures, after checking the group."""
    rewards_N = _checked(rewards_N, keep)
    if np.shape(penalties_N) != rewards_N.shape:
        raise ValueError(
            f"expected one penalty per rollout, found {np.shape(penalties_N)} for {rewards_N.shape}"
        )
    return np.flatnonzero(rewards_N > 0), np.flatnonzero(rewards_N <= 0)


def _checked(rewards_N: np.ndarray, keep: int) -> np.ndarray:
    rewards_N = np.asarray(rewards_N, np.float64)
    if rewards_N.ndim != 1:
        raise ValueError(f"expected rewards of one group, shape [N], found {rewards_N.shape}")
    if np.isnan(rewards_N).any():
        raise ValueError("a rollout has no reward (None or NaN); leave void rollouts out")
    if keep < 1:
        raise ValueError(f"keep must be at least 1, found {keep}")
    if keep > len(rewards_N):
        raise ValueError(
            f"keep={keep} but rewards_N holds only {len(rewards_N)} rollouts; "
            "sample more of them or lower keep"
        )
    return rewards_N


# --- selectors: six functions of one signature ----------------------------------------------------

Array, Rng = np.ndarray, np.random.Generator


def _roc_paper(
    rewards_N: Array, penalties_N: Array, keep: int, rng: Rng, info_N: Lengths | None = None
) -> Array:
    """RoC as the paper states it (§2.2.3)."""
    return resample_on_correct(rewards_N, penalties_N, keep, rng)


def _roc_release(
    rewards_N: Array, penalties_N: Array, keep: int, rng: Rng, info_N: Lengths | None = None
) -> Array:
    """RoC as released: successes sorted by penalty, first failures, floors of 2; deterministic."""
    successes, failures = _split(rewards_N, penalties_N, keep)
    num_failures = _release_failure_quota(len(successes), len(failures), keep)
    success_penalties = np.asarray(penalties_N, np.float64)[successes]
    kept_successes = successes[lowest_penalty_choice(success_penalties, keep - num_failures)]
    return np.sort(np.concatenate([failures[:num_failures], kept_successes]))


def _uniform(
    rewards_N: Array, penalties_N: Array, keep: int, rng: Rng, info_N: Lengths | None = None
) -> Array:
    """Uniform over the whole group: separates the selection from the extra sampling (control)."""
    return np.sort(uniform_choice(_checked(rewards_N, keep), keep, rng))


def _gfpo_length(
    rewards_N: Array, penalties_N: Array, keep: int, rng: Rng, info_N: Lengths | None = None
) -> Array:
    """GFPO (arXiv 2508.09726): the shortest responses, right or wrong; ties in rollout order."""
    lengths_N = _lengths(info_N, _checked(rewards_N, keep))
    return np.sort(np.argsort(lengths_N, kind="stable")[:keep])


def _gfpo_efficiency(
    rewards_N: Array, penalties_N: Array, keep: int, rng: Rng, info_N: Lengths | None = None
) -> Array:
    """GFPO by token efficiency: the highest reward per token; ties in rollout order."""
    rewards_N = _checked(rewards_N, keep)
    efficiency_N = rewards_N / np.maximum(_lengths(info_N, rewards_N), 1)
    return np.sort(np.argsort(-efficiency_N, kind="stable")[:keep])


def _all(
    rewards_N: Array, penalties_N: Array, keep: int, rng: Rng, info_N: Lengths | None = None
) -> Array:
    """Every rollout, whatever `keep` says: the baseline without selection."""
    return np.arange(len(rewards_N))


def _lengths(info_N: Lengths | None, rewards_N: np.ndarray) -> np.ndarray:
    lengths = info_N.get("lengths") if isinstance(info_N, Mapping) else info_N
    if lengths is None:
        raise ValueError('GFPO needs info_N: response lengths in tokens, or {"lengths": …}')
    lengths_N = np.asarray(lengths, np.float64)
    if lengths_N.shape != rewards_N.shape:
        raise ValueError(
            f"expected one length per rollout, found {lengths_N.shape} for {rewards_N.shape}"
        )
    return lengths_N


SELECTORS: dict[str, Selector] = {
    "roc_paper": _roc_paper,
    "roc_release": _roc_release,
    "uniform": _uniform,
    "gfpo_length": _gfpo_length,
    "gfpo_efficiency": _gfpo_efficiency,
    "all": _all,
}
"""Ways to keep `keep` of N rollouts, by the name used in configurations."""
