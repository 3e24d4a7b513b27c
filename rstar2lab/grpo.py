"""Advantages and policy losses: GRPO-RoC's own (Eq 1-2, 6-7) and its relatives.

A loss is two functions: an *objective* per token (what is clipped) and an *aggregation* (what the
sum is divided by). `LOSSES` names the pairs; `grpo_loss` is the paper's, `policy_loss` takes any.
The paper has no KL term and no entropy term (§2.2.1); here the first is an option. Which rollouts
are selected is decided before, in `roc`; how log-probs come about, after, in `learner`.

The loss never chooses its own denominator: `UpdateSize` counts the trained tokens and sequences of
the whole update, so micro-batches and ranks can be split at will and their losses simply added.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from . import config as cfg

_MAX_LOG_RATIO = 60.0  # keeps exp and its gradient finite in float32; e^60 is far outside any clip


# --- advantages, one group at a time --------------------------------------------------------------


def group_advantages(rewards_G: np.ndarray, *, ddof: int = 0, eps: float = 1e-6) -> np.ndarray:
    """Normalize the rewards of one selected group (Eq 7).

    Â_i = (r_i − mean(r)) / (std(r) + eps), shape [G], always finite: a constant group, one rollout
    or G <= ddof gives zeros. ddof 0 is the population deviation.
    Differs from the release: it uses ddof=1.

    Raises: ValueError if the rewards are not one group [G] of finite numbers.
    """
    rewards_G = _one_group(rewards_G)
    is_constant = len(rewards_G) == 0 or np.ptp(rewards_G) == 0
    if is_constant or len(rewards_G) <= ddof:
        return np.zeros_like(rewards_G)
    return (rewards_G - rewards_G.mean()) / (rewards_G.std(ddof=ddof) + eps)


def centered_advantages(rewards_G: np.ndarray, *, ddof: int = 0, eps: float = 0.0) -> np.ndarray:
    """Â_i = r_i − mean(r): Dr. GRPO's, without the deviation (arXiv 2503.20783, Eq 3).

    Dividing by the deviation weighs very easy and very hard problems up. `ddof` and `eps` are
    accepted so that advantages can be computed alike, and not used.

    Raises: ValueError if the rewards are not one group [G] of finite numbers.
    """
    rewards_G = _one_group(rewards_G)
    is_constant = len(rewards_G) == 0 or np.ptp(rewards_G) == 0
    return np.zeros_like(rewards_G) if is_constant else rewards_G - rewards_G.mean()


def _one_group(rewards_G: np.ndarray) -> np.ndarray:
    rewards_G = np.asarray(rewards_G, np.float64)
    if rewards_G.ndim != 1 or not np.isfinite(rewards_G).all():
        raise ValueError(f"expected finite rewards of one group, shape [G], found {rewards_G}")
    return rewards_G


# --- trajectories that ran out of budget ----------------------------------------------------------


def keep_overlong(mask_T: np.ndarray, is_truncated: bool) -> np.ndarray:
    """Truncated trajectories are trained as the negatives that they are (§4.3.1)."""
    return np.asarray(mask_T, bool)


def overlong_filter(mask_T: np.ndarray, is_truncated: bool) -> np.ndarray:
    """Train no token of a truncated trajectory (DAPO, arXiv 2503.14476, §3.4).

    It still counts in its group's mean and deviation, but in no denominator of the loss. The paper
    tried this: no benefit, and more over-long responses (§4.3.1).
    """
    return np.asarray(mask_T, bool) & (not is_truncated)


OVERLONG: dict[str, Callable[[np.ndarray, bool], np.ndarray]] = {
    "keep": keep_overlong,
    "filter": overlong_filter,
}
"""Which tokens of a trajectory are trained, by the name used in configurations."""


def soft_overlong_penalty(length: int, max_length: int, buffer: int) -> float:
    """A reward term in [−1, 0] for coming close to the budget (DAPO, arXiv 2503.14476, Eq 13).

    0 up to max_length − buffer, −1 from max_length on, a straight line between. Lengths in tokens;
    buffer 0 never punishes. DAPO: max_length 20,480, buffer 4,096. Not in the paper.
    """
    if buffer == 0:
        return 0.0
    return -float(np.clip((length - (max_length - buffer)) / buffer, 0.0, 1.0))


# --- parts of a loss ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Clip:
    """The clip's range 1 − low … 1 + high; `dual` > 1 bounds the loss of negative advantages."""

    low: float
    high: float
    dual: float | None = None


