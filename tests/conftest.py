"""Fixtures that several test modules share: a small tokenizer, a barely trained nano model."""

import json

import pytest
from hypothesis import settings

from rstar2lab import config as cfg
from rstar2lab import protocol
from rstar2lab.nano import tokenizer
from rstar2lab.sandbox import Sandbox
from rstar2lab.types import Problem, ToolResult, ToolStatus

settings.register_profile("shared cores", deadline=None)
settings.load_profile("shared cores")

# The nano world at its smallest: about ten seconds of cold start, steps of half a second.
TINY = {
    "run.scale": "test",
    "run.steps": 4,
    "model.layers": 2,
    "model.width": 64,
    "model.heads": 2,
    "model.kv_heads": 1,
    "model.mlp_width": 128,
    "model.max_tokens": 256,
    "cold_start.steps": 40,
    "cold_start.dialogues": 600,
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


def toml_of(flat: dict) -> str:
    """Flat `section.key` values as a TOML file."""
    sections: dict[str, list[str]] = {}
    for name, value in flat.items():
        section, key = name.split(".", 1)
        sections.setdefault(section, []).append(f"{key} = {json.dumps(value)}")
    return "\n".join(f"[{name}]\n" + "\n".join(lines) for name, lines in sections.items())


@pytest.fixture(scope="session")
def config_file(tmp_path_factory):
    """`tiny.toml` with two arms beside it, as the command line reads them."""
    folder = tmp_path_factory.mktemp("configs")
    (folder / "tiny.toml").write_text(toml_of(TINY))
    (folder / "arms").mkdir()
    (folder / "arms" / "grpo_roc.toml").write_text('[selection]\nselector = "roc_paper"\n')
    (folder / "arms" / "grpo_tool.toml").write_text('[selection]\nselector = "uniform"\n')
    return folder / "tiny.toml"


@pytest.fixture(scope="session")
def cold_start_dir(tmp_path_factory):
    """A folder of cold starts that holds the one of `tiny_config`."""
    from rstar2lab import sft

    folder = tmp_path_factory.mktemp("cold_start")
    with Sandbox(workers=2) as sandbox:
        sft.cold_start(tiny_config(), folder, sandbox.run_many, command="test")
    return folder


@pytest.fixture(scope="session")
def cold_model(cold_start_dir):
    """The checkpoint folder of the tiny cold start."""
    from rstar2lab import sft

    return sft.cached(tiny_config(), cold_start_dir)


SMALL_CORPUS = [
    protocol.render_call("import math\nr = math.gcd(12,18)\nprint(r)"),
    "<reason>Wait, the code failed.</reason>",
    r"<answer>\boxed{42}</answer>",
    "What is the sum of all positive divisors of 360?",
]


@pytest.fixture(scope="session")
def tokens(tmp_path_factory):
    """A nano tokenizer whose words are those of four lines."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(tokenizer.train(SMALL_CORPUS * 10).to_str())
    return tokenizer.FileTokenizer(path)


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


@pytest.fixture
def environment():
    return FakeEnvironment()


@pytest.fixture(scope="session")
def problem():
    return Problem("p1", "What is 6 * 7?", "42")
