"""A step on simulated engines, event by event: the first driver of a policy.

One heap of events: an engine reaches a boundary, a tool answers, a report and tick are due, an
engine comes or goes. The policy object is the one that drives real engines. Not modeled: engines
that admit by their own look-ahead, overlap of prefill and decoding, shared bandwidth.
"""

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .cost import CostModel, lower_bound
from .events import Action, Cancel, Event, Hold, Resume, Start
from .lengths import KaplanMeier, bin_width
from .policies import Policy
from .simulated import EnginePool, Request, SimulatedEngine
from .workload import TrajectoryTrace, Workload

_PATIENCE = 100  # ticks in a row at which nothing else is due: then nothing will come any more


@dataclass(frozen=True)
class Fault:
    """Engine `engine` (its number) goes or comes at `time`. One that first comes starts absent.

    With no engine at all, trajectories wait for one to come. The dispatcher cannot know that one
    will, and fails them.
    """

    time: float
    engine: int
    kind: Literal["down", "up"]


def _in_order(faults: Sequence[Fault], count: int) -> list[Fault]:
    """By time. Raises: ValueError for an engine that is not there, or goes or comes twice."""
    last: dict[int, str] = {}
    ordered = sorted(faults, key=lambda fault: fault.time)
    for fault in ordered:
        if not 0 <= fault.engine < count:
            raise ValueError(f"{fault}: the pool has engines 0 to {count - 1}")
        if last.get(fault.engine) == fault.kind:
            raise ValueError(f"{fault}: engine {fault.engine} is {fault.kind} already")
        last[fault.engine] = fault.kind
    return ordered


@dataclass(frozen=True)
class SimResult:
    """What a step took. Seconds are simulated; `ends` counts trajectories by reason.

    lower_bound: of the trajectories that were not refused. preemptions: requests sent back;
    recomputed_tokens: KV computed again after preemption, eviction of a prefix, a move or a loss.
    idle_fraction: of the engines' time, without a running row. mean_batch: rows per step.
    restarts: turns that began again because their engine was lost; lost_tokens: what they had
    sampled. moves: turns that left an engine for another one.
    """

    makespan: float
    lower_bound: float
    preemptions: int
    idle_fraction: float
    recomputed_tokens: int
    generated_tokens: int
    mean_batch: float
    moves: int
    restarts: int
    lost_tokens: int
    ends: dict[str, int]
    events: list[Event]

    @property
    def ratio(self) -> float:
        """Makespan over the lower bound."""
        return self.makespan / self.lower_bound


@dataclass(slots=True)
class _Trip:
    """A trajectory in the simulation. context: tokens so far; turn: the one that is next or runs.

    seen: tokens whose KV was computed somewhere before.
    """

    trace: TrajectoryTrace
    context: int
    turn: int = 0
    seen: int = 0
    home: str = ""  # where its prefix may be
    calls: bool = False  # its tool call is held


