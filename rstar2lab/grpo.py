"""Advantages and the clipped policy loss of GRPO-RoC (Eq 1-2, 6-7).

Group-normalized advantages over the G selected rollouts, and the token-mean objective with
asymmetric clipping (Clip-Higher). There is no KL term and no entropy term (§2.2.1). Which rollouts
are selected is decided before, in `roc`; how log-probs come about, after, in `learner`.

The loss never chooses its own denominator: `num_tokens` counts the trained tokens of the whole
update, so micro-batches and ranks can be split at will and their losses simply added.
"""

from dataclasses import dataclass

import numpy as np
import torch

_MAX_LOG_RATIO = 60.0  # keeps exp and its gradient finite in float32; e^60 is far outside any clip


def group_advantages(rewards_G: np.ndarray, *, ddof: int = 0, eps: float = 1e-6) -> np.ndarray:
    """Normalize the rewards of one selected group (Eq 7).

    Â_i = (r_i − mean(r)) / (std(r) + eps), shape [G], always finite: a constant group, one rollout
    or G <= ddof gives zeros. ddof 0 is the population deviation.
    Differs from the release: it uses ddof=1.

    Raises: ValueError if the rewards are not one group [G] of finite numbers.
    """
    rewards_G = np.asarray(rewards_G, np.float64)
    if rewards_G.ndim != 1 or not np.isfinite(rewards_G).all():
        raise ValueError(f"expected finite rewards of one group, shape [G], found {rewards_G}")
    is_constant = len(rewards_G) == 0 or np.ptp(rewards_G) == 0
    if is_constant or len(rewards_G) <= ddof:
        return np.zeros_like(rewards_G)
    return (rewards_G - rewards_G.mean()) / (rewards_G.std(ddof=ddof) + eps)


@dataclass(frozen=True)
class LossOutput:
    """A loss to call `backward` on, and what happened in it, measured before clipping.

    Ratios are over the trained tokens here (1.0 where there are none). `clip_fraction` is the share
    of them whose gradient the clip removed. Weight by `num_tokens_here` to average over
    micro-batches.
    """

    loss: torch.Tensor
    clip_fraction: float
    ratio_mean: float
    ratio_max: float
    ratio_min: float
    num_tokens_here: int


def grpo_loss(
    logprobs_BT: torch.Tensor,
    old_logprobs_BT: torch.Tensor,
    advantages_B: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    num_tokens: int,
    dual_clip: float | None = None,
) -> LossOutput:
    """Clipped token-mean policy loss of a micro-batch (Eq 6, negated to minimize).

    loss = −1/num_tokens · Σ_{i,t} mask · min(ρ Â_i, clip(ρ, 1−clip_low, 1+clip_high) Â_i)
    with ρ = ρ_{i,t} = exp(logprob − old logprob).

    logprobs_BT, old_logprobs_BT: nats [B, T]; advantages_B: [B]; mask_BT: bool or 0/1, 1 on trained
    tokens. Masked inputs may be NaN or infinite: they add exactly 0 to loss and gradient.
    num_tokens: trained tokens of the whole update, over all micro-batches and ranks.
    dual_clip: bound c > 1 on the loss of a negative advantage, max(…, c Â).
    Differs from the release: it divides per micro-batch (scale <= 0.5), sets dual_clip to 3.0 and
    clamps the log-ratio to ±20.

    Raises: ValueError if shapes disagree, or `num_tokens` is not positive while tokens are trained.
    """
    is_trained_BT = mask_BT != 0
    num_tokens_here = int(is_trained_BT.sum())
    _check_shapes(logprobs_BT, old_logprobs_BT, advantages_B, mask_BT)
    _check_denominator(num_tokens, num_tokens_here)

    # torch.where cuts masked values off before exp, so that no 0 · NaN can arise, also backward.
    work_dtype = torch.promote_types(logprobs_BT.dtype, torch.float32)
    log_ratio_BT = logprobs_BT.to(work_dtype) - old_logprobs_BT.detach().to(work_dtype)
    log_ratio_BT = torch.where(is_trained_BT, log_ratio_BT, torch.zeros_like(log_ratio_BT))
    ratio_BT = log_ratio_BT.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    advantages_BT = advantages_B.detach().to(work_dtype)[:, None].expand_as(ratio_BT)
    advantages_BT = torch.where(is_trained_BT, advantages_BT, torch.zeros_like(ratio_BT))

    unclipped_BT = ratio_BT * advantages_BT
    clipped_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high) * advantages_BT
    objective_BT = torch.minimum(unclipped_BT, clipped_BT)
    if dual_clip is not None:
        bounded_BT = torch.maximum(objective_BT, dual_clip * advantages_BT)
        objective_BT = torch.where(advantages_BT < 0, bounded_BT, objective_BT)
    loss = -objective_BT.sum() / max(float(num_tokens), 1.0)
    is_clipped_BT = objective_BT != unclipped_BT
    return _output(loss, ratio_BT.detach()[is_trained_BT], is_clipped_BT[is_trained_BT])


def _check_shapes(
    logprobs_BT: torch.Tensor,
    old_logprobs_BT: torch.Tensor,
    advantages_B: torch.Tensor,
    mask_BT: torch.Tensor,
) -> None:
    shapes = [tuple(x.shape) for x in (logprobs_BT, old_logprobs_BT, mask_BT)]
    if logprobs_BT.ndim != 2 or len(set(shapes)) > 1:
        raise ValueError(
            f"expected log-probs, old log-probs and mask of one shape [B, T], found {shapes}"
        )
    if tuple(advantages_B.shape) != shapes[0][:1]:
        raise ValueError(
            f"expected advantages of shape {shapes[0][:1]}, found {tuple(advantages_B.shape)}"
        )


def _check_denominator(num_tokens: int, num_tokens_here: int) -> None:
    if num_tokens_here and not float(num_tokens) > 0:
        raise ValueError(
            f"num_tokens={num_tokens} but {num_tokens_here} tokens are trained here; "
            "pass the trained-token count of the whole update"
        )


def _output(loss: torch.Tensor, ratios: torch.Tensor, is_clipped: torch.Tensor) -> LossOutput:
    if not len(ratios):
        return LossOutput(loss, 0.0, 1.0, 1.0, 1.0, 0)
    return LossOutput(
        loss=loss,
        clip_fraction=is_clipped.double().mean().item(),
        ratio_mean=ratios.double().mean().item(),
        ratio_max=ratios.max().item(),
        ratio_min=ratios.min().item(),
        num_tokens_here=len(ratios),
    )
