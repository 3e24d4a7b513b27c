"""Words that policies, simulator and dispatcher share: events in, actions out.

A policy holds no clock and does no I/O: `now` (seconds) comes with every event. Lengths are
tokens. A trajectory's *budget* bounds its whole response, tool output included.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class SchedulingError(ValueError):
    """What was asked can never be done; the message says what was found and what to change."""


@dataclass(frozen=True)
class EngineSpec:
    """One engine as the policy sees it. `speed` is relative to the other engines."""

    id: str
    kv_tokens: int
    block: int = 16
    max_seqs: int = 256
    max_len: int = 1 << 30
    speed: float = 1.0

    def kv_blocks(self) -> int:
        return self.kv_tokens // self.block


@dataclass(frozen=True)
class EngineStats:
    """A reading of one engine's gauges, possibly some seconds old. `kv_usage` counts referenced
    blocks only: a trajectory that waits for its tool holds none. Counts are since the start."""

    id: str
    t: float
    kv_usage: float
    free_blocks: int | None
    running: int
    waiting: int
    preemptions: int
    gen_tokens: int


@dataclass(frozen=True)
class TrajSpec:
    """A trajectory before it starts; `max_tokens` is its budget (model and tool tokens)."""

    id: str
    group: str
    prompt_tokens: int
    max_tokens: int
    max_turns: int


@dataclass(frozen=True)
class Start:
    """Run the trajectory's next turn on `engine`. On another engine than before it is a move: the
    whole context is computed again there. `expect_hit`: tokens whose KV should still be there."""

    traj: str
    engine: str
    expect_hit: int = 0


@dataclass(frozen=True)
class Hold:
    """The trajectory waits, for `reason`. As an answer to `turn_done` it keeps the tool call back
    until the policy says `Call`; else it informs the log only."""

    traj: str
    reason: str


@dataclass(frozen=True)
class Call:
    """Start the tool call that a `Hold` kept back (the barrier of `static_sync`)."""

    traj: str


@dataclass(frozen=True)
class Cancel:
    """End the trajectory without a result; the driver answers with `finished(…, "cancel")`."""

    traj: str
    reason: str


Action = Start | Hold | Call | Cancel


class LengthPrior(Protocol):
    """What is known about total response lengths before a step starts."""

    def survival(self, age: np.ndarray, horizon: np.ndarray, cls: int = 0) -> np.ndarray:
        """P(length > age + horizon | length > age), [age, horizon]."""
        ...

    def observe(self, total: int, group: str, censored: bool) -> None: ...


class Policy(Protocol):
    """Decides which trajectory runs where, and when. Every event returns the actions it causes.

    A driver promises: `bind` once, first; per trajectory `submit`, then for each turn after its
    `Start`: `turn_done` (the tool call starts, unless held) and `tool_done` (the next turn is
    wanted: it runs when the policy says `Start`); `finished` exactly once, at any point after
    `submit`. After `engine_down` the turns that ran there are gone (their tokens too; finished
    turns and tool results are not): the policy starts these trajectories again elsewhere. Tool
    calls go on, and their `tool_done` comes as usual.
    """

    tick_seconds: float | None  # how often it wants `tick`; None: never

    def bind(
        self, engines: Sequence[EngineSpec], prior: LengthPrior | None, seed: int
    ) -> None: ...

    def submit(self, now: float, trajs: Sequence[TrajSpec]) -> list[Action]:
        """Raises SchedulingError for one that fits no engine, however long it waits."""
        ...

    def turn_done(
        self, now: float, traj: str, new_tokens: int, preemptions: int = 0
    ) -> list[Action]: ...

    def tool_done(self, now: float, traj: str, tool_tokens: int) -> list[Action]: ...

    def finished(self, now: float, traj: str, reason: str) -> list[Action]:
        """`reason`: stop, length, error, cancel. Its last turn sends no `turn_done`."""
        ...

    def engine_stats(self, now: float, stats: EngineStats) -> list[Action]: ...

    def engine_up(self, now: float, spec: EngineSpec) -> list[Action]: ...

    def engine_down(self, now: float, engine: str) -> list[Action]: ...

    def tick(self, now: float) -> list[Action]: ...

    def ledger(self) -> Mapping[str, int]:
        """Reserved tokens per engine, in whole blocks. A policy without admission counts what its
        residents hold at the last event."""
        ...