class Simulation:
    """One run. `run` may be called once."""

    def __init__(
        self, policy: Policy, workload: Workload, pool: EnginePool, cost: CostModel, seed: int,
        faults: Sequence[Fault] = (), record: bool = True, tick_seconds: float | None = None,
        prior=None,
    ):  # fmt: skip
        self._policy, self._workload, self._pool, self._cost = policy, workload, pool, cost
        self._record, self._faults = record, _in_order(faults, pool.count)
        self._tick = tick_seconds if policy.tick_seconds is not None else None
        if policy.tick_seconds is not None and tick_seconds is None:
            self._tick = policy.tick_seconds
        first = {fault.engine: fault.kind for fault in reversed(self._faults)}
        present = [n for n in range(pool.count) if first.get(n) != "up"]
        self._engines: dict[str, SimulatedEngine] = {}
        for number in present:
            self._build(number, 0.0)
        self._trips: dict[str, _Trip] = {}
        self._heap: list[tuple] = []
        self._pushed = 0
        self.events: list[Event] = []
        self.ends: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self._busy, self._present_seconds, self._quiet_ticks = 0.0, 0.0, 0
        self._refused: set[str] = set()
        self._since: dict[str, float] = {f"e{n}": 0.0 for n in present}
        policy.bind([pool.spec(n) for n in present], prior, seed)

    def _build(self, number: int, now: float) -> SimulatedEngine:
        engine = SimulatedEngine(self._pool.spec(number), self._pool, self._cost)
        engine.time = now
        self._engines[engine.spec.id] = engine
        return engine

    # The loop

    def run(self) -> SimResult:
        """Raises: RuntimeError if trajectories wait and nothing can happen any more."""
        traces = self._workload.trajectories
        for trace in traces:
            self._trips[trace.id] = _Trip(trace, trace.prompt_tokens)
            self._log(0.0, "submit", trace.id, tokens=trace.prompt_tokens, group=trace.group,
                      max_tokens=trace.max_tokens)  # fmt: skip
        self._apply(0.0, self._policy.submit(0.0, [trace.spec for trace in traces]))
        for fault in self._faults:
            self._push(fault.time, self._on_fault, fault)
        if self._tick is not None:
            self._push(self._tick, self._on_tick, None)
        now = 0.0
        while self._trips:
            if not self._heap:
                raise RuntimeError(f"{len(self._trips)} trajectories wait at {now:.1f} s for ever")
            now, _, handler, argument = heapq.heappop(self._heap)
            handler(now, argument)
        return self._result(now)

    def _push(self, time: float, handler, argument) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (time, self._pushed, handler, argument))

    def _visit_later(self, engine: SimulatedEngine) -> None:
        if engine.due is not None:
            self._push(engine.due, self._on_engine, (engine, engine.generation))

    # Events

    def _on_engine(self, now: float, argument) -> None:
        engine, generation = argument
        if generation != engine.generation:
            return
        for request in engine.arrive():
            self._turn_ended(now, engine, request)
        engine.leave()
        for request in engine.preempted:
            self._log(now, "preempt", request.traj, engine, tokens=request.length)
        for request in engine.started:
            self._log(now, "start", request.traj, engine, tokens=request.length, hit=request.hit)
        self._visit_later(engine)

    def _turn_ended(self, now: float, engine: SimulatedEngine, request: Request) -> None:
        trip = self._trips[request.traj]
        turn = trip.trace.turns[trip.turn]
        trip.context, trip.seen = request.length, request.seen
        trip.turn += 1
        self._log(now, "turn", request.traj, engine, tokens=turn.tokens)
        actions = self._policy.turn_done(now, request.traj, turn.tokens, request.preempted)
        if trip.turn == len(trip.trace.turns):
            self._apply(now, actions)
            engine.forget(request.traj, now)
            self._finish(now, request.traj, "length" if trip.trace.is_cut else "success")
            return
        if any(isinstance(a, Hold) and a.traj == request.traj for a in actions):
            trip.calls = True
        else:
            self._call(now, trip)
        self._apply(now, actions)

    def _call(self, now: float, trip: _Trip) -> None:
        trip.calls = False
        self._log(now, "call", trip.trace.id)
        seconds = trip.trace.turns[trip.turn - 1].tool_seconds
        self._push(now + seconds, self._on_tool, trip)

    def _on_tool(self, now: float, trip: _Trip) -> None:
        traj = trip.trace.id
        if self._trips.get(traj) is not trip:
            return  # cancelled meanwhile
        tokens = trip.trace.turns[trip.turn - 1].tool_tokens
        trip.context += tokens
        self._log(now, "tool", traj, tokens=tokens)
        self._apply(now, self._policy.tool_done(now, traj, tokens))

    def _on_tick(self, now: float, _) -> None:
        for engine in list(self._engines.values()):
            self._apply(now, self._policy.engine_stats(now, engine.stats(now)))
        self._apply(now, self._policy.tick(now))
        self._quiet_ticks = 0 if self._heap else self._quiet_ticks + 1
        if self._quiet_ticks < _PATIENCE:
            self._push(now + self._tick, self._on_tick, None)

    def _on_fault(self, now: float, fault: Fault) -> None:
        name = f"e{fault.engine}"
        if fault.kind == "up":
            self._log(now, "up", "", self._build(fault.engine, now))
            self._since[name] = now
            self._apply(now, self._policy.engine_up(now, self._pool.spec(fault.engine)))
            return
        engine = self._engines.pop(name)
        requests = engine.fail(now)
        self._retire(engine, now)
        engine.generation += 1
        self._log(now, "down", "", engine)
        for request in requests:
            trip = self._trips[request.traj]
            lost = request.length - trip.context
            trip.seen = min(request.seen, trip.context)
            self._totals["lost"] += lost
            self._log(now, "lost", request.traj, engine, tokens=lost, reason="its engine was lost")
        self._totals["restarts"] += len(requests)
        for trip in self._trips.values():
            trip.home = "" if trip.home == name else trip.home
        self._apply(now, self._policy.engine_down(now, name))

    # Actions

    def _apply(self, now: float, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Start):
                self._start(now, action)
            elif isinstance(action, Resume):
                trip = self._trips[action.traj]
                if trip.calls:
                    self._call(now, trip)
            elif isinstance(action, Cancel):
                self._refused.add(action.traj)
                self._drop(now, action.traj, "cancelled")

    def _start(self, now: float, action: Start) -> None:
        trip, engine = self._trips[action.traj], self._engines[action.engine]
        if trip.home and trip.home != action.engine:
            self._totals["moves"] += 1
            if trip.home in self._engines:
                self._engines[trip.home].forget(action.traj, now)
        trip.home = action.engine
        turn = trip.trace.turns[trip.turn]
        request = Request(action.traj, trip.context, turn.tokens, trip.seen)
        if engine.enqueue(request, now):
            self._visit_later(engine)

    def _finish(self, now: float, traj: str, reason: str) -> None:
        actions = self._policy.finished(now, traj, reason)
        self._drop(now, traj, reason)
        self._apply(now, actions)

    def _drop(self, now: float, traj: str, reason: str) -> None:
        trip = self._trips.pop(traj)
        self.ends[reason] += 1
        total = trip.context - trip.trace.prompt_tokens
        self._log(now, "finish", traj, tokens=total, reason=reason)

    # Results

    def _log(self, now, kind, traj, engine: SimulatedEngine | None = None, **more) -> None:
        if self._record:
            if engine is not None:
                more |= {
                    "engine": engine.spec.id,
                    "ledger": self._policy.reserved(engine.spec.id),
                    "gauge": engine.used * engine.spec.block,
                }
            self.events.append(Event(now, kind, traj, **more))

    def _retire(self, engine: SimulatedEngine, now: float) -> None:
        self._present_seconds += now - self._since.pop(engine.spec.id)
        self._busy += engine.busy_seconds
        for name in ("preemptions", "recomputed", "gen_tokens", "steps"):
            self._totals[name] += getattr(engine, name)

    def _result(self, now: float) -> SimResult:
        for engine in self._engines.values():
            self._retire(engine, now)
        totals = self._totals
        served = [t for t in self._workload.trajectories if t.id not in self._refused]
        return SimResult(
            makespan=now,
            lower_bound=lower_bound(served, self._pool, self._cost),
            preemptions=totals["preemptions"],
            idle_fraction=1 - self._busy / self._present_seconds if now else 0.0,
            recomputed_tokens=totals["recomputed"],
            generated_tokens=totals["gen_tokens"],
            mean_batch=totals["gen_tokens"] / max(totals["steps"], 1),
            moves=totals["moves"],
            restarts=totals["restarts"],
            lost_tokens=totals["lost"],
            ends=dict(self.ends),
            events=self.events,
        )


