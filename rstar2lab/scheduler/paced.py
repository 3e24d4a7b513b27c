"""Real engines on a clock that jumps, and prices fitted to their steps.

Several engines work for real, one after the other in one thread; each step takes, on the loop's
clock, the processor seconds that it has used. So two engines on one machine are timed as if each
had a core of its own, whatever else the machine does; bandwidth that they would share is left out.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.optimize import nnls

from ..engines import Sampling
from ..engines.torch_engine import TorchEngine
from .clock import run_virtually
from .cost import CostModel


@dataclass(frozen=True)
class Step:
    """What one step computed, and the processor seconds that it took.

    rows and their context (tokens); prefill: tokens computed beside, pairs: Σ p·(x + p/2) of p
    tokens after x others, after: Σ x, calls: 1 if there were any.
    """

    rows: int
    context: int
    prefill: int
    pairs: float
    after: int
    calls: int
    seconds: float


KNOTS = (1, 2, 4, 8, 16, 32, 64, 128)
_NO_PREFILL = (0, 0.0, 0, 0)


class PacedEngine(TorchEngine):
    """A torch engine that sleeps, on a clock that jumps, for as long as it has worked.

    `steps`: what it did. For event loops of `clock.run_virtually`.
    """

    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        self.steps: list[Step] = []
        self._ready = 0.0  # when the present step ends
        self._decoded, self._prefilled = (0, 0), _NO_PREFILL

    @property
    def longest_sequence(self) -> int:
        return self._max_tokens

    def _prefill(self, first, starts_R):
        counts_R = self._lengths[first : first + len(starts_R)] - 1 - starts_R
        pairs = float((counts_R * (starts_R + counts_R / 2)).sum())
        after = int(starts_R[counts_R > 0].sum())
        self._prefilled = (int(counts_R.sum()), pairs, after, int(counts_R.max() > 0))
        super()._prefill(first, starts_R)

    def _finish_rows(self, sampled_B):
        rows = len(sampled_B)
        self._decoded = (rows, int(self._lengths[:rows].sum()) - rows)
        super()._finish_rows(sampled_B)

    async def _take_step(self):
        self._decoded, self._prefilled = (0, 0), _NO_PREFILL
        started = time.thread_time()
        await super()._take_step()
        seconds = time.thread_time() - started
        if self._decoded[0]:
            self.steps.append(Step(*self._decoded, *self._prefilled, seconds))
        self._ready = asyncio.get_running_loop().time() + seconds
        await asyncio.sleep(seconds)

    async def generate(self, request_id, token_ids, sampling):
        completion = await super().generate(request_id, token_ids, sampling)
        await asyncio.sleep(max(0.0, self._ready - asyncio.get_running_loop().time()))
        return completion


def fit(steps: Sequence[Step], name: str, origin: str) -> tuple[CostModel, dict]:
    """Non-negative least squares of a step's seconds, R², and the mean residual by batch size.

    steps: with rows and context varied independently, 2,000 or more. origin: where they were
    measured; the model says so.

    The seconds by rows are lines between `KNOTS`: the second row costs more than the fiftieth. Each
    step counts by its relative error, so that a few long prefills do not drown the short steps.
    """
    rows = np.array([s.rows for s in steps], float)
    y = np.array([s.seconds for s in steps])
    hats = [np.interp(rows, KNOTS, knot) for knot in np.eye(len(KNOTS))]
    rest = [[s.context, s.prefill, s.pairs, s.after, s.calls] for s in steps]
    x = np.column_stack([*hats, np.array(rest, float)])
    scale = np.maximum(np.abs(x).max(0), 1e-12)
    found, _ = nnls(x / scale / y[:, None], np.ones(len(y)))
    *by_rows, kv, token, pair, after, call = (found / scale).tolist()
    measured = [(n, s) for n, s in zip(KNOTS, by_rows, strict=True) if s > 0]
    cost = CostModel(
        name=name, is_calibrated=True, origin=origin, by_rows=tuple(measured),
        overhead_seconds=0.0, weights_seconds=0.0, compute_seconds_per_row=0.0, row_seconds=0.0,
        kv_seconds_per_token=kv, prefill_seconds_per_token=token, prefill_attention_seconds=pair,
        prefill_call_seconds=call, prefill_context_seconds=after,
    )  # fmt: skip
    residual = y - x @ (found / scale)
    quality = 1 - float((residual**2).sum() / ((y - y.mean()) ** 2).sum())
    parts = [(low, (rows >= low) & (rows < high)) for low, high in pairwise([*KNOTS, 1 << 30])]
    by_size = {
        f"{low} rows": round(float((residual[mine] / y[mine]).mean()), 3)
        for low, mine in parts if mine.any()
    }  # fmt: skip
    return cost, {"steps": len(y), "r_squared": round(quality, 3), "relative_residual": by_size}


_CLIENTS = (1, 64, 4, 32, 2, 16, 8, 1, 48, 3, 24, 12, 6)  # at one time, round after round
_LENGTHS = ((0.05, 0.25), (0.05, 1.0), (0.6, 1.0))  # shares of the longest input, in turn


def exercise(
    engines: Sequence[PacedEngine], vocabulary: int, seed: int = 0, most_turns: int = 120
) -> list[Step]:
    """Steps to fit prices to: requests of random lengths at batch sizes from 1 to 64, no policy.

    Half of them begin, half go on after a few more tokens, as turns after a tool do.

    engines: as many as will run together, for they push each other's weights out of the caches;
    with KV for all requests at once; closed afterwards. most_turns: of a round and engine.
    """
    rng = np.random.default_rng((seed, 3))
    longest = min(520, engines[0].longest_sequence - 100)

    async def client(engine: PacedEngine, number: int, turns: int, least: int, most: int) -> None:
        await asyncio.sleep(0.02 * number)  # staggered, as turns end: prefills of one or few rows
        tokens: list[int] = []
        for _ in range(turns):
            if not 0 < len(tokens) < most or rng.random() < 0.5:  # else it goes on
                await engine.abort(str(number))
                tokens = rng.integers(vocabulary, size=int(rng.integers(least, most))).tolist()
            sampling = Sampling(int(rng.integers(10, 60)), seed=number)
            completion = await engine.generate(str(number), tokens, sampling)
            tokens += completion.token_ids.tolist()
            tokens += rng.integers(vocabulary, size=int(rng.integers(1, 40))).tolist()
        await engine.abort(str(number))

    async def all_sizes() -> None:
        for place, clients in enumerate(_CLIENTS):
            turns = min(max(3, most_turns // clients), 10)
            lengths = [int(share * longest) for share in _LENGTHS[place % len(_LENGTHS)]]
            await asyncio.gather(*(
                client(engine, number, turns, *lengths)
                for number in range(clients) for engine in engines
            ))  # fmt: skip
        for engine in engines:
            engine.close()

    run_virtually(all_sizes())
    return [step for engine in engines for step in engine.steps]
