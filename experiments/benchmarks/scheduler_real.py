"""Does the simulator predict real engines? Two torch engines with small KV pools, every policy.

The engines work for real, one after the other in one process, on a clock that jumps: each step
takes the processor seconds that it has used (`time.thread_time`, one thread), as if each engine had
a core of its own. So a busy machine and the other engine do not disturb the measurement; memory
bandwidth that two cores would share is not part of it. Tools are sleeps on the same clock. Traces
are replayed, so all policies do identical work. The prices are fitted to other requests, before.

    python experiments/benchmarks/scheduler_real.py
"""

import argparse
import asyncio
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from tqdm.auto import tqdm

from rstar2lab import config, runs, scheduler
from rstar2lab.nano import model
from rstar2lab.scheduler import EnginePool, Shape, Workload
from rstar2lab.scheduler.clock import run_virtually
from rstar2lab.scheduler.dispatcher import Dispatcher, Limits
from rstar2lab.scheduler.paced import PacedEngine, Step, exercise, fit
from rstar2lab.scheduler.replay import replay
from rstar2lab.scheduler.simulator import earlier_curve

RESULTS = Path(__file__).parent / "results" / "scheduler_real.json"
ORIGIN = "experiments/benchmarks/scheduler_real.py"
VOCABULARY, ROWS, CAP = 512, 128, 512
POOL = EnginePool(2, kv_tokens=4096, block=16, max_seqs=ROWS, max_len=1024, prefixes="whole")
TICK_SECONDS = 0.1
SHAPE = Shape(prompt_tokens=60, tool_tokens=12, tool_seconds=0.05, slow_seconds=0.6)


SIZES = {  # what a token costs to compute again differs: little in the first, much in the second
    "nano": {},
    "small": {"layers": 4, "width": 256, "heads": 4, "kv_heads": 2, "mlp_width": 768},
}
CALIBRATION_TURNS = {"nano": 30, "small": 10}


def engine(size: str, kv_tokens: int = POOL.kv_tokens) -> PacedEngine:
    """A Qwen3 with random weights."""
    shape = config.Model(max_tokens=POOL.max_len, **SIZES[size])
    net = model.build(shape, VOCABULARY, seed=0).eval()
    return PacedEngine(
        net.config, net.state_dict(), kv_tokens=kv_tokens, block=POOL.block,
        max_tokens=POOL.max_len, max_sequences=ROWS,
    )  # fmt: skip


def workload(trajectories: int, seed: int) -> Workload:
    return Workload.synthetic(
        trajectories // 8, 8, mean_tokens=280, cap=CAP, sigma=0.6, seed=seed, shape=SHAPE
    )


def play(size: str, name: str, work: Workload, seed: int) -> dict:
    """One policy on two real engines. Raises: AssertionError if the work was not done."""

    async def all_at_once() -> dict:
        engines = {POOL.spec(n).id: engine(size) for n in range(POOL.count)}
        limits = Limits(max_seqs=ROWS, max_len=POOL.max_len)
        dispatcher = Dispatcher(
            engines, scheduler.make_policy(name), limits=limits, prior=earlier_curve(work),
            tick_seconds=TICK_SECONDS, seed=seed,
        )  # fmt: skip
        failed = await replay(work.trajectories, dispatcher, VOCABULARY, seed)
        seconds = asyncio.get_running_loop().time()
        sampled = sum(e.load().sampled_tokens for e in engines.values())
        assert not failed and sampled == sum(t.tokens for r in work.trajectories for t in r.turns)
        row = {
            "makespan": seconds,
            "preemptions": sum(e.load().preemptions for e in engines.values()),
            "decision_p99_seconds": dispatcher.decision_p99(),
        }
        dispatcher.close()
        return row

    return run_virtually(all_at_once())


def exercised(size: str, seed: int) -> list[Step]:
    engines = [engine(size, 1 << 17) for _ in range(POOL.count)]
    return exercise(engines, VOCABULARY, seed, CALIBRATION_TURNS[size])


