"""Every named loss against closed forms: weights, quadrants, REINFORCE, splits, masks, KL, TIS."""

import inspect
import math
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rstar2lab import config as cfg
from rstar2lab import grpo

CLIP = grpo.Clip(0.2, 0.28)
NAMES = tuple(grpo.LOSSES)
on_every_loss = pytest.mark.parametrize("name", NAMES)
MAX_TOKENS = 1000


def rule(name, clip=CLIP, **named):
    return grpo.Rule(grpo.LOSSES[name], clip, **named)


def size_of(mask):
    mask = mask != 0
    return grpo.UpdateSize(int(mask.sum()), int(mask.any(-1).sum()), MAX_TOKENS)


def batch(seed=0, rows=8, length=12, spread=0.4):
    generator = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(rows, length, generator=generator, dtype=torch.float64) * 3
    old = logprobs + spread * torch.randn(rows, length, generator=generator, dtype=torch.float64)
    advantages = torch.randn(rows, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, length, generator=generator) < 0.7
    return logprobs, old, advantages, mask


def gradient(rule, logprobs, old, advantages, mask, size=None, splits=None, **named):
    """Gradient with respect to the log-probs, over micro-batches of these rows."""
    leaf, size = logprobs.clone().requires_grad_(), size or size_of(mask)
    for rows in torch.arange(len(leaf)).split(splits or len(leaf)):
        extra = {key: value[rows] for key, value in named.items()}
        grpo.policy_loss(
            leaf[rows], old[rows], advantages[rows], mask[rows], rule, size, **extra
        ).loss.backward()
    return leaf.grad


def of_one_token(name, advantage, ratio, clip=CLIP):
    """Gradient of one token's loss with respect to its log-prob, divided by its weight."""
    logprobs = torch.tensor([[math.log(ratio)]], dtype=torch.float64)
    mask, advantages = torch.ones(1, 1), torch.tensor([advantage], dtype=torch.float64)
    size = grpo.UpdateSize(1, 1, 1)
    return gradient(rule(name, clip), logprobs, torch.zeros(1, 1), advantages, mask, size).item()


# --- weights and signs ---------------------------------------------------------------------------


def test_the_named_losses_are_those_of_the_configuration():
    assert set(NAMES) == set(cfg.Loss.model_fields["name"].annotation.__args__)
    assert set(grpo.KL_ESTIMATORS) == set(cfg.Loss.model_fields["kl_estimator"].annotation.__args__)
    assert set(grpo.OVERLONG) == set(cfg.Loss.model_fields["overlong"].annotation.__args__)


@pytest.mark.parametrize(
    ("name", "short", "long"),
    [
        ("dapo", 1 / 1010, 1 / 1010),
        ("grpo", 1 / (2 * 10), 1 / (2 * 1000)),
        ("dr_grpo", 1 / (2 * 1000), 1 / (2 * 1000)),
        ("gspo", 1 / (2 * 10), 1 / (2 * 1000)),
        ("cispo", 1 / 1010, 1 / 1010),
    ],
)
def test_weights_of_tokens_in_sequences_of_10_and_1000(name, short, long):
    """L3: the length bias of each aggregation, in closed form."""
    mask = torch.arange(1000)[None] < torch.tensor([10, 1000])[:, None]
    logprobs = torch.zeros(2, 1000, dtype=torch.float64)
    found = gradient(rule(name), logprobs, logprobs, torch.tensor([1.0, -1.0]), mask)
    assert found[0, :10].tolist() == pytest.approx([-short] * 10, rel=1e-12)
    assert found[1].tolist() == pytest.approx([long] * 1000, rel=1e-12)
    assert (found[0, 10:] == 0).all()


@pytest.mark.parametrize("name", ["dapo", "grpo", "dr_grpo", "gspo"])
def test_clipped_losses_are_silent_in_exactly_two_quadrants(name):
    """L14: (A > 0, ratio high) and (A < 0, ratio low); elsewhere −A ρ."""
    assert of_one_token(name, 1, 1.5) == 0 and of_one_token(name, -1, 0.5) == 0
    assert of_one_token(name, 1, 0.5) == pytest.approx(-0.5)
    assert of_one_token(name, -1, 1.5) == pytest.approx(1.5)