@dataclass(frozen=True)
class UpdateSize:
    """What the denominators count, over all micro-batches and ranks of one update.

    num_tokens: trained tokens; num_sequences: sequences with a trained token; max_tokens: the
    longest response possible. Give those that the aggregation reads.
    """

    num_tokens: int = 0
    num_sequences: int = 0
    max_tokens: int = 0


class Terms(NamedTuple):
    """What an objective sees of a micro-batch, [B, T]; zeros where no token is trained."""

    logprobs_BT: torch.Tensor
    log_ratio_BT: torch.Tensor  # log ρ = log-prob − old log-prob
    advantages_BT: torch.Tensor
    is_trained_BT: torch.Tensor


class Objective(NamedTuple):
    """Per token: the value to maximize, the ratio before clipping, whether the clip acted."""

    value_BT: torch.Tensor
    ratio_BT: torch.Tensor
    is_clipped_BT: torch.Tensor


def token_clip(terms: Terms, clip: Clip) -> Objective:
    """min(ρ_t Â, clip(ρ_t) Â), one ratio per token: PPO, GRPO, and Eq 6."""
    return _pessimistic(_exp(terms.log_ratio_BT), terms.advantages_BT, clip)


def sequence_clip(terms: Terms, clip: Clip) -> Objective:
    """min(s Â, clip(s) Â) with s = (Π_t ρ_t)^(1/|o|), one ratio per sequence (GSPO, 2507.18071).

    The geometric mean keeps s comparable between lengths; a product would decay or explode.
    """
    lengths_B1 = terms.is_trained_BT.sum(-1, keepdim=True).clamp(min=1)
    log_ratio_B1 = terms.log_ratio_BT.sum(-1, keepdim=True) / lengths_B1
    ratio_BT = _exp(log_ratio_B1).expand_as(terms.log_ratio_BT)
    return _pessimistic(ratio_BT, terms.advantages_BT, clip)


def weight_clip(terms: Terms, clip: Clip) -> Objective:
    """sg(clip(ρ_t)) Â log π_t: the weight is clipped, no gradient vanishes (CISPO, 2506.13585).

    sg stops the gradient. `clip.low` >= 1 means no lower bound, as in MiniMax-M1.
    """
    ratio_BT = _exp(terms.log_ratio_BT.detach())
    weight_BT = ratio_BT.clamp(1 - clip.low, 1 + clip.high)
    value_BT = weight_BT * terms.advantages_BT * terms.logprobs_BT
    return Objective(value_BT, ratio_BT, weight_BT != ratio_BT)