def earlier_curve(workload: Workload) -> KaplanMeier:
    """The survival curve of the lengths before this step; those at the largest budget were cut.

    In bins of `bin_width`.
    """
    cap = max((t.max_tokens for t in workload.trajectories), default=0)
    lengths = workload.earlier_lengths
    return KaplanMeier(lengths, [length >= cap for length in lengths], bin_width(cap))


def simulate(
    policy: str | Policy, workload: Workload, engines: EnginePool, cost: CostModel, seed: int = 0,
    *, faults: Sequence[Fault] = (), record: bool = True, tick_seconds: float | None = None,
    prior=None,
) -> SimResult:  # fmt: skip
    """Run one step. policy: a key of `POLICIES` or an object; seed: its chance, nothing else's.

    tick_seconds: between reports of the engines, default the policy's own. prior: lengths that the
    policy knows, default the curve of the workload's `earlier_lengths`. record=False keeps no
    events.

    Raises: ValueError for an unknown policy or faults that make no sense; RuntimeError if
    trajectories wait for ever.
    """
    from . import make_policy

    chosen = make_policy(policy) if isinstance(policy, str) else policy
    prior = earlier_curve(workload) if prior is None else prior
    return Simulation(
        chosen, workload, engines, cost, seed, faults, record, tick_seconds, prior
    ).run()
