"""Many engines behind the protocol of one: the second driver of a policy, for real engines.

A rollout asks it as it asks any engine. Its first `generate` submits the trajectory, which waits
until the policy starts it; each later one says that its tool has answered; `abort` ends it. It
wakes by event. An engine that raises or stalls is lost: its turns start again elsewhere.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np

from ..engines import Completion, Engine, EngineError, EngineLoad, EngineLost, KvCapacity, Sampling
from ..engines import Result as ToolResult
from .events import Action, Cancel, EngineSpec, EngineStats, Event, Hold, Resume, Start, TrajSpec
from .lengths import LengthPrior
from .policies import Policy

_NONE_LEFT = "no engine is left; add one, then repeat"
_request: ContextVar[str] = ContextVar("scheduled", default="")  # each rollout is a task of its own


@dataclass(frozen=True)
class Limits:
    """What an engine does not say of itself, and when it is given up.

    max_seqs, max_len: rows of a step, tokens of a sequence. stall_seconds: without any token while
    requests run. restarts: of one trajectory before it fails.
    """

    max_seqs: int = 256
    max_len: int = 1 << 30
    stall_seconds: float = 600.0
    restarts: int = 2


@dataclass(slots=True, eq=False)
class _Trip:
    """A trajectory between its first request and its end."""

    spec: TrajSpec
    context: int
    gate: asyncio.Future  # opens when its turn may start
    engine: str | None = None  # where its turn runs
    home: str | None = None  # where its prefix may be
    tool_gate: asyncio.Future | None = None  # before a barrier
    is_calling: bool = False
    task: asyncio.Task | None = None
    restarts: int = 0


@dataclass
class _Watch:
    """The last sign of life of an engine."""

    sign: tuple[int, int, int] = (-1, -1, -1)
    since: float = 0.0
    preemptions: int = 0
    turns: int = 0


class _Aborted(EngineError):
    """The trajectory was aborted while it waited for its start."""


def _refuse(gate: asyncio.Future, error: EngineError) -> None:
    """Whoever waits gets the error. That nobody waits is no error."""
    if not gate.done():
        gate.set_exception(error)
        gate.exception()


def _nothing() -> Completion:
    empty = np.zeros(0, np.float32)
    return Completion(np.zeros(0, np.int32), empty, empty, "abort", 0, 0)


class Dispatcher:
    """The `Engine` protocol over many engines and one policy.

    tick_seconds: between reports to the policy, default its own wish. seed: the policy's chance.
    `events` is the log, `decision_seconds` the time of each call of the policy, `counts` what was
    lost, restarted and moved. It serves one event loop at a time.
    """

    def __init__(
        self,
        engines: Mapping[str, Engine],
        policy: Policy,
        *,
        limits: Limits | None = None,
        prior: LengthPrior | None = None,
        tick_seconds: float | None = None,
        seed: int = 0,
    ):
        self.limits = limits or Limits()
        self.policy, self._engines = policy, dict(engines)
        self._trips: dict[str, _Trip] = {}
        self._announced: dict[str, TrajSpec] = {}
        self._arriving: list[_Trip] = []
        self._watches = {name: _Watch() for name in engines}
        self._ticker: asyncio.Task | None = None
        self._tick = tick_seconds or policy.tick_seconds or 1.0
        self._errands: set[asyncio.Task] = set()
        self.events: list[Event] = []
        self.decision_seconds: list[float] = []
        self.counts: Counter[str] = Counter()
        policy.bind([self._spec(name) for name in engines], prior, seed)

    def _spec(self, name: str) -> EngineSpec:
        kv = self._engines[name].capacity()
        return EngineSpec(name, kv.tokens, kv.block, self.limits.max_seqs, self.limits.max_len)

    # The engine protocol

    def announce(self, trajectories: Sequence[TrajSpec]) -> None:
        """Say what is coming: budgets and groups. Else a first request speaks for itself."""
        self._announced |= {spec.id: spec for spec in trajectories}

    async def generate(self, request_id: str, token_ids, sampling: Sampling) -> Completion:
        """One turn. It starts when the policy says so, and again if its engine is lost.

        Raises:
            EngineError: it fits on no engine, or its engine refuses it.
            EngineLost: no engine is left, or too many were lost under this trajectory.
        """
        _request.set(request_id)
        trip = self._trips.get(request_id)
        if trip is None:
            trip = self._arrive(request_id, len(token_ids), sampling)
        else:
            self._tool_done(trip, len(token_ids))
        try:
            completion = await self._turn(trip, token_ids, sampling)
        except BaseException as error:
            if isinstance(error, _Aborted):
                return _nothing()
            is_cancelled = isinstance(error, asyncio.CancelledError)
            await self._end(trip, "cancel" if is_cancelled else "error")
            raise
        if request_id in self._trips:  # else it was aborted
            self._turn_done(trip, completion)
        return completion

    async def deliver(self, result: Awaitable[ToolResult]) -> ToolResult:
        """Await a tool's result, after the policy's barrier if it has one."""
        trip = self._trips.get(_request.get())
        if trip is None:
            return await result
        trip.is_calling = True
        if trip.tool_gate is not None:
            try:
                await trip.tool_gate
            except BaseException:
                if asyncio.iscoroutine(result):
                    result.close()
                raise
        self._log("call", trip.spec.id)
        found = await result
        trip.is_calling = False
        return found

    async def abort(self, request_id: str) -> None:
        """The trajectory has ended. Its reservation is free; a turn in flight ends as "abort"."""
        trip = self._trips.get(request_id)
        if trip is not None:
            is_cut = trip.context - trip.spec.prompt_tokens >= trip.spec.max_tokens
            reason = "length" if is_cut else "success"
            is_busy = trip.engine or trip.is_calling or not trip.gate.done()
            await self._end(trip, "cancel" if is_busy else reason)

    def capacity(self) -> KvCapacity:
        """Of all engines together; the block of the first."""
        found = [engine.capacity() for engine in self._engines.values()]
        return KvCapacity(sum(kv.tokens for kv in found), found[0].block if found else 1)

    def load(self) -> EngineLoad:
        """Of all engines together; trajectories that the policy holds are waiting."""
        loads = [engine.load() for engine in self._engines.values()]
        names = ("running", "waiting", "used_tokens", "preemptions", "sampled_tokens")
        sums = {name: sum(getattr(load, name) for load in loads) for name in names}
        sums["waiting"] += sum(not trip.gate.done() for trip in self._trips.values())
        return EngineLoad(**sums)

    async def update_weights(self, version: int, tensors: Mapping) -> None:
        """All engines take the new weights; saved prefixes are void with them."""
        names = list(self._engines)
        updates = (self._engines[name].update_weights(version, tensors) for name in names)
        found = await asyncio.gather(*updates, return_exceptions=True)
        for name, error in zip(names, found, strict=True):
            if isinstance(error, EngineLost) and name in self._engines:
                self.engine_down(name, repr(error))
            elif isinstance(error, BaseException):
                raise error
        if self._is_hopeless():
            raise EngineLost(_NONE_LEFT)

    def close(self) -> None:
        """Close all engines; whoever waits gets `EngineLost`."""
        if self._ticker is not None:
            self._ticker.cancel()
        self._fail_all(EngineLost("the dispatcher was closed"))
        for engine in self._engines.values():
            engine.close()

    # Engines come and go

    def engine_up(self, name: str, engine: Engine) -> None:
        """An engine joins, or joins again after a loss."""
        if name in self._engines:
            raise EngineError(f"engine {name!r} is up already; report engine_down first")
        self._engines[name], self._watches[name] = engine, _Watch()
        self._log("up", "", name)
        self._tell("engine_up", self._spec(name))

    def engine_down(self, name: str, reason: str) -> None:
        """An engine is lost; its running turns start again elsewhere."""
        self._engines.pop(name)
        logging.getLogger(__name__).warning("engine %s is lost: %s", name, reason)
        self.counts["engines_lost"] += 1
        self.events.append(Event(self._now(), "down", "", name, reason=reason))
        loop = asyncio.get_running_loop()
        for trip in self._trips.values():
            trip.home = None if trip.home == name else trip.home
            if trip.engine == name:
                trip.engine, trip.gate = None, loop.create_future()
                trip.restarts += 1
                self.counts["restarts"] += 1
                self.events.append(Event(self._now(), "lost", trip.spec.id, name, reason=reason))
                if trip.task is not None:
                    trip.task.cancel()
        self._tell("engine_down", name)
        self._fail_if_hopeless()

    def _is_hopeless(self) -> bool:
        """No engine is left, and none is on its way."""
        return not self._engines

    def _fail_if_hopeless(self) -> None:
        if self._is_hopeless():
            self._fail_all(EngineLost(_NONE_LEFT))

    def _fail_all(self, error: EngineError) -> None:
        """Whoever waits for a start gets the error."""
        for trip in self._trips.values():
            _refuse(trip.gate, error)

    # Turns

    def _arrive(self, request_id: str, length: int, sampling: Sampling) -> _Trip:
        """A new trajectory; those of one round of the event loop are submitted together."""
        if self._is_hopeless():
            raise EngineLost(_NONE_LEFT)
        group = request_id.rpartition("/")[0] or request_id
        inferred = TrajSpec(request_id, group, length, sampling.max_new_tokens)
        spec = self._announced.pop(request_id, inferred)
        loop = asyncio.get_running_loop()
        trip = _Trip(spec, spec.prompt_tokens, loop.create_future())
        if not self._arriving:
            loop.call_soon(self._submit)
        self._arriving.append(trip)
        self._trips[request_id] = trip
        if self._ticker is None or self._ticker.done():
            self._ticker = loop.create_task(self._keep_time())
        return trip

    def _submit(self) -> None:
        trips, self._arriving = self._arriving, []
        trips = [trip for trip in trips if trip.spec.id in self._trips]
        for trip in trips:
            spec = trip.spec
            row = Event(self._now(), "submit", spec.id, tokens=spec.prompt_tokens,
                        group=spec.group, max_tokens=spec.max_tokens)  # fmt: skip
            self.events.append(row)
        self._tell("submit", [trip.spec for trip in trips])

    async def _turn(self, trip: _Trip, token_ids, sampling: Sampling) -> Completion:
        """Wait for the start, sample; once more for every engine that is lost on the way."""
        while True:
            if trip.restarts > self.limits.restarts:
                raise EngineLost(f"{trip.spec.id!r} has lost {trip.restarts} engines; giving up")
            await trip.gate
            name = trip.engine
            if name is None:
                continue  # lost before it began
            engine = self._engines[name]
            work = engine.generate(trip.spec.id, token_ids, sampling)
            trip.task = asyncio.ensure_future(work)
            try:
                completion = await trip.task
                if self._engines.get(name) is engine:
                    return completion
            except (Exception, asyncio.CancelledError) as error:
                is_lost = self._engines.get(name) is not engine
                if is_lost and not asyncio.current_task().cancelling():
                    continue  # known already; the turn may have its next start
                is_refusal = isinstance(error, EngineError) and not isinstance(error, EngineLost)
                if is_refusal or asyncio.current_task().cancelling():
                    trip.task.cancel()
                    raise
                self.engine_down(name, repr(error))
            finally:
                trip.task = None

    def _turn_done(self, trip: _Trip, completion: Completion) -> None:
        sampled = len(completion.token_ids)
        trip.context += sampled
        name, trip.engine = trip.engine, None
        self._watches[name].turns += 1
        preempted = self._log_preemptions(name)
        self._log("turn", trip.spec.id, name, tokens=sampled, hit=completion.cached_tokens)
        self._tell("turn_done", trip.spec.id, sampled, preempted)

    def _log_preemptions(self, name: str) -> int:
        """A row for each preemption since the last look; the engine does not say whose."""
        watch, load = self._watches[name], self._engines[name].load()
        found, watch.preemptions = load.preemptions - watch.preemptions, load.preemptions
        for _ in range(found):
            self._log("preempt", "", name)
        return found

    def _tool_done(self, trip: _Trip, length: int) -> None:
        tokens, trip.context = length - trip.context, length
        trip.gate = asyncio.get_running_loop().create_future()
        self._log("tool", trip.spec.id, tokens=tokens)
        self._tell("tool_done", trip.spec.id, tokens)
        self._fail_if_hopeless()

    async def _end(self, trip: _Trip, reason: str) -> None:
        """Release everything, once, however it ended."""
        if self._trips.pop(trip.spec.id, None) is None:
            return
        if trip in self._arriving:
            self._arriving.remove(trip)
        elif trip.spec.id in self.policy.seats:
            self._tell("finished", trip.spec.id, reason)
        tokens = trip.context - trip.spec.prompt_tokens
        row = Event(self._now(), "finish", trip.spec.id, tokens=tokens, reason=reason)
        self.events.append(row)
        self.counts[reason] += 1
        _refuse(trip.gate, _Aborted(f"{trip.spec.id!r} was aborted"))
        if not self._trips and self._ticker is not None:
            self._ticker.cancel()
        await self._forget(trip.home, trip.spec.id)

    async def _forget(self, name: str | None, traj: str) -> None:
        """Free what an engine keeps of a trajectory, if the engine is still there."""
        if name in self._engines:
            try:
                await self._engines[name].abort(traj)
            except EngineLost as error:
                if name in self._engines:
                    self.engine_down(name, repr(error))

    # The policy

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _tell(self, event: str, *arguments) -> None:
        """Report an event and do what the policy answers."""
        started = time.perf_counter()
        try:
            actions = getattr(self.policy, event)(self._now(), *arguments)
        except Exception as error:  # recorded for all who wait, then raised: nobody waits for ever
            self._fail_all(EngineError(f"the policy failed at {event}: {error!r}"))
            raise
        self.decision_seconds.append(time.perf_counter() - started)
        for action in actions:
            self._act(action)

    def _act(self, action: Action) -> None:
        trip = self._trips.get(action.traj)
        if trip is None:
            return
        if isinstance(action, Start):
            self._start(trip, action.engine)
        elif isinstance(action, Resume):
            if trip.tool_gate is not None and not trip.tool_gate.done():
                trip.tool_gate.set_result(None)
            trip.tool_gate = None
        elif isinstance(action, Cancel):
            _refuse(trip.gate, EngineError(action.reason))
        elif isinstance(action, Hold) and trip.gate.done():
            trip.tool_gate = asyncio.get_running_loop().create_future()

    def _start(self, trip: _Trip, engine: str) -> None:
        if trip.home not in (None, engine):
            self.counts["moves"] += 1
            errand = asyncio.ensure_future(self._forget(trip.home, trip.spec.id))
            self._errands.add(errand)  # the prefix there is of no more use
            errand.add_done_callback(self._errands.discard)
        trip.engine = trip.home = engine
        self._log("start", trip.spec.id, engine, tokens=trip.context)
        if not trip.gate.done():  # else its task was cancelled a moment ago, and ends it
            trip.gate.set_result(None)

    async def _keep_time(self) -> None:
        """Reports and ticks for a policy that wants them; an eye on engines that stall."""
        wants_reports = self.policy.tick_seconds is not None
        while self._trips:
            await asyncio.sleep(self._tick)
            for name in list(self._engines):
                load = self._engines[name].load()
                self._look(name, load)
                if wants_reports and name in self._engines:
                    self._tell("engine_stats", self._stats(name, load))
            if wants_reports:
                self._tell("tick")

    def _look(self, name: str, load: EngineLoad) -> None:
        """Give up an engine that runs requests and has not moved for too long."""
        watch, now = self._watches[name], self._now()
        sign = (load.sampled_tokens, load.preemptions, watch.turns)
        is_asked = any(trip.engine == name for trip in self._trips.values())
        if sign != watch.sign or not is_asked:
            watch.sign, watch.since = sign, now
        elif now - watch.since > self.limits.stall_seconds:
            self.engine_down(name, f"no token for {now - watch.since:.0f} s")

    def _stats(self, name: str, load: EngineLoad) -> EngineStats:
        kv = self._engines[name].capacity()
        return EngineStats(
            id=name,
            t=self._now(),
            kv_usage=load.used_tokens / (kv.tokens // kv.block * kv.block),
            free_blocks=(kv.tokens - load.used_tokens) // kv.block,
            running=load.running,
            waiting=load.waiting,
            preemptions=load.preemptions,
            gen_tokens=load.sampled_tokens,
        )

    def _log(self, kind, traj: str, engine: str = "", **more) -> None:
        if engine:
            more["ledger"] = self.policy.reserved(engine)
            more["gauge"] = self._engines[engine].load().used_tokens
        self.events.append(Event(self._now(), kind, traj, engine, **more))

    def decision_p99(self) -> float:
        """99th percentile of the policy's seconds per event."""
        return float(np.percentile(self.decision_seconds, 99)) if self.decision_seconds else 0.0
