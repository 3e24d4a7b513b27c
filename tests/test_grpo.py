"""The loss against closed forms: quadrants, REINFORCE, split invariance, masks."""

import math

import numpy as np
import pytest
import torch

from rstar2lab import grpo

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def one_token(advantage, ratio, **named):
    """Loss and gradient of a single token with this ratio."""
    logprobs = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([advantage], dtype=torch.float64)
    output = grpo.grpo_loss(
        logprobs, torch.zeros(1, 1), advantages, torch.ones(1, 1), **CLIP, num_tokens=1, **named
    )
    output.loss.backward()
    return output, logprobs.grad.item()


def batch(seed=0, size=8, length=12, spread=0.4):
    generator = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(size, length, generator=generator, dtype=torch.float64) * 3
    old = logprobs + spread * torch.randn(size, length, generator=generator, dtype=torch.float64)
    advantages = torch.randn(size, generator=generator, dtype=torch.float64)
    mask = torch.rand(size, length, generator=generator) < 0.7
    return logprobs, old, advantages, mask


def gradient(logprobs, old, advantages, mask, splits, num_tokens):
    leaf = logprobs.clone().requires_grad_()
    for rows in torch.arange(len(leaf)).split(splits):
        grpo.grpo_loss(
            leaf[rows], old[rows], advantages[rows], mask[rows], **CLIP, num_tokens=num_tokens
        ).loss.backward()
    return leaf.grad


# --- loss ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "slope"),
    [
        (1, 1.5, -1.28, 0.0),  # clipped from above
        (1, 0.5, -0.5, -0.5),
        (-1, 1.5, 1.5, 1.5),
        (-1, 0.5, 0.8, 0.0),  # clipped from below
    ],
)
def test_gradient_vanishes_in_exactly_two_quadrants(advantage, ratio, loss, slope):
    output, found = one_token(advantage, ratio)
    assert output.loss.item() == pytest.approx(loss, abs=1e-12)
    assert found == 0.0 if slope == 0 else found == pytest.approx(slope, abs=1e-12)
    assert output.clip_fraction == (slope == 0)


def test_upper_and_lower_clip_are_apart():
    assert one_token(1, 1.27)[1] != 0 and one_token(1, 1.29)[1] == 0
    assert one_token(-1, 0.81)[1] != 0 and one_token(-1, 0.79)[1] == 0


def test_ratio_one_is_reinforce():
    logprobs, _, advantages, mask = batch()
    num_tokens = int(mask.sum())
    found = gradient(logprobs, logprobs, advantages, mask, 8, num_tokens)
    reinforce = -advantages[:, None] * mask / num_tokens
    assert torch.allclose(found, reinforce, atol=1e-15, rtol=0)


@pytest.mark.parametrize("splits", [1, 2, 3, 4, [1, 7], [5, 2, 1]])
def test_splitting_the_batch_leaves_the_gradient_unchanged(splits):
    logprobs, old, advantages, mask = batch()
    mask[2] = False  # a micro-batch of one may have nothing to train
    num_tokens = int(mask.sum())
    whole = gradient(logprobs, old, advantages, mask, 8, num_tokens)
    parts = gradient(logprobs, old, advantages, mask, splits, num_tokens)
    assert whole.abs().max() > 1e-3
    assert torch.allclose(whole, parts, atol=1e-12, rtol=0)


def test_every_token_weighs_the_same_whatever_the_length_of_its_sequence():
    mask = torch.arange(1000)[None] < torch.tensor([10, 1000])[:, None]
    logprobs = torch.zeros(2, 1000, dtype=torch.float64)
    found = gradient(logprobs, logprobs, torch.tensor([1.0, -1.0]), mask, 2, 1010)
    assert torch.allclose(found[0, :10], torch.tensor(-1 / 1010, dtype=torch.float64))
    assert torch.allclose(found[1], torch.tensor(1 / 1010, dtype=torch.float64))
    assert (found[0, 10:] == 0).all()


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
def test_masked_entries_never_touch_loss_or_gradient(junk):
    logprobs, old, advantages, mask = batch()
    clean = grpo.grpo_loss(logprobs, old, advantages, mask, **CLIP, num_tokens=50)
    for spoil_new, spoil_old in [(True, False), (False, True), (True, True)]:
        new = torch.where(mask | (not spoil_new), logprobs, junk).requires_grad_()
        spoiled_old = torch.where(mask | (not spoil_old), old, junk)
        output = grpo.grpo_loss(new, spoiled_old, advantages, mask, **CLIP, num_tokens=50)
        output.loss.backward()
        assert output.loss.item() == clean.loss.item()
        assert (new.grad[~mask] == 0).all() and torch.isfinite(new.grad).all()
        assert output.ratio_max == clean.ratio_max and output.clip_fraction == clean.clip_fraction


def test_advantage_of_a_fully_masked_row_may_be_nan():
    logprobs, old, advantages, mask = batch()
    mask[3] = False
    leaf = logprobs.clone().requires_grad_()
    advantages[3] = math.nan
    output = grpo.grpo_loss(leaf, old, advantages, mask, **CLIP, num_tokens=50)
    output.loss.backward()
    assert torch.isfinite(output.loss) and torch.isfinite(leaf.grad).all()