def test_cispo_is_silent_in_none_and_bounds_the_weight():
    found = [of_one_token("cispo", a, r) for a in (1, -1) for r in (0.5, 1.5)]
    assert found == pytest.approx([-0.8, -1.28, 0.8, 1.28])
    no_floor = grpo.Clip(1.0, 0.28)
    assert of_one_token("cispo", 1, 0.01, no_floor) == pytest.approx(-0.01)


@on_every_loss
def test_at_ratio_one_every_loss_is_reinforce(name):
    logprobs, _, advantages, mask = batch()
    found = gradient(rule(name), logprobs, logprobs, advantages, mask)
    lengths = mask.sum(-1, keepdim=True)
    weights = {
        "dapo": 1 / mask.sum(), "cispo": 1 / mask.sum(), "dr_grpo": torch.tensor(1 / 8000),
        "grpo": 1 / (8 * lengths), "gspo": 1 / (8 * lengths),
    }  # fmt: skip
    assert torch.allclose(found, -advantages[:, None] * mask * weights[name].double(), atol=1e-8)


@on_every_loss
@pytest.mark.parametrize("splits", [1, 2, 3, [1, 7], [5, 2, 1]])
def test_splitting_into_microbatches_leaves_the_gradient_unchanged(name, splits):
    """L1, with a sequence that has nothing to train, weights and a KL term."""
    logprobs, old, advantages, mask = batch()
    mask[2] = False
    full = rule(name, kl_coefficient=0.1)
    extra = {"weights_BT": torch.rand_like(old), "reference_logprobs_BT": old - 0.1}
    whole = gradient(full, logprobs, old, advantages, mask, **extra)
    parts = gradient(full, logprobs, old, advantages, mask, splits=splits, **extra)
    assert whole.abs().max() > 1e-5
    assert torch.allclose(whole, parts, atol=1e-12, rtol=0)


@on_every_loss
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_masked_entries_add_exactly_zero(name, junk):
    """L9: log-probs, old, reference, weights, and the advantage of a row without tokens."""
    logprobs, old, advantages, mask = batch()
    mask[3] = False
    full = rule(name, kl_coefficient=0.1)
    extra = {"weights_BT": torch.rand_like(old), "reference_logprobs_BT": old - 0.1}
    clean = gradient(full, logprobs, old, advantages, mask, **extra)
    spoiled = [torch.where(mask, x, junk) for x in (logprobs, old, *extra.values())]
    advantages[3] = junk
    found = gradient(
        full, spoiled[0], spoiled[1], advantages, mask,
        weights_BT=spoiled[2], reference_logprobs_BT=spoiled[3],
    )  # fmt: skip
    assert torch.equal(found, clean) and (found[~mask] == 0).all()


@on_every_loss
def test_nothing_to_train_gives_zero_with_a_graph(name):
    """L2: the whole batch truncated and filtered."""
    logprobs, old, advantages, mask = batch()
    mask = np.array([grpo.overlong_filter(row, True) for row in mask.numpy()])
    leaf = logprobs.clone().requires_grad_()
    mask = torch.from_numpy(mask)
    output = grpo.policy_loss(leaf, old, advantages, mask, rule(name), size_of(mask))
    output.loss.backward()
    assert output.loss.item() == 0 and (leaf.grad == 0).all() and output.num_tokens_here == 0


@on_every_loss
def test_masking_half_of_the_batch_equals_leaving_it_out(name):
    """L2: one mask in numerator and denominator."""
    logprobs, old, advantages, mask = batch()
    kept = torch.arange(8) % 2 == 0
    rows = zip(mask.numpy(), ~kept.numpy(), strict=True)
    filtered = torch.from_numpy(np.array([grpo.overlong_filter(row, cut) for row, cut in rows]))
    found = gradient(rule(name), logprobs, old, advantages, filtered)
    alone = gradient(rule(name), logprobs[kept], old[kept], advantages[kept], mask[kept])
    assert torch.allclose(found[kept], alone, atol=1e-15) and (found[~kept] == 0).all()
    assert (grpo.keep_overlong(mask[0].numpy(), True) == mask[0].numpy()).all()


@on_every_loss
def test_a_denominator_that_is_read_must_be_given(name):
    logprobs, old, advantages, mask = batch()
    with pytest.raises(ValueError, match="pass the count of the whole update"):
        gradient(rule(name), logprobs, old, advantages, mask, grpo.UpdateSize(0, 0, 0))


