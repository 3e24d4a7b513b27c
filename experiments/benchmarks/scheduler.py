"""Every policy on simulated engines, against the time that no schedule can beat.

One step of 512 × 32 trajectories on 64 engines (§3.2), four settings of KV capacity and response
length, then B once more with something wrong: the curve of lengths, the age of the reports, an
engine. Prices are arithmetic from data sheets, not calibrated. All policies play the same
trajectories; speed-ups are paired by seed; intervals are Student-t over the seeds.

    python experiments/benchmarks/scheduler.py

Interrupted, it goes on where it was. Points of another version of the scheduler are computed anew.
"""

import argparse
import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tqdm.auto import tqdm

from rstar2lab import runs, scheduler, stats
from rstar2lab.scheduler import CostModel, EnginePool, Fault, Survival, Workload
from rstar2lab.scheduler.policies import Reserve

RESULTS = Path(__file__).parent / "results" / "scheduler.json"
SAMPLES, PROMPTS_PER_ENGINE = 32, 8
COST = CostModel.preset("mi300x_qwen3_14b")
VALUES = (
    "ratio", "preempted", "recomputed", "moved", "mean_batch", "idle_fraction", "makespan",
    "over_static_sync", "over_least",
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """KV tokens of an engine, the response budget, mean length before the cut; what goes wrong.

    curve: factor on the lengths that the policy has seen. lost_at: when engine 0 goes for good.
    """

    kv_tokens: int
    cap: int = 8192
    mean_tokens: float = 4500
    curve: float = 1.0
    tick_seconds: float | None = None
    lost_at: float | None = None
    engines_missing: int = 0


B = Setting(400_000)  # half of the memory: a trainer lives beside it
MAIN = {
    "A": Setting(757_000),  # 192 GB × 0.8 - weights
    "B": B,
    "C": Setting(210_000),  # 80 GB × 0.8 - weights
    "D": Setting(400_000, 12_288, 7000),
}
WRONG = {
    "B, curve × 0.70": replace(B, curve=0.70),
    "B, curve × 0.85": replace(B, curve=0.85),
    "B, curve × 1.15": replace(B, curve=1.15),
    "B, curve × 1.30": replace(B, curve=1.30),
    "B, reports every 5 s": replace(B, tick_seconds=5.0),
    "B, one engine lost": replace(B, lost_at=60.0),
    "B, one engine less": replace(B, engines_missing=1),
}
SETTINGS = MAIN | WRONG
VARIANTS = {
    "static_sync_half": lambda: scheduler.make_policy("static_sync"),  # half evicted and held
    "reserve_half": lambda: Reserve(commit=0.5),
    "survival_z3": lambda: Survival(z=3.0),
}
NAMES = [*scheduler.POLICIES, *VARIANTS]
DECIDING = "cost events lengths policies simulated simulator survival workload".split()
ON_WRONG = ("least", "survival", "survival_move", "survival_yield")


def version() -> str:
    """Of the code that decides the numbers."""
    folder = Path(scheduler.__file__).parent
    sources = b"".join((folder / f"{name}.py").read_bytes() for name in DECIDING)
    return hashlib.sha256(sources).hexdigest()[:12]


def play(setting: Setting, name: str, seed: int, engines: int) -> dict:
    """One policy on one step; processor seconds are the simulator's own."""
    work = Workload.synthetic(
        PROMPTS_PER_ENGINE * engines, SAMPLES, setting.mean_tokens, setting.cap, seed=seed
    )
    work = replace(work, earlier_lengths=[int(n * setting.curve) for n in work.earlier_lengths])
    pool = EnginePool(
        engines - setting.engines_missing, setting.kv_tokens,
        preemption="half" if name == "static_sync_half" else "newest",
    )  # fmt: skip
    policy = VARIANTS[name]() if name in VARIANTS else name
    faults = [Fault(setting.lost_at, 0, "down")] if setting.lost_at else []
    started = time.process_time()
    found = scheduler.simulate(
        policy, work, pool, COST, seed, faults=faults, record=False,
        tick_seconds=setting.tick_seconds,
    )  # fmt: skip
    cpu_seconds = time.process_time() - started
    result = asdict(found) | {"cpu_seconds": round(cpu_seconds, 2)}
    del result["events"]
    return result


def row(point: dict, makespans: dict[tuple, float]) -> dict[str, float]:
    """What is averaged over the seeds. Shares are of the trajectories, recomputed of the sampled.

    A speed-up needs the other policy's makespan for the same setting and seed.
    """
    count = sum(point["ends"].values())
    found = {name: point[name] for name in ("makespan", "mean_batch", "idle_fraction")}
    found |= {
        "ratio": point["makespan"] / point["lower_bound"],
        "preempted": point["preemptions"] / count,
        "recomputed": point["recomputed_tokens"] / point["generated_tokens"],
        "moved": point["moves"] / count,
    }
    for other in ("static_sync", "least"):
        before = makespans.get((point["setting"], other, point["seed"]))
        if before is not None:
            found[f"over_{other}"] = before / point["makespan"]
    return found


def summary(points: list[dict]) -> list[dict]:
    """One entry per setting and policy: mean, low, high and n of every value."""
    makespans = {(p["setting"], p["policy"], p["seed"]): p["makespan"] for p in points}
    found: dict[tuple, list[dict]] = {}
    for point in points:
        key = point["setting"], point["policy"]
        found.setdefault(key, []).append(row(point, makespans))
    table = []
    for setting in SETTINGS:
        for name in NAMES:
            rows = found.get((setting, name), [])
            entry: dict = {"setting": setting, "policy": name}
            for value in VALUES:
                values = [r[value] for r in rows if value in r]
                if values:
                    entry[value] = asdict(stats.t_interval(values))
            if rows:
                table.append(entry)
    return table


def text(table: list[dict]) -> Iterator[str]:
    """The table for a terminal; ± is half of the 95 % interval."""
    head = f"{'× bound':>14}{'preempted':>11}{'recomputed':>11}{'moved':>7}{'batch':>7}{'idle':>6}"
    head += f"{'× static_sync':>16}{'× least':>15}"
    last = None
    for entry in table:
        if entry["setting"] != last:
            last = entry["setting"]
            yield f"\n{last:22}" + head
        cells = [_pm(entry["ratio"], 14)]
        for name, width, form in (
            ("preempted", 11, ".3f"), ("recomputed", 11, ".3f"), ("moved", 7, ".2f"),
            ("mean_batch", 7, ".0f"), ("idle_fraction", 6, ".2f"),
        ):  # fmt: skip
            cells.append(f"{entry[name]['mean']:{width}{form}}")
        cells += [_pm(entry.get("over_static_sync"), 16), _pm(entry.get("over_least"), 15)]
        yield f"{entry['policy']:22}" + "".join(cells)


def _pm(interval: dict | None, width: int) -> str:
    if interval is None:
        return " " * width
    half = (interval["high"] - interval["low"]) / 2
    return f"{interval['mean']:.3f} ± {half:.3f}".rjust(width)


def planned(chosen: argparse.Namespace) -> list[tuple[str, str, int]]:
    """Seed by seed, so that an early stop leaves all policies with the same seeds."""
    return [
        (setting, name, seed)
        for group in (MAIN, WRONG)
        for seed in range(chosen.seeds)
        for setting in group
        for name in chosen.policies
        if setting in chosen.settings and (group is MAIN or name in ON_WRONG)
    ]


def load(path: Path, engines: int) -> dict[tuple, dict]:
    """Points of an earlier run by this version, at this scale."""
    if not path.exists():
        return {}
    before = json.loads(path.read_text())
    if before["version"] != version() or before["engines"] != engines:
        return {}
    return {(p["setting"], p["policy"], p["seed"]): p for p in before["points"]}


def save(path: Path, engines: int, points: dict[tuple, dict], command: str) -> list[dict]:
    table = summary(list(points.values()))
    result = {
        "engines": engines, "prompts": PROMPTS_PER_ENGINE * engines, "samples": SAMPLES,
        "cost": asdict(COST), "settings": {name: asdict(s) for name, s in SETTINGS.items()},
        "version": version(), "table": table, "points": list(points.values()),
        "provenance": runs.provenance(command, "simulated; prices not calibrated"),
    }  # fmt: skip
    runs.write_atomic(path, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS,
                        metavar="NAME", help="; ".join(SETTINGS))  # fmt: skip
    parser.add_argument("--policies", nargs="+", default=NAMES, choices=NAMES,
                        metavar="NAME", help="; ".join(NAMES))  # fmt: skip
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--engines", type=int, default=64, help="with 256 trajectories each")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file; also what is resumed")
    chosen = parser.parse_args()
    command = f"python experiments/benchmarks/scheduler.py --engines {chosen.engines} " \
              f"--seeds {chosen.seeds}"  # fmt: skip
    points = load(chosen.out, chosen.engines)
    for key in tqdm(planned(chosen), unit="step"):
        if key not in points:
            setting, name, seed = key
            points[key] = {"setting": setting, "policy": name, "seed": seed} | play(
                SETTINGS[setting], name, seed, chosen.engines
            )
            save(chosen.out, chosen.engines, points, command)
    table = save(chosen.out, chosen.engines, points, command)
    print("\n".join(text(table)))


if __name__ == "__main__":
    main()
