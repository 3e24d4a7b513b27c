"""An engine that plays back given tokens: the rollout loop in milliseconds, no model."""

from collections.abc import Awaitable, Callable, Mapping, Sequence

import numpy as np

from . import Completion, EngineLoad, KvCapacity, Result, Sampling


class ScriptedEngine:
    """Turn k of a request answers with script line k; log-probs are -0.5, entropies 0.25.

    `script` maps a request id to its lines (token id lists, stop token included). A line longer
    than `max_new_tokens` is cut and finishes with "length", as a real engine would.
    """

    def __init__(self, script: Callable[[str], Sequence[Sequence[int]]]):
        self._script = script
        self._turns: dict[str, int] = {}
        self.requests: list[tuple[str, list[int], Sampling]] = []
        self._version = 0

    async def generate(self, request_id: str, token_ids, sampling: Sampling) -> Completion:
        turn = self._turns.get(request_id, 0)
        self._turns[request_id] = turn + 1
        self.requests.append((request_id, [int(i) for i in token_ids], sampling))
        line = list(self._script(request_id)[turn])
        ids = np.asarray(line[: sampling.max_new_tokens], np.int32)
        stopped = len(ids) == len(line) and len(ids) > 0 and int(ids[-1]) in sampling.stop_ids
        return Completion(
            token_ids=ids,
            logprobs=np.full(len(ids), -0.5, np.float32),
            entropies=np.full(len(ids), 0.25, np.float32) if sampling.entropies else None,
            finish="stop" if stopped else "length",
            weight_version=self._version,
            cached_tokens=0,
        )

    def capacity(self) -> KvCapacity:
        return KvCapacity(tokens=1 << 20, block=16)

    def load(self) -> EngineLoad:
        return EngineLoad(running=0, waiting=0, used_tokens=0, preemptions=0)

    async def update_weights(self, version: int, tensors: Mapping) -> None:
        self._version = version

    async def abort(self, request_id: str) -> None:
        self._turns.pop(request_id, None)

    async def deliver(self, result: Awaitable[Result]) -> Result:
        return await result

    def close(self) -> None:
        self._turns.clear()