def test_grpo_loss_is_the_loss_named_dapo_to_the_bit():
    logprobs, old, advantages, mask = batch()
    named = grpo.grpo_loss(
        logprobs, old, advantages, mask, clip_low=0.2, clip_high=0.28, num_tokens=50, dual_clip=3.0
    )
    clip = grpo.Clip(0.2, 0.28, 3.0)
    same = grpo.policy_loss(
        logprobs, old, advantages, mask, rule("dapo", clip), grpo.UpdateSize(50)
    )
    assert named == same


# --- GSPO ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [1e-3, 0.19, 0.3])
def test_the_sequence_ratio_does_not_depend_on_the_length(shift):
    """L5: a uniform shift per token decides alike for 100 and 10,000 tokens."""
    outputs = []
    for length in (100, 10_000):
        logprobs = torch.full((1, length), shift, dtype=torch.float64)
        mask, old = torch.ones(1, length), torch.zeros(1, length)
        size = size_of(mask)
        outputs.append(grpo.policy_loss(logprobs, old, torch.ones(1), mask, rule("gspo"), size))
    short, long = outputs
    assert short.loss.item() == pytest.approx(long.loss.item(), rel=1e-12)
    assert short.ratio_max == pytest.approx(math.exp(shift))
    assert short.clip_fraction == long.clip_fraction == (math.exp(shift) > 1.28)


def test_the_sequence_ratio_is_the_geometric_mean_over_trained_tokens():
    logprobs = torch.tensor([[math.log(2), math.log(0.5), 9.0, math.log(1.21)]])
    mask = torch.tensor([[1, 1, 0, 1]])
    output = grpo.policy_loss(
        logprobs, torch.zeros(1, 4), torch.ones(1), mask, rule("gspo"), size_of(mask)
    )
    assert output.ratio_mean == pytest.approx(1.21 ** (1 / 3))
    assert output.loss.item() == pytest.approx(-(1.21 ** (1 / 3)))


# --- options -------------------------------------------------------------------------------------


def test_centered_advantages_by_hand():
    found = grpo.centered_advantages(np.array([1, 0, 0, 0]))
    assert found.tolist() == [0.75, -0.25, -0.25, -0.25]
    assert grpo.centered_advantages([1, 1]).tolist() == [0, 0]
    assert len(grpo.centered_advantages([])) == 0
    with pytest.raises(ValueError, match="one group"):
        grpo.centered_advantages([1, None])


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(0, 0), (16_384, 0), (16_385, -1 / 4096), (18_432, -0.5), (20_480, -1), (30_000, -1)],
)
def test_the_soft_overlong_penalty_is_dapo_s(length, penalty):
    assert grpo.soft_overlong_penalty(length, 20_480, 4_096) == pytest.approx(penalty)


def test_without_a_buffer_no_length_is_punished():
    assert grpo.soft_overlong_penalty(99, 10, 0) == 0


def test_dual_clip_bounds_the_sequence_ratio_too():
    assert of_one_token("gspo", -1, 9) == pytest.approx(9)
    assert of_one_token("gspo", -1, 9, replace(CLIP, dual=3.0)) == 0


def test_importance_weights_are_truncated_and_only_on_trained_tokens():
    """L15: junk in the engine's log-probs of tool tokens changes nothing."""
    learner = torch.tensor([[0.0, 0.0, 0.0, 0.0]], requires_grad=True)
    engine = torch.tensor([[0.0, -math.log(1.5), -5.0, math.log(4)]])
    mask = torch.tensor([[True, True, True, False]])
    weights = grpo.truncated_importance(learner, engine, mask, cap=2.0)
    assert weights[0].tolist() == pytest.approx([1, 1.5, 2, 0]) and not weights.requires_grad
    for junk in (7.0, math.nan, -math.inf):
        spoiled = torch.where(mask, engine, junk)
        assert torch.equal(grpo.truncated_importance(learner, spoiled, mask, 2.0), weights)
    with pytest.raises(ValueError, match="cap > 0"):
        grpo.truncated_importance(learner, engine, mask, 0.0)


