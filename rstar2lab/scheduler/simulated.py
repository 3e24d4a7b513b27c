"""One simulated engine: continuous batching over a block pool, in closed form between events.

While the batch stays the same, n steps take a quadratic in n, and the first step at which the
blocks run out follows from how many rows sit at each offset within a block. So nothing loops over
tokens. What it stands for: an engine that admits first come first served, saves the prefix of a
finished turn until its room is needed, and preempts when a step has no block left.
"""

import heapq
import math
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Literal

from .cost import CostModel
from .events import EngineSpec, EngineStats


@dataclass(frozen=True)
class EnginePool:
    """`count` engines of one kind.

    preemption: "newest" sends the newest request back and recomputes it later (vLLM V1, our torch
    engine); "half" evicts the newer half and holds it until the others have ended (the paper's
    baseline). prefixes: "blocks" evicts saved prefixes block by block, their ends first, and a
    preempted request's blocks are saved too (vLLM V1); "whole" drops a prefix at once and saves
    nothing of a preempted request (our torch engine).
    """

    count: int
    kv_tokens: int
    block: int = 16
    max_seqs: int = 256
    max_len: int = 1 << 30
    preemption: Literal["newest", "half"] = "newest"
    prefixes: Literal["blocks", "whole"] = "blocks"

    def spec(self, number: int) -> EngineSpec:
        """Engine `number` as a policy sees it."""
        return EngineSpec(f"e{number}", self.kv_tokens, self.block, self.max_seqs, self.max_len)


@dataclass(slots=True)
class Request:
    """A turn on its way: `length` tokens of input, `remaining` to sample, KV of `seen` computed."""

    traj: str
    length: int
    remaining: int
    seen: int
    hit: int = 0
    preempted: int = 0


@dataclass(slots=True)
class _Row:
    """A request in the batch. It had `length` tokens at step `joined`."""

    request: Request
    length: int
    joined: int
    last_step: int
    is_gone: bool = False
    stays: bool = False  # it was spared when half were evicted


