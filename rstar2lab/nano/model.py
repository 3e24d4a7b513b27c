"""The nano model: a plain `Qwen3Config`, so that transformers and vLLM load it as it is.

The head width is 32, the smallest that vLLM's CPU attention supports. A small RoPE base (200) makes
copying operands easy to learn: the contexts have a few hundred tokens.
"""

import shutil
from pathlib import Path

import torch

from .. import config as cfg


def build(settings: cfg.Model, vocabulary_size: int, seed: int):
    """A freshly initialized `Qwen3ForCausalLM` with a tied head."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary_size,
            hidden_size=settings.width,
            intermediate_size=settings.mlp_width,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            num_key_value_heads=settings.kv_heads,
            head_dim=settings.head_width,
            max_position_embeddings=settings.max_tokens,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": settings.rope_base},
            attention_dropout=0.0,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
    )


def load(path: str | Path):
    """A checkpoint folder of any causal language model in float32.

    Raises:
        ConfigError: there is no checkpoint; a mistyped path never becomes a download.
    """
    if not (Path(path) / "config.json").is_file():
        raise cfg.ConfigError(f"no checkpoint at {path}: expected a folder with config.json")
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def save(net, tokenizer_from: str | Path, path: str | Path) -> None:
    """A checkpoint folder that transformers and vLLM load: weights, config, tokenizer."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    net.save_pretrained(path)
    if Path(tokenizer_from) != Path(path):
        for file in Path(tokenizer_from).glob("tokenizer*.json"):
            shutil.copyfile(file, Path(path) / file.name)