@on_every_loss
def test_weights_scale_each_token_s_gradient_and_no_denominator(name):
    logprobs, _, advantages, mask = batch()
    weights = torch.rand_like(logprobs)
    plain = gradient(rule(name), logprobs, logprobs, advantages, mask)
    weighted = gradient(rule(name), logprobs, logprobs, advantages, mask, weights_BT=weights)
    if name == "gspo":  # one ratio per sequence: the weights act through their mean
        mean = (weights * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)
        assert torch.allclose(weighted, plain * mean, atol=1e-12)
    else:
        assert torch.allclose(weighted, plain * weights, atol=1e-12)


def test_what_was_used_is_reported():
    logprobs, old, advantages, mask = batch()
    weights = torch.full_like(old, 0.5)
    output = grpo.policy_loss(
        logprobs, old, advantages, mask, rule("dapo", kl=grpo.kl_k1, kl_coefficient=1.0),
        size_of(mask), weights_BT=weights, reference_logprobs_BT=logprobs - 0.25,
    )  # fmt: skip
    assert output.weight_mean == pytest.approx(0.5) and output.kl == pytest.approx(0.25)


def test_a_kl_term_without_a_reference_is_refused():
    with pytest.raises(ValueError, match="pass reference_logprobs_BT"):
        gradient(rule("dapo", kl_coefficient=0.1), *batch())


# --- KL estimators on a categorical of four outcomes, by exact expectation ------------------------

LOGITS = torch.tensor([0.3, -1.0, 0.9, 0.0], dtype=torch.float64)
REFERENCE = torch.tensor([0.1, 0.4, -0.2, 0.5], dtype=torch.float64).log_softmax(-1)


def kl(first, second):
    return (first.exp() * (first - second)).sum()


@pytest.mark.parametrize(("name", "is_unbiased"), [("k1", True), ("k2", False), ("k3", True)])
def test_the_expected_estimate_is_the_divergence(name, is_unbiased):
    logprobs = LOGITS.log_softmax(-1)
    estimates = grpo.KL_ESTIMATORS[name](logprobs, REFERENCE)
    expected = (logprobs.exp() * estimates).sum().item()
    assert (expected == pytest.approx(kl(logprobs, REFERENCE).item(), rel=1e-12)) == is_unbiased
    close = (LOGITS * 1e-2).log_softmax(-1), (LOGITS * 0).log_softmax(-1)
    near = (close[0].exp() * grpo.KL_ESTIMATORS[name](*close)).sum()
    assert near.item() == pytest.approx(kl(*close).item(), rel=0.01)  # all agree to second order


def gradient_of(value_of_logprobs):
    leaf = LOGITS.clone().requires_grad_()
    value_of_logprobs(leaf.log_softmax(-1)).backward()
    return leaf.grad


@pytest.mark.parametrize(
    ("name", "descends"),
    [
        ("k1", lambda p: 0 * p.sum()),
        ("k2", lambda p: kl(p, REFERENCE)),
        ("k3", lambda p: kl(REFERENCE, p)),
    ],
)
def test_the_expected_gradient_of_each_estimator_as_a_loss(name, descends):
    """Samples are fixed, as in training: only the estimate is differentiated."""
    found = gradient_of(
        lambda p: (p.detach().exp() * grpo.KL_ESTIMATORS[name](p, REFERENCE)).sum()
    )
    assert torch.allclose(found, gradient_of(descends), atol=1e-12)


def test_k3_is_never_negative():
    logprobs, reference, _, _ = batch(spread=3.0)
    assert (grpo.kl_k3(logprobs, reference) >= 0).all()


# --- the formula in use --------------------------------------------------------------------------


@on_every_loss
def test_every_loss_says_its_formula(name):
    text = grpo.formula(name)
    assert text.startswith("J = ") and "Â" in text
    assert text in grpo.LOSSES[name].formula
    shown = grpo.describe(cfg.Loss(name=name))
    assert shown.startswith(f"{name}: J = ") and "0.8, 1.28" in shown and "\n" not in shown


def test_formulas_differ_and_an_unknown_name_lists_the_known():
    assert len({grpo.formula(name) for name in NAMES}) == len(NAMES)
    with pytest.raises(ValueError, match="'drgrpo' is unknown; choose one of dapo, grpo, dr_grpo"):
        grpo.formula("drgrpo")