def _exp(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def _pessimistic(ratio_BT: torch.Tensor, advantages_BT: torch.Tensor, clip: Clip) -> Objective:
    """The smaller of the clipped and the unclipped objective, for advantages of either sign."""
    unclipped_BT = ratio_BT * advantages_BT
    clipped_BT = ratio_BT.clamp(1 - clip.low, 1 + clip.high) * advantages_BT
    value_BT = torch.minimum(unclipped_BT, clipped_BT)
    if clip.dual is not None:
        bounded_BT = torch.maximum(value_BT, clip.dual * advantages_BT)
        value_BT = torch.where(advantages_BT < 0, bounded_BT, value_BT)
    return Objective(value_BT, ratio_BT, value_BT != unclipped_BT)


def token_mean(
    values_BT: torch.Tensor, is_trained_BT: torch.Tensor, size: UpdateSize
) -> torch.Tensor:
    """Σ values / Σ_i |o_i|: every trained token weighs the same (DAPO, and Eq 6)."""
    _check_denominator("num_tokens", size.num_tokens, is_trained_BT)
    return values_BT.sum() / max(float(size.num_tokens), 1.0)


def sequence_mean(
    values_BT: torch.Tensor, is_trained_BT: torch.Tensor, size: UpdateSize
) -> torch.Tensor:
    """Mean over sequences of the mean over tokens: a token weighs 1/|o_i| (GRPO, Eq 1)."""
    _check_denominator("num_sequences", size.num_sequences, is_trained_BT)
    lengths_B = is_trained_BT.sum(-1).clamp(min=1)
    return (values_BT.sum(-1) / lengths_B).sum() / max(float(size.num_sequences), 1.0)


def constant_mean(
    values_BT: torch.Tensor, is_trained_BT: torch.Tensor, size: UpdateSize
) -> torch.Tensor:
    """Σ values / (sequences · L_max): a denominator that no length changes (Dr. GRPO)."""
    _check_denominator("num_sequences", size.num_sequences, is_trained_BT)
    _check_denominator("max_tokens", size.max_tokens, is_trained_BT)
    return values_BT.sum() / max(float(size.num_sequences) * size.max_tokens, 1.0)


def _check_denominator(name: str, value: int, is_trained_BT: torch.Tensor) -> None:
    num_tokens_here = int(is_trained_BT.sum())
    if num_tokens_here and not float(value) > 0:
        raise ValueError(
            f"{name}={value} but {num_tokens_here} tokens are trained here; pass the count of the "
            "whole update (num_tokens: the trained-token count of the whole update)"
        )


# --- KL to a reference, and the gap between engine and learner ------------------------------------


def kl_k1(logprobs_BT: torch.Tensor, reference_logprobs_BT: torch.Tensor) -> torch.Tensor:
    """log π − log π_ref: an unbiased estimate of KL(π‖π_ref); its gradient averages to zero."""
    return logprobs_BT - reference_logprobs_BT


def kl_k2(logprobs_BT: torch.Tensor, reference_logprobs_BT: torch.Tensor) -> torch.Tensor:
    """(log π − log π_ref)² / 2: a biased estimate; its gradient is that of KL(π‖π_ref)."""
    return (logprobs_BT - reference_logprobs_BT).square() / 2


def kl_k3(logprobs_BT: torch.Tensor, reference_logprobs_BT: torch.Tensor) -> torch.Tensor:
    """r − 1 − log r with r = π_ref/π: unbiased and never negative (GRPO, Eq 1).

    Its gradient is, on average over π, that of the *other* direction, KL(π_ref‖π).
    """
    log_r_BT = reference_logprobs_BT - logprobs_BT
    return torch.expm1(log_r_BT.clamp(max=_MAX_LOG_RATIO)) - log_r_BT


Estimator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
KL_ESTIMATORS: dict[str, Estimator] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}
"""Per-token estimates of KL(π‖π_ref) from tokens of π; the names are Schulman's."""


def truncated_importance(
    learner_logprobs_BT: torch.Tensor,
    engine_logprobs_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    cap: float,
) -> torch.Tensor:
    """Weights min(π_learner / π_engine, cap) for tokens that another engine sampled, [B, T].

    Both log-probs are of the same weights version: the learner's recomputed, the engine's recorded.
    The two differ by kernels and precision; without the weight, the update is slightly off-policy.
    Zero, and never computed, where no token is trained. No gradient. Not in the paper.

    Raises: ValueError if `cap` is not positive.
    """
    if not cap > 0:
        raise ValueError(f"expected cap > 0, found {cap}")
    is_trained_BT = mask_BT != 0
    gap_BT = (learner_logprobs_BT - engine_logprobs_BT).detach()
    gap_BT = torch.where(is_trained_BT, gap_BT, torch.zeros_like(gap_BT))
    return torch.where(is_trained_BT, _exp(gap_BT).clamp(max=cap), torch.zeros_like(gap_BT))


# --- losses ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PolicyLoss:
    """A named loss: objective per token, aggregation, advantages, and how they are written."""

    objective: Callable[[Terms, Clip], Objective]
    aggregate: Callable[[torch.Tensor, torch.Tensor, UpdateSize], torch.Tensor]
    advantages: Callable[..., np.ndarray]
    formula: str


_CLIPPED = "min({0} Â, clip({0}, 1−ε_low, 1+ε_high) Â)"
_TOKEN = _CLIPPED.format("ρ_t")
_NORMALIZED = "Â = (r − mean r) / (std r + 1e-6)"

