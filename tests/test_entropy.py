"""Entropy against known distributions and the dense formula; the mask against exact counts."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rstar2lab import entropy, protocol
from rstar2lab.types import StopReason, Trajectory, Turn


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


# --- masks over several sequences ----------------------------------------------------------------


def arrays(*rows):
    return [np.asarray(row) for row in rows]


def test_one_threshold_per_sequence_or_one_for_the_batch():
    entropies = arrays([3.0, 2.0, 9.0, 1.0], [0.4, 0.3])
    trained = arrays([True, True, False, True], [True, True])
    found = entropy.sequence_masks(entropies, trained, 0.4)
    assert [mask.tolist() for mask in found] == [[True, True, False, False], [True, False]]
    found = entropy.batch_masks(entropies, trained, 0.4)
    assert [mask.tolist() for mask in found] == [[True, True, False, False], [False, False]]


@pytest.mark.parametrize("scope", entropy.MASKS)
def test_untrained_tokens_are_never_on_top_whatever_their_entropy(scope):
    """L8 and L9: NaN where nothing was sampled; a sequence without a trained token."""
    entropies = arrays([np.nan, 1.0, np.nan], [np.nan, np.nan])
    trained = arrays([False, True, False], [False, False])
    found = entropy.MASKS[scope](entropies, trained, 0.2)
    assert [mask.tolist() for mask in found] == [[False, True, False], [False, False]]
    assert entropy.MASKS[scope]([], [], 0.2) == []


@given(st.lists(st.lists(st.booleans(), max_size=9), min_size=1, max_size=4), st.integers(1, 100))
def test_masks_keep_the_ceiling_of_the_share_of_trained_tokens(rows, percent):
    trained = [np.asarray(row, bool) for row in rows]
    entropies = [np.arange(len(row), dtype=float) for row in rows]
    share = Fraction(percent, 100)
    kept = entropy.sequence_masks(entropies, trained, percent / 100)
    assert [int(k.sum()) for k in kept] == [math.ceil(share * int(t.sum())) for t in trained]
    total = sum(int(t.sum()) for t in trained)
    kept = entropy.batch_masks(entropies, trained, percent / 100)
    assert sum(int(k.sum()) for k in kept) == math.ceil(share * total)


# --- roles ---------------------------------------------------------------------------------------

VOCABULARY: list[str] = []


def ids_of(pieces):
    """Ids of these texts; a text gets a number when it is first seen."""
    VOCABULARY.extend(piece for piece in pieces if piece not in VOCABULARY)
    return np.asarray([VOCABULARY.index(piece) for piece in pieces], np.int32)


def decode(ids):
    assert len(ids) == 1
    return VOCABULARY[ids[0]]


def told(*turns, entropies=None):
    """A trajectory of (sampled pieces, tool pieces) per turn."""
    made = []
    for sampled, response in turns:
        empty = np.zeros(len(sampled), np.float32)
        text = "".join(sampled)
        made.append(Turn(text, ids_of(sampled), empty, result_token_ids=ids_of(response)))
    ids = np.concatenate([x for t in made for x in (t.token_ids, t.result_token_ids)])
    mask = np.concatenate(
        [np.ones(len(x), bool) * on for t in made for x, on in
         ((t.token_ids, 1), (t.result_token_ids, 0))]
    ).astype(bool)  # fmt: skip
    if entropies is not None:
        entropies = np.asarray(entropies, np.float32)
    zeros = np.zeros(len(ids), np.float32)
    return Trajectory(
        "p", 0, np.zeros(1, np.int32), ids, mask, zeros, entropies, tuple(made),
        StopReason.ANSWERED,
    )  # fmt: skip


SHORT = {
    "tool_response": "-", "tool_call": "c", "answer": "a", "tool_reflection": "r",
    "forking": "f", "reasoning": ".",
}  # fmt: skip
FIRST = (["Let", " me", " compute", "<tool_call>", "print", "(6*7)", "</tool_call>", "<|im_end|>"],
         ["<tool_response>", "42", "</tool_response>"])  # fmt: skip
SECOND = (["So", " it", " is", " right", "<answer>", "42", "</answer>", "<|im_end|>"], [])


def roles(trajectory, **named):
    return "".join(SHORT[role] for role in entropy.token_roles(trajectory, decode, **named))


def test_every_role_is_one_of_six_and_has_its_place():
    found = roles(told(FIRST, SECOND), reflection_tokens=2)
    assert found == "...cccc." + "---" + "rr..aaa."
    assert set(SHORT) == set(entropy.ROLES)


def test_reflection_lasts_k_tokens_and_yields_to_calls_and_answers():
    assert roles(told(FIRST, SECOND), reflection_tokens=20)[11:] == "rrrraaar"
    again = (["Wait", "<tool_call>", "x", "</tool_call>", " so"], ["-> 1"])
    found = roles(told(FIRST, again, SECOND), reflection_tokens=5)
    assert found == "...cccc." + "---" + "rcccr" + "-" + "rrrraaa."
    assert "r" not in roles(told(FIRST, SECOND), reflection_tokens=0)


def test_forking_is_the_top_share_of_sampled_tokens_and_the_last_rule_but_one():
    high = [0, 9, 0, 8, 0, 0, 0, 0] + [99, 99, 99] + [7, 0, 6, 0, 0, 0, 0, 0]
    found = roles(told(FIRST, SECOND, entropies=high), reflection_tokens=1, forking_fraction=0.25)
    assert found == ".f.cccc." + "---" + "r.f.aaa."  # 4 of 16: one is in a call, one a reflection


def test_tags_count_wherever_token_borders_fall():
    pieces = ["a<tool", "_call>{", "}</tool_ca", "ll>b", " c"]
    assert roles(told((pieces, []))) == "cccc."


def test_what_the_parser_does_not_call_a_call_is_none():
    unclosed = (["x", "<tool_call>", "print(1)"], [])
    assert roles(told(unclosed)) == "..."
    thought = (["<reason>", "<tool_call>", "1", "</tool_call>", "</reason>", "b"], [])
    assert roles(told(thought)) == "......"
    without_tag = (thought[0][1:], [])  # the chat format forced the opening tag: it is prompt
    assert roles(told(without_tag)) == "ccc.."
    assert roles(told(without_tag), prefixes=("<reason>", "")) == "....."
    inside = (["<reason>", "<answer>", "1", "</answer>", "</reason>"], [])
    assert roles(told(inside)) == ".aaa."


def test_a_response_that_was_cut_or_voided_has_as_many_roles_as_tokens():
    whole = told(FIRST, SECOND)
    cut = Trajectory(
        "p", 0, whole.prompt_ids, whole.response_ids[:13], whole.loss_mask[:13],
        whole.logprobs[:13], None, whole.turns, StopReason.LENGTH,
    )  # fmt: skip
    assert roles(cut) == "...cccc.---rr"
    lost = Trajectory(
        "p", 0, whole.prompt_ids, whole.response_ids, whole.loss_mask, whole.logprobs, None, (),
        StopReason.VOID,
    )  # fmt: skip
    assert roles(lost) == "........---........"


def test_roles_on_real_token_ids(tokens):
    """The kit's tokenizer, a rendered call, and ids that were never text before."""
    call = protocol.render_call("print(42)")
    ids = tokens.encode(f"Wait, {call}<|im_end|>")
    turn = Turn("", np.asarray(ids), np.zeros(len(ids)))
    zeros = np.zeros(len(ids), np.float32)
    trajectory = Trajectory(
        "p", 0, np.zeros(1), np.asarray(ids), zeros == 0, zeros, None, (turn,), StopReason.LENGTH
    )
    found = entropy.token_roles(trajectory, tokens.decode)
    inside = tokens.decode([i for i, role in zip(ids, found, strict=True) if role == "tool_call"])
    assert inside == call and set(found) == {"tool_call", "reasoning"}
