"""The words of the scheduler: what a policy is told, what it answers, and one row of a log.

Ids are strings, sizes are tokens, times are seconds on the driver's clock (simulated or real).
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class EngineSpec:
    """An engine: KV tokens in blocks, most rows of a step, longest sequence, relative speed."""

    id: str
    kv_tokens: int
    block: int = 16
    max_seqs: int = 256
    max_len: int = 1 << 30
    speed: float = 1.0


@dataclass(frozen=True)
class EngineStats:
    """What an engine reports at time `t`: kv_usage in [0, 1]; counters since its start.

    A row of the batch waits for nothing; `waiting` requests wait for memory. free_blocks may be
    unknown. Usage leaves out trajectories that wait for a tool: it is a gauge, not the ledger.
    """

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
    """A trajectory before it starts. max_tokens bounds its response, tool tokens included."""

    id: str
    group: str
    prompt_tokens: int
    max_tokens: int
    max_turns: int = 1 << 30

    def blocks(self, block: int) -> int:
        """Blocks that it may come to hold: an engine wants room for one token ahead."""
        return -(-(self.prompt_tokens + self.max_tokens + 1) // block)


@dataclass(frozen=True, slots=True)
class Start:
    """The trajectory's turn starts on the engine. expect_hit: its last turn was there too."""

    traj: str
    engine: str
    expect_hit: bool


@dataclass(frozen=True, slots=True)
class Hold:
    """The trajectory waits: in the queue, or with its tool call before a barrier."""

    traj: str
    reason: str


@dataclass(frozen=True, slots=True)
class Resume:
    """The tool call that was held before a barrier may start."""

    traj: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """The trajectory ends unfinished; the reason says what to change."""

    traj: str
    reason: str


Action = Start | Hold | Resume | Cancel

EventKind = Literal[
    "submit", "start", "preempt", "turn", "call", "tool", "finish", "lost", "down", "up"
]


@dataclass(frozen=True, slots=True)
class Event:
    """One row of a log, the same from a simulation and from real engines.

    tokens: the prompt (submit), the input of a turn (start), sampled (turn), added by the tool
    (tool), thrown away (lost), the whole response (finish). hit: input tokens whose KV was reused.
    ledger: tokens reserved on the engine. gauge: tokens that it holds for running requests.
    group, max_tokens: of a submitted trajectory. reason: why it ended or was lost.
    """

    time: float
    kind: EventKind
    traj: str
    engine: str = ""
    tokens: int = 0
    hit: int = 0
    ledger: int = 0
    gauge: int = 0
    group: str = ""
    max_tokens: int = 0
    reason: str = ""


def save_events(events: Iterable[Event], path: str | Path) -> None:
    """One JSON object per line."""
    lines = (json.dumps(asdict(event), ensure_ascii=False) + "\n" for event in events)
    Path(path).write_text("".join(lines))


def load_events(path: str | Path) -> list[Event]:
    """What `save_events` wrote. Raises: ValueError if a line is no event."""
    events = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        try:
            events.append(Event(**json.loads(line)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: expected one event, {error}") from error
    return events