class SimulatedEngine:
    """The state at a step boundary `time`; `due` is when it wants to be asked again, or None."""

    def __init__(self, spec: EngineSpec, pool: EnginePool, cost: CostModel):
        self.spec, self._pool, self._cost = spec, pool, cost
        self.blocks, self._block = spec.kv_tokens // spec.block, spec.block
        self.time, self.step, self.due = 0.0, 0, None
        self.generation = 0  # of `due`: a later plan makes an earlier one void
        self.is_between_steps = False
        self.rows: dict[str, _Row] = {}  # the newest last
        self.context, self.used = 0, 0  # Σ lengths; blocks of running rows, one token ahead
        self._phases = [0] * spec.block  # rows by (length - step) mod block
        self._ends: list[tuple[int, int, _Row]] = []
        self.waiting: deque[Request] = deque()
        self._held: list[Request] = []
        self._spared = 0
        self.saved: OrderedDict[str, int] = OrderedDict()  # tokens, the oldest first
        self._saved_blocks = 0
        self._planned, self._lead, self._admissions = 0, 0.0, 0
        self.preemptions = self.recomputed = self.gen_tokens = self.steps = 0
        self.busy_seconds = 0.0
        self.preempted: list[Request] = []  # in the last visit

    # Time

    def _seconds(self, steps: int) -> float:
        """From the boundary to `steps` steps later, a prefill on the way included."""
        passed = self._lead + self._cost.decode(len(self.rows), self.context, steps)
        return passed / self.spec.speed

    def _steps_until(self, seconds: float) -> float:
        """Steps that have been done `seconds` after the boundary, a real number ≥ 0."""
        rows, kv = len(self.rows), self._cost.kv_seconds_per_token
        left = seconds * self.spec.speed - self._lead
        if left <= 0:
            return 0.0
        a = kv * rows / 2
        b = self._cost.fixed(rows) + kv * self.context - a
        return 2 * left / (b + math.sqrt(b * b + 4 * a * left))

    def _steps_done(self, now: float) -> int:
        """Whole steps since the boundary."""
        if not self.rows or self.due is None:
            return 0
        return min(int(self._steps_until(now - self.time) + 1e-9), self._planned)

    def _blocks_after(self, steps: int) -> int:
        """Blocks of the rows `steps` steps later."""
        cycles, rest = divmod(steps, self._block)
        used = self.used + cycles * len(self.rows)
        for k in range(rest):
            used += self._phases[(-self.step - 1 - k) % self._block]
        return used

    def _steps_until_full(self) -> int:
        """The first step for which the rows need more blocks than there are."""
        free = self.blocks - self.used
        if free < 0:
            return 0
        cycles, free = divmod(free, len(self.rows))
        for k in range(self._block):
            free -= self._phases[(-self.step - 1 - k) % self._block]
            if free < 0:
                return cycles * self._block + k + 1
        raise AssertionError("a cycle of steps takes a block per row")

    def _advance(self) -> None:
        steps, rows = self._planned, len(self.rows)
        seconds = self._seconds(steps)
        self._trim(self._blocks_after(max(steps - 1, 0)))  # rows that end need no further step
        self.used = self._blocks_after(steps)
        self.time += seconds
        self.busy_seconds += seconds
        self.step += steps
        self.steps += steps
        self.context += rows * steps
        self.gen_tokens += rows * steps
        self._planned, self._lead = 0, 0.0

    # Visits

    def enqueue(self, request: Request, now: float) -> bool:
        """Add a request; True if `due` has changed. It joins at the next step boundary."""
        had_waiting = bool(self.waiting)
        self.waiting.append(request)
        if self.is_between_steps:
            return False
        if not self.rows:
            if self.due is not None:
                return False
            self.time = max(self.time, now)
            return self._plan(self.time, 0)
        if had_waiting:
            return False  # the one before it has asked for the next boundary, or does not fit
        done = math.ceil(self._steps_until(now - self.time) - 1e-9)
        steps = max(done, 1)
        if steps < self._planned:
            return self._plan(self.time + self._seconds(steps), steps)
        return False

    def _plan(self, due: float | None, steps: int) -> bool:
        self.due, self._planned = due, steps
        self.generation += 1
        return True

    def arrive(self) -> list[Request]:
        """Reach the boundary that was due: the requests whose turn ended there."""
        if self.rows:
            self._advance()
        self.is_between_steps = True
        self.preempted = []
        ended = []
        while self._ends and (self._ends[0][2].is_gone or self._ends[0][0] <= self.step):
            row = heapq.heappop(self._ends)[2]
            if not row.is_gone:
                self._remove(row)
                self._save(row.request.traj, row.request.length - 1)
                ended.append(row.request)
        return ended

    def leave(self) -> None:
        """Admit, preempt, and plan the next visit."""
        if not self.rows and self._held:
            self._release_held()
        started = self._admit()
        while self.used > self.blocks:
            self._preempt()
        self._trim(self.used)
        self.is_between_steps = False
        self.started = started
        if not self.rows:
            self._plan(None, 0)
            return
        while self._ends[0][2].is_gone:
            heapq.heappop(self._ends)
        steps = min(self._ends[0][0] - self.step, self._steps_until_full())
        if self.waiting and self.preempted and self._pool.preemption == "half":
            steps = 1  # the half that is free may take those who wait
        self._plan(self.time + self._seconds(steps), steps)

    # Memory

    def _need(self, length: int) -> int:
        """Blocks for `length` tokens and one more."""
        return -(-(length + 1) // self._block)

    def _stored(self, tokens: int) -> int:
        """Blocks of a saved prefix."""
        return -(-tokens // self._block)

    def _admit(self) -> list[Request]:
        started, computes = [], False
        while self.waiting and len(self.rows) < self.spec.max_seqs:
            request = self.waiting[0]
            need = self._need(request.length)
            if self.used + need > self.blocks:
                break
            self.waiting.popleft()
            saved = self.saved.pop(request.traj, 0)
            self._saved_blocks -= self._stored(saved)
            hit = min(saved, request.length - 1)
            if not request.preempted:
                request.hit = hit
            fresh = request.length - 1 - hit
            self.recomputed += max(0, min(request.seen, request.length - 1) - hit)
            if fresh:
                self._lead += self._cost.prefill(fresh, hit)
                computes = True
            request.seen = max(request.seen, request.length - 1)
            self._add(request, need)
            self._trim(self.used)
            started.append(request)
        self._lead += self._cost.prefill_call_seconds * computes
        return started

    def _add(self, request: Request, need: int) -> None:
        row = _Row(request, request.length, self.step, self.step + request.remaining)
        self.rows[request.traj] = row
        self.used += need
        self.context += request.length
        self._phases[(request.length - self.step) % self._block] += 1
        self._admissions += 1
        heapq.heappush(self._ends, (row.last_step, self._admissions, row))

    def _remove(self, row: _Row) -> None:
        """Take a row off the batch; its request then has what was sampled."""
        request = row.request
        passed = self.step - row.joined
        length = row.length + passed
        del self.rows[request.traj]
        row.is_gone = True
        self.used -= self._need(length)
        self.context -= length
        self._phases[(row.length - row.joined) % self._block] -= 1
        request.length, request.remaining = length, request.remaining - passed
        request.seen = max(request.seen, length - 1)
        if row.stays:
            self._spared -= 1
            if not self._spared:
                self._release_held()

    def _save(self, traj: str, tokens: int) -> None:
        if self._pool.prefixes == "blocks":
            tokens -= tokens % self._block  # only full blocks are found again
        self.saved[traj] = tokens
        self._saved_blocks += self._stored(tokens)
        self._trim(self.used)

    def _trim(self, used: int) -> None:
        """Saved prefixes give way to the `used` blocks of rows, the oldest first."""
        excess = used + self._saved_blocks - self.blocks
        while excess > 0 and self.saved:
            traj = next(iter(self.saved))
            held = self._stored(self.saved[traj])
            take = held if self._pool.prefixes == "whole" else min(held, excess)
            if take == held:
                del self.saved[traj]
            else:
                self.saved[traj] -= take * self._block
            self._saved_blocks -= take
            excess -= take

    def _preempt(self) -> None:
        """Make room for the next step: the newest row, or half of all."""
        count = 1
        if self._pool.preemption == "half":
            count = max(1, len(self.rows) // 2)
        victims = list(self.rows.values())[-count:]
        for row in reversed(victims):
            row.stays, spared = False, row.stays
            self._spared -= spared
            self._remove(row)
            row.request.preempted += 1
            self.preemptions += 1
            self.preempted.append(row.request)
            if self._pool.preemption == "newest":
                self.waiting.appendleft(row.request)
        if self._pool.prefixes == "blocks":
            for row in reversed(victims):
                self._save(row.request.traj, row.request.length - 1)
        if self._pool.preemption == "half":
            self._held = [row.request for row in victims] + self._held
            for row in self.rows.values():
                self._spared += not row.stays
                row.stays = True

    def _release_held(self) -> None:
        self.waiting.extendleft(reversed(self._held))
        self._held = []

    # Reports

    def forget(self, traj: str, now: float) -> None:
        """The trajectory has ended or gone elsewhere: its saved prefix is free from now on."""
        if not self.is_between_steps:
            self._trim(self._blocks_after(self._steps_done(now)))
        self._saved_blocks -= self._stored(self.saved.pop(traj, 0))

    def stats(self, now: float) -> EngineStats:
        """What a metrics poll would see."""
        steps = self._steps_done(now)
        used = self._blocks_after(steps)
        return EngineStats(
            id=self.spec.id,
            t=now,
            kv_usage=used / self.blocks,
            free_blocks=self.blocks - used,
            running=len(self.rows),
            waiting=len(self.waiting) + len(self._held),
            preemptions=self.preemptions,
            gen_tokens=self.gen_tokens + len(self.rows) * steps,
        )

    def fail(self, now: float) -> list[Request]:
        """The engine is gone: its requests, with what they had sampled in whole steps."""
        if self.rows:
            busy = self.busy_seconds + now - self.time
            self._planned = self._steps_done(now)
            self._advance()
            self.busy_seconds = busy
        requests = [row.request for row in self.rows.values()]
        for row in list(self.rows.values()):
            self._remove(row)
        return requests + [*self.waiting, *self._held]
