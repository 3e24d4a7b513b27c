"""The non-reasoning cold start (§4.1): a model that talks to the tool and cannot solve the tasks.

Loss on assistant tokens only, the stop token of every turn included. The result is cached under a
hash of everything it depends on, with its provenance, and a killed run resumes from its checkpoint.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch

from . import config as cfg
from . import protocol, runs
from .muon import Muon
from .nano import corpus, model, tokenizer
from .types import ToolResult

Progress = Callable[[dict], None]
RunMany = Callable[[list[str]], list[ToolResult]]
_POOL_BATCHES = 16  # batches sorted by length together: little padding, still random
_CHECKPOINT_EVERY = 100


@dataclass(frozen=True)
class Encoded:
    """One dialogue as tokens; `trained` marks assistant tokens."""

    ids: np.ndarray
    trained: np.ndarray


def cold_start_config(config: cfg.Config) -> str:
    """All that decides the cold-started weights, as canonical JSON."""
    return json.dumps(
        {
            "model": config.model.model_dump(exclude={"dtype", "device", "gradient_checkpointing"}),
            "cold_start": config.cold_start.model_dump(),
            "chat": {"response_chars": config.chat.response_chars, "style": config.chat.style},
        },
        indent=1,
        sort_keys=True,
    )


def cache_key(config: cfg.Config) -> str:
    return hashlib.sha256(cold_start_config(config).encode()).hexdigest()[:8]


def corpus_rates(settings: cfg.ColdStart) -> corpus.CorpusRates:
    names = [field.name for field in fields(corpus.CorpusRates)]
    return corpus.CorpusRates(**{name: getattr(settings, name) for name in names})


def render_corpus(config: cfg.Config, run_many: RunMany) -> list[list[corpus.Segment]]:
    """The dialogues of the cold start, every program executed by `run_many`."""
    settings = config.cold_start
    with_tool, no_tool = (
        protocol.chat_format(config.chat.style, tools=t, response_chars=config.chat.response_chars)
        for t in (True, False)
    )
    dialogues = corpus.build(
        settings.dialogues, seed=settings.seed, rates=corpus_rates(settings), execute=run_many
    )
    return [corpus.render(dialogue, with_tool, no_tool) for dialogue in dialogues]


def encode(segments: list[corpus.Segment], chat, tokens: protocol.Tokenizer) -> Encoded:
    """Token ids and their loss mask. A tool's text is encoded with special tokens disabled."""
    ids: list[int] = []
    trained: list[bool] = []
    for segment in segments:
        new = (
            protocol.encode_response(segment.text, chat, tokens)
            if segment.from_tool
            else tokens.encode(segment.text)
        )
        ids += new
        trained += [segment.trained] * len(new)
    return Encoded(np.asarray(ids, np.int64), np.asarray(trained, bool))


