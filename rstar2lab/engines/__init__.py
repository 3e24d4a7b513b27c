"""Inference engines behind one protocol: scripted (tests), torch (CPU or one GPU).

`generate` takes and returns token ids. Sampling settings are immutable and travel with each call;
the log-probs are those of the sampling distribution, after temperature and top-p.
"""

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import numpy as np

Result = TypeVar("Result")


class EngineError(RuntimeError):
    """The engine cannot do what was asked; the message says what to change."""


class EngineLost(EngineError):
    """The engine is gone, the request unanswered; another engine may answer it."""


@dataclass(frozen=True)
class Sampling:
    """How one completion is sampled. Temperature 0 is greedy (its log-probs are 0)."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    logprobs: bool = True
    entropies: bool = False
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Completion:
    """Sampled tokens (the stop token included), one log-prob each, and how it ended."""

    token_ids: np.ndarray  # int32 [T]
    logprobs: np.ndarray  # float32 [T]
    entropies: np.ndarray | None  # float32 [T], nats at the sampling temperature, full vocabulary
    finish: Literal["stop", "length", "abort"]
    weight_version: int
    cached_tokens: int  # leading tokens of the input whose KV was reused


@dataclass(frozen=True)
class KvCapacity:
    """Size of the KV cache: `tokens` in all, handed out in blocks of `block` tokens."""

    tokens: int
    block: int


@dataclass(frozen=True)
class EngineLoad:
    """What the engine does right now; `preemptions` and `sampled_tokens` count since the start.

    used_tokens: in blocks that running requests hold; prefixes saved for later make room for them.
    """

    running: int
    waiting: int
    used_tokens: int
    preemptions: int
    sampled_tokens: int = 0


class Engine(Protocol):
    """What a rollout needs of an engine. One `request_id` is one trajectory."""

    async def generate(self, request_id: str, token_ids, sampling: Sampling) -> Completion: ...

    def capacity(self) -> KvCapacity: ...

    def load(self) -> EngineLoad: ...

    async def update_weights(self, version: int, tensors: Mapping) -> None: ...

    async def abort(self, request_id: str) -> None: ...

    async def deliver(self, result: Awaitable[Result]) -> Result:
        """Await a tool's result. A deterministic engine hands it over at a fixed decoding step, so
        that its batches, hence every bit, do not depend on the tool's speed."""
        ...

    def close(self) -> None: ...
