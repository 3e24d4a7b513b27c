"""Continuous batching in plain torch, on a CPU or one GPU.

Requests join and leave between decoding steps. Rows stay packed, so a step costs what its running
rows cost. KV capacity is counted in blocks; when it is full, saved prefixes go first, then the
newest request is preempted and later recomputed. Sampling uses one counter-based random stream per
request, so a token depends on (seed, position), not on the company it was sampled in.

Reproducible to the bit: a tool's result enters at a fixed decoding step (`deliver`), so the
batches, hence the rounding, are the same however fast the tool was.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from . import Completion, EngineError, EngineLoad, EngineLost, KvCapacity, Result, Sampling
from .kv import CachedModel, Places
from .qwen3 import Qwen3

_SETTLE_ROUNDS = 6  # event-loop rounds in which a client reacts to a completion with its next call


@dataclass
class _Request:
    """One call of `generate` in flight. `tokens` grows only when the request is preempted."""

    id: str
    tokens: list[int]
    sampling: Sampling
    seed: int
    future: asyncio.Future
    prompt_length: int
    arrival: int
    cached_tokens: int = 0
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)

    @property
    def limit(self) -> int:
        """Length at which the budget is spent."""
        return self.prompt_length + self.sampling.max_new_tokens


@dataclass(frozen=True)
class _SavedPrefix:
    tokens: np.ndarray
    kv: list[Tensor]


def uniforms(seeds_B: np.ndarray, positions_B: np.ndarray) -> np.ndarray:
    """One number in [0, 1) per row, a hash of (seed, position): the splitmix64 finalizer."""
    with np.errstate(over="ignore"):
        x = seeds_B.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) + positions_B.astype(np.uint64) * np.uint64(
            0xD1B54A32D192ED03
        )
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(11)).astype(np.float64) / 2.0**53


def sampling_logprobs(logits_BV: Tensor, temperature_B: Tensor, top_p_B: Tensor) -> Tensor:
    """Log-probabilities of the sampling distribution, after temperature and top-p.

    Top-p keeps the smallest set of most probable tokens whose mass reaches p. Temperature 0 puts
    everything on the first maximum.
    """
    greedy_B = temperature_B == 0
    scaled_BV = logits_BV / torch.where(greedy_B, 1.0, temperature_B)[:, None]
    logprobs_BV = scaled_BV.log_softmax(-1)
    if bool((top_p_B < 1).any()):
        ordered, order = logprobs_BV.sort(-1, descending=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()
        ordered = ordered.masked_fill(before >= top_p_B[:, None], float("-inf"))
        logprobs_BV = torch.empty_like(ordered).scatter_(1, order, ordered).log_softmax(-1)
    if bool(greedy_B.any()):
        best = torch.nn.functional.one_hot(logits_BV.argmax(-1), logits_BV.shape[-1]).bool()
        one_hot = torch.zeros_like(logprobs_BV).masked_fill(~best, float("-inf"))
        logprobs_BV = torch.where(greedy_B[:, None], one_hot, logprobs_BV)
    return logprobs_BV


def draw(logprobs_BV: Tensor, uniforms_B: np.ndarray) -> Tensor:
    """Invert the cumulative distribution; never returns a token of probability 0."""
    cumulative = logprobs_BV.exp().cumsum(-1, dtype=torch.float64)
    target = torch.from_numpy(uniforms_B).to(cumulative.device) * cumulative[:, -1]
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0].clamp_max(
        logprobs_BV.shape[-1] - 1
    )


def load_model(config, tensors: Mapping[str, Tensor], rows: int, max_tokens: int) -> CachedModel:
    """Our own Qwen3 where it fits, else the model's own forward pass."""
    if Qwen3.fits(config):
        return Qwen3(config, tensors, rows, max_tokens)
    from .causal import CausalLM

    return CausalLM(config, tensors, rows, max_tokens)


