"""Entropy against known distributions and the dense formula; the mask against exact counts."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rstar2lab import entropy


def dense(logits, temperature=1.0):
    scaled = logits.double() / temperature
    return torch.distributions.Categorical(logits=scaled, validate_args=False).entropy()


def test_known_distributions():
    probs = torch.tensor([[0.5, 0.5, 0], [1, 0, 0], [1 / 3, 1 / 3, 1 / 3], [0.5, 0.25, 0.25]])
    found = entropy.token_entropy(probs.log())
    expected = [math.log(2), 0, math.log(3), 1.5 * math.log(2)]
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("shape", [(7,), (10, 7), (3, 10, 7), (2, 3, 5, 7), (0, 7)])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 1024])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.2])
def test_chunks_equal_the_dense_formula(shape, chunk_tokens, temperature):
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 4
    found = entropy.token_entropy(logits, temperature, chunk_tokens)
    assert found.shape == logits.shape[:-1]
    assert torch.allclose(found.double(), dense(logits, temperature), atol=1e-6)


def test_temperature_divides_the_logits():
    logits = torch.tensor([0.0, math.log(3)])
    p = 1 / (1 + 3**0.5)
    expected = -p * math.log(p) - (1 - p) * math.log(1 - p)
    assert entropy.token_entropy(logits, 2.0).item() == pytest.approx(expected)


def test_a_slice_of_a_batch_equals_the_dense_formula():
    logits = torch.randn(3, 9, 5)[:, :-1]
    assert not logits.is_contiguous()
    assert torch.allclose(entropy.token_entropy(logits).double(), dense(logits), atol=1e-6)


def test_large_logits_banned_tokens_and_half_precision_stay_finite():
    logits = torch.tensor([[1e4, 1e4, -1e4], [0, -math.inf, -math.inf], [5, 5, -math.inf]])
    expected = [math.log(2), 0, math.log(2)]
    assert entropy.token_entropy(logits).tolist() == pytest.approx(expected)
    half = entropy.token_entropy(logits.bfloat16())
    assert half.dtype == torch.float32 and torch.isfinite(half).all()


def test_gradient_is_finite_and_zero_for_banned_tokens():
    logits = torch.tensor([1.0, 2.0, -math.inf], requires_grad=True)
    entropy.token_entropy(logits).backward()
    assert torch.isfinite(logits.grad).all() and logits.grad[2] == 0
    assert logits.grad[0] > 0 > logits.grad[1]  # more even logits, more entropy


def test_no_array_is_larger_than_a_chunk(monkeypatch):
    sizes = []
    chunk_entropy = entropy._chunk_entropy

    def recorded(logits_TV, temperature):
        sizes.append(len(logits_TV))
        return chunk_entropy(logits_TV, temperature)

    monkeypatch.setattr(entropy, "_chunk_entropy", recorded)
    entropy.token_entropy(torch.zeros(2, 5, 3), chunk_tokens=4)
    assert sizes == [4, 4, 2]


@pytest.mark.parametrize("named", [{"temperature": 0}, {"chunk_tokens": 0}])
def test_bad_arguments_are_refused(named):
    with pytest.raises(ValueError, match="expected temperature > 0"):
        entropy.token_entropy(torch.zeros(2, 3), **named)


@given(st.integers(0, 400), st.integers(0, 100))
def test_the_mask_has_exactly_the_ceiling_of_the_share(size, percent):
    mask = entropy.top_entropy_mask(np.zeros(size), percent / 100)
    assert mask.dtype == bool and mask.shape == (size,)
    assert mask.sum() == math.ceil(Fraction(percent, 100) * size)


def test_float_shares_do_not_round_up():
    assert entropy.top_entropy_mask(np.zeros(5), 0.2).sum() == 1
    assert entropy.top_entropy_mask(np.zeros(30), 0.1).sum() == 3
    assert entropy.top_entropy_mask(np.zeros(100), 0.07).sum() == 7  # 0.07 · 100 > 7 in floats


def test_the_mask_marks_the_highest_and_of_equal_ones_the_earlier():
    found = entropy.top_entropy_mask(np.array([0.1, 0.9, 0.5, 0.9, 0.5]), 0.6)
    assert found.tolist() == [False, True, True, True, False]


def test_the_mask_refuses_nan_and_shares_outside_0_1():
    with pytest.raises(ValueError, match="without NaN"):
        entropy.top_entropy_mask(np.array([0.1, np.nan]))
    with pytest.raises(ValueError, match="fraction"):
        entropy.top_entropy_mask(np.zeros(3), 1.5)