def batches(
    lengths: np.ndarray, batch: int, seed: int, first_step: int = 0
) -> Iterator[np.ndarray]:
    """Endless batches of dialogue numbers, similar in length; may start at any step."""
    per_epoch = max(1, len(lengths) // batch)
    step = first_step
    while True:
        epoch, start = divmod(step, per_epoch)
        rng = np.random.default_rng([seed, epoch])
        order = rng.permutation(len(lengths))
        pools = [
            pool[np.argsort(lengths[pool], kind="stable")]
            for pool in np.split(
                order, range(batch * _POOL_BATCHES, len(order), batch * _POOL_BATCHES)
            )
        ]
        epoch_batches = [pool[i : i + batch] for pool in pools for i in range(0, len(pool), batch)]
        shuffled = [epoch_batches[i] for i in rng.permutation(len(epoch_batches))][:per_epoch]
        for numbers in shuffled[start:]:
            yield numbers
            step += 1


def learning_rate_factor(step: int, settings: cfg.ColdStart) -> float:
    """Linear warm-up, constant, then linear decay to 5 %."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    held = settings.constant_fraction * settings.steps
    return 1.0 if step < held else 1 - 0.95 * (step - held) / max(1.0, settings.steps - held)


class ColdStartTrainer:
    """One model with Muon for its hidden matrices and AdamW for the rest."""

    def __init__(self, net, settings: cfg.ColdStart):
        self.net, self._settings = net.train(), settings
        named = dict(net.named_parameters())
        hidden = [
            p for n, p in named.items() if p.ndim == 2 and "embed" not in n and "head" not in n
        ]
        rest = [p for p in named.values() if not any(p is h for h in hidden)]
        self._optimizers = (
            Muon(hidden, lr=settings.muon_lr),
            torch.optim.AdamW(rest, lr=settings.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0),
        )
        self._rates = (settings.muon_lr, settings.adamw_lr)

    def state_dict(self) -> dict:
        return {
            "model": self.net.state_dict(),
            "optimizers": [o.state_dict() for o in self._optimizers],
        }

    def load_state_dict(self, state: dict) -> None:
        self.net.load_state_dict(state["model"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    def train_step(self, dialogues: list[Encoded], step: int) -> float:
        """One update; returns the loss in nats per assistant token."""
        width = max(len(d.ids) for d in dialogues)
        ids_BT = torch.zeros((len(dialogues), width), dtype=torch.int64)
        trained_BT = torch.zeros((len(dialogues), width), dtype=torch.bool)
        for row, dialogue in enumerate(dialogues):  # right padding: causal attention never sees it
            ids_BT[row, : len(dialogue.ids)] = torch.from_numpy(dialogue.ids)
            trained_BT[row, : len(dialogue.ids)] = torch.from_numpy(dialogue.trained)
        hidden = self.net.model(input_ids=ids_BT[:, :-1], use_cache=False).last_hidden_state
        predicts_BT = trained_BT[:, 1:]
        loss = torch.nn.functional.cross_entropy(
            self.net.lm_head(hidden[predicts_BT]), ids_BT[:, 1:][predicts_BT]
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), self._settings.clip_norm)
        for optimizer, rate in zip(self._optimizers, self._rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * learning_rate_factor(step, self._settings)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


def _folder(config: cfg.Config, out: str | Path) -> runs.RunFolder:
    return runs.RunFolder(Path(out) / f"nano-{cache_key(config)}")


def cached(config: cfg.Config, out: str | Path) -> Path | None:
    """The finished cold start of this configuration below `out`, None if there is none."""
    folder = _folder(config, out)
    return folder.path / "model" if folder.is_done else None


def cold_start(
    config: cfg.Config,
    out: str | Path,
    run_many: RunMany,
    *,
    command: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """The folder of the cold-started model: made once, then reused.

    `out/<hash>/` holds `model/` (weights, config, tokenizer) and the files of a run folder.
    `progress` receives one metric row per step.
    """
    if (found := cached(config, out)) is not None:
        return found
    folder = _folder(config, out)
    folder.open(
        cold_start_config(config),
        command=command or runs.command_line(),
        scale=config.run.scale,
        resume=True,
    )
    try:
        _train(config, folder, run_many, progress or (lambda row: None))
    finally:
        folder.close()
    return folder.path / "model"


def _train(
    config: cfg.Config, folder: runs.RunFolder, run_many: RunMany, progress: Progress
) -> None:
    settings = config.cold_start
    torch.set_num_threads(settings.threads)
    segments = render_corpus(config, run_many)
    path = folder.path / "model" / "tokenizer.json"
    vocabulary = tokenizer.train("".join(s.text for s in dialogue) for dialogue in segments)
    runs.write_atomic(path, vocabulary.to_str())
    tokens = tokenizer.FileTokenizer(path)
    chat = protocol.chat_format(
        config.chat.style, tools=True, response_chars=config.chat.response_chars
    )
    encoded = [encode(dialogue, chat, tokens) for dialogue in segments]
    fitting = [e for e in encoded if len(e.ids) <= config.model.max_tokens]
    trainer = ColdStartTrainer(
        model.build(config.model, tokens.vocabulary_size, settings.seed), settings
    )
    first = 0
    if state := folder.load_checkpoint():
        trainer.load_state_dict(state)
        first = state["step"]
    folder.keep_rows_up_to(first)
    stream = batches(
        np.asarray([len(e.ids) for e in fitting]), settings.batch, settings.seed, first
    )
    for step in range(first, settings.steps):
        loss = trainer.train_step([fitting[i] for i in next(stream)], step)
        row = {"step": step + 1, "loss": loss, "dialogues_too_long": len(encoded) - len(fitting)}
        folder.append_row(row)
        progress(row)
        if (step + 1) % _CHECKPOINT_EVERY == 0:
            folder.save_checkpoint(step + 1, trainer.state_dict())
    write_tokenizer_config(path.parent, config.model.max_tokens)
    model.save(trainer.net, path.parent, path.parent)
    folder.mark_done({"steps": settings.steps, "parameters": trainer.net.num_parameters()})
    folder.remove_checkpoints()


def write_tokenizer_config(path: Path, max_tokens: int) -> None:
    """What `AutoTokenizer` needs beside `tokenizer.json`."""
    runs.write_atomic(
        path / "tokenizer_config.json",
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": max_tokens,
                "eos_token": protocol.STOP_TOKEN,
                "pad_token": "<|endoftext|>",
                "unk_token": "<unk>",
                "clean_up_tokenization_spaces": False,
            },
            indent=1,
        ),
    )
