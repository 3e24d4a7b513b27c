"""Calls per second and latency of code environments that speak code-judge's wire format.

By itself it starts two servers and lets them take turns: ours at the strongest isolation level, and
the peer's request path rebuilt from its public description (code-judge itself is not on the package
index): behind the same HTTP endpoint every call writes a script and starts one fresh interpreter,
four at a time, without isolation. `--url NAME=ADDRESS` measures any other server instead.

Mixes: `tiny` prints a power, in batches or one call per request; `mixed` is 60 % tiny, 20 % numpy
or sympy, 20 % raising; `loops` is mixed with 5 % endless loops. No mix holds an attack: the peer
would suffer it. CPU per call is that of the server's process tree.

    python experiments/benchmarks/sandbox.py
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np

from rstar2lab import runs

RESULTS = Path(__file__).parent / "results" / "sandbox.json"
WORKERS, LIMIT_SECONDS, BATCH = 4, 4.0, 16
MIXES = {"tiny": (BATCH, 0.0), "tiny, one per request": (1, 0.0), "mixed": (BATCH, 0.0),
         "loops": (BATCH, 0.05)}  # fmt: skip
SCIENCE = (
    "import numpy as np\nprint(int(np.linalg.det(np.eye({n})) + {n}))",
    "from sympy import *\nx = symbols('x')\nprint(integrate(x**{n}, x).subs(x, 1))",
)


def programs(mix: str, count: int, seed: int = 0) -> list[tuple[str, bool | None]]:
    """(program, whether it must succeed); None for an endless loop."""
    rng, found = np.random.default_rng(seed), []
    loops = MIXES[mix][1]
    for _ in range(count):
        n, draw = int(rng.integers(2, 9)), rng.random()
        if rng.random() < loops:
            found.append(("while True: pass", None))
        elif mix.startswith("tiny") or draw < 0.6:
            found.append((f"print({n}**{int(rng.integers(2, 60))})", True))
        elif draw < 0.8:
            found.append((SCIENCE[int(rng.integers(2))].format(n=n), True))
        else:
            found.append((f"x = {n}\nprint(y)", False))
    return found


# --- servers --------------------------------------------------------------------------------------


def serve_peer(port: int) -> None:
    """The peer's request path: a script file and a fresh interpreter per call, no isolation."""
    import uvicorn
    from fastapi import FastAPI

    app, slots = FastAPI(), asyncio.Semaphore(WORKERS)
    alarm = f"import signal; signal.alarm({int(LIMIT_SECONDS)})\n"

    async def one(item: dict) -> dict:
        async with slots:
            with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
                file.write(alarm + item["solution"])
                file.flush()
                started = time.monotonic()
                child = await asyncio.create_subprocess_exec(
                    sys.executable, file.name, stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                )  # fmt: skip
                out, err = await child.communicate()
        is_ok = child.returncode == 0
        reason = "worker_timeout" if child.returncode == -signal.SIGALRM else ""
        return {"success": is_ok, "run_success": is_ok, "cost": time.monotonic() - started,
                "stdout": out.decode()[:1000], "stderr": err.decode()[:1000],
                "reason": reason}  # fmt: skip

    @app.post("/run/long-batch")
    async def batch(asked: dict) -> dict:
        return {"results": await asyncio.gather(*(one(item) for item in asked["submissions"]))}

    @app.get("/ping")
    async def ping() -> str:
        return "pong"

    uvicorn.run(app, port=port, log_level="warning")


