"""Multi-turn generation at 128 concurrent rollouts: the torch engine against transformers.

Both run the kit's own rollout loop over the same weights and problems. The other engine is
transformers' `generate` as one would use it: all trajectories take their turn together, left-padded
into one batch, and every turn computes the whole conversation again. It runs twice: for its tokens
alone, which is less than our engine does, and with log-probs and entropies, which training needs.

Only generation is timed. A first pass runs the programs in the sandbox and records the results; the
timed passes answer from the record, in the same process. Each engine draws from its own fixed
seeds, so all its passes sample the same tokens. The engines take turns, A B C A B C, so that a busy
machine hurts all. Tokens per second counts sampled tokens; per CPU second is the steadier number.
One more pass of each is profiled: the seconds that its matrix products take are its floor.

    python experiments/benchmarks/generation.py --model experiments/results/cold_start/*/model
"""

import argparse
import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import torch

from rstar2lab import config, protocol, rollout, runs
from rstar2lab.engines import Completion, EngineLoad, KvCapacity, Result, Sampling
from rstar2lab.engines.torch_engine import TorchEngine
from rstar2lab.nano import model, tasks
from rstar2lab.nano.tokenizer import FileTokenizer
from rstar2lab.sandbox import Sandbox
from rstar2lab.types import Problem, ToolResult, Trajectory

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results" / "generation.json"
SETTLE_ROUNDS = 6  # event-loop rounds in which the trajectories react to their turn


class GenerateEngine:
    """transformers' `generate` behind the engine protocol: waits for everyone, then one batch."""

    def __init__(self, net, pad_id: int, with_logprobs: bool, seed: int = 0):
        self._net, self._pad_id, self._with_logprobs = net, pad_id, with_logprobs
        self._waiting: list[tuple[str, list[int], Sampling, asyncio.Future]] = []
        self._round: asyncio.Task | None = None
        self._tools = 0
        torch.manual_seed(seed)

    async def generate(self, request_id: str, token_ids, sampling: Sampling) -> Completion:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((request_id, list(token_ids), sampling, future))
        if self._round is None:
            self._round = asyncio.create_task(self._take_turn())
        return await future

    async def deliver(self, result: Awaitable[Result]) -> Result:
        self._tools += 1
        try:
            return await result
        finally:
            self._tools -= 1

    async def _take_turn(self) -> None:
        """The turn starts when no tool is running and every trajectory has asked for it."""
        quiet = 0
        while quiet < SETTLE_ROUNDS:
            await asyncio.sleep(0)
            quiet = 0 if self._tools else quiet + 1
        batch = sorted(self._waiting, key=lambda asked: asked[0])  # not by the speed of tools
        self._waiting, self._round = [], None
        try:
            completions = self._sample([(tokens, sampling) for _, tokens, sampling, _ in batch])
            for (*_, future), found in zip(batch, completions, strict=True):
                future.set_result(found)
        except Exception as error:
            for *_, future in batch:
                if not future.done():
                    future.set_exception(error)

    @torch.inference_mode()
    def _sample(self, batch: list[tuple[list[int], Sampling]]) -> list[Completion]:
        width = max(len(tokens) for tokens, _ in batch)
        ids = np.full((len(batch), width), self._pad_id)
        attention = np.zeros((len(batch), width), np.int64)
        for row, (tokens, _) in enumerate(batch):
            ids[row, width - len(tokens) :], attention[row, width - len(tokens) :] = tokens, 1
        first = batch[0][1]  # all share temperature, top-p and stop token
        found = self._net.generate(
            input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(attention),
            max_new_tokens=max(sampling.max_new_tokens for _, sampling in batch),
            do_sample=True, temperature=first.temperature, top_p=first.top_p, top_k=0,
            eos_token_id=list(first.stop_ids) or None, pad_token_id=self._pad_id,
            return_dict_in_generate=True, output_logits=self._with_logprobs,
        )  # fmt: skip
        ids_BT = found.sequences[:, width:]
        statistics = _statistics(found.logits, ids_BT) if self._with_logprobs else None
        return [
            _cut(row, sampling, statistics and [values[place] for values in statistics])
            for place, (row, (_, sampling)) in enumerate(zip(ids_BT.numpy(), batch, strict=True))
        ]

    def capacity(self) -> KvCapacity:
        return KvCapacity(tokens=1 << 20, block=16)

    def load(self) -> EngineLoad:
        return EngineLoad(running=0, waiting=len(self._waiting), used_tokens=0, preemptions=0)

    async def abort(self, request_id: str) -> None:
        pass

    def close(self) -> None:
        self._waiting = []


