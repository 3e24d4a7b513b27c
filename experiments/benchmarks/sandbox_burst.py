"""All calls of one training step at once, and not one lost: 45,000 (§3.1) into one service.

Twice: programs that sleep 10 ms, and real tiny programs (`a**b`). Every call is sent before the
first is missed; each must come back once, right, and in its place. What a call waited for and what
it ran for are told apart; the memory is the server's own process.

    python experiments/benchmarks/sandbox_burst.py --calls 45000
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil

from rstar2lab import runs
from rstar2lab.sandbox import SandboxError
from rstar2lab.sandbox.client import SandboxClient

RESULTS = Path(__file__).parent / "results" / "sandbox_burst.json"
KINDS = {
    "sleeps of 10 ms": lambda i: (f"import time; time.sleep(0.01)\nprint({i})", f"{i}\n"),
    "tiny": lambda i: (f"print({i}**3)", f"{i**3}\n"),
}


class Watch(threading.Thread):
    """The most resident memory of a process, in MB, looked at every 0.2 s."""

    def __init__(self, process: psutil.Process):
        super().__init__(daemon=True)
        self.process, self.done = process, threading.Event()
        self.memory = 0.0

    def run(self) -> None:
        while not self.done.wait(0.2):
            self.memory = max(self.memory, self.process.memory_info().rss / 2**20)


def burst(client: SandboxClient, server: psutil.Process, kind: str, calls: int) -> dict:
    """One kind, `calls` of them at once. Seconds per call: waiting, running, and both."""
    programs, expected = zip(*map(KINDS[kind], range(calls)), strict=True)
    before = server.memory_info().rss / 2**20
    watch = Watch(server)
    watch.start()
    started = time.monotonic()
    results = client.run_many(programs)
    wall = time.monotonic() - started
    watch.done.set()
    watch.join()
    both = np.array([[r.queue_seconds, r.seconds] for r in results])
    seconds = dict(zip(("waiting", "running"), both.T, strict=True)) | {"both": both.sum(1)}
    return {
        "calls_per_second": round(calls / wall, 1),
        "wall_seconds": round(wall, 1),
        "results": len(results),
        "wrong_or_out_of_place": sum(
            r.stdout != text for r, text in zip(results, expected, strict=True)
        ),
        "sent_again": client.retries,
        "seconds_per_call": {
            name: {"mean": round(float(s.mean()), 4), "p99": round(float(np.quantile(s, 0.99)), 4)}
            for name, s in seconds.items()
        },
        "server_mb": {"before": round(before), "most": round(watch.memory)},
    }


def connected(address: str) -> SandboxClient:
    """The client, as soon as the service answers."""
    for _ in range(300):
        try:
            return SandboxClient(address)
        except SandboxError:
            time.sleep(0.2)
    raise SystemExit(f"expected a service at {address} within a minute, found none")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=45_000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file")
    chosen = parser.parse_args()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = str(sock.getsockname()[1])
    serve = ("-m", "rstar2lab.cli", "sandbox", "serve", "--workers", str(chosen.workers))
    server = subprocess.Popen([sys.executable, *serve, "--port", port])
    found = {}
    try:
        with connected(f"http://127.0.0.1:{port}") as client:
            client.run_many(["1"] * 4 * chosen.workers)  # warms up
            for kind in KINDS:
                found[kind] = burst(client, psutil.Process(server.pid), kind, chosen.calls)
                print(f"{kind}: {json.dumps(found[kind], indent=1)}", flush=True)
            level = client.level
    finally:
        server.terminate()
        server.wait(60)
    report = {
        "calls": chosen.calls, "workers": chosen.workers, "level": level, "bursts": found,
        "load": round(os.getloadavg()[0], 2),
        "provenance": runs.provenance("python experiments/benchmarks/sandbox_burst.py", "no model"),
    }  # fmt: skip
    runs.write_atomic(chosen.out, json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
