"""What a step asks of the engines: recorded or made-up trajectories, turn by turn.

A trajectory is replayed, not sampled: how many tokens each turn samples and what its tool adds are
given. So every policy does identical work.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .events import Event, TrajSpec, load_events


@dataclass(frozen=True, slots=True)
class TurnTrace:
    """A turn samples `tokens`, then its tool adds `tool_tokens` after `tool_seconds`."""

    tokens: int
    tool_tokens: int = 0
    tool_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class TrajectoryTrace:
    """One trajectory to replay. max_tokens: the budget that a scheduler is told, never exceeded."""

    id: str
    group: str
    prompt_tokens: int
    max_tokens: int
    turns: tuple[TurnTrace, ...]

    @property
    def response_tokens(self) -> int:
        """Model and tool tokens."""
        return sum(turn.tokens + turn.tool_tokens for turn in self.turns)

    @property
    def is_cut(self) -> bool:
        """Whether the budget ended it."""
        return self.response_tokens >= self.max_tokens

    @property
    def spec(self) -> TrajSpec:
        """What a scheduler knows before the start."""
        return TrajSpec(self.id, self.group, self.prompt_tokens, self.max_tokens, len(self.turns))


@dataclass(frozen=True)
class Workload:
    """The trajectories of one step, in the order of submission, and the lengths of earlier ones.

    earlier_lengths: response tokens seen before this step, from which policies may learn; those at
    the budget are censored.
    """

    trajectories: Sequence[TrajectoryTrace]
    earlier_lengths: Sequence[int] = ()

    def __post_init__(self):
        ids = [t.id for t in self.trajectories]
        if len(set(ids)) != len(ids):
            raise ValueError("two trajectories share an id; give each its own")
        for t in self.trajectories:
            if not t.turns or t.prompt_tokens < 1 or min(turn.tokens for turn in t.turns) < 1:
                raise ValueError(f"{t.id!r}: expected a prompt and turns of at least one token")
            if t.response_tokens > t.max_tokens:
                raise ValueError(
                    f"{t.id!r} has {t.response_tokens} response tokens, above its budget of "
                    f"{t.max_tokens}: then no reservation bounds its memory; raise max_tokens"
                )

    @classmethod
    def synthetic(
        cls, prompts=512, samples=32, mean_tokens=4500, cap=8192, sigma=0.6, calls=3.0, seed=0,
        shape: "Shape | None" = None,
    ) -> "Workload":  # fmt: skip
        """Log-normal response lengths, cut at `cap`; gamma-Poisson calls, `calls` in the mean.

        mean_tokens: before the cut. `earlier_lengths` are an independent step of the same kind.
        """
        shape = shape or Shape()
        rng, earlier = np.random.default_rng(seed), np.random.default_rng((seed, 1))
        lengths_PN = _lengths(earlier, prompts, samples, mean_tokens, cap, sigma, shape)
        return cls(
            _synthetic(rng, prompts, samples, mean_tokens, cap, sigma, calls, shape),
            tuple(lengths_PN.ravel().tolist()),
        )

    @classmethod
    def from_log(cls, path: str | Path, earlier_lengths: Sequence[int] = ()) -> "Workload":
        """The trajectories of a run that was logged, simulated or real, to be replayed.

        Trajectories that did not end by success or length are left out; see `from_events`.
        """
        return cls.from_events(load_events(path), earlier_lengths)

    @classmethod
    def from_events(cls, events: Iterable[Event], earlier_lengths=()) -> "Workload":
        """As `from_log`. A turn that was lost with its engine counts once, where it was finished.

        A trajectory that was refused or failed has no length of its own: it is not replayed.
        """
        submitted, turns, calls, ended = {}, {}, {}, set()
        for event in events:
            if event.kind == "submit":
                submitted[event.traj] = event
            elif event.kind == "turn":
                turns.setdefault(event.traj, []).append(TurnTrace(event.tokens))
            elif event.kind == "call":
                calls[event.traj] = event.time
            elif event.kind == "tool":
                seconds = event.time - calls[event.traj]
                turns[event.traj][-1] = TurnTrace(
                    turns[event.traj][-1].tokens, event.tokens, seconds
                )
            elif event.kind == "finish" and event.reason in ("success", "length"):
                ended.add(event.traj)
        return cls(
            tuple(
                TrajectoryTrace(name, e.group, e.tokens, e.max_tokens, tuple(turns[name]))
                for name, e in submitted.items()
                if name in ended
            ),
            earlier_lengths,
        )


@dataclass(frozen=True)
class Shape:
    """The rest of a synthetic workload; all assumed, except what cites the paper.

    group_share: part of the length's (log) variance that the samples of a prompt have in common.
    call_shape: of the gamma rate of a group's calls. max_turns, tool_seconds (mean; §3.1: 0.3 s),
    slow_share of calls take slow_seconds; tool_tokens: mean of a log-normal with σ 0.5.
    """

    prompt_tokens: int = 300
    group_share: float = 0.5
    call_shape: float = 4.0
    max_turns: int = 10
    tool_seconds: float = 0.3
    slow_share: float = 0.01
    slow_seconds: float = 4.0
    tool_tokens: int = 110


def _lengths(rng, prompts, samples, mean_tokens, cap, sigma, shape: Shape) -> np.ndarray:
    group = rng.standard_normal((prompts, 1)) * np.sqrt(shape.group_share)
    own = rng.standard_normal((prompts, samples)) * np.sqrt(1 - shape.group_share)
    logs = np.log(mean_tokens) - sigma**2 / 2 + sigma * (group + own)
    return np.clip(np.exp(logs), min(64, cap), cap).astype(np.int64)


def _synthetic(rng, prompts, samples, mean_tokens, cap, sigma, calls, shape: Shape):
    lengths_PN = _lengths(rng, prompts, samples, mean_tokens, cap, sigma, shape)
    rates_P = rng.gamma(shape.call_shape, calls / shape.call_shape, prompts)
    calls_PN = np.minimum(rng.poisson(rates_P[:, None], lengths_PN.shape), shape.max_turns - 1)
    prompt_P = np.exp(rng.normal(np.log(shape.prompt_tokens) - 0.02, 0.2, prompts)).astype(int) + 1
    return tuple(
        TrajectoryTrace(
            f"p{p}/{n}", f"p{p}", int(prompt_P[p]), cap,
            _turns(rng, int(lengths_PN[p, n]), int(calls_PN[p, n]), shape),
        )
        for p in range(prompts) for n in range(samples)
    )  # fmt: skip


def _turns(rng, length: int, calls: int, shape: Shape) -> tuple[TurnTrace, ...]:
    """Split a response of `length` tokens into turns; the tools' share comes off first."""
    calls = min(calls, length // 16 - 1)
    if calls < 1:
        return (TurnTrace(length),)
    most = max(1, length // (2 * calls))
    tools = np.exp(rng.normal(np.log(shape.tool_tokens) - 0.125, 0.5, calls))
    tools = np.clip(tools, 1, most).astype(int)
    seconds = np.exp(rng.normal(np.log(max(shape.tool_seconds, 1e-9)) - 0.125, 0.5, calls))
    seconds[rng.random(calls) < shape.slow_share] = shape.slow_seconds
    left = length - int(tools.sum()) - (calls + 1)
    parts = (rng.dirichlet(np.ones(calls + 1) * 2) * left).astype(int) + 1
    parts[-1] += length - int(tools.sum()) - int(parts.sum())
    return tuple(
        TurnTrace(int(n), int(t), float(s))
        for n, t, s in zip(parts, [*tools, 0], [*seconds, 0.0], strict=True)
    )
