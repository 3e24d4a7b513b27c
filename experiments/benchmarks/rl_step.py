"""One RL step, against TRL's GRPO trainer with the same model, prompts, batch and lengths.

8 prompts × 8 completions of exactly 60 tokens, one turn, no tool; one update with the DAPO loss,
no KL term, float32 on a CPU. Both sides sample, reward (a seeded coin), compute advantages, update
with AdamW; ours also sends the weights to the engine. Steps of the two alternate, so that a busy
machine hurts both. `parts`: where our step's time goes, measured after the steps, wholes and parts
in turn. `floor`: the step's matrix products alone, with the same shapes.

TRL is no dependency of the kit: `pip install trl==1.16.0` beside it.

    python experiments/benchmarks/rl_step.py --model MODEL

MODEL is one of the folders `experiments/results/cold_start/*/model`.
"""

import argparse
import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from rstar2lab import config, grpo, learner, protocol, rollout, runs
from rstar2lab.engines import Sampling
from rstar2lab.engines.torch_engine import TorchEngine
from rstar2lab.learner import Sample
from rstar2lab.nano import model, tasks
from rstar2lab.nano.tokenizer import FileTokenizer
from rstar2lab.types import Problem

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results" / "rl_step.json"
PROMPTS, SAMPLES, TOKENS, WARM_UP = 8, 8, 60, 2
LR = 1e-5  # small: every step samples from nearly the same model


class Ours:
    """The kit's step: rollouts, advantages, update, weights to the engine."""

    def __init__(self, path: Path, chat: protocol.ChatFormat):
        settings = config.load(ROOT / "experiments/configs/nano.toml", "grpo_tool", {
            "loss.minibatches": 1, "optimizer.lr": LR,
        })  # fmt: skip
        net, tokens = model.load(path), FileTokenizer(path / "tokenizer.json")
        tokens.stop_id = -1  # never sampled: every completion has its full length
        self.loss = settings.loss
        self.learner = learner.LocalLearner(net, settings.optimizer, settings.loss, 1.0)
        self.engine = TorchEngine(
            net.config, net.state_dict(), kv_tokens=1 << 15, max_tokens=settings.model.max_tokens
        )
        self.actors = rollout.Actors(self.engine, None, tokens, chat)
        self.rng = np.random.default_rng(0)

    def step(self, problems: list[Problem], number: int) -> dict[str, float]:
        """One step; seconds by part."""
        marks = [time.perf_counter()]
        limits = rollout.RolloutSettings(1, 1, TOKENS, 1.0, 1.0, f"rl_step/{number}")
        self.sampled = problems, limits
        found = asyncio.run(self._sample(problems, limits))
        marks.append(time.perf_counter())
        self.samples = samples = []
        for start in range(0, len(found), SAMPLES):
            group = found[start : start + SAMPLES]
            advantages = grpo.group_advantages(self.rng.integers(0, 2, SAMPLES).astype(float))
            samples += [Sample(t, float(a)) for t, a in zip(group, advantages, strict=True)]
        self.learner.update(samples, self.rng)
        marks.append(time.perf_counter())
        asyncio.run(self.engine.update_weights(number + 1, self.learner.model.state_dict()))
        marks.append(time.perf_counter())
        assert sum(s.num_trained_tokens for s in samples) == PROMPTS * SAMPLES * TOKENS
        parts = dict(zip(("sampling", "update", "weights"), np.diff(marks), strict=True))
        return {"step": sum(parts.values())} | parts

    def parts(self) -> dict[str, float]:
        """Seconds of parts of a step and of their wholes, on the last step's trajectories.

        `sampling` without `engine` is the rollouts' texts and events; `update` without the four
        parts before it is clipping, optimizer and statistics.
        """
        found, began = {}, time.perf_counter()

        def mark(part: str) -> None:
            nonlocal began
            now = time.perf_counter()
            found[part], began = now - began, now

        asyncio.run(self._sample(*self.sampled))
        mark("sampling")
        asyncio.run(self._complete())
        mark("engine")
        batch = learner.make_batch(self.samples)
        mark("batch")
        logprobs_BT = learner.sampled_logprobs(self.learner.model, batch)
        mark("forward")
        size = grpo.UpdateSize(num_tokens=PROMPTS * SAMPLES * TOKENS)
        loss = grpo.policy_loss(
            logprobs_BT, batch.old_logprobs_BT, batch.advantages_B, batch.mask_BT,
            grpo.rule_of(self.loss), size,
        ).loss  # fmt: skip
        mark("loss")
        loss.backward()
        mark("backward")
        self.learner.model.zero_grad()
        self.learner.update(self.samples, self.rng)
        mark("update")
        return found

    async def _complete(self):
        """The last step's completions once more, by the engine alone."""

        async def one(name: str, prompt: list[int], seed: int) -> None:
            await self.engine.generate(name, prompt, Sampling(TOKENS, seed=seed, entropies=True))
            await self.engine.abort(name)  # else the next pass would find its prompt in the cache

        prompts = [s.trajectory.prompt_ids.tolist() for s in self.samples]
        await asyncio.gather(*(one(f"{i}", prompt, i) for i, prompt in enumerate(prompts)))

    async def _sample(self, problems, limits):
        return await asyncio.gather(*(
            rollout.rollout(p, i, self.actors, limits) for p in problems for i in range(SAMPLES)
        ))  # fmt: skip


