"""Log-probs and entropies of tokens, straight from hidden states: no logits tensor is ever whole.

At a vocabulary of 151,936 the float32 logits of 8,192 tokens take 5 GB, and a plain backward pass
holds several such arrays. Here the head, the softmax and both statistics are computed for a chunk
of tokens at a time; the backward pass computes the chunk's logits once more instead of keeping them
(§5.1's context lengths are what this is for). Which tokens are of interest is decided in `learner`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**23  # logits at a time: 32 MB in float32, 55 tokens of a 150 k vocabulary


class TokenStatistics(NamedTuple):
    """Per token, in nats: its log-prob, and the entropy of the distribution it was drawn from."""

    logprobs_K: Tensor
    entropies_K: Tensor | None


def token_statistics(
    hidden_KD: Tensor,
    weight_VD: Tensor,
    targets_K: Tensor,
    *,
    temperature: float = 1.0,
    entropies: bool = True,
    chunk_tokens: int | None = None,
) -> TokenStatistics:
    """log p(target) and H(p) with p = softmax(W h / temperature), for K tokens at once.

    hidden_KD: last hidden states; weight_VD: the head; targets_K: token ids. Differentiable in
    hidden states and head, also through the entropies. The product W h is taken in the precision of
    hidden_KD, everything after it in float32 at least.
    Extra memory: two arrays of chunk_tokens × V and the head's gradient, whatever K is.

    Raises: ValueError if `temperature` or `chunk_tokens` is not positive.
    """
    if chunk_tokens is None:
        chunk_tokens = max(1, CHUNK_ELEMENTS // weight_VD.shape[0])
    if not temperature > 0 or chunk_tokens < 1:
        raise ValueError(
            "expected temperature > 0 and chunk_tokens >= 1, "
            f"found temperature={temperature}, chunk_tokens={chunk_tokens}"
        )
    logprobs_K, entropies_K = _Statistics.apply(
        hidden_KD, weight_VD, targets_K, temperature, entropies, chunk_tokens
    )
    return TokenStatistics(logprobs_K, entropies_K if entropies else None)


class _Statistics(torch.autograd.Function):
    """Keeps hidden states, head and one normalizer per token between the passes."""

    @staticmethod
    def forward(ctx, hidden_KD, weight_VD, targets_K, temperature, entropies, chunk_tokens):
        head_VD = weight_VD.to(hidden_KD.dtype)
        buffers = _buffers(hidden_KD, head_VD, chunk_tokens, count=2)
        parts = []
        chunks = zip(hidden_KD.split(chunk_tokens), targets_K.split(chunk_tokens), strict=True)
        for hidden_CD, targets_C in chunks:
            logits_CV, exps_CV = (buffer[: len(targets_C)] for buffer in buffers)
            _logits(hidden_CD, head_VD, temperature, out=logits_CV)
            parts.append(_chunk_statistics(logits_CV, exps_CV, targets_C, entropies))
        logprobs_K, normalizers_K, entropies_K = map(torch.cat, zip(*parts, strict=True))
        entropies_K = entropies_K if entropies else None
        ctx.settings = temperature, chunk_tokens
        ctx.save_for_backward(hidden_KD, weight_VD, targets_K, normalizers_K, entropies_K)
        return logprobs_K, entropies_K

    @staticmethod
    def backward(ctx, grad_logprobs_K, grad_entropies_K):
        hidden_KD, weight_VD, targets_K, normalizers_K, entropies_K = ctx.saved_tensors
        temperature, chunk_tokens = ctx.settings
        if entropies_K is None or not grad_entropies_K.any():
            grad_entropies_K = entropies_K = None
        head_VD = weight_VD.to(hidden_KD.dtype)
        (buffer_CV,) = _buffers(hidden_KD, head_VD, chunk_tokens, count=1)
        grad_hidden_KD, grad_weight_VD = torch.empty_like(hidden_KD), None
        if ctx.needs_input_grad[1]:
            grad_weight_VD = torch.zeros_like(weight_VD, dtype=buffer_CV.dtype)
        for start in range(0, len(targets_K), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            hidden_CD = hidden_KD[rows]
            logprobs_CV = buffer_CV[: len(hidden_CD)]
            _logits(hidden_CD, head_VD, temperature, out=logprobs_CV)
            logprobs_CV.sub_(normalizers_K[rows, None])
            grad_CV = _grad_logits(logprobs_CV, targets_K[rows], grad_logprobs_K[rows],
                                   *(None if x is None else x[rows]
                                     for x in (grad_entropies_K, entropies_K)))  # fmt: skip
            if temperature != 1:
                grad_CV.div_(temperature)
            grad_CV = grad_CV.to(hidden_KD.dtype)
            torch.mm(grad_CV, head_VD, out=grad_hidden_KD[rows])
            if grad_weight_VD is not None:
                _add_product(grad_weight_VD, grad_CV, hidden_CD)
        grad_weight_VD = None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_KD, grad_weight_VD, None, None, None, None


def _buffers(hidden_KD: Tensor, head_VD: Tensor, chunk_tokens: int, count: int) -> list[Tensor]:
    """Arrays [C, V] that every chunk writes to: new ones would cost as much as the exp."""
    size = (min(chunk_tokens, len(hidden_KD)), len(head_VD))
    work_dtype = torch.promote_types(hidden_KD.dtype, torch.float32)
    return [hidden_KD.new_empty(size, dtype=work_dtype) for _ in range(count)]


def _logits(hidden_CD: Tensor, head_VD: Tensor, temperature: float, out: Tensor) -> None:
    with torch.autocast(hidden_CD.device.type, enabled=False):
        if out.dtype == hidden_CD.dtype:
            torch.mm(hidden_CD, head_VD.T, out=out)
        else:
            out.copy_(hidden_CD @ head_VD.T)
    if temperature != 1:
        out.div_(temperature)


def _chunk_statistics(
    logits_CV: Tensor, exps_CV: Tensor, targets_C: Tensor, entropies: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, log-normalizers and entropies of a chunk, from one exp; overwrites both arrays."""
    highest_C = logits_CV.amax(-1)
    torch.exp(logits_CV.sub_(highest_C[:, None]), out=exps_CV)
    sums_C = exps_CV.sum(-1)
    log_sums_C = sums_C.log()
    logprobs_C = logits_CV.gather(1, targets_C[:, None])[:, 0] - log_sums_C
    normalizers_C = highest_C + log_sums_C
    if not entropies:
        return logprobs_C, normalizers_C, log_sums_C
    return logprobs_C, normalizers_C, log_sums_C - exps_CV.mul_(logits_CV).sum(-1) / sums_C


