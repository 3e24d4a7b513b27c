"""Sandbox pools on the nodes of a Ray cluster, behind the API of one `Sandbox`.

One pool actor runs on every node with processors to spare. A call goes to the pool with the fewest
calls per worker. When a pool or its node is lost, its calls are repeated on another one, and a pool
is started again wherever a node has none.
"""

import asyncio
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from .. import extras
from ..sandbox.levels import Limits, SandboxError
from ..sandbox.service import as_pairs
from ..types import ToolResult, ToolStatus

_ATTEMPTS = 3


@dataclass
class _Pool:
    """One actor, as the client sees it."""

    node: str
    actor: object
    level: str
    workers: int
    in_flight: int = 0

    @property
    def load(self) -> float:
        return self.in_flight / self.workers


class RaySandbox:
    """Sandbox pools on the nodes of a Ray cluster, usable wherever a `Sandbox` is.

    workers_per_cpu: slots per spare processor. spare_cpus: processors that a node keeps for others;
    a node with no more than these gets no pool. limits: of each call. `ray.init` is the caller's.

    Raises: SandboxError if no node has processors to spare, or no pool starts.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        workers_per_cpu: int = 4,
        spare_cpus: int = 1,
        level: str | None = None,
    ):
        self._ray = extras.load("ray")
        self._limits, self._level = limits or Limits(), level
        self._per_cpu, self._spare = workers_per_cpu, spare_cpus
        self._pools: list[_Pool] = []
        self.retries, self.pools_lost, self.failures = 0, 0, 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._growing: asyncio.Lock | None = None
        try:
            self._call(self._grow()).result()
            if not self._pools:
                raise SandboxError(
                    f"no node of the Ray cluster has more than {spare_cpus} free processors; "
                    "lower spare_cpus or add a node"
                )
        except BaseException:
            self.close()
            raise
        self.level = min(pool.level for pool in self._pools)  # the weakest one is what is promised

    @property
    def workers(self) -> int:
        return sum(pool.workers for pool in self._pools)

    @property
    def nodes(self) -> list[str]:
        """Ids of the nodes that hold a pool."""
        return [pool.node for pool in self._pools]

    def run(
        self, code: str, stdin: str = "", *, seconds: float | None = None, echo: bool = True
    ) -> ToolResult:
        """Run one program and wait for its result."""
        return self._call(self._run(code, stdin, seconds, echo)).result()

    def run_many(self, programs: Iterable[str | tuple[str, str]]) -> list[ToolResult]:
        """Run programs, or (program, stdin) pairs. Results in input order."""
        found = [self._call(self._run(*pair, None, True)) for pair in as_pairs(programs)]
        return [future.result() for future in found]

    async def arun(
        self, code: str, stdin: str = "", *, seconds: float | None = None, echo: bool = True
    ) -> ToolResult:
        """Awaitable twin of `run`, from any event loop."""
        return await asyncio.wrap_future(self._call(self._run(code, stdin, seconds, echo)))

    def close(self) -> None:
        """End the pools. Idempotent."""
        if self._loop.is_closed():
            return
        for pool in self._pools:
            self._ray.kill(pool.actor)
        self._pools = []
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> "RaySandbox":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    # In the client's own event loop

    def _call(self, coroutine) -> Future:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _run(self, code, stdin, seconds, echo) -> ToolResult:
        error: Exception | str = "no node with a pool is left"
        for attempt in range(_ATTEMPTS):
            if not self._pools:
                await self._grow()
            if not self._pools:
                break
            pool = min(self._pools, key=lambda one: one.load)
            self.retries += attempt > 0
            pool.in_flight += 1
            try:
                return await pool.actor.run.remote(code, stdin, seconds, echo)
            except self._ray.exceptions.RayError as lost:
                error = lost
                await self._lose(pool)
            finally:
                pool.in_flight -= 1
        self.failures += 1
        text = f"sandbox pools: {type(error).__name__}: {error}".splitlines()[0]
        return ToolResult(ToolStatus.SERVICE_FAILURE, stderr=text)

    async def _lose(self, pool: _Pool) -> None:
        """Take a pool off, and start one where a node has none. Its calls go elsewhere at once."""
        if pool not in self._pools:
            return
        self._pools.remove(pool)
        self.pools_lost += 1
        if self._pools:
            self._growth = asyncio.ensure_future(self._grow())
        else:
            await self._grow()

    async def _grow(self) -> None:
        """A pool on every living node that has processors to spare and holds none."""
        self._growing = self._growing or asyncio.Lock()
        async with self._growing:
            for node in await asyncio.to_thread(self._ray.nodes):
                free = int(node["Resources"].get("CPU", 0)) - self._spare
                if node["Alive"] and free >= 1 and node["NodeID"] not in self.nodes:
                    await self._start(node["NodeID"], free)

    async def _start(self, node: str, cpus: int) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actor = self._ray.remote(_PoolActor).options(
            num_cpus=cpus,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            max_concurrency=1000,
        )
        workers = cpus * self._per_cpu
        try:
            handle = actor.remote(workers, self._limits, self._level)
            level = await asyncio.wait_for(handle.level.remote(), 120)
        except (self._ray.exceptions.RayError, TimeoutError):  # the node has gone, or is full
            return
        self._pools.append(_Pool(node, handle, level, workers))


class _PoolActor:
    """In the actor: one sandbox."""

    def __init__(self, workers: int, limits: Limits, level: str | None):
        from ..sandbox import Sandbox

        self._sandbox = Sandbox(workers, limits, level=level)

    async def level(self) -> str:
        return self._sandbox.level

    async def run(self, code, stdin, seconds, echo) -> ToolResult:
        return await self._sandbox.arun(code, stdin, seconds=seconds, echo=echo)
