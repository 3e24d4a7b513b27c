"""Any engine, watched: which trajectory samples, and which waits for its tool, from when to when.

For timelines and counts; what comes back is what the engine gave. Steps are the decoding steps of
an engine that counts them (the torch engine), else 0; they do not depend on the clock.
"""

import time
from collections.abc import Awaitable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

from . import Completion, Engine, EngineLoad, KvCapacity, Result, Sampling

_request: ContextVar[str] = ContextVar("request", default="")  # each rollout is a task of its own


@dataclass(frozen=True)
class Span:
    """What one trajectory did in one stretch; seconds and steps since the watch began.

    tokens: sampled in the stretch; input_tokens, cached_tokens: of its prompt, and how many of them
    needed no computation. All three are 0 while a tool is awaited.
    """

    request_id: str
    kind: Literal["sampling", "tool"]
    start: float
    end: float
    first_step: int
    last_step: int
    tokens: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0


class WatchedEngine:
    """The `Engine` protocol around another engine; `spans` in the order in which they ended."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._started, self._first_step = time.monotonic(), self._step()
        self.spans: list[Span] = []

    def _step(self) -> int:
        return getattr(self._engine, "step", 0)

    def _now(self) -> tuple[float, int]:
        return time.monotonic() - self._started, self._step() - self._first_step

    def _ended(self, request_id: str, kind, since: tuple[float, int], *counts: int) -> None:
        now = self._now()
        self.spans.append(Span(request_id, kind, since[0], now[0], since[1], now[1], *counts))

    async def generate(self, request_id: str, token_ids, sampling: Sampling) -> Completion:
        _request.set(request_id)
        since = self._now()
        found = await self._engine.generate(request_id, token_ids, sampling)
        counts = len(found.token_ids), len(token_ids), found.cached_tokens
        self._ended(request_id, "sampling", since, *counts)
        return found

    async def deliver(self, result: Awaitable[Result]) -> Result:
        since = self._now()
        found = await self._engine.deliver(result)
        self._ended(_request.get(), "tool", since)
        return found

    def capacity(self) -> KvCapacity:
        return self._engine.capacity()

    def load(self) -> EngineLoad:
        return self._engine.load()

    async def update_weights(self, version: int, tensors: Mapping) -> None:
        await self._engine.update_weights(version, tensors)

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)

    def close(self) -> None:
        self._engine.close()
