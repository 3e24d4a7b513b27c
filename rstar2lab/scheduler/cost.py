"""What a step of an engine costs, as named constants; and the time that no schedule can beat.

A decoding step of B rows with `context` tokens in all takes

    overhead + max(weights, compute · B) + row · B + kv · context

seconds (or a measured function of B in place of the first three), and computing the KV of p tokens
after x others takes prefill · p + attention · p·(x + p/2) + prefill_context · x (an engine that
fetches a saved prefix) plus a fixed `prefill_call`, one after the other with decoding: a
conservative picture of chunked prefill, which overlaps them.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from .workload import TrajectoryTrace, Workload


@dataclass(frozen=True)
class CostModel:
    """Seconds per unit; `calibrated` says whether they were measured, `origin` where.

    kv_tokens: capacity of one engine of this kind, if the preset names one. by_rows: measured
    seconds of a step without its context, as (rows, seconds) with lines between; it then stands in
    place of overhead, weights, compute and row.
    """

    name: str
    is_calibrated: bool
    origin: str
    overhead_seconds: float
    weights_seconds: float
    compute_seconds_per_row: float
    row_seconds: float
    kv_seconds_per_token: float
    prefill_seconds_per_token: float
    prefill_attention_seconds: float = 0.0  # per token and token of its context
    prefill_call_seconds: float = 0.0
    prefill_context_seconds: float = 0.0  # per token of the context, however few tokens follow it
    kv_tokens: int = 0
    by_rows: tuple[tuple[int, float], ...] = ()

    def fixed(self, rows: int) -> float:
        """Seconds of a step of so many rows, without their context."""
        if self.by_rows:
            return self._interpolated(rows)
        by_rows = max(self.weights_seconds, self.compute_seconds_per_row * rows)
        return self.overhead_seconds + by_rows + self.row_seconds * rows

    def _interpolated(self, rows: int) -> float:
        """On the line between two knots; beyond the last one it goes on."""
        place = bisect_left(self.by_rows, (rows, 0.0), 1, len(self.by_rows) - 1)
        (low, before), (high, after) = self.by_rows[place - 1 : place + 1]
        return before + (after - before) * (rows - low) / (high - low)

    def floor(self, most_rows: int) -> tuple[float, float]:
        """(a, b) such that a step of B rows takes at least a + b·B, for 1 ≤ B ≤ most_rows."""
        rows = [1, most_rows] + [knot for knot, _ in self.by_rows if 1 < knot < most_rows]
        b = max(0.0, self.fixed(most_rows) - self.fixed(1)) / max(most_rows - 1, 1)
        a = min(self.fixed(knot) - b * knot for knot in rows)
        return (a, b) if a >= 0 else (0.0, min(self.fixed(knot) / knot for knot in rows))

    def decode(self, rows: int, context: int, steps: int) -> float:
        """Seconds of `steps` steps: the context starts at `context` and grows by a token per row.

        (fixed(B) + kv·context)·n + kv·B·n(n - 1)/2
        """
        grown = context * steps + rows * steps * (steps - 1) / 2
        return self.fixed(rows) * steps + self.kv_seconds_per_token * grown

    def prefill(self, tokens: int, after: int) -> float:
        """Seconds to compute the KV of `tokens` that follow `after` others."""
        if not tokens:
            return 0.0
        seconds = self.prefill_attention_seconds * tokens * (after + tokens / 2)
        seconds += self.prefill_context_seconds * after
        return seconds + self.prefill_seconds_per_token * tokens

    @classmethod
    def preset(cls, name: str) -> "CostModel":
        """One of `PRESETS`. Raises: ValueError if there is none of this name."""
        if name not in PRESETS:
            raise ValueError(f"no cost model {name!r}; expected one of {', '.join(PRESETS)}")
        return PRESETS[name]


def transformer(
    name, *, parameters, layers, heads, kv_heads, head_width, bandwidth, flops, memory, overhead
) -> CostModel:
    """From arithmetic, bf16: bandwidth (bytes/s) and FLOP/s that are reached, memory for a GPU.

    weights = 2P / bandwidth, compute = 2P / FLOP/s per row and per prefilled token,
    KV = 2·layers·kv_heads·head_width·2 bytes per token.
    """
    kv_bytes = 4 * layers * kv_heads * head_width
    return CostModel(
        name=name,
        is_calibrated=False,
        origin="arithmetic from the data sheets, 0.7 of the bandwidth; not measured",
        overhead_seconds=overhead,
        weights_seconds=2 * parameters / bandwidth,
        compute_seconds_per_row=2 * parameters / flops,
        row_seconds=0.0,
        kv_seconds_per_token=kv_bytes / bandwidth,
        prefill_seconds_per_token=2 * parameters / flops,
        prefill_attention_seconds=4 * layers * heads * head_width / flops,
        kv_tokens=int((memory - 2 * parameters) / kv_bytes),
    )


_QWEN3_14B = {
    "parameters": 14.8e9, "layers": 40, "heads": 40, "kv_heads": 8, "head_width": 128,
    "overhead": 4e-3,
}  # fmt: skip
PRESETS = {
    model.name: model
    for model in (
        transformer(
            "mi300x_qwen3_14b", bandwidth=3.7e12, flops=500e12, memory=0.8 * 192e9, **_QWEN3_14B
        ),
        transformer(
            "h100_qwen3_14b", bandwidth=2.3e12, flops=450e12, memory=0.8 * 80e9, **_QWEN3_14B
        ),
        CostModel(
            name="cpu_nano",
            is_calibrated=True,
            origin="our torch engine, nano 0.4M, one thread of an x86-64 server, R² 0.95: "
            "experiments/benchmarks/scheduler_real.py --size nano",
            overhead_seconds=6.5e-4,
            weights_seconds=0.0,
            compute_seconds_per_row=0.0,
            row_seconds=4.9e-5,
            kv_seconds_per_token=7.6e-8,
            prefill_seconds_per_token=6.8e-6,
            prefill_attention_seconds=2.5e-8,
            prefill_call_seconds=6.0e-4,
        ),
    )
}


def work_seconds(trace: TrajectoryTrace, cost: CostModel) -> float:
    """Seconds of the trajectory alone on an engine: first prefills, steps of one row, tools."""
    seconds, context = 0.0, 0
    length = trace.prompt_tokens
    for turn in trace.turns:
        seconds += cost.prefill(length - 1 - context, context) + cost.decode(1, length, turn.tokens)
        seconds += turn.tool_seconds
        context = length + turn.tokens - 1
        length += turn.tokens + turn.tool_tokens
    return seconds


def lower_bound(
    workload: Workload | Sequence[TrajectoryTrace], engines, cost: CostModel
) -> float:
    """Seconds that no schedule of the workload on these engines can beat, in this model.

    max(work / n, longest trajectory alone); work = steps·overhead + max(steps·weights,
    tokens·compute) + tokens·row + kv·Σ context + first prefills, with
    steps ≥ max(Σ context / C, tokens / max_seqs). Ramp-up and drain are left out: it is not tight.

    engines: an `EnginePool`, all engines alike.
    """
    traces = getattr(workload, "trajectories", workload)
    tokens = context = 0
    prefill = longest = 0.0
    for trace in traces:
        length, stored = trace.prompt_tokens, 0
        for turn in trace.turns:
            prefill += cost.prefill(length - 1 - stored, stored)
            tokens += turn.tokens
            context += length * turn.tokens + turn.tokens * (turn.tokens - 1) // 2
            stored = length + turn.tokens - 1
            length += turn.tokens + turn.tool_tokens
        longest = max(longest, work_seconds(trace, cost))
    steps = max(context / engines.kv_tokens, tokens / engines.max_seqs)
    if cost.by_rows:
        per_step, per_row = cost.floor(engines.max_seqs)
        work = steps * per_step + tokens * per_row + prefill
    else:
        work = steps * cost.overhead_seconds + tokens * cost.row_seconds + prefill
        work += max(steps * cost.weights_seconds, tokens * cost.compute_seconds_per_row)
    work += cost.kv_seconds_per_token * context
    return max(work / engines.count, longest)
