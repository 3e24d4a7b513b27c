"""Calls per second of code servers: `python experiments/benchmarks/sandbox.py`.

Four mixes of programs go to our service and to a peer in turn, round by round, in code-judge's wire
format. The peer is code-judge's request path rebuilt from its public description, since it is on no
package index: one queue, and for every call a script in a folder of its own, run by a new
interpreter that limits itself. It has no Redis in between, which is to its advantage, and no
isolation: none of the programs here is hostile. `--url` takes any running server instead.

CPU-ms per call are those of the server's whole process tree. The fork floor is what an empty
`fork` and `_exit` costs from a process that holds what our warm workers hold.
Prints a table and writes it, with provenance, to `results/sandbox.json` beside this file.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rstar2lab import runs

RESULTS = Path(__file__).parent / "results" / "sandbox.json"
BATCH, IN_FLIGHT = 40, 8  # calls of a batch; single requests at one time
PEER = "one fresh interpreter per call (code-judge's request path, rebuilt)"

# --- programs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """A program and what it prints; None for one that does not end well."""

    code: str
    prints: str | None


def tiny(rng: random.Random) -> Program:
    a, b = rng.randint(2, 99), rng.randint(2, 30)
    return Program(f"print({a}**{b})", f"{a**b}\n")


def with_libraries(rng: random.Random) -> Program:
    n = rng.randint(3, 9)
    return rng.choice([
        Program(f"import numpy as np\nprint(int(np.arange({n}).sum()))", f"{n * (n - 1) // 2}\n"),
        Program(f"import sympy\nprint(sympy.factorial({n}) // {n})", f"{factorial(n - 1)}\n"),
        Program(f"from sympy import symbols, expand\nx = symbols('x')\nprint(expand((x + {n})**2))",
                f"x**2 + {2 * n}*x + {n * n}\n"),
    ])  # fmt: skip


def factorial(n: int) -> int:
    return n * factorial(n - 1) if n > 1 else 1


def raising(rng: random.Random) -> Program:
    return Program(rng.choice(["print(undefined)", "1/0", "int('x')", "[][1]"]), None)


def looping(rng: random.Random) -> Program:
    return Program("while True:\n    pass", None)


MIXES = {  # shares, and calls of one request
    "tiny, batches": ({tiny: 1.0}, BATCH),
    "tiny, one per request": ({tiny: 1.0}, 1),
    "no loops": ({tiny: 0.6, with_libraries: 0.2, raising: 0.2}, BATCH),
    "5 % loops": ({tiny: 0.55, with_libraries: 0.2, raising: 0.2, looping: 0.05}, BATCH),
}


def programs(shares: dict, count: int, seed: int) -> list[Program]:
    """Exactly the given shares, in an order that depends on the seed alone."""
    rng = random.Random(seed)
    chosen = [make(rng) for make, share in shares.items() for _ in range(round(share * count))]
    rng.shuffle(chosen)
    return chosen


# --- a client that costs little ------------------------------------------------------------------


async def post(reader, writer, path: str, body: dict) -> dict:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: b\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    if " 200 " not in answer.splitlines()[0]:
        raise RuntimeError(f"expected 200 from {path}, found: {answer.splitlines()[0]}")
    length = next(x for x in answer.splitlines() if x.startswith("content-length:"))
    return json.loads(await reader.readexactly(int(length.split(":")[1])))


async def send_all(address: str, chosen: list[Program], batch: int) -> tuple[list, list[float]]:
    """(program, its result) pairs, and the seconds that each request took."""
    host, _, port = address.rpartition("/")[2].partition(":")
    pending = [chosen[i : i + batch] for i in range(0, len(chosen), batch)][::-1]
    pairs, seconds = [], []

    async def connection() -> None:
        reader, writer = await asyncio.open_connection(host, int(port or 80), limit=1 << 26)
        while pending:
            part, started = pending.pop(), time.perf_counter()
            rows = [{"type": "python", "solution": p.code, "input": None} for p in part]
            if batch == 1:
                results = [await post(reader, writer, "/run", rows[0])]
            else:
                body = {"type": "batch", "submissions": rows}
                results = (await post(reader, writer, "/run/long-batch", body))["results"]
            seconds.append(time.perf_counter() - started)
            pairs.extend(zip(part, results, strict=True))
        writer.close()

    await asyncio.gather(*(connection() for _ in range(IN_FLIGHT if batch == 1 else 2)))
    return pairs, seconds


# --- one round ------------------------------------------------------------------------------------


def cpu_seconds(root: int) -> float:
    """Processor seconds of a process, all below it, and all that they have buried."""
    children, own = {}, {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            text = Path(f"/proc/{name}/stat").read_text()
        except OSError:
            continue
        fields = text.rpartition(")")[2].split()
        children.setdefault(int(fields[1]), []).append(int(name))
        own[int(name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    total, pending = 0.0, [root]
    while pending:
        pid = pending.pop()
        total += own.get(pid, 0.0)
        pending += children.get(pid, [])
    return total


def measure(server: "Server", chosen: list[Program], batch: int) -> dict:
    before = cpu_seconds(server.pid) if server.pid else None
    started = time.perf_counter()
    pairs, seconds = asyncio.run(send_all(server.address, chosen, batch))
    wall = time.perf_counter() - started
    cpu = cpu_seconds(server.pid) - before if server.pid else None
    right = [(program, result) for program, result in pairs if program.prints is not None]
    failed = [p for p, r in right if not r["run_success"] or r["stdout"] != p.prints]
    ordered = sorted(seconds)
    return {
        "calls_per_second": round(len(pairs) / wall, 1),
        "request_mean_ms": round(1e3 * statistics.fmean(seconds), 1),
        "request_p99_ms": round(1e3 * ordered[int(0.99 * (len(ordered) - 1))], 1),
        "cpu_ms_per_call": None if cpu is None else round(1e3 * cpu / len(pairs), 2),
        "correct": len(right),
        "correct_reported_failed": len(failed),
    }


def compare(servers: list["Server"], count: int, rounds: int) -> dict:
    """Rounds of each mix, the servers in turn; which of them begins alternates as well."""
    found = {}
    for mix, (shares, batch) in MIXES.items():
        found[mix] = {server.name: [] for server in servers}
        for number in range(rounds):
            chosen = programs(shares, count, seed=number)
            for server in servers[:: 1 if number % 2 == 0 else -1]:
                row = measure(server, chosen, batch)
                found[mix][server.name].append(row)
                print(f"{mix:22} {server.name:6} round {number}: {json.dumps(row)}", flush=True)
    return found


# --- servers --------------------------------------------------------------------------------------


@dataclass
class Server:
    name: str
    address: str
    pid: int | None
    status: dict


@contextlib.contextmanager
def started(name: str, *command: str) -> Iterator[Server]:
    """A server process that has answered one call of every kind."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    process = subprocess.Popen([sys.executable, *command, "--port", str(port)])
    address = f"http://127.0.0.1:{port}"
    try:
        yield warmed_up(name, address, process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def warmed_up(name: str, address: str, pid: int | None) -> Server:
    for attempt in range(300):
        try:
            with urllib.request.urlopen(f"{address}/status", timeout=10) as answer:
                status = json.load(answer)
            break
        except OSError:
            if attempt == 299:
                raise
            time.sleep(0.2)
    shares = {tiny: 0.2, with_libraries: 0.6, raising: 0.2}
    asyncio.run(send_all(address, programs(shares, 40, seed=-1), 10))
    return Server(name, address, pid, status)


# --- the peer -------------------------------------------------------------------------------------

_PRELUDE = """\
import resource, signal
resource.setrlimit(resource.RLIMIT_CPU, ({seconds}, {seconds} + 1))
resource.setrlimit(resource.RLIMIT_AS, ({memory}, {memory}))
signal.alarm({seconds})
del resource, signal
"""


class Peer:
    """An ASGI application that runs each program with an interpreter of its own."""

    def __init__(self, workers: int, seconds: int, memory_mb: int):
        self.workers = asyncio.Semaphore(workers)
        self.status = {"queue": 0, "num_workers": workers}
        self.prelude = _PRELUDE.format(seconds=seconds, memory=memory_mb << 20)
        self.seconds = seconds

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "lifespan":
            for name in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{name}.complete"})
            return
        body, is_more = b"", True
        while is_more:
            message = await receive()
            body, is_more = body + message.get("body", b""), message.get("more_body", False)
        content = self.status
        if scope["path"] == "/run":
            content = await self.run(json.loads(body))
        elif scope["path"] == "/run/long-batch":
            rows = json.loads(body)["submissions"]
            content = {"sub_id": None, "results": await asyncio.gather(*map(self.run, rows))}
        data = json.dumps(content).encode()
        headers = [(b"content-length", b"%d" % len(data)), (b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": data})

    async def run(self, row: dict) -> dict:
        async with self.workers:
            start = time.monotonic()
            folder = Path(tempfile.mkdtemp())
            try:
                (folder / "source.py").write_text(self.prelude + row["solution"])
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "source.py", cwd=folder,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                )  # fmt: skip
                out, err = await process.communicate((row.get("input") or "").encode())
            finally:
                shutil.rmtree(folder)
            cost = time.monotonic() - start
        is_right = process.returncode == 0
        reason = "worker_timeout" if cost >= self.seconds and not is_right else ""
        return {
            "sub_id": None, "success": is_right, "run_success": is_right, "cost": cost,
            "stdout": out.decode()[:1000], "stderr": err.decode()[:1000], "reason": reason,
        }  # fmt: skip


# --- the floor ------------------------------------------------------------------------------------

_FLOOR = """\
import gc, os, resource, sys
{imports}
from rstar2lab.sandbox import kernel
gc.collect(); gc.freeze(); kernel.collapse_heap()
def cpu():
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in both)
before = cpu()
for _ in range(300):
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
print(1e3 * (cpu() - before) / 300)
"""


def fork_floor(imports: str) -> float:
    """CPU-ms of an empty fork and exit from a process that holds these modules."""
    program = _FLOOR.format(imports=imports)
    settings = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    run = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | settings, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    return round(float(run.stdout), 2)


# --- all together ---------------------------------------------------------------------------------


def ratios(found: dict) -> dict:
    """Ours against the peer, pair by pair of a round: the median and the range."""
    rows = {}
    for mix, by_server in found.items():
        pairs = zip(by_server.get("ours", []), by_server.get("peer", []), strict=False)
        each = [a["calls_per_second"] / b["calls_per_second"] for a, b in pairs]
        if each:
            rows[mix] = [round(x, 2) for x in (statistics.median(each), min(each), max(each))]
    return rows


def run(chosen: argparse.Namespace) -> dict:
    common = ("--workers", str(chosen.workers))
    limits = (
        "--cpu-seconds", str(chosen.seconds), "--wall-seconds", str(chosen.seconds),
        "--memory-mb", str(chosen.memory_mb),
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        if chosen.url:
            servers = [warmed_up("url", chosen.url.rstrip("/"), chosen.pid)]
        else:
            ours = ("-m", "rstar2lab.cli", "sandbox", "serve", *common, *limits)
            servers = [stack.enter_context(started("ours", *ours))]
            if not chosen.alone:
                peer = (__file__, "--peer", *common, "--seconds", str(chosen.seconds))
                servers.append(stack.enter_context(started("peer", *peer)))
        found = compare(servers, chosen.count, chosen.rounds)
        status = {server.name: server.status for server in servers}
    return {
        "peer": PEER,
        "level": {name: row.get("level") for name, row in status.items()},
        "ratio_median_min_max": ratios(found),
        "fork_floor_cpu_ms": {
            "bare": fork_floor(""),
            "numpy, scipy, sympy": fork_floor("import numpy, scipy, sympy"),
        },
        "mixes": found,
        "provenance": runs.provenance(
            "python experiments/benchmarks/sandbox.py",
            f"{chosen.count} calls per round, {chosen.rounds} rounds, {chosen.workers} workers, "
            f"limit {chosen.seconds} s, batches of {BATCH} or {IN_FLIGHT} single requests at once",
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="measure this server instead, in code-judge's format")
    parser.add_argument("--pid", type=int, help="its process, for CPU-ms per call")
    parser.add_argument("--alone", action="store_true", help="ours without the peer")
    parser.add_argument("--count", type=int, default=160, help="calls per round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seconds", type=int, default=4, help="limit of a call")
    parser.add_argument("--memory-mb", type=int, default=512)
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file")
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.peer:
        import uvicorn

        app = Peer(chosen.workers, chosen.seconds, 4096)
        return uvicorn.run(app, port=chosen.port, log_level="warning")
    result = run(chosen)
    print(json.dumps({k: v for k, v in result.items() if k != "mixes"}, indent=1))
    runs.write_atomic(chosen.out, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