class Trl:
    """TRL's trainer, one `train()` whose steps are handed out one at a time."""

    def __init__(self, path: Path, prompts: list[str], steps: int):
        from datasets import Dataset
        from transformers import AutoTokenizer
        from trl import GRPOConfig, GRPOTrainer

        rng = np.random.default_rng(0)
        tokens = AutoTokenizer.from_pretrained(path)
        tokens.pad_token = tokens.pad_token or tokens.eos_token
        settings = GRPOConfig(
            output_dir="runs/rl_step_trl", max_steps=steps, per_device_train_batch_size=64,
            num_generations=SAMPLES, max_completion_length=TOKENS, use_cpu=True, bf16=False,
            generation_kwargs={"min_new_tokens": TOKENS}, beta=0.0, loss_type="dapo",
            epsilon=0.2, epsilon_high=0.28, learning_rate=LR, lr_scheduler_type="constant",
            temperature=1.0, top_k=0, max_grad_norm=1.0, optim="adamw_torch", report_to=[],
            gradient_checkpointing=False, save_strategy="no", logging_strategy="no",
            disable_tqdm=True, dataloader_pin_memory=False, seed=0,
        )  # fmt: skip
        self.trainer = GRPOTrainer(
            model=model.load(path), args=settings, processing_class=tokens,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            reward_funcs=lambda completions, **_: rng.integers(0, 2, len(completions)).tolist(),
        )  # fmt: skip

    def train(self, after_step: Callable[[], None]) -> None:
        from transformers import TrainerCallback

        class AfterStep(TrainerCallback):
            def on_step_end(self, *_, **__):
                after_step()

        self.trainer.add_callback(AfterStep())
        self.trainer.train()


def measure(path: Path, steps: int) -> tuple[dict[str, list[dict]], list[dict]]:
    """Seconds and CPU seconds of every step of both, ours in between TRL's; then our parts."""
    chat = protocol.chat_format("nano", tools=False, response_chars=60)
    problems = tasks.problems(PROMPTS * (steps + WARM_UP), seed=0, held_out=False)
    batches = [problems[at : at + PROMPTS] for at in range(0, len(problems), PROMPTS)]
    ours, found = Ours(path, chat), {"rstar2lab": [], "TRL": []}
    trl = Trl(path, [chat.prompt(p.question) for p in problems], len(batches))
    clock = [time.perf_counter(), time.process_time()]

    def after_step() -> None:
        number = len(found["TRL"])
        wall, cpu = time.perf_counter() - clock[0], time.process_time() - clock[1]
        found["TRL"].append({"step": wall, "cpu": cpu, "load": os.getloadavg()[0]})
        cpu = time.process_time()
        parts = ours.step(batches[number], number)
        found["rstar2lab"].append(parts | {"cpu": time.process_time() - cpu})
        clock[:] = time.perf_counter(), time.process_time()

    trl.train(after_step)
    parts = [ours.parts() for _ in range(WARM_UP + steps)]
    return {name: rows[WARM_UP:] for name, rows in found.items()}, parts[WARM_UP:]