def _statistics(logits: tuple[torch.Tensor, ...], ids_BT: torch.Tensor) -> list[np.ndarray]:
    """Log-probs of the sampled tokens, and entropies, at temperature 1, step by step: [B, T]."""
    chosen, entropies = [], []
    for step, logits_BV in enumerate(logits):
        logprobs_BV = logits_BV.float().log_softmax(-1)
        chosen.append(logprobs_BV.gather(1, ids_BT[:, step : step + 1])[:, 0])
        entropies.append(-(logprobs_BV.exp() * logprobs_BV).sum(-1))
    return [torch.stack(values, 1).numpy() for values in (chosen, entropies)]


def _cut(row: np.ndarray, sampling: Sampling, statistics: list[np.ndarray] | None) -> Completion:
    """One row of the batch without its padding and within its own budget."""
    row = row[: sampling.max_new_tokens]
    stops = np.flatnonzero(np.isin(row, sampling.stop_ids))
    ids = row[: stops[0] + 1] if len(stops) else row
    statistics = statistics or [np.zeros(len(ids), np.float32)] * 2
    logprobs, entropies = (values[: len(ids)] for values in statistics)
    finish = "stop" if len(stops) else "length"
    return Completion(ids.astype(np.int32), logprobs, entropies, finish, 0, 0)


class Recorder:
    """A code environment that runs a program once and then answers it from memory."""

    def __init__(self, sandbox: Sandbox):
        self._sandbox, self._results = sandbox, {}
        self.is_replay = False

    async def arun(self, code: str, stdin: str = "") -> ToolResult:
        if (code, stdin) not in self._results:
            if self.is_replay:
                raise RuntimeError("a timed pass wrote a program that the first pass had not")
            self._results[code, stdin] = await self._sandbox.arun(code, stdin)
        return self._results[code, stdin]


def engines(net, settings: config.Config, stop_id: int) -> dict:
    """Each engine fresh, by name: used ones remember prefixes or random states."""
    return {
        "torch engine": lambda: TorchEngine(
            net.config, net.state_dict(), kv_tokens=settings.engine.kv_tokens,
            max_tokens=settings.model.max_tokens, tool_steps=settings.engine.tool_steps,
        ),
        "generate": lambda: GenerateEngine(net, stop_id, with_logprobs=False),
        "generate, log-probs": lambda: GenerateEngine(net, stop_id, with_logprobs=True),
    }  # fmt: skip


def play(engine, problems: list[Problem], actors: dict, limits) -> tuple[list[Trajectory], dict]:
    """One pass over all problems at once: trajectories, and what it took."""

    async def all_at_once() -> list[Trajectory]:
        who = rollout.Actors(engine=engine, **actors)
        return await asyncio.gather(*(rollout.rollout(p, 0, who, limits) for p in problems))

    wall, cpu = time.perf_counter(), time.process_time()
    found = asyncio.run(all_at_once())
    seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
    engine.close()
    tokens = sum(t.num_trained_tokens for t in found)
    return found, {
        "tokens": tokens, "turns": sum(len(t.turns) for t in found),
        "seconds": seconds, "cpu_seconds": cpu_seconds,
        "tokens_per_second": tokens / seconds, "tokens_per_cpu_second": tokens / cpu_seconds,
        "load": os.getloadavg()[0],
    }  # fmt: skip