@pytest.mark.parametrize("num_tokens", [0, 100])
@pytest.mark.parametrize("shape", [(2, 5), (2, 0), (0, 5)])
def test_nothing_to_train_gives_zero_with_a_graph(num_tokens, shape):
    logprobs = torch.full(shape, math.nan, requires_grad=True)
    mask = torch.zeros(shape, dtype=torch.bool)
    old, advantages = torch.zeros(shape), torch.ones(shape[0])
    output = grpo.grpo_loss(logprobs, old, advantages, mask, **CLIP, num_tokens=num_tokens)
    output.loss.backward()
    assert output.loss.item() == 0 and (logprobs.grad == 0).all()
    assert output.num_tokens_here == 0 and output.clip_fraction == 0
    assert output.ratio_mean == output.ratio_max == output.ratio_min == 1


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32])
def test_masks_of_any_type_agree(dtype):
    logprobs, old, advantages, mask = batch()
    expected = grpo.grpo_loss(logprobs, old, advantages, mask, **CLIP, num_tokens=9).loss
    found = grpo.grpo_loss(logprobs, old, advantages, mask.to(dtype), **CLIP, num_tokens=9).loss
    assert found == expected


def test_ratios_are_reported_before_clipping():
    logprobs = torch.tensor([[3.0, 0.5, 1.0, 9.0]]).log()
    output = grpo.grpo_loss(
        logprobs, torch.zeros(1, 4), torch.ones(1), torch.tensor([[1, 1, 1, 0]]), **CLIP,
        num_tokens=3,
    )
    assert output.ratio_max == pytest.approx(3) and output.ratio_min == pytest.approx(0.5)
    assert output.ratio_mean == pytest.approx(1.5) and output.num_tokens_here == 3
    assert output.clip_fraction == pytest.approx(1 / 3)  # 0.5 with A > 0 keeps its gradient


def test_huge_log_ratios_stay_finite():
    logprobs = torch.tensor([[0.0, 0.0]], requires_grad=True)
    old = torch.tensor([[-500.0, 500.0]])
    output = grpo.grpo_loss(logprobs, old, torch.ones(1), torch.ones(1, 2), **CLIP, num_tokens=2)
    output.loss.backward()
    assert torch.isfinite(output.loss) and torch.isfinite(logprobs.grad).all()


def test_half_precision_is_computed_in_single():
    logprobs = torch.zeros(1, 4000, dtype=torch.bfloat16)
    output = grpo.grpo_loss(
        logprobs, logprobs, torch.ones(1), torch.ones(1, 4000), **CLIP, num_tokens=4000
    )
    assert output.loss.dtype == torch.float32 and output.loss.item() == pytest.approx(-1)


def test_dual_clip_bounds_the_loss_of_negative_advantages_only():
    assert one_token(-1, 9)[0].loss.item() == pytest.approx(9)
    bounded, slope = one_token(-1, 9, dual_clip=3.0)
    assert bounded.loss.item() == pytest.approx(3) and slope == 0 and bounded.clip_fraction == 1
    assert one_token(1, 0.1, dual_clip=3.0)[0].loss.item() == pytest.approx(-0.1)


def test_no_gradient_reaches_old_log_probs_or_advantages():
    logprobs, old, advantages, mask = batch()
    old.requires_grad_(), advantages.requires_grad_(), logprobs.requires_grad_()
    grpo.grpo_loss(logprobs, old, advantages, mask, **CLIP, num_tokens=9).loss.backward()
    assert old.grad is None and advantages.grad is None


def test_wrong_shapes_and_denominators_are_refused():
    ones = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"one shape \[B, T\]"):
        grpo.grpo_loss(ones, ones[:, :2], torch.ones(2), ones, **CLIP, num_tokens=6)
    with pytest.raises(ValueError, match="advantages of shape"):
        grpo.grpo_loss(ones, ones, torch.ones(3), ones, **CLIP, num_tokens=6)
    for num_tokens in (0, -1, math.nan):
        with pytest.raises(ValueError, match="trained-token count of the whole update"):
            grpo.grpo_loss(ones, ones, torch.ones(2), ones, **CLIP, num_tokens=num_tokens)


# --- advantages ----------------------------------------------------------------------------------


def test_advantages_of_equation_7_by_hand():
    found = grpo.group_advantages(np.array([1, 0, 0, 0]), eps=0)
    assert found == pytest.approx([3**0.5, *[-(3**-0.5)] * 3])
    assert grpo.group_advantages([1, 0], ddof=1, eps=0) == pytest.approx([0.5**0.5, -(0.5**0.5)])


@pytest.mark.parametrize("size", [2, 3, 8, 16, 32])
def test_a_group_has_mean_zero_and_deviation_one(size):
    rewards = np.random.default_rng(size).random(size)
    for ddof in (0, 1):
        advantages = grpo.group_advantages(rewards, ddof=ddof, eps=0)
        assert advantages.mean() == pytest.approx(0, abs=1e-12)
        assert advantages.std(ddof=ddof) == pytest.approx(1)


@pytest.mark.parametrize("rewards", [[1], [0, 0], [1, 1, 1], [0.1] * 7, [], [-3.3] * 32])
@pytest.mark.parametrize("ddof", [0, 1])
def test_constant_groups_have_zero_advantage(rewards, ddof):
    advantages = grpo.group_advantages(rewards, ddof=ddof, eps=0)
    assert (advantages == np.zeros(len(rewards))).all()


def test_advantages_refuse_missing_rewards_and_several_groups():
    for rewards in ([1, np.nan], [[0, 1], [1, 0]], [1, None]):
        with pytest.raises(ValueError, match="one group"):
            grpo.group_advantages(rewards)
