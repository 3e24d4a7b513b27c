"""Exact token entropy, and the mask of the highest-entropy tokens (§5.4).

H_t = −Σ_j p_{t,j} log p_{t,j} with p = softmax(z / T), in nats, over the full vocabulary and at
the sampling temperature. The paper takes the top 20 % of the tokens of each trajectory. Computed in
chunks of tokens, so that the extra memory does not grow with the sequence. Which role a token plays
is not decided here, and nothing here enters the loss.
"""

import math
from fractions import Fraction

import numpy as np
import torch


def token_entropy(
    logits: torch.Tensor, temperature: float = 1.0, chunk_tokens: int = 1024
) -> torch.Tensor:
    """Entropy of the next-token distribution over the last axis, in nats (§5.4).

    logits: [..., V], −inf allowed (banned tokens have probability 0). Returns [...], float32 at
    least. Differentiable.
    Extra memory: about four float32 arrays of chunk_tokens × V.

    Raises: ValueError if `temperature` or `chunk_tokens` is not positive.
    """
    if not temperature > 0 or chunk_tokens < 1:
        raise ValueError(
            "expected temperature > 0 and chunk_tokens >= 1, "
            f"found temperature={temperature}, chunk_tokens={chunk_tokens}"
        )
    if logits.ndim > 2 and not logits.is_contiguous():  # flattening would copy all of it
        rows = [token_entropy(row, temperature, chunk_tokens) for row in logits]
        return torch.stack(rows)
    logits_TV = logits.reshape(-1, logits.shape[-1])
    chunks = [_chunk_entropy(chunk, temperature) for chunk in logits_TV.split(chunk_tokens)]
    return torch.cat(chunks).reshape(logits.shape[:-1])


def _chunk_entropy(logits_TV: torch.Tensor, temperature: float) -> torch.Tensor:
    work_dtype = torch.promote_types(logits_TV.dtype, torch.float32)
    logprobs_TV = torch.log_softmax(logits_TV.to(work_dtype) / temperature, dim=-1)
    probs_TV = logprobs_TV.exp()
    finite_TV = logprobs_TV.masked_fill(logprobs_TV == -math.inf, 0.0)  # 0 · log 0 = 0
    return -(probs_TV * finite_TV).sum(-1)


def top_entropy_mask(entropies_T: np.ndarray, fraction: float = 0.2) -> np.ndarray:
    """Mark the ⌈fraction · T⌉ tokens of highest entropy; of equal ones the earlier (§5.4).

    `fraction` counts as the decimal number it prints as: 0.1 of 30 tokens is 3. Leave tool tokens
    out beforehand. Returns bool [T].

    Raises: ValueError if `fraction` is outside [0, 1] or an entropy is NaN.
    """
    entropies_T = np.asarray(entropies_T)
    if not 0 <= fraction <= 1:
        raise ValueError(f"expected fraction in [0, 1], found {fraction}")
    if entropies_T.ndim != 1 or np.isnan(entropies_T).any():
        raise ValueError("expected one entropy per token, shape [T], without NaN")
    count = math.ceil(Fraction(repr(float(fraction))) * len(entropies_T))
    mask_T = np.zeros(len(entropies_T), bool)
    mask_T[np.argsort(-entropies_T, kind="stable")[:count]] = True
    return mask_T