def one_seed(size: str, names: list[str], trajectories: int, seed: int) -> dict:
    """All policies on one trace, and what the simulator says of each.

    The prices come from exercises before and after: the speed of a machine drifts.
    """
    steps, work, rows = exercised(size, seed), workload(trajectories, seed), {}
    for name in names[seed % len(names) :] + names[: seed % len(names)]:  # none is always first
        rows[name] = play(size, name, work, seed)
    cost, quality = fit(steps + exercised(size, seed + 1000), f"cpu_{size}", ORIGIN)
    for name, row in rows.items():
        told = scheduler.simulate(
            name, work, POOL, cost, seed, tick_seconds=TICK_SECONDS, record=False
        )
        row |= {
            "predicted_makespan": told.makespan, "predicted_preemptions": told.preemptions,
            "lower_bound": told.lower_bound,
        }  # fmt: skip
        print(f"seed {seed} {name:21}{row['makespan']:8.3f} s {told.makespan:8.3f} s told"
              f"{row['preemptions']:6}{told.preemptions:6} told", flush=True)  # fmt: skip
    return {"cost": asdict(cost), "fit": quality, "policies": rows}


def summary(seeds: list[dict], names: list[str]) -> dict:
    """Medians over the seeds; errors of the predictions of the sums; speed-ups pair by pair."""
    out = {}
    for name in names:
        rows = [seed["policies"][name] for seed in seeds]
        sums = {key: sum(row[key] for row in rows) for key in rows[0]}
        errors = [row["predicted_makespan"] / row["makespan"] - 1 for row in rows]
        over_least = [
            seed["policies"]["least"]["makespan"] / seed["policies"][name]["makespan"]
            for seed in seeds
        ]
        measured, told = sums["preemptions"], sums["predicted_preemptions"]
        out[name] = {
            "makespan_median": float(np.median([row["makespan"] for row in rows])),
            "predicted_median": float(np.median([row["predicted_makespan"] for row in rows])),
            "makespan_error": [min(errors), float(np.median(errors)), max(errors)],
            "preemptions": measured,
            "predicted_preemptions": told,
            "preemption_error": told / measured - 1 if measured else float(told > 0),
            "times_faster_than_least": [min(over_least), float(np.median(over_least)),
                                        max(over_least)],
            "ratio_to_bound": float(np.median([r["makespan"] / r["lower_bound"] for r in rows])),
        }  # fmt: skip
    return out


def swapped_pairs(found: dict) -> list[list[str]]:
    """Pairs that differ by more than 5 % and that the simulator puts in the other order."""
    names = list(found)
    return [
        [a, b]
        for i, a in enumerate(names)
        for b in names[i + 1 :]
        if abs(found[a]["makespan_median"] / found[b]["makespan_median"] - 1) > 0.05
        and (found[a]["makespan_median"] > found[b]["makespan_median"])
        != (found[a]["predicted_median"] > found[b]["predicted_median"])
    ]


def table(found: dict) -> str:
    head = f"{'policy':22}{'s':>8}{'told':>8}{'error':>8}{'preempted':>11}{'told':>7}"
    lines = [head + f"{'over least':>12}{'bound':>7}"]
    for name, row in found.items():
        lines.append(
            f"{name:22}{row['makespan_median']:8.2f}{row['predicted_median']:8.2f}"
            f"{row['makespan_error'][1]:+8.1%}{row['preemptions']:11}"
            f"{row['predicted_preemptions']:7}{row['times_faster_than_least'][1]:11.2f}×"
            f"{row['ratio_to_bound']:7.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--trajectories", type=int, default=96)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--policies", nargs="+", default=list(scheduler.POLICIES))
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    exercised("nano", 99)  # warms up
    seeds = [
        one_seed(chosen.size, chosen.policies, chosen.trajectories, seed)
        for seed in tqdm(range(chosen.seeds), unit="trace")
    ]
    found = summary(seeds, chosen.policies)
    swapped = swapped_pairs(found)
    print(table(found))
    print(f"pairs in the wrong order: {swapped or 'none'}")
    command = (
        "python experiments/benchmarks/scheduler_real.py "
        f"--size {chosen.size} --trajectories {chosen.trajectories} --seeds {chosen.seeds}"
    )
    result = {
        "summary": found, "swapped_pairs": swapped, "seeds": seeds, "pool": asdict(POOL),
        "clock": "virtual; each step takes the processor seconds that it used",
        "provenance": runs.provenance(command, f"{chosen.size}, random weights, two CPU engines"),
    }  # fmt: skip
    runs.write_atomic(chosen.out, json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
