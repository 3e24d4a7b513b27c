"""Chunked log-probs and entropies against the dense formula: values, gradients, sizes."""

import pytest
import torch

from rstar2lab import logprobs


def inputs(tokens=13, width=6, vocabulary=17, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=generator, dtype=dtype)
    weight = torch.randn(vocabulary, width, generator=generator, dtype=dtype)
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def dense(hidden, weight, targets, temperature=1.0):
    log_softmax = (hidden.double() @ weight.double().T / temperature).log_softmax(-1)
    chosen = log_softmax.gather(1, targets[:, None])[:, 0]
    return chosen, -(log_softmax.exp() * log_softmax).sum(-1)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 13, 100, None])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_values_and_gradients_equal_the_dense_formula(chunk_tokens, temperature):
    """L10: a ragged last chunk, chunks of one, one chunk; both outputs differentiated at once."""
    hidden, weight, targets = inputs()
    found = logprobs.token_statistics(
        hidden, weight, targets, temperature=temperature, chunk_tokens=chunk_tokens
    )
    expected = dense(hidden, weight, targets, temperature)
    factors = torch.linspace(-1, 2, 13, dtype=torch.float64)
    grads = [
        torch.autograd.grad((factors * a + factors.flip(0) * b).sum(), (hidden, weight))
        for a, b in (found, expected)
    ]
    for mine, theirs in zip([*found, *grads[0]], [*expected, *grads[1]], strict=True):
        assert torch.allclose(mine, theirs, atol=1e-12)


@pytest.mark.parametrize("entropies", [True, False])
def test_the_gradient_of_log_probs_alone_and_without_entropies(entropies):
    hidden, weight, targets = inputs()
    found = logprobs.token_statistics(
        hidden, weight, targets, entropies=entropies, chunk_tokens=5
    )
    assert (found.entropies_K is not None) == entropies
    mine = torch.autograd.grad(found.logprobs_K.sum(), (hidden, weight))
    theirs = torch.autograd.grad(dense(hidden, weight, targets)[0].sum(), (hidden, weight))
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(mine, theirs, strict=True))


def test_single_precision_is_within_1e_5_at_a_large_vocabulary():
    hidden, weight, targets = inputs(tokens=40, width=64, vocabulary=50_000, dtype=torch.float32)
    found = logprobs.token_statistics(hidden / 8, weight, targets, chunk_tokens=7)
    for mine, exact in zip(found, dense(hidden / 8, weight, targets), strict=True):
        assert mine.dtype == torch.float32
        assert (mine.double() - exact).abs().max() < 1e-5


def test_half_precision_hidden_states_give_single_precision_statistics():
    hidden, weight, targets = inputs(dtype=torch.float32)
    half = hidden.detach().bfloat16().requires_grad_()
    found = logprobs.token_statistics(half, weight, targets, chunk_tokens=4)
    (found.logprobs_K.sum() + found.entropies_K.sum()).backward()
    expected = dense(half, weight.bfloat16(), targets)
    assert found.logprobs_K.dtype == torch.float32 and half.grad.dtype == torch.bfloat16
    assert weight.grad.dtype == torch.float32
    assert (found.logprobs_K.double() - expected[0]).abs().max() < 0.1


def test_no_array_is_larger_than_a_chunk(monkeypatch):
    sizes = []
    original = logprobs._logits

    def recorded(hidden, weight, temperature, out):
        sizes.append(len(out))
        return original(hidden, weight, temperature, out)

    monkeypatch.setattr(logprobs, "_logits", recorded)
    hidden, weight, targets = inputs()
    found = logprobs.token_statistics(hidden, weight, targets, chunk_tokens=5)
    assert sizes == [5, 5, 3]
    found.logprobs_K.sum().backward()
    assert sizes == [5, 5, 3] * 2
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 2 * 17)
    logprobs.token_statistics(hidden, weight, targets)
    assert sizes[6:] == [2] * 6 + [1]


def test_no_tokens_give_empty_statistics_with_a_graph():
    hidden, weight, targets = inputs(tokens=0)
    found = logprobs.token_statistics(hidden, weight, targets)
    found.logprobs_K.sum().backward()
    assert found.logprobs_K.shape == (0,) and (weight.grad == 0).all()


def test_a_frozen_head_gets_no_gradient():
    hidden, weight, targets = inputs()
    found = logprobs.token_statistics(hidden, weight.detach(), targets)
    found.logprobs_K.sum().backward()
    assert hidden.grad is not None


@pytest.mark.parametrize("named", [{"temperature": 0}, {"chunk_tokens": 0}])
def test_bad_arguments_are_refused(named):
    with pytest.raises(ValueError, match="expected temperature > 0"):
        logprobs.token_statistics(*inputs(), **named)
