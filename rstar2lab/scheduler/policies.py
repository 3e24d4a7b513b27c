"""Placement and admission of trajectories on engines: pure state machines (§3.2, Fig 7).

Events go in, actions come out; no clock, no I/O, chance only from the seed. All policies share one
central queue, first come first served, and one ledger: each trajectory that has started reserves
its worst case until it ends. They differ in what they admit, and where. What `reserve` calls full,
others fill further; the ledger bounds the real use of every one of them.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .events import Action, Cancel, EngineSpec, EngineStats, Hold, Resume, Start, TrajSpec
from .lengths import LengthPrior


@dataclass(slots=True)
class Seat:
    """A trajectory between submission and end. order: its place in the order of submission."""

    spec: TrajSpec
    order: int
    context: int  # tokens at the last end of a turn or tool
    engine: str | None = None
    stage: str = "queued"  # queued, running, tool
    since: float = 0.0  # when the running turn started


@dataclass(slots=True)
class Desk:
    """What a policy knows of one engine. residents: started and unfinished, by id.

    capacity: KV tokens in whole blocks.
    """

    spec: EngineSpec
    capacity: int = field(init=False)
    residents: dict[str, Seat] = field(default_factory=dict)
    reserved_blocks: int = 0
    stats: EngineStats | None = None

    def __post_init__(self):
        self.capacity = self.spec.kv_tokens // self.spec.block * self.spec.block

    @property
    def reserved(self) -> int:
        """Tokens that its residents may come to hold."""
        return self.reserved_blocks * self.spec.block

    def could_hold(self, traj: TrajSpec) -> bool:
        """Whether the trajectory fits when it is alone."""
        block = self.spec.block
        total = traj.prompt_tokens + traj.max_tokens
        return traj.blocks(block) * block <= self.capacity and total <= self.spec.max_len


class Policy:
    """The bookkeeping that all policies share; a subclass says where the queue's head may start.

    Every event returns the actions that follow. A trajectory leaves through `finished` or `Cancel`,
    once. A trajectory whose engine is lost goes back to the front of the queue, with its tokens.
    """

    tick_seconds: float | None = None  # how often it wants `engine_stats` and `tick`; None: never

    def bind(
        self, engines: Sequence[EngineSpec], prior: LengthPrior | None = None, seed: int = 0
    ) -> None:
        """Take over the engines. prior: lengths known from earlier steps, if a policy asks."""
        self.desks = {spec.id: Desk(spec) for spec in engines}
        self.queue: OrderedDict[str, Seat] = OrderedDict()  # by id, so that one leaves at no cost
        self.seats: dict[str, Seat] = {}
        self.prior, self.rng = prior, np.random.default_rng(seed)
        self.submitted = 0

    # Events

    def submit(self, now: float, trajs: Sequence[TrajSpec]) -> list[Action]:
        """New trajectories arrive together. One that fits on no engine is refused.

        Raises: ValueError, before anything is queued, if two that are unfinished share an id.
        """
        for traj, count in Counter(traj.id for traj in trajs).items():
            if count > 1 or traj in self.seats:
                raise ValueError(f"trajectory {traj!r} was submitted twice; give it its own id")
        actions: list[Action] = []
        fresh = []
        for traj in trajs:
            seat = Seat(traj, self.submitted, traj.prompt_tokens)
            self.submitted += 1
            refusal = self._refusal(traj)
            if refusal:
                actions.append(Cancel(traj.id, refusal))
                continue
            self.seats[traj.id] = self.queue[traj.id] = seat
            fresh.append(seat)
        self._arrange(fresh)
        actions += self._admit(now)
        return actions + [Hold(s.spec.id, "no room yet") for s in fresh if s.engine is None]

    def turn_done(self, now: float, traj: str, new_tokens: int, preempted: int = 0) -> list[Action]:
        """A turn has sampled `new_tokens`; its tool call starts unless a `Hold` comes back."""
        seat = self.seats[traj]
        seat.context += new_tokens
        seat.stage = "tool"
        return self._after_turn(now, seat) + self._admit(now)

    def tool_done(self, now: float, traj: str, tool_tokens: int) -> list[Action]:
        """The tool has answered with so many tokens; the next turn is wanted."""
        seat = self.seats[traj]
        seat.context += tool_tokens
        if seat.engine is None:  # its engine was lost meanwhile
            return self._requeue(now, [seat])
        old = seat.engine
        engine = self._next_engine(now, seat)
        if engine != old:
            self._leave(seat)
            self._enter(seat, engine)
        return [self._start(now, seat, engine == old)]

    def finished(self, now: float, traj: str, reason: str) -> list[Action]:
        """The trajectory has ended: success, length, error or cancel; in any stage."""
        seat = self.seats.pop(traj)
        self.queue.pop(traj, None)
        was_running = seat.stage == "running"
        seat.stage = "ended"
        engine = seat.engine
        self._leave(seat)
        total = seat.context - seat.spec.prompt_tokens
        if self.prior is not None and total:
            self.prior.observe(total, seat.spec.group, reason != "success")
        after = self._after_leaving(now, engine) if was_running and engine else []
        return after + self._admit(now)

    def engine_stats(self, now: float, stats: EngineStats) -> list[Action]:
        """A report of an engine; may be seconds old."""
        if stats.id in self.desks:
            self.desks[stats.id].stats = stats
        return []

    def engine_up(self, now: float, spec: EngineSpec) -> list[Action]:
        """An engine arrives, or comes back empty."""
        if spec.id in self.desks:
            raise ValueError(f"engine {spec.id!r} is up already; report engine_down first")
        self.desks[spec.id] = Desk(spec)
        return self._admit(now)

    def engine_down(self, now: float, engine: str) -> list[Action]:
        """An engine is lost. Running turns start again elsewhere; tools go on."""
        if engine not in self.desks:
            raise ValueError(f"engine {engine!r} is not up; expected one of {list(self.desks)}")
        desk = self.desks.pop(engine)
        orphans = sorted(desk.residents.values(), key=lambda seat: seat.order)
        running = [seat for seat in orphans if seat.stage == "running"]
        for seat in orphans:
            seat.engine = None
        self._lost(desk)
        return self._requeue(now, running)

    def tick(self, now: float) -> list[Action]:
        """Time has passed: look at the queue again."""
        return self._admit(now)

    def ledger(self) -> dict[str, int]:
        """Reserved tokens per engine."""
        return {name: desk.reserved for name, desk in self.desks.items()}

    def reserved(self, engine: str) -> int:
        """Reserved tokens of one engine; 0 for an engine that is gone."""
        return self.desks[engine].reserved if engine in self.desks else 0

    # What a policy decides

    def _arrange(self, fresh: list[Seat]) -> None:
        """Look at trajectories that arrive together before they are queued."""

    def _choose(self, now: float, seat: Seat) -> str | None:
        """The engine on which the head of the queue starts now, or None: it waits."""
        raise NotImplementedError

    def _next_engine(self, now: float, seat: Seat) -> str:
        """The engine of the next turn: sticky unless a policy says otherwise."""
        return seat.engine

    def _after_turn(self, now: float, seat: Seat) -> list[Action]:
        return []

    def _after_leaving(self, now: float, engine: str) -> list[Action]:
        """A running trajectory has left the engine without ending its turn."""
        return []

    def _lost(self, desk: Desk) -> None:
        """Forget what is kept about an engine beside its desk."""

    # Bookkeeping

    def _refusal(self, traj: TrajSpec) -> str:
        """Why no engine can ever take the trajectory, or ""."""
        desks = self.desks.values()
        if not desks or any(desk.could_hold(traj) for desk in desks):
            return ""
        best = max(desks, key=lambda desk: desk.capacity)
        return (
            f"trajectory {traj.id!r} may need {traj.prompt_tokens} prompt + {traj.max_tokens} "
            f"response tokens + 1 ahead, in blocks of {best.spec.block}, but the largest engine "
            f"holds {best.capacity}, and {best.spec.max_len} per sequence; lower max_tokens or "
            "raise the engine's kv_tokens or max_len"
        )

    def _requeue(self, now: float, seats: list[Seat]) -> list[Action]:
        """To the front of the queue, in their order."""
        for seat in reversed(seats):
            seat.stage = "queued"
            self.queue[seat.spec.id] = seat
            self.queue.move_to_end(seat.spec.id, last=False)
        actions = self._admit(now)
        left = [s for s in seats if s.engine is None and s.spec.id in self.seats]
        return actions + [Hold(seat.spec.id, "its engine was lost") for seat in left]

    def _admit(self, now: float) -> list[Action]:
        """Start heads of the queue while there is an engine for them.

        A head that fits on no engine that is left is refused.
        """
        actions: list[Action] = []
        while self.queue and self.desks:
            seat = self._head()
            refusal = self._refusal(seat.spec)
            if refusal:
                del self.queue[seat.spec.id], self.seats[seat.spec.id]
                actions.append(Cancel(seat.spec.id, refusal))
                continue
            engine = self._choose(now, seat)
            if engine is None:
                break
            del self.queue[seat.spec.id]
            self._enter(seat, engine)
            actions.append(self._start(now, seat, False))
        return actions

    def _head(self) -> Seat:
        return next(iter(self.queue.values()))

    def _start(self, now: float, seat: Seat, expect_hit: bool) -> Start:
        seat.stage, seat.since = "running", now
        return Start(seat.spec.id, seat.engine, expect_hit)

    def _enter(self, seat: Seat, engine: str) -> None:
        desk = self.desks[engine]
        seat.engine = engine
        desk.residents[seat.spec.id] = seat
        desk.reserved_blocks += seat.spec.blocks(desk.spec.block)

    def _leave(self, seat: Seat) -> None:
        """Release the reservation; a lost engine took it along."""
        desk = self.desks.get(seat.engine)
        if desk is not None:
            del desk.residents[seat.spec.id]
            desk.reserved_blocks -= seat.spec.blocks(desk.spec.block)
        seat.engine = None

    def _able(self, seat: Seat) -> list[Desk]:
        """Desks that could hold the trajectory."""
        return [desk for desk in self.desks.values() if desk.could_hold(seat.spec)]

    def _fewest(self, desks: list[Desk], count: int = 1) -> list[Desk]:
        """The desks with the fewest residents for their KV, ties at random.

        Index order would send the mates of a group to the same engine again and again.
        """
        residents = np.array([len(desk.residents) for desk in desks])
        sizes = np.array([desk.capacity for desk in desks])
        keys = (residents + self.rng.random(len(desks))) / sizes
        if count >= len(desks):
            return [desks[i] for i in keys.argsort()]
        best = keys.argpartition(count - 1)[:count]
        return [desks[i] for i in best[keys[best].argsort()]]


class Static(Policy):
    """Everything starts at once, on an engine given by its place in the batch; no admission.

    contiguous: engine ⌊i·n / N⌋ of the N that arrive together, whole groups side by side; else
    i mod n, where i goes on from arrival to arrival. barrier: the tool calls of an engine start
    when its last running turn has ended, as in the paper's baseline (verl 0.2); there the next
    turns wait for the slowest tool as well, here they do not.
    """

    def __init__(self, contiguous: bool = True, barrier: bool = False):
        self._contiguous, self._barrier = contiguous, barrier

    def bind(self, engines, prior=None, seed=0) -> None:
        super().bind(engines, prior, seed)
        self._assigned: dict[str, str] = {}
        self._held: dict[str, dict[str, None]] = {}
        self._running: dict[str, int] = {}

    def _arrange(self, fresh):
        names = list(self.desks)
        for i, seat in enumerate(fresh):
            if names:
                place = i * len(names) // len(fresh) if self._contiguous else seat.order
                self._assigned[seat.spec.id] = names[place % len(names)]

    def _choose(self, now, seat):
        engine = self._assigned.pop(seat.spec.id, None)
        if engine in self.desks and self.desks[engine].could_hold(seat.spec):
            return engine
        return self._fewest(self._able(seat))[0].spec.id

    def _start(self, now, seat, expect_hit):
        self._running[seat.engine] = self._running.get(seat.engine, 0) + 1
        return super()._start(now, seat, expect_hit)

    def _after_turn(self, now, seat):
        if not self._barrier:
            return []
        self._held.setdefault(seat.engine, {})[seat.spec.id] = None
        released = self._after_leaving(now, seat.engine)
        held = [] if released else [Hold(seat.spec.id, "the turn's barrier")]
        return held + [r for r in released if r.traj != seat.spec.id]

    def _after_leaving(self, now, engine):
        if not self._barrier:
            return []
        self._running[engine] -= 1
        if self._running[engine]:
            return []
        return [Resume(traj) for traj in self._held.pop(engine, ())]

    def finished(self, now, traj, reason):
        seat = self.seats[traj]
        self._assigned.pop(traj, None)
        self._held.get(seat.engine, {}).pop(traj, None)
        return super().finished(now, traj, reason)

    def engine_down(self, now, engine):
        held = [Resume(traj) for traj in self._held.get(engine, ())]
        return held + super().engine_down(now, engine)

    def _lost(self, desk):
        self._held.pop(desk.spec.id, None)
        self._running.pop(desk.spec.id, None)


class RoundRobin(Policy):
    """Each turn goes to the next engine in turn: no affinity, no admission (AReaL's default)."""

    def bind(self, engines, prior=None, seed=0) -> None:
        super().bind(engines, prior, seed)
        self._turn = 0

    def _choose(self, now, seat):
        desks = self._able(seat)
        self._turn += 1
        return desks[self._turn % len(desks)].spec.id

    def _next_engine(self, now, seat):
        return self._choose(now, seat)


class Least(Policy):
    """Fewest residents at the first turn, ties at random, then sticky; no admission (verl)."""

    def _choose(self, now, seat):
        return self._fewest(self._able(seat))[0].spec.id


class Gauge(Policy):
    """Admit by the KV that is free now: used + prompt ≤ high · C, on the emptiest engine.

    It does not look ahead, and it does not see trajectories that wait for a tool.
    """

    tick_seconds = 1.0

    def __init__(self, high: float = 0.9):
        self._high = high

    def bind(self, engines, prior=None, seed=0) -> None:
        super().bind(engines, prior, seed)
        self._fresh: dict[str, int] = {}  # tokens started since the engine's last report

    def engine_stats(self, now, stats):
        self._fresh[stats.id] = 0
        return super().engine_stats(now, stats)

    def _lost(self, desk):
        self._fresh.pop(desk.spec.id, None)

    def _used(self, desk: Desk) -> float:
        reported = desk.stats.kv_usage * desk.capacity if desk.stats else 0.0
        return reported + self._fresh.get(desk.spec.id, 0)

    def _choose(self, now, seat):
        desks = self._able(seat)
        used = np.array([self._used(desk) / desk.capacity for desk in desks])
        desk = desks[int((used + 1e-9 * self.rng.random(len(used))).argmin())]
        is_free = self._used(desk) + seat.context <= self._high * desk.capacity
        return desk.spec.id if is_free or not desk.residents else None

    def _start(self, now, seat, expect_hit):
        self._fresh[seat.engine] = self._fresh.get(seat.engine, 0) + seat.context
        return super()._start(now, seat, expect_hit)


class Reserve(Policy):
    """Reserve prompt + L per trajectory on the engine with most room, else wait (the paper, §3.2).

    room = C / commit - Σ reservations. commit = 1 never overflows; 0.5 commits every token twice.
    An empty engine always takes what it can hold.
    """

    def __init__(self, commit: float = 1.0):
        if not commit > 0:
            raise ValueError(f"commit={commit}: expected a positive share, 1 for the worst case")
        self._commit = commit

    def _choose(self, now, seat):
        desks = self._able(seat)
        room = np.array([desk.capacity / self._commit - desk.reserved for desk in desks])
        desk = desks[int((room + 1e-3 * self.rng.random(len(room))).argmax())]
        need = seat.spec.blocks(desk.spec.block) * desk.spec.block
        fits = desk.capacity / self._commit - desk.reserved >= need
        return desk.spec.id if fits or not desk.residents else None


class Aimd(Policy):
    """A limit of residents per engine, raised slowly and cut on congestion (TCP; prime-rl, CONCUR).

    It starts at C / (L + prompt); × 1.25 per turnover while usage < 0.6 and nothing waits; trimmed
    to 0.7 / usage above 0.8; × 0.8 at a preemption. A turnover is as many ends as the limit.
    """

    tick_seconds = 1.0

    def bind(self, engines, prior=None, seed=0) -> None:
        super().bind(engines, prior, seed)
        self._limit: dict[str, float] = {}
        self._ended: dict[str, int] = {}

    def _limit_of(self, desk: Desk, seat: Seat) -> float:
        worst = seat.spec.blocks(desk.spec.block) * desk.spec.block
        return self._limit.setdefault(desk.spec.id, max(1.0, desk.capacity / worst))

    def finished(self, now, traj, reason):
        engine = self.seats[traj].engine
        self._ended[engine] = self._ended.get(engine, 0) + 1
        return super().finished(now, traj, reason)

    def engine_stats(self, now, stats):
        desk, limit = self.desks.get(stats.id), self._limit.get(stats.id)
        before = desk.stats if desk is not None else None
        super().engine_stats(now, stats)
        if limit is None or before is None:
            return []
        if stats.preemptions > before.preemptions:
            limit *= 0.8
        elif stats.kv_usage > 0.8:
            limit = min(limit, len(desk.residents) * 0.7 / stats.kv_usage)
        elif stats.kv_usage < 0.6 and not stats.waiting and self._ended.get(stats.id, 0) >= limit:
            limit *= 1.25
            self._ended[stats.id] = 0
        self._limit[stats.id] = max(1.0, limit)
        return []

    def _lost(self, desk):
        self._limit.pop(desk.spec.id, None)
        self._ended.pop(desk.spec.id, None)

    def _choose(self, now, seat):
        desks = [d for d in self._able(seat) if len(d.residents) + 1 <= self._limit_of(d, seat)]
        return self._fewest(desks)[0].spec.id if desks else None
