"""Inference engines as Ray actors: placed, watched, and started again when they are lost.

Each actor holds one engine; here a `RayEngine` speaks for it, and `RayEngines` puts all of them
behind a scheduling policy. An engine whose actor or node dies is lost: its turns start again
elsewhere, a new actor is placed, given the present weights, and joins.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping

from .. import extras
from ..engines import (
    Completion,
    Engine,
    EngineError,
    EngineLoad,
    EngineLost,
    KvCapacity,
    Result,
    Sampling,
)
from ..scheduler.dispatcher import Dispatcher
from ..scheduler.policies import Policy

_READING_SECONDS = 0.5  # between two looks at the gauges of an engine that is at work
_PAUSE_SECONDS = 1.0  # between two attempts to replace an engine
_IDLE = EngineLoad(running=0, waiting=0, used_tokens=0, preemptions=0)


class RayEngine:
    """An engine in an actor, behind the protocol of one in this process.

    `load()` is the latest reading: one comes with every completion, and every half second while
    requests run. What the actor's engine refuses is raised here as it is.

    Raises (all that ask it): EngineLost once the actor is gone.
    """

    def __init__(self, actor, capacity: KvCapacity):
        self._ray = extras.load("ray")
        self.actor, self._capacity, self._load = actor, capacity, _IDLE
        self._in_flight, self._reading = 0, None

    async def generate(self, request_id: str, token_ids, sampling: Sampling) -> Completion:
        self._in_flight += 1
        if self._reading is None or self._reading.done():
            self._reading = asyncio.ensure_future(self._read_gauges())
        try:
            completion, self._load = await self._ask("generate", request_id, token_ids, sampling)
            return completion
        except asyncio.CancelledError:
            self.actor.abort.remote(request_id)
            raise
        finally:
            self._in_flight -= 1

    def capacity(self) -> KvCapacity:
        return self._capacity

    def load(self) -> EngineLoad:
        return self._load

    async def update_weights(self, version: int, tensors: Mapping) -> None:
        """`tensors` may be a reference into Ray's object store, put there once for all engines."""
        await self._ask("update_weights", version, tensors)

    async def abort(self, request_id: str) -> None:
        await self._ask("abort", request_id)

    async def deliver(self, result: Awaitable[Result]) -> Result:
        return await result

    def close(self) -> None:
        """End the actor. Requests in flight get `EngineLost`."""
        self._ray.kill(self.actor)

    async def _ask(self, method: str, *arguments):
        try:
            return await getattr(self.actor, method).remote(*arguments)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, EngineError) else error from None
        except self._ray.exceptions.RayError as error:
            reason = str(error).splitlines()[0]
            raise EngineLost(f"the engine's actor is gone: {reason}") from error

    async def _read_gauges(self) -> None:
        while self._in_flight:
            await asyncio.sleep(_READING_SECONDS)
            try:
                self._load = await self._ask("load")
            except EngineError:
                return  # the requests in flight say so themselves


class _EngineActor:
    """In the actor: one engine. Built there, since a model does not travel."""

    def __init__(self, build: Callable[[], Engine]):
        self._engine = build()

    async def capacity(self) -> KvCapacity:
        return self._engine.capacity()

    async def load(self) -> EngineLoad:
        return self._engine.load()

    async def generate(self, *request) -> tuple[Completion, EngineLoad]:
        completion = await self._engine.generate(*request)
        return completion, self._engine.load()

    async def update_weights(self, version: int, tensors: Mapping) -> None:
        await self._engine.update_weights(version, tensors)

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)