LOSSES: dict[str, PolicyLoss] = {
    "dapo": PolicyLoss(
        token_clip, token_mean, group_advantages,
        f"J = 1/Σ|o_i| · Σ_i Σ_t {_TOKEN}; {_NORMALIZED}",
    ),
    "grpo": PolicyLoss(
        token_clip, sequence_mean, group_advantages,
        f"J = 1/n · Σ_i 1/|o_i| · Σ_t {_TOKEN}; {_NORMALIZED}",
    ),
    "dr_grpo": PolicyLoss(
        token_clip, constant_mean, centered_advantages,
        f"J = 1/(n·L_max) · Σ_i Σ_t {_TOKEN}; Â = r − mean r",
    ),
    "gspo": PolicyLoss(
        sequence_clip, sequence_mean, group_advantages,
        f"J = 1/n · Σ_i {_CLIPPED.format('s_i')}, s_i = (Π_t ρ_t)^(1/|o_i|); {_NORMALIZED}",
    ),
    "cispo": PolicyLoss(
        weight_clip, token_mean, group_advantages,
        "J = 1/Σ|o_i| · Σ_i Σ_t sg(clip(ρ_t, 1−ε_low, 1+ε_high)) Â log π_t; " + _NORMALIZED,
    ),
}  # fmt: skip
"""Losses by the name used in configurations. The paper's (Eq 6) is "dapo"."""


def formula(name: str) -> str:
    """The objective that a named loss maximizes, as text.

    n sequences o_i of |o_i| trained tokens; sg(…) passes no gradient.

    Raises: ValueError for an unknown name.
    """
    if name not in LOSSES:
        raise ValueError(f"loss {name!r} is unknown; choose one of {', '.join(LOSSES)}")
    return LOSSES[name].formula


@dataclass(frozen=True)
class Rule:
    """A loss with its numbers: all that `policy_loss` needs besides data."""

    loss: PolicyLoss
    clip: Clip
    kl: Estimator = kl_k3
    kl_coefficient: float = 0.0


def rule_of(settings: cfg.Loss) -> Rule:
    """The rule that a configuration names."""
    clip = Clip(settings.clip_low, settings.clip_high, settings.dual_clip)
    estimator = KL_ESTIMATORS[settings.kl_estimator]
    return Rule(LOSSES[settings.name], clip, estimator, settings.kl_coefficient)


def describe(settings: cfg.Loss) -> str:
    """The formula in use, its numbers filled in, and every option that changes it (one line)."""
    low, high = f"{1 - settings.clip_low:g}", f"{1 + settings.clip_high:g}"
    text = formula(settings.name).replace("1−ε_low", low).replace("1+ε_high", high)
    parts = [f"{settings.name}: {text}"]
    if "std" in text:
        parts.append(f"std with ddof {settings.ddof}")
    if settings.dual_clip is not None:
        parts.append(f"Â < 0: at least {settings.dual_clip:g} Â")
    if settings.kl_coefficient:
        parts.append(f"− {settings.kl_coefficient:g} · KL ({settings.kl_estimator})")
    if settings.importance_cap is not None:
        parts.append(f"tokens weighted by min(π_learner/π_engine, {settings.importance_cap:g})")
    if settings.entropy_mask != "none":
        scope = settings.entropy_mask
        parts.append(f"only the top {settings.entropy_fraction:.0%} entropy tokens of each {scope}")
    if settings.overlong != "keep":
        parts.append("truncated trajectories masked")
    if settings.overlong_buffer_tokens:
        parts.append(f"soft overlong penalty over {settings.overlong_buffer_tokens} tokens")
    return "; ".join(parts)


@dataclass(frozen=True)
class LossOutput:
    """A loss to call `backward` on, and what happened in it, measured before clipping.

    Ratios are over the trained tokens here (1.0 where there are none). `clip_fraction` is the share
    of them whose gradient the clip removed (CISPO: whose weight it changed). Weight by
    `num_tokens_here` to average over micro-batches. `kl` is the estimate per trained token,
    `weight_mean` that of the importance or entropy weights.
    """

    loss: torch.Tensor
    clip_fraction: float
    ratio_mean: float
    ratio_max: float
    ratio_min: float
    num_tokens_here: int
    kl: float = 0.0
    weight_mean: float = 1.0


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
    paper = Rule(LOSSES["dapo"], Clip(clip_low, clip_high, dual_clip))
    size = UpdateSize(num_tokens=num_tokens)
    return policy_loss(logprobs_BT, old_logprobs_BT, advantages_B, mask_BT, paper, size)


