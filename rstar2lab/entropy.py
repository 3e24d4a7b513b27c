"""Exact token entropy, the masks of the highest-entropy tokens, and token roles (§5.4).

H_t = −Σ_j p_{t,j} log p_{t,j} with p = softmax(z / T), in nats, over the full vocabulary and at
the sampling temperature. The paper takes the top 20 % of the tokens of each trajectory. Computed in
chunks of tokens, so that the extra memory does not grow with the sequence. The paper names classes
of tokens without a rule; `token_roles` states one. What a mask does to the loss is in `grpo`.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import torch

from . import protocol
from .types import Trajectory


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


# --- masks over several sequences -----------------------------------------------------------------

Masks = Callable[[Sequence[np.ndarray], Sequence[np.ndarray], float], list[np.ndarray]]
"""`mask(entropies, trained, fraction)`: per sequence, which of its trained tokens are on top."""


def sequence_masks(
    entropies: Sequence[np.ndarray], trained: Sequence[np.ndarray], fraction: float
) -> list[np.ndarray]:
    """The top `fraction` of each sequence's trained tokens, as in §5.4 and the release's fork.

    entropies, trained: [T] per sequence, of any lengths; values of untrained tokens are not read.
    """
    return [
        batch_masks([values_T], [trained_T], fraction)[0]
        for values_T, trained_T in zip(entropies, trained, strict=True)
    ]


def batch_masks(
    entropies: Sequence[np.ndarray], trained: Sequence[np.ndarray], fraction: float
) -> list[np.ndarray]:
    """The top `fraction` of all trained tokens together: one threshold (arXiv 2506.01939, Eq 5).

    A sequence may have none of them. Arguments as in `sequence_masks`.
    """
    if not trained:
        return []
    lengths = [len(trained_T) for trained_T in trained]
    is_trained = np.concatenate([np.asarray(trained_T, bool) for trained_T in trained])
    is_top = np.zeros(len(is_trained), bool)
    values = np.concatenate([np.asarray(values_T) for values_T in entropies])[is_trained]
    is_top[is_trained] = top_entropy_mask(values, fraction)
    return np.split(is_top, np.cumsum(lengths)[:-1])


MASKS: dict[str, Masks] = {"sequence": sequence_masks, "batch": batch_masks}
"""Top-entropy masks by the name used in configurations."""


# --- roles ----------------------------------------------------------------------------------------

ROLES = ("tool_response", "tool_call", "answer", "tool_reflection", "forking", "reasoning")


def token_roles(
    trajectory: Trajectory,
    decode: Callable[[Sequence[int]], str],
    *,
    reflection_tokens: int = 20,
    forking_fraction: float = 0.2,
    prefixes: tuple[str, str] = ("", ""),
) -> list[str]:
    """The role of each response token, by position and entropy: the first rule that holds (§5.4).

    1. `tool_response`: not sampled (mask 0).
    2. `tool_call`: overlaps a call as the protocol parses it, tags included.
    3. `answer`: overlaps a closed answer block, tags included.
    4. `tool_reflection`: among the first `reflection_tokens` sampled after a tool response.
    5. `forking`: among the top `forking_fraction` of the trajectory's sampled tokens by entropy.
    6. `reasoning`: any other; without recorded entropies also what would be forking.

    decode: ids → text, called on one id at a time; nothing is tokenized again. A character that
    several tokens share decodes to replacement signs in each, which moves no tag.
    prefixes: what the chat format forced before the first and before later turns. The rules are
    ours: the paper describes its classes in words only.
    """
    sampled_T = np.asarray(trajectory.loss_mask, bool)
    is_top_T = np.zeros(len(sampled_T), bool)
    if trajectory.entropies is not None:
        is_top_T = sequence_masks([trajectory.entropies], [sampled_T], forking_fraction)[0]
    rest = np.where(is_top_T, "forking", "reasoning")
    roles_T = np.where(sampled_T, rest, "tool_response").astype(object)
    start, follows_response = 0, False
    for number, turn in enumerate(trajectory.turns):
        end = start + len(turn.token_ids)
        if follows_response:
            roles_T[start : min(start + reflection_tokens, end)] = "tool_reflection"
        named = _block_roles(turn.token_ids, decode, prefixes[min(number, 1)])
        for place, role in enumerate(named):
            if role is not None and start + place < len(roles_T):
                roles_T[start + place] = role
        follows_response = len(turn.result_token_ids) > 0
        start = end + len(turn.result_token_ids)
    return roles_T.tolist()


def _block_roles(
    token_ids: np.ndarray, decode: Callable[[Sequence[int]], str], prefix: str
) -> list[str | None]:
    """"tool_call", "answer" or None for each token of one turn; calls win."""
    pieces = {int(i): decode([int(i)]) for i in np.unique(token_ids)}
    texts = [pieces[int(i)] for i in token_ids]
    ends = len(prefix) + np.cumsum([len(text) for text in texts], dtype=np.int64)
    starts = ends - [len(text) for text in texts]
    roles: list[str | None] = [None] * len(texts)
    found = protocol.blocks(prefix + "".join(texts))
    for block in sorted(found, key=lambda block: block.tag == "tool_call"):
        if block.tag != "reason":
            for place in np.flatnonzero((starts < block.end) & (ends > block.start)):
                roles[place] = "tool_call" if block.tag == "tool_call" else "answer"
    return roles
