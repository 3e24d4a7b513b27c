"""An engine without a model that takes its steps one by one: the reference for the simulator.

It speaks the engine protocol and keeps time on the event loop's clock; every token is a step of
its own, every block is counted anew. Nothing of it is shared with the simulator but the prices.
"""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from rstar2lab.engines import Completion, EngineError, EngineLoad, EngineLost, KvCapacity
from rstar2lab.scheduler import CostModel, EnginePool, Fault
from rstar2lab.scheduler.clock import run_virtually
from rstar2lab.scheduler.dispatcher import Dispatcher, Limits
from rstar2lab.scheduler.replay import replay
from rstar2lab.scheduler.simulator import earlier_curve


@dataclass(eq=False)
class Asked:
    id: str
    length: int
    left: int
    future: asyncio.Future
    sampled: int = 0
    hit: int = -1
    stays: bool = False


class TokenEngine:
    def __init__(self, pool: EnginePool, cost: CostModel):
        self.pool, self.cost = pool, cost
        self.total = pool.kv_tokens // pool.block
        self.waiting: list[Asked] = []
        self.running: list[Asked] = []
        self.held: list[Asked] = []
        self.saved: OrderedDict[str, int] = OrderedDict()
        self.preemptions = self.sampled = self.steps = 0
        self.task: asyncio.Task | None = None

    async def generate(self, request_id, token_ids, sampling):
        length, count = len(token_ids), sampling.max_new_tokens
        if self.blocks(length + count + 1) > self.total:
            raise EngineError("too large")
        future = asyncio.get_running_loop().create_future()
        self.waiting.append(Asked(request_id, length, count, future))
        if self.task is None or self.task.done():
            self.task = asyncio.get_running_loop().create_task(self.serve())
        return await future

    def capacity(self):
        return KvCapacity(self.pool.kv_tokens, self.pool.block)

    def load(self):
        used = sum(self.blocks(r.length + 1) for r in self.running) * self.pool.block
        waiting = len(self.waiting) + len(self.held)
        return EngineLoad(len(self.running), waiting, used, self.preemptions, self.sampled)

    async def abort(self, request_id):
        self.saved.pop(request_id, None)
        for group in (self.running, self.waiting, self.held):
            for asked in [a for a in group if a.id == request_id]:
                group.remove(asked)
                if not asked.future.done():
                    asked.future.set_result(self.answer(asked, "abort"))

    async def update_weights(self, version, tensors):
        self.saved.clear()

    async def deliver(self, result):
        return await result

    def close(self):
        if self.task is not None:
            self.task.cancel()

    def blocks(self, tokens: int) -> int:
        return (tokens + self.pool.block - 1) // self.pool.block

    def used(self) -> int:
        return sum(self.blocks(r.length + 1) for r in self.running)

    def trim(self) -> None:
        while self.saved and self.used() + sum(map(self.blocks, self.saved.values())) > self.total:
            oldest = next(iter(self.saved))
            fewer = 0
            if self.pool.prefixes == "blocks":
                fewer = (self.blocks(self.saved[oldest]) - 1) * self.pool.block
            self.saved[oldest] = fewer
            if not fewer:
                del self.saved[oldest]

    def save(self, asked: Asked) -> None:
        tokens = asked.length - 1
        if self.pool.prefixes == "blocks":
            tokens = tokens // self.pool.block * self.pool.block
        if tokens:
            self.saved[asked.id] = tokens
        self.trim()

    def answer(self, asked: Asked, finish: str) -> Completion:
        zeros = np.zeros(asked.sampled, np.float32)
        return Completion(zeros.astype(np.int32), zeros, None, finish, 0, max(asked.hit, 0))

    async def serve(self) -> None:
        try:
            while True:
                for _ in range(8):
                    await asyncio.sleep(0)
                if not (self.running or self.waiting or self.held):
                    return
                await self.take_step()
        finally:
            lost = EngineLost("this engine is gone")
            for asked in self.running + self.waiting + self.held:
                if not asked.future.done():
                    asked.future.set_exception(lost)

    async def take_step(self) -> None:
        if not self.running and self.held:
            self.waiting, self.held = self.held + self.waiting, []
        seconds = self.admit()
        while self.used() > self.total:
            self.preempt()
        self.trim()
        context = sum(r.length for r in self.running)
        seconds += self.cost.fixed(len(self.running)) + self.cost.kv_seconds_per_token * context
        await asyncio.sleep(seconds)
        self.steps += 1
        for asked in list(self.running):
            asked.length += 1
            asked.sampled += 1
            asked.left -= 1
            self.sampled += 1
        for asked in [r for r in self.running if not r.left]:
            self.running.remove(asked)
            self.save(asked)
            asked.future.set_result(self.answer(asked, "length"))
            if asked.stays and not any(r.stays for r in self.running):
                self.waiting, self.held = self.held + self.waiting, []

    def admit(self) -> float:
        seconds, calls = 0.0, 0
        while self.waiting and len(self.running) < self.pool.max_seqs:
            asked = self.waiting[0]
            if self.used() + self.blocks(asked.length + 1) > self.total:
                break
            self.waiting.pop(0)
            hit = min(self.saved.pop(asked.id, 0), asked.length - 1)
            asked.hit = hit if asked.hit < 0 else asked.hit
            if asked.length - 1 > hit:
                seconds += self.cost.prefill(asked.length - 1 - hit, hit)
                calls += 1
            self.running.append(asked)
            self.trim()
        return seconds + self.cost.prefill_call_seconds * bool(calls)

    def preempt(self) -> None:
        half = self.pool.preemption == "half"
        count = max(1, len(self.running) // 2) if half else 1
        victims, self.running = self.running[-count:], self.running[:-count]
        self.preemptions += count
        if self.pool.prefixes == "blocks":
            for asked in victims[::-1]:
                self.save(asked)
        for asked in victims:
            asked.stays = False
        if half:
            self.held = victims + self.held
            for asked in self.running:
                asked.stays = True
        else:
            self.waiting = victims + self.waiting


@dataclass(frozen=True)
class Played:
    """What a step on `TokenEngine`s took; the dispatcher holds the log."""

    makespan: float
    preemptions: int
    sampled: int
    steps: int
    dispatcher: Dispatcher
    failed: dict[str, EngineError]


def play(policy, workload, pool, cost, seed=0, tick_seconds=1.0, faults=(), prior=None) -> Played:
    """A step, token by token, on a clock that jumps."""
    every: list[TokenEngine] = []

    def built() -> TokenEngine:
        every.append(TokenEngine(pool, cost))
        return every[-1]

    async def disturb(fault: Fault, dispatcher: Dispatcher, engines: dict) -> None:
        name = f"e{fault.engine}"
        await asyncio.sleep(fault.time)
        if fault.kind == "up":
            engines[name] = built()
            dispatcher.engine_up(name, engines[name])
        else:
            dispatcher.engine_down(name, "pulled")
            engines[name].close()

    async def step() -> Played:
        late = {f.engine for f in faults if f.kind == "up"} - {
            f.engine for f in faults if f.kind == "down"
        }
        engines = {f"e{n}": built() for n in range(pool.count) if n not in late}
        dispatcher = Dispatcher(
            engines, policy, limits=Limits(max_seqs=pool.max_seqs, restarts=99),
            prior=earlier_curve(workload) if prior is None else prior,
            tick_seconds=tick_seconds, seed=seed,
        )  # fmt: skip
        troubles = [asyncio.ensure_future(disturb(f, dispatcher, engines)) for f in faults]
        failed = await replay(workload.trajectories, dispatcher, 100, seed)
        makespan = asyncio.get_running_loop().time()
        for trouble in troubles:
            trouble.cancel()
        dispatcher.close()
        sums = (sum(getattr(e, k) for e in every) for k in ("preemptions", "sampled", "steps"))
        return Played(makespan, *sums, dispatcher, failed)

    return run_virtually(step())