def policy_loss(
    logprobs_BT: torch.Tensor,
    old_logprobs_BT: torch.Tensor,
    advantages_B: torch.Tensor,
    mask_BT: torch.Tensor,
    rule: Rule,
    size: UpdateSize,
    *,
    weights_BT: torch.Tensor | None = None,
    reference_logprobs_BT: torch.Tensor | None = None,
) -> LossOutput:
    """Any loss of `LOSSES` on a micro-batch, negated to minimize; shapes as in `grpo_loss`.

    loss = −aggregate(weight · objective − kl_coefficient · KL). `weights_BT` multiplies the policy
    term per token, without gradient, and no denominator: the truncated importance correction, or
    the entropy mask (arXiv 2506.01939, where the mean stays one over all tokens).
    reference_logprobs_BT: read if the rule has a KL term.

    Raises: ValueError if shapes disagree, a denominator that the aggregation reads is not positive
    while tokens are trained, or the reference is missing.
    """
    _check_shapes(logprobs_BT, old_logprobs_BT, advantages_B, mask_BT)
    terms = _terms(logprobs_BT, old_logprobs_BT, advantages_B, mask_BT)
    found = rule.loss.objective(terms, rule.clip)
    values_BT, weight_mean, kl = found.value_BT, 1.0, 0.0
    if weights_BT is not None:
        weights_BT = _trained(weights_BT.detach(), terms)
        values_BT = values_BT * weights_BT
        weight_mean = _mean(weights_BT, terms)
    if rule.kl_coefficient:
        if reference_logprobs_BT is None:
            raise ValueError("the rule has a KL term; pass reference_logprobs_BT")
        kl_BT = rule.kl(terms.logprobs_BT, _trained(reference_logprobs_BT.detach(), terms))
        values_BT, kl = values_BT - rule.kl_coefficient * kl_BT, _mean(kl_BT.detach(), terms)
    loss = -rule.loss.aggregate(values_BT, terms.is_trained_BT, size)
    return _output(loss, found, terms, kl, weight_mean)


def _terms(
    logprobs_BT: torch.Tensor,
    old_logprobs_BT: torch.Tensor,
    advantages_B: torch.Tensor,
    mask_BT: torch.Tensor,
) -> Terms:
    """Working precision, and zeros where the mask is: torch.where lets no 0 · NaN arise."""
    is_trained_BT = mask_BT != 0
    work_dtype = torch.promote_types(logprobs_BT.dtype, torch.float32)
    new_BT = logprobs_BT.to(work_dtype)
    log_ratio_BT = new_BT - old_logprobs_BT.detach().to(work_dtype)
    advantages_BT = advantages_B.detach().to(work_dtype)[:, None].expand_as(new_BT)
    zeros_BT = torch.zeros_like(new_BT)
    return Terms(
        torch.where(is_trained_BT, new_BT, zeros_BT),
        torch.where(is_trained_BT, log_ratio_BT, zeros_BT),
        torch.where(is_trained_BT, advantages_BT, zeros_BT),
        is_trained_BT,
    )


def _trained(values_BT: torch.Tensor, terms: Terms) -> torch.Tensor:
    zeros_BT = torch.zeros_like(terms.logprobs_BT)
    return torch.where(terms.is_trained_BT, values_BT.to(zeros_BT.dtype), zeros_BT)


def _mean(values_BT: torch.Tensor, terms: Terms) -> float:
    """Over the trained tokens here; masked values are zero."""
    return values_BT.double().sum().item() / max(int(terms.is_trained_BT.sum()), 1)


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


def _output(
    loss: torch.Tensor, found: Objective, terms: Terms, kl: float, weight_mean: float
) -> LossOutput:
    ratios = found.ratio_BT.detach()[terms.is_trained_BT]
    if not len(ratios):
        return LossOutput(loss, 0.0, 1.0, 1.0, 1.0, 0)
    return LossOutput(
        loss=loss,
        clip_fraction=found.is_clipped_BT[terms.is_trained_BT].double().mean().item(),
        ratio_mean=ratios.double().mean().item(),
        ratio_max=ratios.max().item(),
        ratio_min=ratios.min().item(),
        num_tokens_here=len(ratios),
        kl=kl,
        weight_mean=weight_mean,
    )