def product_seconds(run: Callable[[], object]) -> float:
    """CPU seconds that `run` spends in matrix products, attention's included."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        run()
    return sum(
        event.self_cpu_time_total
        for event in profiled.key_averages()
        if event.key in ("aten::mm", "aten::addmm", "aten::bmm") or "attention" in event.key
    ) / 1e6


def measure(path: Path, rollouts: int, repeats: int) -> tuple[dict[str, list[dict]], dict]:
    """The timed passes of each engine, in the order in which they ran, and its product seconds."""
    settings = config.load(ROOT / "experiments/configs/nano.toml", "grpo_roc")
    net, tokens = model.load(path).eval(), FileTokenizer(path / "tokenizer.json")
    chat = protocol.chat_format("nano", tools=True, response_chars=settings.chat.response_chars)
    limits = rollout.RolloutSettings(
        settings.chat.max_turns, 1, settings.rollout.max_response_tokens, 1.0, 1.0, "generation"
    )
    problems = tasks.problems(rollouts, seed=0, held_out=False)
    made, passes = engines(net, settings, tokens.stop_id), {}
    with Sandbox(workers=1) as sandbox:
        recorder = Recorder(sandbox)
        actors = {"sandbox": recorder, "tokenizer": tokens, "chat": chat}
        first = {name: play(make(), problems, actors, limits)[0] for name, make in made.items()}
        recorder.is_replay = True
        for _ in range(repeats):
            for name, make in made.items():
                found, row = play(make(), problems, actors, limits)
                for a, b in zip(found, first[name], strict=True):
                    assert a.response_ids.tolist() == b.response_ids.tolist(), "not the same pass"
                passes.setdefault(name, []).append(row)
        floors = {
            name: product_seconds(lambda: play(make(), problems, actors, limits))  # noqa: B023
            for name, make in made.items()
        }
    return passes, floors


def summary(passes: list[dict]) -> dict:
    """Median and range over the passes of one engine."""
    out = {key: passes[0][key] for key in ("tokens", "turns")}
    for key in ("seconds", "cpu_seconds", "tokens_per_second", "tokens_per_cpu_second"):
        values = [row[key] for row in passes]
        out[key] = {
            "median": round(float(np.median(values)), 3),
            "range": [round(min(values), 3), round(max(values), 3)],
        }
    return out


def ratios(passes: dict[str, list[dict]], key: str) -> dict[str, dict]:
    """The first engine over each other one, pass by neighboring pass: median and range."""
    (_, ours), *others = passes.items()
    out = {}
    for name, theirs in others:
        values = [a[key] / b[key] for a, b in zip(ours, theirs, strict=True)]
        out[name] = {
            "median": round(float(np.median(values)), 2),
            "range": [round(min(values), 2), round(max(values), 2)],
        }
    return out


def table(cases: dict[str, dict], found: dict[str, dict]) -> str:
    heads = f"{'engine':24}{'tokens':>8}"
    heads += f"{'tokens/s':>10}{'range':>16}{'per CPU s':>11}{'range':>16}"
    lines = [heads + f"{'CPU s':>8}{'products':>10}"]
    for name, row in cases.items():
        line = f"{name:24}{row['tokens']:8,}"
        for key, width in (("tokens_per_second", 10), ("tokens_per_cpu_second", 11)):
            low, high = row[key]["range"]
            line += f"{row[key]['median']:{width},.0f}{f'{low:,.0f}–{high:,.0f}':>16}"
        line += f"{row['cpu_seconds']['median']:8.2f}{row['product_cpu_seconds']:10.2f}"
        lines.append(line)
    for key, others in found.items():
        for name, row in others.items():
            low, high = row["range"]
            what = f"{key.replace('_', ' ')}, over {name}"
            lines.append(f"{what}: {row['median']:.2f}× ({low:.2f}–{high:.2f})")
    return "\n".join(lines)


def case(path: Path, rollouts: int, repeats: int, threads: int) -> dict:
    """All engines with so many threads."""
    torch.set_num_threads(threads)
    passes, floors = measure(path, rollouts, repeats)
    load = max(row["load"] for rows in passes.values() for row in rows)
    return {
        "highest_load": round(load, 2),
        "cases": {
            name: summary(rows) | {"product_cpu_seconds": round(floors[name], 3)}
            for name, rows in passes.items()
        },
        "ratio": {
            key: ratios(passes, key) for key in ("tokens_per_second", "tokens_per_cpu_second")
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a nano checkpoint folder")
    parser.add_argument("--rollouts", type=int, default=128, help="concurrent, one per problem")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file")
    chosen = parser.parse_args()
    cases = {}
    for threads in chosen.threads:
        cases[threads] = case(chosen.model, chosen.rollouts, chosen.repeats, threads)
        print(f"{threads} threads, load {cases[threads]['highest_load']}")
        print(table(cases[threads]["cases"], cases[threads]["ratio"]))
    command = f"python experiments/benchmarks/generation.py --rollouts {chosen.rollouts}"
    found = {
        "rollouts": chosen.rollouts, "repeats": chosen.repeats, "threads": cases,
        "provenance": runs.provenance(command, "nano 0.4M, cold start"),
    }  # fmt: skip
    runs.write_atomic(chosen.out, json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
