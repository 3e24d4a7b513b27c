"""The engine, sandbox, tokenizer and problems that a configuration describes, ready to roll out.

Used by training and by evaluation alike, so that both run the same policy in the same environment.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
import torch

from . import config as cfg
from . import evaluate, protocol, templates
from . import rollout as rollouts
from .engines import Engine
from .engines.torch_engine import TorchEngine
from .engines.vllm import VllmEngine, VllmSettings
from .nano import model, tasks
from .nano.tokenizer import FileTokenizer
from .sandbox import Limits, Sandbox
from .sandbox.client import SandboxClient
from .types import Group, Problem

Tick = Callable[[str, int, int], None]  # part, trajectories done, of how many


class Workbench:
    """Owns an engine and a sandbox; a context manager. `net` is the model as loaded."""

    def __init__(self, config: cfg.Config, model_path: str | Path, tick: Tick | None = None):
        self.config = config
        self._tick = tick or (lambda part, done, total: None)
        self.net = model.load(model_path).to(_device(config.model.device))
        self.sandbox = code_environment(config.sandbox) if config.chat.tools else None
        engine = inference_engine(config, self.net, model_path)
        chat = _chat(config.chat, model_path)
        tokenizer = FileTokenizer(Path(model_path) / "tokenizer.json", chat.frame.stop_token)
        check = self.sandbox.check if isinstance(self.sandbox, SandboxClient) else None
        self.actors = rollouts.Actors(engine, self.sandbox, tokenizer, chat, check)
        settings = config.problems
        self.train_problems, self.held_out = (
            tasks.problems(count, seed=settings.seed, held_out=side, level=settings.level)
            for count, side in ((settings.train, False), (settings.held_out, True))
        )

    def __enter__(self) -> "Workbench":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        self.actors.engine.close()
        if self.sandbox is not None:
            self.sandbox.close()

    def rollout(self, problems: Sequence[Problem], samples: int, key: str) -> list[Group]:
        """Scored groups at the training temperature; `key` names the random stream."""
        return rollouts.run_to_end(
            rollouts.rollout_groups(
                problems,
                samples,
                self.actors,
                self._settings(key, self.config.rollout.temperature),
                self._counted("rollout", len(problems) * samples),
            )
        )

    def evaluate(self, step: int) -> pd.DataFrame:
        """Rows of `eval.parquet` on the held-out problems; every step draws the same streams."""
        settings = self.config.evaluation
        return evaluate.evaluate(
            self.held_out,
            settings.samples,
            self.actors,
            self._settings("evaluation", settings.temperature),
            step=step,
            on_done=self._counted("evaluation", len(self.held_out) * settings.samples),
        )

    def update_weights(self, version: int, tensors) -> None:
        rollouts.run_to_end(self.actors.engine.update_weights(version, tensors))

    def _settings(self, key: str, temperature: float) -> rollouts.RolloutSettings:
        chat, rollout = self.config.chat, self.config.rollout
        return rollouts.RolloutSettings(
            max_turns=chat.max_turns,
            max_calls_per_turn=chat.max_calls_per_turn,
            max_response_tokens=rollout.max_response_tokens,
            temperature=temperature,
            top_p=rollout.top_p,
            seed_key=f"{self.config.run.seed}/{key}",
        )

    def _counted(self, part: str, total: int):
        done = 0

        def on_done(_) -> None:
            nonlocal done
            done += 1
            self._tick(part, done, total)

        return on_done


def inference_engine(config: cfg.Config, net, model_path: str | Path) -> Engine:
    """The engine of `engine.kind`: with the weights of `net`, or those of the checkpoint.

    Raises:
        engines.EngineError: vLLM does not start.
        extras.MissingExtra: vLLM is not installed.
    """
    settings, max_tokens = config.engine, config.model.max_tokens
    if settings.kind == "torch":
        return TorchEngine(
            net.config,
            net.state_dict(),
            kv_tokens=settings.kv_tokens,
            max_tokens=max_tokens,
            max_sequences=settings.max_sequences,
            tool_steps=settings.tool_steps,
            device=net.device,
        )
    chosen = VllmSettings(
        max_tokens=max_tokens,
        kv_tokens=settings.kv_tokens,
        max_sequences=settings.max_sequences,
        block=settings.block_tokens,
        dtype=config.model.dtype,
        memory_fraction=settings.memory_fraction,
        tensor_parallel=settings.tensor_parallel,
        threads=settings.threads,
        eager=settings.eager,
    )
    return VllmEngine(model_path, chosen)


def _chat(settings: cfg.Chat, model_path: str | Path) -> protocol.ChatFormat:
    """The format by name, or the checkpoint's own template after the check."""
    named = {"tools": settings.tools, "response_chars": settings.response_chars}
    if settings.style == "template":
        return templates.chat_format(templates.load(model_path), **named)
    return protocol.chat_format(settings.style, **named)


def _device(chosen: str) -> str:
    """Raises: ConfigError: a GPU is asked for by name, and there is none."""
    has_gpu = torch.cuda.is_available()
    if chosen == "cuda" and not has_gpu:
        raise cfg.ConfigError("model.device='cuda', but torch finds no GPU; use 'auto' or 'cpu'")
    return "cuda" if has_gpu and chosen != "cpu" else "cpu"


def code_environment(settings: cfg.SandboxLimits) -> Sandbox | SandboxClient:
    """Workers of this process, or a client of the services named, whose own limits then hold.

    Raises: SandboxError if there is none of them, or no isolation.
    """
    if settings.address:
        token = Path(settings.token_file).read_text().strip() if settings.token_file else None
        return SandboxClient(settings.address.split(), token)
    return Sandbox(
        workers=settings.workers,
        limits=Limits(
            cpu_seconds=settings.cpu_seconds,
            wall_seconds=settings.wall_seconds,
            memory_mb=settings.memory_mb,
            output_chars=settings.output_chars,
        ),
    )
