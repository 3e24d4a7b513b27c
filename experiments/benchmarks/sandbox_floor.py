"""What an isolated call costs in processor time, beside the bare fork that it cannot do without.

For each tier: a process of the sandbox, with the tier's modules in memory, forks empty children
(`fork`) and children that run the program and do nothing else (`fork_and_run`); then the sandbox
runs the program in full (`call`), with limits, isolation and clean-up. The three alternate. Seconds
are those of the processor, of all processes together, so that a busy machine matters less.

    python experiments/benchmarks/sandbox_floor.py --calls 300
"""

import argparse
import json
import os
from pathlib import Path

from rstar2lab import runs
from rstar2lab.sandbox import Limits, Sandbox
from rstar2lab.sandbox.service import DEFAULT_TIERS

RESULTS = Path(__file__).parent / "results" / "sandbox_floor.json"
PROGRAM = "print(7**9)"
FORKS = """
import os, resource
def used():
    both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)
before, null = used(), os.open("/dev/null", os.O_WRONLY)
for _ in range({calls}):
    pid = os.fork()
    if pid == 0:
        if {runs_program}:
            os.dup2(null, 1)
            exec(compile({program!r}, "<program>", "exec"), {{}})
        os._exit(0)
    os.waitpid(pid, 0)
print(1000 * (used() - before) / {calls})
"""
TICKS = os.sysconf("SC_CLK_TCK")


def seconds_of(pids: list[int]) -> float:
    """Processor seconds of processes and the children that they have waited for."""
    fields = [Path(f"/proc/{p}/stat").read_text().rpartition(")")[2].split() for p in pids]
    return sum(sum(map(int, row[11:15])) for row in fields) / TICKS


def below(root: int) -> list[int]:
    """`root`, and processes below it that last: templates and slots."""
    found = [root]
    for pid in found:
        found += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return found


def full_calls(sandbox: Sandbox, program: str, calls: int) -> float:
    """Processor milliseconds per call, of the owner and all workers."""
    before = seconds_of(below(os.getpid()))
    for _ in range(calls):
        if sandbox.run(program).stdout != "40353607\n":
            raise SystemExit("a program had a wrong result")
    return 1000 * (seconds_of(below(os.getpid())) - before) / calls


def measure(modules: tuple[str, ...], calls: int, rounds: int) -> dict:
    """One tier: medians over rounds that alternate."""
    imports = "".join(f"import {name}\n" for name in modules)
    program, rows = imports + PROGRAM, []
    with Sandbox(1, Limits(cpu_seconds=120, wall_seconds=120)) as sandbox:

        def forks(runs_program: bool) -> float:
            code = FORKS.format(calls=calls, runs_program=runs_program, program=program)
            return float(sandbox.run(imports + code).stdout)

        full_calls(sandbox, program, 3)
        for _ in range(rounds):
            rows.append([forks(False), forks(True), full_calls(sandbox, program, calls)])
        level = sandbox.level
    middle = [round(sorted(column)[len(column) // 2], 3) for column in zip(*rows, strict=True)]
    names = ("fork_ms", "fork_and_run_ms", "call_ms")
    return {"modules": modules, "level": level, **dict(zip(names, middle, strict=True))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file")
    chosen = parser.parse_args()
    tiers = [measure(tier, chosen.calls, chosen.rounds) for tier in ((), *DEFAULT_TIERS)]
    report = {
        "calls": chosen.calls, "rounds": chosen.rounds, "tiers": tiers,
        "load": round(os.getloadavg()[0], 2),
        "provenance": runs.provenance("python experiments/benchmarks/sandbox_floor.py", "no model"),
    }  # fmt: skip
    print(json.dumps(tiers, indent=1))
    runs.write_atomic(chosen.out, json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