def _grad_logits(
    logprobs_CV: Tensor,
    targets_C: Tensor,
    grad_logprobs_C: Tensor,
    grad_entropies_C: Tensor | None,
    entropies_C: Tensor | None,
) -> Tensor:
    """∂ log p_a / ∂z_j = [j = a] − p_j and ∂H / ∂z_j = −p_j (log p_j + H); overwrites its input."""
    if grad_entropies_C is None:
        grad_CV = logprobs_CV.exp_().mul_(-grad_logprobs_C[:, None])
    else:
        probs_CV = logprobs_CV.exp()
        grad_CV = logprobs_CV.add_(entropies_C[:, None]).mul_(-grad_entropies_C[:, None])
        grad_CV = grad_CV.sub_(grad_logprobs_C[:, None]).mul_(probs_CV)
    return grad_CV.scatter_add_(1, targets_C[:, None], grad_logprobs_C[:, None])


def _add_product(total_VD: Tensor, grad_CV: Tensor, hidden_CD: Tensor) -> None:
    """total += gradᵀ · hidden, without a second array of the total's size in the usual case."""
    if total_VD.dtype == grad_CV.dtype:
        total_VD.addmm_(grad_CV.T, hidden_CD)
    else:
        total_VD += grad_CV.T @ hidden_CD
