"""Many calls with some hostile ones among them: does anything grow?

Tiny programs, and in 2 % programs that loop, fork, allocate, flood, hide or hang, each with 0.3 s.
Ten times on the way it notes the resident memory, descriptors and processes of the whole tree. Only
on a sandbox at L3 or L4: the hostile programs must not reach the machine.

    python experiments/benchmarks/sandbox_soak.py --calls 100000
"""

import argparse
import contextlib
import json
import os
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
from tqdm.auto import tqdm

from rstar2lab import runs
from rstar2lab.sandbox import Limits, Sandbox

RESULTS = Path(__file__).parent / "results" / "sandbox_soak.json"
HOSTILE = (
    "while True: pass",
    "import os\nfor _ in range(300):\n    if os.fork() == 0:\n        os.setsid()\n",
    "x = bytearray(2 << 30)",
    "while True: print('x' * 10_000)",
    "import os\nos._exit(0)",
    "import os, time\nos.closerange(0, 100)\ntime.sleep(60)",
    "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()",
    "import signal, time\nfor s in range(1, 32):\n    try: signal.signal(s, signal.SIG_IGN)\n"
    "    except OSError: pass\nwhile True: pass",
    "import ctypes\nctypes.string_at(0)",
    "open('big', 'wb').write(b'x' * (300 << 20))",
)
SHARE = 0.02


def footprint() -> dict:
    """Of this process and everything below it; memory is proportional, so forks count once."""
    found = {"processes": 0, "descriptors": 0, "memory_mb": 0.0}
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            memory, descriptors = process.memory_full_info().pss, process.num_fds()
            found["processes"] += 1
            found["descriptors"] += descriptors
            found["memory_mb"] += memory / 2**20
    return found | {"memory_mb": round(found["memory_mb"], 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file")
    chosen = parser.parse_args()
    rng, statuses, marks = np.random.default_rng(0), Counter(), []
    wrong, part = 0, chosen.calls // 10
    started = time.monotonic()
    limits = Limits(wall_seconds=0.3, cpu_seconds=0.3)
    with Sandbox(chosen.workers, limits, require_level="L3") as sandbox:
        sandbox.run_many(["1"] * chosen.workers)
        marks.append({"calls": 0} | footprint())
        for number in tqdm(range(1, 11), unit="tenth"):
            hostile = rng.random(part) < SHARE
            programs = [
                HOSTILE[int(rng.integers(len(HOSTILE)))] if bad else f"print({i})"
                for i, bad in enumerate(hostile)
            ]
            results = sandbox.run_many(programs)
            statuses.update(r.status.name for r in results)
            wrong += sum(
                r.stdout != f"{i}\n"
                for i, (r, bad) in enumerate(zip(results, hostile, strict=True)) if not bad
            )  # fmt: skip
            time.sleep(0.5)  # the last of the killed are reaped
            marks.append({"calls": number * part} | footprint())
        level = sandbox.level
    seconds = time.monotonic() - started
    report = {
        "calls": chosen.calls, "level": level, "hostile_share": SHARE, "statuses": dict(statuses),
        "tiny_programs_with_a_wrong_result": wrong,
        "calls_per_second": round(10 * part / seconds, 1),
        "marks": marks, "after_close": footprint(), "load": round(os.getloadavg()[0], 2),
        "provenance": runs.provenance("python experiments/benchmarks/sandbox_soak.py", "no model"),
    }  # fmt: skip
    print(json.dumps({k: v for k, v in report.items() if k != "provenance"}, indent=1))
    runs.write_atomic(chosen.out, json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