@contextmanager
def server(name: str):
    """A server process that answers: (address, pid)."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    words = [sys.executable, __file__, "--serve-peer", str(port)]
    if name == "rstar2lab":
        words = [sys.executable, "-m", "rstar2lab.cli", "sandbox", "serve", "--port", str(port)]
        words += ["--workers", str(WORKERS)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                httpx.get(f"{address}/ping")
                break
            except httpx.HTTPError:
                time.sleep(0.1)
        yield address, process.pid
    finally:
        process.terminate()
        process.wait(20)


def cpu_seconds(pid: int) -> float:
    """User and system time of the tree below `pid`, ended children included."""
    ticks, children = 0, {}
    stats = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        stats[int(name)] = sum(map(int, fields[11:15]))
        children.setdefault(int(fields[1]), []).append(int(name))
    pending = [pid]
    while pending:
        one = pending.pop()
        ticks += stats.get(one, 0)
        pending += children.get(one, [])
    return ticks / os.sysconf("SC_CLK_TCK")


# --- measuring ------------------------------------------------------------------------------------


async def drive(address: str, items: list[tuple[str, bool | None]], batch: int) -> list[tuple]:
    """(seconds until the answer, result, whether it must succeed) of every program."""
    found = []

    async def send(client: httpx.AsyncClient, part) -> None:
        submissions = [{"type": "python", "solution": code, "input": None} for code, _ in part]
        started = time.monotonic()
        answer = await client.post(f"{address}/run/long-batch", json={"type": "batch",
                                   "submissions": submissions})  # fmt: skip
        answer.raise_for_status()
        seconds = time.monotonic() - started
        for (_, must), result in zip(part, answer.json()["results"], strict=True):
            found.append((seconds, result, must))

    limits = httpx.Limits(max_connections=8)
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:
        parts = [items[i : i + batch] for i in range(0, len(items), batch)]
        await asyncio.gather(*(send(client, part) for part in parts))
    return found


def measure(address: str, pid: int | None, mix: str, count: int, seed: int) -> dict:
    """One pass of one mix."""
    items = programs(mix, count, seed)
    cpu, started = cpu_seconds(pid) if pid else 0.0, time.monotonic()
    found = asyncio.run(drive(address, items, MIXES[mix][0]))
    wall = time.monotonic() - started
    latencies = [seconds for seconds, _, _ in found]
    return {
        "calls_per_second": count / wall,
        "mean_seconds": float(np.mean(latencies)),
        "p99_seconds": float(np.quantile(latencies, 0.99)),
        "cpu_ms_per_call": 1000 * (cpu_seconds(pid) - cpu) / count if pid else None,
        "right_programs_failed": sum(must is True and not r["run_success"] for _, r, must in found),
        "loops_not_stopped": sum(
            must is None and r["reason"] != "worker_timeout" for _, r, must in found
        ),
    }


def summary(passes: list[dict]) -> dict:
    """Medians; failures are sums."""
    sums, found = ("right_programs_failed", "loops_not_stopped"), {}
    for key, first in passes[0].items():
        values = [one[key] for one in passes]
        found[key] = sum(values) if key in sums else first and round(float(np.median(values)), 4)
    return found


def compare(servers: dict[str, tuple[str, int | None]], chosen) -> dict:
    """All mixes, the servers in turn."""
    report = {}
    for address, _ in servers.values():  # warm both: templates, tiers, page cache
        asyncio.run(drive(address, programs("mixed", 20), 4))
    for mix in chosen.mixes:
        passes = {name: [] for name in servers}
        for seed in range(chosen.repeats):
            for name, (address, pid) in servers.items():
                passes[name].append(measure(address, pid, mix, chosen.calls, seed))
        report[mix] = {name: summary(rows) for name, rows in passes.items()}
        for name, row in report[mix].items():
            print(f"{mix:24}{name:22}", {k: v for k, v in row.items()}, flush=True)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=160, help="per pass and mix")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=list(MIXES))
    parser.add_argument("--url", nargs="*", default=[], metavar="NAME=ADDRESS")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file")
    parser.add_argument("--serve-peer", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve_peer:
        return serve_peer(chosen.serve_peer)
    if chosen.url:
        named = (text.partition("=") for text in chosen.url)
        servers = {name: (address, None) for name, _, address in named}
        mixes = compare(servers, chosen)
    else:
        with server("rstar2lab") as ours, server("peer") as peer:
            level = httpx.get(f"{ours[0]}/status").json()["level"]
            mixes = compare({f"rstar2lab {level}": ours, "fresh interpreter": peer}, chosen)
    report = {
        "calls": chosen.calls, "repeats": chosen.repeats, "workers": WORKERS, "batch": BATCH,
        "load": round(os.getloadavg()[0], 2), "mixes": mixes,
        "provenance": runs.provenance("python experiments/benchmarks/sandbox.py", "no model"),
    }  # fmt: skip
    runs.write_atomic(chosen.out, json.dumps(report, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