def test_the_paper_s_formula_has_no_extras_and_every_option_shows():
    plain = grpo.describe(cfg.Loss())
    assert plain.count(";") == 2 and "ddof 0" in plain
    settings = cfg.Loss(
        dual_clip=3.0, kl_coefficient=0.01, kl_estimator="k2", importance_cap=2.0,
        overlong="filter", overlong_buffer_tokens=64, entropy_mask="batch", ddof=1,
    )  # fmt: skip
    shown = grpo.describe(settings)
    for part in ("ddof 1", "3 Â", "0.01 · KL (k2)", "π_engine, 2)", "truncated", "64", "top 20%"):
        assert part in shown


def test_rules_follow_the_configuration():
    found = grpo.rule_of(cfg.Loss(name="gspo", clip_low=3e-4, clip_high=4e-4, kl_estimator="k1"))
    assert found.loss is grpo.LOSSES["gspo"] and found.clip == grpo.Clip(3e-4, 4e-4)
    assert found.kl is grpo.kl_k1 and found.kl_coefficient == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "cispo", "dual_clip": 3.0}, "cispo clips weights"),
        ({"name": "gspo", "entropy_mask": "batch"}, "one ratio per sequence"),
    ],
)
def test_options_that_contradict_the_loss_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        cfg.Loss(**settings)


# --- an independent implementation ---------------------------------------------------------------

TRL_NAMES = {
    "dapo": ("dapo", "token"), "grpo": ("grpo", "token"), "dr_grpo": ("dr_grpo", "token"),
    "gspo": ("grpo", "sequence"), "cispo": ("cispo", "token"),
}  # fmt: skip


def trl_loss(kind, level, logprobs, old, advantages, mask, **options):
    """TRL's own `_compute_loss` on given log-probs, in evaluation mode: one batch, one process."""
    from trl import GRPOTrainer

    class Stub:
        """The attributes that the method reads; everything it does not know switches off."""

        _metrics = {"eval": defaultdict(list)}
        model = SimpleNamespace(training=False)
        args = SimpleNamespace(delta=options.get("dual"), use_bias_correction_kl=False)
        accelerator = SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
        )
        loss_type, importance_sampling_level = kind, level
        epsilon_low, epsilon_high = 0.2, 1.28 if kind == "cispo" else 0.28
        beta, max_completion_length = options.get("beta", 0.0), MAX_TOKENS
        top_entropy_quantile, off_policy_mask_threshold = 1.0, None
        use_vllm = vllm_importance_sampling_correction = "weights" in options
        aux_loss_enabled = _entropy_bonus_enabled = False

        def _get_per_token_logps_and_entropies(self, *arguments, **named):
            return logprobs, torch.zeros_like(logprobs), None

        def __getattr__(self, name):
            return False

    nothing = torch.zeros(len(mask), 0)
    inputs = {
        "prompt_ids": nothing, "prompt_mask": nothing, "completion_ids": torch.zeros(mask.shape),
        "completion_mask": mask.double(), "advantages": advantages, "old_per_token_logps": old,
        "ref_per_token_logps": options.get("reference"),
        "importance_sampling_ratio": options.get("weights"),
        "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    return inspect.unwrap(GRPOTrainer._compute_loss)(Stub(), None, inputs)


@on_every_loss
@pytest.mark.parametrize("option", ["plain", "kl", "weights", "dual"])
def test_loss_and_gradient_equal_trl_s(name, option):
    """Where both define the same objective: same micro-batch, same KL (k3), same corrections."""
    pytest.importorskip("trl")
    if (name, option) == ("cispo", "dual"):
        pytest.skip("cispo has no dual clip")
    logprobs, old, advantages, mask = batch()
    mask[:, 0] = True
    clip = grpo.Clip(1.0 if name == "cispo" else 0.2, 0.28, 1.5 if option == "dual" else None)
    reference, weights = old + 0.3, torch.rand_like(old)
    ours, theirs = (logprobs.clone().requires_grad_() for _ in range(2))
    found = grpo.policy_loss(
        ours, old, advantages, mask, rule(name, clip, kl_coefficient=0.1 * (option == "kl")),
        size_of(mask), reference_logprobs_BT=reference,
        weights_BT=weights if option == "weights" else None,
    ).loss  # fmt: skip
    options = {"kl": {"beta": 0.1, "reference": reference}, "weights": {"weights": weights}}
    options |= {"dual": {"dual": 1.5}, "plain": {}}
    expected = trl_loss(*TRL_NAMES[name], theirs, old, advantages, mask, **options[option])
    found.backward(), expected.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-9)
    assert torch.allclose(ours.grad, theirs.grad, atol=1e-12)
