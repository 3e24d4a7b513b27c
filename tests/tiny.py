"""The smallest worlds that tests run in: a configuration, a corpus, a made-up code environment."""

import asyncio
import json
import sys
from dataclasses import replace

from rstar2lab import config as cfg
from rstar2lab import protocol, rollout
from rstar2lab.types import StopReason, ToolResult, ToolStatus, Trajectory

# Two seconds of cold start teach the format and no arithmetic; a step takes 0.2 s.
TINY = {
    "run.scale": "test",
    "run.steps": 4,
    "model.layers": 1,
    "model.width": 64,
    "model.heads": 2,
    "model.kv_heads": 1,
    "model.mlp_width": 128,
    "model.max_tokens": 256,
    "cold_start.dialogues": 200,
    "cold_start.steps": 120,
    "cold_start.batch": 8,
    "cold_start.warmup_steps": 5,
    "cold_start.no_tool": 0.1,
    "cold_start.threads": 1,
    "problems.train": 40,
    "problems.held_out": 4,
    "chat.style": "nano",
    "chat.max_turns": 3,
    "chat.response_chars": 60,
    "rollout.prompts_per_step": 3,
    "rollout.samples_per_prompt": 4,
    "rollout.max_response_tokens": 96,
    "selection.keep": 2,
    "selection.selector": "roc_paper",
    "optimizer.lr": 5e-4,
    "evaluation.every": 2,
    "evaluation.samples": 1,
    "records.checkpoint_every": 1,
    "records.trajectories_every": 2,
}


def tiny_config(**changes) -> cfg.Config:
    """The smallest runnable configuration; `loss__ddof=1` sets `loss.ddof`."""
    return cfg.from_flat(TINY | {k.replace("__", ".", 1): v for k, v in changes.items()})


def less_uniform(net):
    """Random weights made larger, so that a wrong position or mask shows in the log-probs."""
    for parameter in net.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(6.0)
    return net


def toml_of(flat: dict) -> str:
    """Flat `section.key` values as a TOML file."""
    sections: dict[str, list[str]] = {}
    for name, value in flat.items():
        section, key = name.split(".", 1)
        sections.setdefault(section, []).append(f"{key} = {json.dumps(value)}")
    return "\n".join(f"[{name}]\n" + "\n".join(lines) for name, lines in sections.items())


CORPUS = [
    protocol.render_call("import math\nr = math.gcd(12,18)\nprint(r)"),
    "<reason>Wait, the code failed.</reason>",
    r"<answer>\boxed{42}</answer>",
    "What is the sum of all positive divisors of 360?",
]


class FakeEnvironment:
    """Answers `print(<integer>)` with the integer; other programs by the first word they hold."""

    OUTCOMES = {
        "boom": ToolResult(ToolStatus.ERROR, stderr="ZeroDivisionError: division by zero\n"),
        "slow": ToolResult(ToolStatus.TIMEOUT),
        "outage": ToolResult(ToolStatus.SERVICE_FAILURE, stderr="worker died twice"),
    }

    def __init__(self):
        self.programs: list[tuple[str, str]] = []

    async def arun(self, code: str, stdin: str = "") -> ToolResult:
        self.programs.append((code, stdin))
        for word, result in self.OUTCOMES.items():
            if word in code:
                return result
        return ToolResult(ToolStatus.OK, stdout=code.removeprefix("print(").rstrip(")") + "\n")


class SlowFirst(FakeEnvironment):
    """The same answers, earlier calls taking longer, so that rollouts interleave."""

    delay_seconds = 0.02

    async def arun(self, code: str, stdin: str = "") -> ToolResult:
        self.delay_seconds /= 2
        await asyncio.sleep(self.delay_seconds)
        return await super().arun(code, stdin)


def odd_lengths_win(trajectory: Trajectory, problem, check=None) -> Trajectory:
    """A reward that a model which cannot calculate earns half of the time: groups are mixed."""
    if trajectory.stop is StopReason.VOID:
        return replace(trajectory, reason="void")
    reward = float(len(trajectory.response_ids) % 2)
    return replace(trajectory, reward=reward, reason="exact_integer" if reward else "mismatch")


def train(folder: str, model_path: str, *settings: str) -> None:
    """A training run in a process of its own, for tests that kill it."""
    from rstar2lab import trainer

    rollout.score_or_void = odd_lengths_win
    config = cfg.from_flat(TINY | dict(cfg.parse_setting(text) for text in settings))
    trainer.Trainer(config, folder, arm="grpo_roc", model_path=model_path).run()


if __name__ == "__main__":
    train(*sys.argv[1:])
