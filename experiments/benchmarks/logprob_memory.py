"""Peak memory and time of log-probs and entropies: a dense logits tensor against chunks.

Each measurement runs in a process of its own and reports its peak resident memory over what it held
before the path began, and its CPU seconds on one thread. One pass is: statistics of all tokens, a
loss on the log-probs, gradients of hidden states and head. The dense path grows by the token, so
its numbers for the full batch follow from two smaller ones by a straight line, unless
`--dense-full` (about 15 GB) measures them.

    python experiments/benchmarks/logprob_memory.py
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

VOCABULARY, WIDTH, SEQUENCE = 151_936, 64, 1024
RESULTS = Path(__file__).parent / "results" / "logprob_memory.json"


def dense_statistics(hidden_KD, weight_VD, targets_K):
    """The plain float32 formula, every array whole."""
    logprobs_KV = (hidden_KD @ weight_VD.T).log_softmax(-1)
    entropies_K = -(logprobs_KV.detach().exp() * logprobs_KV.detach()).sum(-1)
    return logprobs_KV.gather(1, targets_K[:, None])[:, 0], entropies_K


def chunked_statistics(hidden_KD, weight_VD, targets_K):
    from rstar2lab import logprobs

    return logprobs.token_statistics(hidden_KD, weight_VD, targets_K)


PATHS = {"dense": dense_statistics, "chunked": chunked_statistics}


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def tensors(num_tokens: int):
    import torch

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, WIDTH, generator=generator) / 2
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator) / 2
    targets = torch.randint(VOCABULARY, (num_tokens,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def measure(path: str, num_tokens: int) -> dict:
    """One pass of one path: peak memory above the start in MB, and CPU seconds."""
    statistics = PATHS[path]
    hidden, weight, targets = tensors(num_tokens)
    (hidden[:8] @ weight.T).sum().backward()  # wakes the matrix library before the count
    before, started = peak_mb(), time.process_time()
    logprobs_K, entropies_K = statistics(hidden, weight, targets)
    (logprobs_K * targets).mean().backward()
    return {
        "path": path, "tokens": num_tokens, "seconds": time.process_time() - started,
        "peak_mb": peak_mb() - before,
    }  # fmt: skip


def largest_errors(num_tokens: int) -> dict:
    """Both paths against float64 on the same tokens, in nats."""
    import torch

    hidden, weight, targets = tensors(num_tokens)
    with torch.no_grad():
        exact_KV = (hidden.double() @ weight.double().T).log_softmax(-1)
        exact = exact_KV.gather(1, targets[:, None])[:, 0], -(exact_KV.exp() * exact_KV).sum(-1)
        return {
            f"{path} {name}": float((found - right).abs().max())
            for path, statistics in PATHS.items()
            for name, found, right in zip(
                ("log-probs", "entropies"), statistics(hidden, weight, targets), exact, strict=True
            )
        }


def in_own_process(*arguments: object) -> dict:
    command = [sys.executable, __file__, *map(str, arguments)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def best_of(repeats: int, path: str, num_tokens: int) -> dict:
    """The fastest of several runs, with the highest of their peaks."""
    runs = [in_own_process("--measure", path, num_tokens) for _ in range(repeats)]
    best = min(runs, key=lambda run: run["seconds"])
    return best | {"peak_mb": max(run["peak_mb"] for run in runs), "how": f"best of {repeats}"}


def extrapolated(first: dict, second: dict, num_tokens: int) -> dict:
    """The straight line through two measurements, at `num_tokens`."""
    share = (num_tokens - first["tokens"]) / (second["tokens"] - first["tokens"])
    line = {key: first[key] + share * (second[key] - first[key]) for key in ("seconds", "peak_mb")}
    return {"path": first["path"], "tokens": num_tokens, **line, "how": "extrapolated"}


def compare(sequences: int, repeats: int, dense_full: bool) -> dict:
    small, middle, full = SEQUENCE, 2 * SEQUENCE, sequences * SEQUENCE
    rows = [best_of(repeats, path, tokens) for tokens in (small, middle) for path in PATHS]
    dense = [row for row in rows if row["path"] == "dense"]
    rows.append(best_of(1, "dense", full) if dense_full else extrapolated(*dense, full))
    rows.append(best_of(1, "chunked", full))
    pairs = [rows[i : i + 2] for i in range(0, len(rows), 2)]
    return {
        "vocabulary": VOCABULARY, "width": WIDTH, "threads": 1,
        "host": f"{platform.machine()}, {platform.python_version()}",
        "rows": rows,
        "memory_ratio": {d["tokens"]: c["peak_mb"] / d["peak_mb"] for d, c in pairs},
        "time_ratio": {d["tokens"]: c["seconds"] / d["seconds"] for d, c in pairs},
        "largest_error_against_float64": in_own_process("--errors", 256),
    }  # fmt: skip


def table(found: dict) -> str:
    lines = [f"{'path':<9}{'tokens':>8}{'peak MB':>10}{'CPU s':>9}  how"]
    lines += [
        f"{row['path']:<9}{row['tokens']:>8}{row['peak_mb']:>10.0f}{row['seconds']:>9.2f}  "
        f"{row['how']}"
        for row in found["rows"]
    ]
    for tokens, ratio in found["memory_ratio"].items():
        lines.append(
            f"{tokens} tokens: memory 1/{1 / ratio:.1f}, time {found['time_ratio'][tokens]:.2f}×"
        )
    errors = found["largest_error_against_float64"].items()
    return "\n".join([*lines, "largest error: " + ", ".join(f"{k} {v:.1e}" for k, v in errors)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=8, help="of 1,024 tokens each")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dense-full", action="store_true", help="measure it: about 15 GB")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--errors", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.measure:
        print(json.dumps(measure(chosen.measure[0], int(chosen.measure[1]))))
    elif chosen.errors:
        print(json.dumps(largest_errors(chosen.errors)))
    else:
        found = compare(chosen.sequences, chosen.repeats, chosen.dense_full)
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        print(table(found))


if __name__ == "__main__":
    main()