class TorchEngine:
    """The `Engine` protocol over a transformers causal language model.

    kv_tokens: KV capacity in tokens; max_tokens: longest sequence; max_sequences: rows of a step;
    tool_steps: decoding steps after which a tool's result is delivered.
    """

    @classmethod
    def from_pretrained(cls, path: str | Path, **options) -> "TorchEngine":
        """The engine of a checkpoint folder, in float32; options as of the class.

        Raises: EngineError: there is no checkpoint; a mistyped path never becomes a download.
        """
        if not (Path(path) / "config.json").is_file():
            raise EngineError(f"no checkpoint at {path}: expected a folder with config.json")
        from transformers import AutoModelForCausalLM

        net = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        return cls(net.config, net.state_dict(), **options)

    def __init__(
        self,
        config,
        tensors: Mapping[str, Tensor],
        *,
        kv_tokens: int,
        max_tokens: int,
        max_sequences: int = 256,
        tool_steps: int = 8,
        block: int = 16,
        device="cpu",
    ):
        tensors = {k: v.to(device) for k, v in tensors.items()}
        self._model = load_model(config, tensors, max_sequences, max_tokens)
        self._cache = self._model.cache
        self._capacity, self._total_blocks = KvCapacity(kv_tokens, block), kv_tokens // block
        self._max_tokens, self._max_sequences = max_tokens, max_sequences
        self._tool_steps, self._device = tool_steps, device
        self._version, self._preemptions, self._arrivals, self._sampled = 0, 0, 0, 0
        self.step, self._first_step = 0, 0  # decoding steps; the one at which the loop last woke
        self._waiting: list[_Request] = []
        self._running: list[_Request] = []  # row r of the cache belongs to self._running[r]
        self._saved: OrderedDict[str, _SavedPrefix] = OrderedDict()
        self._due: list[tuple[int, asyncio.Future, asyncio.Future]] = []
        self._updates: list[asyncio.Future] = []
        self._loop_task: asyncio.Task | None = None
        self._fallback_seed = 0
        size = (max_sequences, max_tokens)
        self._tokens = np.zeros(size, np.int32)
        self._logprobs, self._entropies = np.zeros(size, np.float32), np.zeros(size, np.float32)
        self._lengths, self._limits = (np.zeros(max_sequences, np.int64) for _ in range(2))
        self._seeds = np.zeros(max_sequences, np.uint64)
        self._temperatures, self._top_ps = (np.ones(max_sequences, np.float32) for _ in range(2))

    # The engine protocol

    async def generate(self, request_id: str, token_ids, sampling: Sampling) -> Completion:
        """Sample one completion.

        Raises:
            EngineError: the request cannot fit, however long it waits.
        """
        tokens = [int(i) for i in token_ids]
        longest = len(tokens) + sampling.max_new_tokens
        if not tokens or sampling.max_new_tokens < 1:
            raise EngineError("a request needs at least one input token and max_new_tokens >= 1")
        held = self._total_blocks * self._capacity.block
        if longest > min(self._max_tokens, held):
            raise EngineError(
                f"request {request_id!r} may reach {longest} tokens, but the engine holds "
                f"{self._max_tokens} per sequence and {held} in all; "
                "lower max_new_tokens or raise model.max_tokens / engine.kv_tokens"
            )
        if sampling.seed is None:
            self._fallback_seed += 1
        seed = self._fallback_seed if sampling.seed is None else sampling.seed
        future = asyncio.get_running_loop().create_future()
        self._arrivals += 1
        self._waiting.append(
            _Request(request_id, tokens, sampling, seed, future, len(tokens), self._arrivals)
        )
        self._wake()
        try:
            return await future
        except asyncio.CancelledError:  # the caller is gone: nothing of it stays in flight
            await self.abort(request_id)
            raise

    def capacity(self) -> KvCapacity:
        return self._capacity

    def load(self) -> EngineLoad:
        return EngineLoad(
            running=len(self._running),
            waiting=len(self._waiting),
            used_tokens=self._row_blocks(ahead=-1) * self._capacity.block,
            preemptions=self._preemptions,
            sampled_tokens=self._sampled,
        )

    async def update_weights(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Take new weights once no request is running; every saved prefix is dropped."""
        if self._running:
            self._updates.append(asyncio.get_running_loop().create_future())
            await self._updates[-1]
        self._model.load({k: v.to(self._device) for k, v in tensors.items()})
        self._saved.clear()
        self._version = version

    async def abort(self, request_id: str) -> None:
        """End the request's completion now; it returns what it has with finish "abort"."""
        for request in [r for r in self._waiting if r.id == request_id]:
            self._waiting.remove(request)
            self._complete(request, request.tokens[request.prompt_length :], "abort")
        for row in [i for i, r in enumerate(self._running) if r.id == request_id][::-1]:
            self._finish_row(row, "abort")
        self._saved.pop(request_id, None)

    async def deliver(self, result: Awaitable[Result]) -> Result:
        """Await a tool's result and hand it over at a decoding step known in advance."""
        task = asyncio.ensure_future(result)
        gate = asyncio.get_running_loop().create_future()
        self._wake()
        quantum, now = max(1, self._tool_steps), self.step - self._first_step
        due = self._first_step + (now + self._tool_steps + quantum - 1) // quantum * quantum
        self._due.append((due, task, gate))
        try:
            await gate
        except BaseException:  # cancelled, or the engine failed: forget the tool
            self._due = [entry for entry in self._due if entry[2] is not gate]
            task.cancel()
            raise
        return task.result()

    def close(self) -> None:
        """Stop. Who still waits for an answer gets `EngineLost`."""
        if self._loop_task is not None and not self._loop_task.done():
            self._loop_task.cancel()
        self._fail(EngineLost("the engine was closed; start another one"))
        self._saved.clear()

    def _fail(self, error: BaseException) -> None:
        """Nobody is left waiting: all pending answers become the error."""
        requests = [request.future for request in self._waiting + self._running]
        for future in requests + [gate for _, _, gate in self._due] + self._updates:
            if not future.done():
                future.set_exception(error)
        self._waiting, self._running, self._due, self._updates = [], [], [], []

    # The loop

    def _wake(self) -> None:
        if self._loop_task is None or self._loop_task.done():
            self._first_step = self.step
            self._loop_task = asyncio.get_running_loop().create_task(self._serve())

    async def _serve(self) -> None:
        try:
            while True:
                for _ in range(_SETTLE_ROUNDS):
                    await asyncio.sleep(0)
                if not (self._waiting or self._running or self._due or self._updates):
                    return
                if await self._deliver_due():
                    continue
                await self._take_step()
        except asyncio.CancelledError:
            self._fail(EngineLost("the engine's loop was cancelled; start another engine"))
            raise
        except Exception as error:
            self._fail(error)
            self._saved.clear()

    async def _take_step(self) -> None:
        """Admit and decode once. A subclass may keep time here."""
        self._admit()
        if self._running:
            self._decode()
        self.step += 1

    async def _deliver_due(self) -> bool:
        """Open the gates whose step has come; with nothing to decode, time jumps to it."""
        if self._due and not (self._running or self._waiting):
            self.step = max(self.step, min(due for due, _, _ in self._due))
        ready = [entry for entry in self._due if entry[0] <= self.step]
        self._due = [entry for entry in self._due if entry[0] > self.step]
        if ready:
            await asyncio.wait([task for _, task, _ in ready])
        for _, _, gate in ready:
            if not gate.done():
                gate.set_result(None)
        return bool(ready)

    # Memory

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._capacity.block)

    def _row_blocks(self, ahead: int) -> int:
        """Blocks of running rows, `ahead` tokens beyond their length.

        The last token of a row has no KV before the next step: -1 is what is stored now.
        """
        rows = self._lengths[: len(self._running)]
        return int(np.sum(-(-(rows + ahead) // self._capacity.block)))

    def _fits(self, extra_blocks: int) -> bool:
        """Make room by dropping the oldest saved prefixes; False, and none dropped, if in vain."""
        saved = [self._blocks(len(s.tokens)) for s in self._saved.values()]
        excess = self._row_blocks(ahead=1) + sum(saved) + extra_blocks - self._total_blocks
        if excess > sum(saved):
            return False
        for blocks in saved:
            if excess <= 0:
                break
            self._saved.popitem(last=False)
            excess -= blocks
        return True

    def _preempt_newest(self) -> None:
        """Send the newest request back to the queue's front; it is recomputed from its tokens."""
        row = max(range(len(self._running)), key=lambda r: self._running[r].arrival)
        request, length = self._running[row], int(self._lengths[row])
        start = len(request.tokens)
        request.tokens += self._tokens[row, start:length].tolist()
        request.logprobs += self._logprobs[row, start:length].tolist()
        request.entropies += self._entropies[row, start:length].tolist()
        self._vacate(row)
        self._waiting.insert(0, request)
        self._preemptions += 1

    # Steps

    def _admit(self) -> None:
        """Move waiting requests into rows, in order of arrival, and compute their unseen tokens."""
        if self._updates:
            if not self._running:
                for update in self._updates:
                    if not update.done():
                        update.set_result(None)
                self._updates = []
            return
        first = len(self._running)
        starts = []
        while self._waiting and len(self._running) < self._max_sequences:
            request = self._waiting[0]
            saved = self._saved.pop(request.id, None)
            if not self._fits(self._blocks(len(request.tokens) + 1)):
                if saved is not None:
                    self._saved[request.id] = saved
                break
            self._waiting.pop(0)
            starts.append(self._enter(request, saved))
        if starts:
            self._prefill(first, np.asarray(starts))

    def _enter(self, request: _Request, saved: _SavedPrefix | None) -> int:
        """Give the request the next row; returns how many of its tokens already have their KV."""
        row = len(self._running)
        tokens = np.asarray(request.tokens, np.int32)
        common = 0
        if saved is not None:
            length = min(len(saved.tokens), len(tokens) - 1)
            differs = np.flatnonzero(saved.tokens[:length] != tokens[:length])
            common = int(differs[0]) if len(differs) else length
            self._cache.write(row, saved.kv, common)
        if not request.logprobs:
            request.cached_tokens = common
        self._tokens[row, : len(tokens)] = tokens
        self._lengths[row], self._limits[row] = len(tokens), request.limit
        self._seeds[row] = request.seed % 2**64
        self._temperatures[row] = request.sampling.temperature
        self._top_ps[row] = request.sampling.top_p
        self._running.append(request)
        return common

    @torch.inference_mode()
    def _prefill(self, first: int, starts_R: np.ndarray) -> None:
        """Store keys and values of all but the last token of the new rows."""
        counts_R = self._lengths[first : first + len(starts_R)] - 1 - starts_R
        if counts_R.max() < 1:
            return
        ids_K = np.concatenate([
            self._tokens[first + r, start : start + count]
            for r, (start, count) in enumerate(zip(starts_R, counts_R, strict=True))
        ])  # fmt: skip
        self._model.store(*self._inputs(ids_K, first, starts_R, counts_R))

    def _inputs(self, ids_K: np.ndarray, first, starts_R, counts_R) -> tuple[Tensor, Places]:
        places = Places.of(first, starts_R, counts_R, self._device)
        return torch.from_numpy(ids_K.astype(np.int64)).to(self._device), places

    @torch.inference_mode()
    def _decode(self) -> None:
        """One token for every running row."""
        while not self._fits(0):
            self._preempt_newest()
        count = len(self._running)
        rows, lengths = np.arange(count), self._lengths[:count].copy()
        last_B, one_each = self._tokens[rows, lengths - 1], np.ones(count, np.int64)
        logits_BV = self._model.logits(*self._inputs(last_B, 0, lengths - 1, one_each)).float()
        temperatures_B, top_ps_B = (
            torch.from_numpy(values[:count]).to(self._device)
            for values in (self._temperatures, self._top_ps)
        )
        logprobs_BV = sampling_logprobs(logits_BV, temperatures_B, top_ps_B)
        sampled = draw(logprobs_BV, uniforms(self._seeds[:count], lengths))
        chosen = logprobs_BV.gather(1, sampled[:, None])[:, 0]
        if any(request.sampling.entropies for request in self._running):
            full_BV = logprobs_BV  # before top-p: the entropy is that of the whole vocabulary
            if bool((top_ps_B < 1).any()):
                full_BV = sampling_logprobs(logits_BV, temperatures_B, torch.ones_like(top_ps_B))
            entropies_B = torch.special.entr(full_BV.exp()).sum(-1)
            self._entropies[rows, lengths] = entropies_B.cpu().numpy()
        sampled = sampled.cpu().numpy()
        self._tokens[rows, lengths] = sampled
        self._logprobs[rows, lengths] = chosen.cpu().numpy()
        self._lengths[:count] += 1
        self._sampled += count
        self._finish_rows(sampled)

    def _finish_rows(self, sampled_B: np.ndarray) -> None:
        """Answer what has ended, from the last row up: a row that moves has been looked at."""
        spent_B = self._lengths[: len(sampled_B)] >= self._limits[: len(sampled_B)]
        for row in reversed(range(len(sampled_B))):
            stopped = int(sampled_B[row]) in self._running[row].sampling.stop_ids
            if stopped or spent_B[row]:
                self._finish_row(row, "stop" if stopped else "length")

    def _finish_row(self, row: int, finish) -> None:
        """Answer the request and keep its prefix for the next turn."""
        request, length = self._running[row], int(self._lengths[row])
        start = len(request.tokens)
        request.logprobs += self._logprobs[row, start:length].tolist()
        request.entropies += self._entropies[row, start:length].tolist()
        self._saved[request.id] = _SavedPrefix(
            self._tokens[row, : length - 1].copy(), self._cache.read(row, length - 1)
        )
        self._complete(request, self._tokens[row, request.prompt_length : length], finish)
        self._vacate(row)

    def _vacate(self, row: int) -> None:
        """Take the row's request off; the last row moves into the gap."""
        last = len(self._running) - 1
        if row != last:
            self._cache.move(last, row, int(self._lengths[last]) - 1)
            for array in (
                self._tokens,
                self._logprobs,
                self._entropies,
                self._lengths,
                self._limits,
                self._seeds,
                self._temperatures,
                self._top_ps,
            ):
                array[row] = array[last]
            self._running[row] = self._running[last]
        self._running.pop()

    def _complete(self, request: _Request, token_ids, finish) -> None:
        if request.future.done():
            return
        request.future.set_result(
            Completion(
                token_ids=np.asarray(token_ids, np.int32).copy(),
                logprobs=np.asarray(request.logprobs, np.float32),
                entropies=np.asarray(request.entropies, np.float32)
                if request.sampling.entropies
                else None,
                finish=finish,
                weight_version=self._version,
                cached_tokens=request.cached_tokens,
            )
        )