def products(shape, prompt_tokens: int) -> dict[str, list[tuple[int, int, int]]]:
    """(rows, inputs, outputs) of every product with a weight matrix in one step, by its part.

    Sampling: each prompt once, then 64 rows a time; the head on sampled tokens only. Learning: all
    tokens once forward and two products of the same size backward.
    """
    heads = shape.num_attention_heads + 2 * shape.num_key_value_heads
    width, mixed = shape.hidden_size, shape.num_attention_heads * shape.head_dim
    layers = shape.num_hidden_layers * [
        (width, heads * shape.head_dim), (mixed, width),
        (width, 2 * shape.intermediate_size), (shape.intermediate_size, width),
    ]  # fmt: skip
    rows, head = PROMPTS * SAMPLES, (width, shape.vocab_size)
    forward = [(rows * (prompt_tokens + TOKENS), *size) for size in layers]
    forward.append((rows * TOKENS, *head))
    return {
        "prefill": [(rows * prompt_tokens, *size) for size in layers],
        "decoding": TOKENS * [(rows, *size) for size in [*layers, head]],
        "forward": forward,
        "backward": 2 * forward,
    }


def floor(path: Path, prompt_tokens: int, repeats: int = 3) -> dict[str, float]:
    """Seconds of those products alone, by part: the best of some repeats."""
    found = {}
    for part, sizes in products(model.load(path).config, prompt_tokens).items():
        operands = {(r, a, b): (torch.randn(r, a), torch.randn(a, b)) for r, a, b in set(sizes)}
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            for size in sizes:
                torch.mm(*operands[size])
            times.append(time.perf_counter() - started)
        found[part] = round(min(times), 4)
    return found | {"step": round(sum(found.values()), 4)}


def summary(rows: list[dict]) -> dict:
    """Median and range of every column."""
    return {
        key: {"median": round(float(np.median(v)), 4),
              "range": [round(float(min(v)), 4), round(float(max(v)), 4)]}
        for key in rows[0] if (v := [row[key] for row in rows])
    }  # fmt: skip


def case(path: Path, steps: int, threads: int) -> dict:
    """Both steps and the floor, with so many threads."""
    torch.set_num_threads(threads)
    passes, parts = measure(path, steps)
    pairs = zip(passes["TRL"], passes["rstar2lab"], strict=True)
    return {
        "seconds": {name: summary(rows) for name, rows in passes.items()},
        "parts_seconds": summary(parts),
        "floor_seconds": floor(path, prompt_tokens=25),
        "trl_over_rstar2lab": summary([{"step": t["step"] / o["step"]} for t, o in pairs])["step"],
        "highest_load": round(max(row["load"] for row in passes["TRL"]), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a nano checkpoint folder")
    parser.add_argument("--steps", type=int, default=15, help=f"timed, after {WARM_UP} others")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file")
    chosen = parser.parse_args()
    try:
        import trl
    except ImportError:
        raise SystemExit("TRL is not installed: pip install trl==1.16.0 beside the kit") from None
    cases = {threads: case(chosen.model, chosen.steps, threads) for threads in chosen.threads}
    for threads, found in cases.items():
        print(f"{threads} threads, load {found['highest_load']}, seconds of a step (median):")
        for name, parts in found["seconds"].items():
            print(f"  {name:10}", {key: value["median"] for key, value in parts.items()})
        ratio = found["trl_over_rstar2lab"]
        parts = {part: value["median"] for part, value in found["parts_seconds"].items()}
        print("  parts of ours        ", parts)
        print("  matrix products alone", found["floor_seconds"])
        print("  TRL's step over ours ", ratio)
    command = "python experiments/benchmarks/rl_step.py --model MODEL"
    report = {
        "completions": PROMPTS * SAMPLES, "tokens_each": TOKENS, "steps": chosen.steps,
        "trl": trl.__version__, "threads": cases,
        "provenance": runs.provenance(command, "nano 0.4M, cold start"),
    }  # fmt: skip
    runs.write_atomic(chosen.out, json.dumps(report, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