class RayEngines(Dispatcher):
    """`count` engines on a Ray cluster behind the protocol of one: an actor each, over the nodes.

    build: makes one engine, in its actor; it must pickle, and load the model there. policy: who
    runs where. num_cpus, num_gpus: of one engine. start_seconds: patience with a start. options:
    as of `Dispatcher`. `ray.init` is the caller's. A context manager.

    A lost engine is started again, gets the present weights and joins; `counts` tells `replaced`
    and `not_replaced` beside the dispatcher's own. A replacement that a step did not wait for is
    made at the next update of the weights.

    Raises: EngineError if the cluster has no room for them, or one does not start.
    """

    def __init__(
        self,
        build: Callable[[], Engine],
        count: int,
        policy: Policy,
        *,
        num_cpus: float = 1,
        num_gpus: float = 0,
        start_seconds: float = 600.0,
        **options,
    ):
        self._ray = extras.load("ray")
        self._build, self._patience = build, start_seconds
        self._needs = {"CPU": num_cpus} | ({"GPU": num_gpus} if num_gpus else {})
        self._weights: tuple[int, object] | None = None
        self._missing: dict[str, asyncio.Task] = {}
        self._group = self._reserve(count)
        try:
            actors = {f"e{number}": self._spawn(number) for number in range(count)}
            engines = {
                name: RayEngine(
                    actor, self._ray.get(actor.capacity.remote(), timeout=start_seconds)
                )
                for name, actor in actors.items()
            }
        except (self._ray.exceptions.RayError, TimeoutError) as error:
            self._free_places()
            raise EngineError(f"an engine did not start: {error}") from error
        super().__init__(engines, policy, **options)

    def _reserve(self, count: int):
        """A bundle per engine, spread over the nodes; it stays when its actor is replaced."""
        from ray.util import placement_group, remove_placement_group

        group = placement_group([dict(self._needs)] * count, strategy="SPREAD")
        if not group.wait(min(self._patience, 60)):
            remove_placement_group(group)
            free = {k: v for k, v in self._ray.available_resources().items() if k in ("CPU", "GPU")}
            raise EngineError(
                f"{count} engines of {self._needs} find no room on the Ray cluster, which has "
                f"{free} free; lower their number or needs, or add nodes"
            )
        return group

    def _spawn(self, number: int):
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor = self._ray.remote(_EngineActor).options(
            num_cpus=self._needs["CPU"],
            num_gpus=self._needs.get("GPU", 0),
            max_concurrency=10_000,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=number
            ),
        )
        return actor.remote(self._build)

    async def update_weights(self, version: int, tensors: Mapping) -> None:
        """Into the object store once; all engines take them from there, replacements too."""
        self._weights = version, self._ray.put(dict(tensors))
        for name in [n for n, task in self._missing.items() if task.done()]:
            self._missing[name] = asyncio.ensure_future(self._replace(name))
        await super().update_weights(*self._weights)
        await asyncio.gather(*self._missing.values())

    def engine_down(self, name: str, reason: str) -> None:
        self._ray.kill(self._engines[name].actor)
        self._missing[name] = asyncio.ensure_future(self._replace(name))
        super().engine_down(name, reason)

    def _is_hopeless(self) -> bool:
        return super()._is_hopeless() and all(task.done() for task in self._missing.values())

    async def _replace(self, name: str) -> None:
        """A new actor in the old bundle, which Ray places anew if its node has gone."""
        until, error = time.monotonic() + self._patience, None
        while time.monotonic() < until:
            try:
                engine = await self._start_again(name)
            except (self._ray.exceptions.RayError, EngineError, TimeoutError) as trouble:
                error = trouble  # Ray may not know yet that the node has gone
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            self.counts["replaced"] += 1
            del self._missing[name]
            self.engine_up(name, engine)
            return
        self.counts["not_replaced"] += 1
        logging.getLogger(__name__).warning("engine %s is not replaced: %s", name, error)
        del self._missing[name]
        self._fail_if_hopeless()

    async def _start_again(self, name: str) -> RayEngine:
        """An actor that is up and has the present weights."""
        actor = self._spawn(int(name.removeprefix("e")))
        try:
            capacity = await asyncio.wait_for(actor.capacity.remote(), self._patience)
            engine, given = RayEngine(actor, capacity), None
            while given is not self._weights:  # they may change while it loads them
                given = self._weights
                await engine.update_weights(*given)
            return engine
        except BaseException:
            self._ray.kill(actor)
            raise

    def close(self) -> None:
        """End all actors and free their places. Idempotent."""
        for task in self._missing.values():
            task.cancel()
        super().close()
        self._free_places()

    def _free_places(self) -> None:
        """Removing the group ends the actors in it."""
        from ray.util import remove_placement_group

        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    def __enter__(self) -> "RayEngines":
        return self

    def __exit__(self, *exception) -> None:
        self.close()
