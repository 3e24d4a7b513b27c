"""Log-probs against transformers, gradients under every split, resume, the optimizers."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from rstar2lab import config as cfg
from rstar2lab import grpo, learner
from rstar2lab.engines import Sampling
from rstar2lab.engines.torch_engine import TorchEngine
from rstar2lab.learner import (
    LocalLearner,
    Precision,
    Sample,
    make_batch,
    microbatches,
    sampled_logprobs,
)
from rstar2lab.muon import Muon, orthogonalize
from rstar2lab.nano import model
from rstar2lab.types import StopReason, Trajectory

VOCABULARY = 40
SETTINGS = cfg.Model(layers=2, width=48, heads=3, kv_heads=1, mlp_width=64, max_tokens=128)
OPTIMIZER = cfg.Optimizer(lr=1e-3)
LOSS = cfg.Loss(minibatches=1)
pytestmark = pytest.mark.usefixtures("one_thread")


def make_net(seed: int = 0):
    return model.build(SETTINGS, VOCABULARY, seed)


def trajectory(number: int, mask: str, prompt: int = 4) -> Trajectory:
    """Random ids; `mask` has "s" for a sampled token and "t" for a tool's."""
    rng = np.random.default_rng(number)
    size = len(mask)
    return Trajectory(
        f"p{number}", 0,
        prompt_ids=rng.integers(0, VOCABULARY, prompt).astype(np.int32),
        response_ids=rng.integers(0, VOCABULARY, size).astype(np.int32),
        loss_mask=np.asarray([c == "s" for c in mask]),
        logprobs=rng.uniform(-4, -3, size).astype(np.float32),
        entropies=None, turns=(), stop=StopReason.ANSWERED,
    )  # fmt: skip


MASKS = ["sss", "ssttss", "s" * 12, "sstttttsssss", "s", "sttts", "ssssssss", "sstts"]
SAMPLES = [
    Sample(trajectory(i, mask, prompt=3 + i), (-1) ** i * (0.5 + i / 4))
    for i, mask in enumerate(MASKS)
]


def full_logprobs(net, t: Trajectory, temperature=1.0) -> torch.Tensor:
    """Transformers' log-probs of the response's tokens, one sequence alone, no padding."""
    ids = torch.from_numpy(np.r_[t.prompt_ids, t.response_ids].astype(np.int64))[None]
    logits = net(input_ids=ids).logits[0, len(t.prompt_ids) - 1 : -1] / temperature
    return logits.log_softmax(-1)[range(len(t.response_ids)), t.response_ids.tolist()]


# --- log-probs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_transformers_own_on_sampled_tokens_and_zero_elsewhere(temperature):
    net = make_net().eval()
    with torch.no_grad():
        batch = make_batch(SAMPLES)
        found = sampled_logprobs(net, batch, temperature)
        assert found.shape == batch.ids_BT.shape
        assert torch.all(found[~batch.mask_BT] == 0)
        for row, sample in enumerate(SAMPLES):
            t = sample.trajectory
            start = len(t.prompt_ids)
            mine = found[row, start : start + len(t.response_ids)][torch.from_numpy(t.loss_mask)]
            theirs = full_logprobs(net, t, temperature)[torch.from_numpy(t.loss_mask)]
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)


def test_tool_tokens_are_attended_to_though_they_carry_no_loss():
    """Changing what the tool said changes the log-probs after it and none before it."""
    net, t = make_net().eval(), trajectory(1, "ssttss")
    other_ids = t.response_ids.copy()
    other_ids[2:4] = (other_ids[2:4] + 1) % VOCABULARY
    with torch.no_grad():
        first, second = (
            sampled_logprobs(net, make_batch([Sample(x, 1.0)]))[0, 4:]
            for x in (t, replace(t, response_ids=other_ids))
        )
    assert torch.equal(first[:2], second[:2])
    assert torch.all((first - second)[4:].abs() > 1e-5)


def test_a_batch_keeps_ids_masks_and_recorded_logprobs_aligned():
    batch = make_batch(SAMPLES)
    for row, sample in enumerate(SAMPLES):
        t, start = sample.trajectory, len(sample.trajectory.prompt_ids)
        end = start + len(t.response_ids)
        assert batch.ids_BT[row, :end].tolist() == [*t.prompt_ids, *t.response_ids]
        assert batch.mask_BT[row, start:end].tolist() == t.loss_mask.tolist()
        assert not batch.mask_BT[row, :start].any() and not batch.mask_BT[row, end:].any()
        assert batch.old_logprobs_BT[row, start:end].tolist() == t.logprobs.tolist()
    assert int(batch.mask_BT.sum()) == sum(mask.count("s") for mask in MASKS)


def test_engine_and_learner_agree_on_what_the_engine_sampled():
    net = make_net()
    engine = TorchEngine(net.config, net.state_dict(), kv_tokens=4096, max_tokens=128)

    async def main():
        return await asyncio.gather(
            *(engine.generate(f"r{i}", [1, 2, 3 + i], Sampling(10 + i, 0.8, seed=i))
              for i in range(5))
        )  # fmt: skip

    samples = [
        Sample(
            Trajectory(
                "p", i, np.asarray([1, 2, 3 + i], np.int32), c.token_ids,
                np.ones(len(c.token_ids), bool), c.logprobs, None, (), StopReason.ANSWERED,
            ),
            1.0,
        )
        for i, c in enumerate(asyncio.run(main()))
    ]  # fmt: skip
    batch = make_batch(samples)
    with torch.no_grad():
        gap = (sampled_logprobs(net, batch, 0.8) - batch.old_logprobs_BT).abs().max()
    assert float(gap) < 1e-4
    stats = LocalLearner(net, OPTIMIZER, LOSS, 0.8).update(samples, np.random.default_rng(0))
    assert stats.parity < 1e-4
    assert stats.ratio_mean == pytest.approx(1, abs=1e-4)
    assert stats.ratio_max == pytest.approx(1, abs=1e-3)
    assert stats.clip_fraction == 0


# --- micro-batches and gradients -----------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 20, 40, 10_000])
def test_microbatches_hold_every_sample_once_within_their_size(limit):
    parts = microbatches(SAMPLES, limit)
    assert sorted(s.trajectory.problem_id for p in parts for s in p) == [f"p{i}" for i in range(8)]
    for part in parts:
        longest = max(len(s.trajectory.prompt_ids) + len(s.trajectory.response_ids) for s in part)
        assert len(part) == 1 or len(part) * longest <= limit


def gradient(limit: int, samples=SAMPLES, dtype=torch.float32) -> torch.Tensor:
    """The gradient that one minibatch leaves, cut into micro-batches of `limit` tokens."""
    net = make_net().to(dtype)
    made = LocalLearner(
        net, OPTIMIZER, LOSS.model_copy(update={"tokens_per_microbatch": limit}), 1.0
    )
    made._accumulate(samples, None)
    return torch.cat([p.grad.flatten() for p in net.parameters()])


def test_no_split_into_microbatches_changes_the_gradient():
    whole = gradient(100_000)
    assert float(whole.norm()) > 0.01
    for limit in (1, 30, 60):
        assert float((gradient(limit) - whole).norm() / whole.norm()) < 1e-6


def test_the_gradient_is_that_of_equation_6_written_out():
    """Token mean over the whole batch of min(r·A, clip(r)·A), from plain transformers logits."""
    sampler = make_net(1)
    recorded = [full_logprobs(sampler, s.trajectory).detach().numpy() for s in SAMPLES]
    samples = [
        Sample(replace(s.trajectory, logprobs=old), s.advantage)
        for s, old in zip(SAMPLES, recorded, strict=True)
    ]
    net, terms = make_net(), []
    for s in samples:
        mask = torch.from_numpy(s.trajectory.loss_mask)
        old = torch.from_numpy(s.trajectory.logprobs)
        ratio = (full_logprobs(net, s.trajectory) - old)[mask].exp()
        terms.append(torch.minimum(ratio * s.advantage, ratio.clamp(0.8, 1.28) * s.advantage))
    loss = -torch.cat(terms).mean()
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in net.parameters()])
    found = gradient(100_000, samples)
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_masked_tokens_give_no_gradient_and_their_recorded_values_do_not_matter():
    """Other ids, log-probs or NaN after the last sampled token and inside tool spans' records."""
    t = trajectory(3, "ssttsstt")
    changed = replace(
        t,
        response_ids=np.r_[t.response_ids[:6], (t.response_ids[6:] + 5) % VOCABULARY],
        logprobs=np.where(t.loss_mask, t.logprobs, np.nan).astype(np.float32),
    )
    first, second = (gradient(1000, [Sample(x, 1.0)]) for x in (t, changed))
    assert torch.equal(first, second) and torch.isfinite(first).all()


def test_a_trajectory_without_trained_tokens_changes_nothing():
    alone = gradient(1, SAMPLES[:3])
    silent = Sample(trajectory(9, "tttt"), 5.0)
    assert torch.equal(alone, gradient(1, [*SAMPLES[:3], silent]))
    assert torch.all(gradient(1000, [silent]) == 0)


# --- updates -------------------------------------------------------------------------------------


def parameters(made: LocalLearner) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in made.model.parameters()])


def test_the_first_update_moves_every_weight_by_at_most_the_warmed_up_rate():
    """AdamW's first step is lr · sign(gradient), so the largest move is lr · warm-up."""
    optimizer = cfg.Optimizer(lr=1e-3, warmup_steps=4)
    made = LocalLearner(make_net(), optimizer, LOSS, 1.0)
    before = parameters(made)
    made.update(SAMPLES, np.random.default_rng(0))
    assert float((parameters(made) - before).abs().max()) == pytest.approx(2.5e-4, rel=1e-3)


def test_minibatches_are_one_update_each_and_every_sample_is_used_once():
    loss = LOSS.model_copy(update={"minibatches": 3})
    stats = LocalLearner(make_net(), OPTIMIZER, loss, 1.0).update(SAMPLES, np.random.default_rng(0))
    assert stats.updates == 3
    assert stats.trained_tokens == sum(mask.count("s") for mask in MASKS)


def test_fewer_samples_than_minibatches_give_fewer_updates():
    loss = LOSS.model_copy(update={"minibatches": 4})
    made = LocalLearner(make_net(), OPTIMIZER, loss, 1.0)
    assert made.update(SAMPLES[:2], np.random.default_rng(0)).updates == 2


def test_a_positive_advantage_makes_a_trajectory_likelier_and_a_negative_one_less():
    for advantage in (1.0, -1.0):
        net, t = make_net(), trajectory(5, "ssssss")
        old = full_logprobs(net, t).detach()
        t = replace(t, logprobs=old.numpy())
        LocalLearner(net, OPTIMIZER, LOSS, 1.0).update(
            [Sample(t, advantage)], np.random.default_rng(0)
        )
        gained = float((full_logprobs(net, t) - old).sum().detach())
        assert gained * advantage > 0.01


def test_a_learner_that_became_nan_reports_no_agreement():
    net = make_net()
    with torch.no_grad():
        net.model.norm.weight[0] = float("nan")
    made = LocalLearner(net, OPTIMIZER, LOSS, 1.0)
    assert not made.update(SAMPLES, np.random.default_rng(0)).parity < 1e9


def test_a_resumed_learner_goes_on_bit_for_bit(tmp_path):
    optimizer = cfg.Optimizer(lr=1e-3, warmup_steps=3, weight_decay=0.1)
    undisturbed = LocalLearner(make_net(), optimizer, LOSS, 1.0)
    for step in range(4):
        undisturbed.update(SAMPLES, np.random.default_rng(step))
        if step == 1:
            torch.save(undisturbed.state_dict(), tmp_path / "state.pt")
    resumed = LocalLearner(make_net(7), optimizer, LOSS, 1.0)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for step in (2, 3):
        resumed.update(SAMPLES, np.random.default_rng(step))
    assert torch.equal(parameters(resumed), parameters(undisturbed))


def test_the_loss_is_told_the_whole_minibatch_s_tokens(monkeypatch):
    seen, original = [], grpo.policy_loss

    def spy(*arguments, **settings):
        seen.append(arguments[5].num_tokens)
        return original(*arguments, **settings)

    monkeypatch.setattr(learner.grpo, "policy_loss", spy)
    gradient(20)
    assert len(seen) > 2 and set(seen) == {sum(mask.count("s") for mask in MASKS)}


# --- precision, memory, and the options of the loss ----------------------------------------------


def made_with(loss=LOSS, net=None, **named) -> LocalLearner:
    return LocalLearner(net or make_net(), OPTIMIZER, loss, 1.0, **named)


def gradient_of(made: LocalLearner, samples=SAMPLES) -> torch.Tensor:
    made._accumulate(samples, None)
    return torch.cat([p.grad.flatten() for p in made.model.parameters()])


def test_half_precision_passes_leave_weights_and_gradients_in_single():
    made = made_with(precision=Precision(torch.bfloat16))
    found, expected = gradient_of(made), gradient(100_000)
    assert found.dtype == torch.float32 and not torch.equal(found, expected)
    assert float(torch.cosine_similarity(found, expected, dim=0)) > 0.99
    stats = made.update(SAMPLES, np.random.default_rng(0))
    assert np.isfinite(stats.loss)
    assert all(weight.dtype == torch.float32 for weight in made.model.parameters())


def test_recomputing_activations_leaves_the_gradient_unchanged():
    made = made_with(precision=Precision(gradient_checkpointing=True))
    runs = []
    made.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    found, expected = gradient_of(made), gradient(100_000)
    assert float((found - expected).norm() / expected.norm()) < 1e-6
    assert len(runs) == 2  # once forward, once again in the backward pass


@pytest.mark.parametrize("name", grpo.LOSSES)
def test_every_named_loss_trains_and_no_split_changes_its_gradient(name):
    loss = LOSS.model_copy(update={"name": name})
    whole = gradient_of(made_with(loss, max_tokens=20))
    assert float(whole.norm()) > 1e-3
    small = loss.model_copy(update={"tokens_per_microbatch": 30})
    parts = gradient_of(made_with(small, max_tokens=20))
    assert float((parts - whole).norm() / whole.norm()) < 1e-5


def test_dr_grpo_must_know_the_longest_response():
    with pytest.raises(ValueError, match="max_tokens=0"):
        gradient_of(made_with(LOSS.model_copy(update={"name": "dr_grpo"})))


def with_engine(samples, shift: float, junk: float = 0.0):
    """The samples as an engine would record them whose log-probs are lower by `shift`."""
    net, found = make_net(), []
    for s in samples:
        t = s.trajectory
        recorded = full_logprobs(net, t).detach().numpy() - shift
        logprobs = np.where(t.loss_mask, recorded, junk).astype(np.float32)
        found.append(replace(s, trajectory=replace(t, logprobs=logprobs)))
    return found


def test_the_importance_correction_starts_the_ratio_at_one_and_caps_the_weight():
    loss = LOSS.model_copy(update={"importance_cap": 2.0})
    stats = made_with(loss).update(with_engine(SAMPLES, np.log(1.5)), np.random.default_rng(0))
    assert stats.ratio_mean == pytest.approx(1, abs=1e-5)
    assert stats.token_weight == pytest.approx(1.5, rel=1e-4)
    assert stats.parity == pytest.approx(np.log(1.5), rel=1e-3)
    stats = made_with(loss).update(with_engine(SAMPLES, np.log(3)), np.random.default_rng(0))
    assert stats.token_weight == pytest.approx(2.0)


def test_what_the_engine_says_of_tool_tokens_does_not_reach_the_weights():
    loss = LOSS.model_copy(update={"importance_cap": 2.0})
    moved = []
    for junk in (0.0, -9.0, np.nan):
        made = made_with(loss)
        made.update(with_engine(SAMPLES, 0.3, junk), np.random.default_rng(0))
        moved.append(parameters(made))
    assert torch.equal(moved[0], moved[1]) and torch.equal(moved[0], moved[2])


def test_the_kl_term_is_zero_at_the_start_and_holds_the_policy_back(tmp_path):
    """Two updates with a strong term end nearer to the start than without it."""
    loss = LOSS.model_copy(update={"kl_coefficient": 50.0})
    far, near = made_with(), made_with(loss)
    start = parameters(far)
    first = near.update(SAMPLES, np.random.default_rng(0))
    assert first.kl == pytest.approx(0, abs=1e-6)
    far.update(SAMPLES, np.random.default_rng(0))
    for made in (far, near):
        stats = made.update(SAMPLES, np.random.default_rng(1))
    assert stats.kl > 0
    distances = [float((parameters(made) - start).norm()) for made in (far, near)]
    assert distances[1] < distances[0]


def test_only_the_tokens_of_highest_entropy_get_a_gradient():
    """The engine recorded entropies for none: the learner computes them, as transformers would."""
    net = make_net()
    made = made_with(LOSS.model_copy(update={"entropy_mask": "batch"}), net)
    weighted = made._with_weights(list(SAMPLES))
    entropies, weights = [], []
    for s in weighted:
        t = s.trajectory
        ids = torch.from_numpy(np.r_[t.prompt_ids, t.response_ids].astype(np.int64))[None]
        logits = net(input_ids=ids).logits[0, len(t.prompt_ids) - 1 : -1]
        found = torch.distributions.Categorical(logits=logits).entropy().detach().numpy()
        entropies += found[t.loss_mask].tolist()
        weights += s.weights[t.loss_mask].tolist()
        assert (s.weights[~t.loss_mask] == 0).all()
    top = np.argsort(-np.asarray(entropies))[: int(np.ceil(0.2 * len(entropies)))]
    assert sorted(np.flatnonzero(weights)) == sorted(top)
    assert set(weights) == {0.0, 1.0}


def test_a_recorded_entropy_is_used_as_it_is():
    t = replace(trajectory(0, "sssss"), entropies=np.asarray([0, 9, 0, 0, 0], np.float32))
    made = made_with(LOSS.model_copy(update={"entropy_mask": "sequence"}))
    assert made._with_weights([Sample(t, 1.0)])[0].weights.tolist() == [0, 1, 0, 0, 0]


def test_a_sample_s_own_mask_decides_what_is_trained_and_counted():
    half = np.asarray([True, False, True, False, False, False])
    chosen = Sample(trajectory(0, "ssttss"), 1.0, mask=half)
    batch = make_batch([chosen])
    assert batch.mask_BT[0, 4:].tolist() == half.tolist() and chosen.num_trained_tokens == 2
    stats = made_with().update([chosen], np.random.default_rng(0))
    assert stats.trained_tokens == 2


# --- muon ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(96, 256), (256, 96), (64, 192), (128, 32)])
def test_orthogonalizing_leaves_singular_values_near_one_and_the_directions_alone(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = orthogonalize(matrix * 1e-3)
    values = torch.linalg.svdvals(found)
    assert 0.6 < float(values.min()) and float(values.max()) < 1.3
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    inside = u.mT @ found @ v.mT
    assert float((inside - torch.diag(inside.diagonal())).abs().max()) < 1e-3
    torch.testing.assert_close(orthogonalize(matrix), found, atol=1e-3, rtol=0)


def test_orthogonalizing_nothing_gives_nothing():
    assert torch.equal(orthogonalize(torch.zeros(3, 5)), torch.zeros(3, 5))


def test_muon_descends_a_least_squares_problem_and_skips_what_has_no_gradient():
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(8, 12, generator=generator)
    weight, idle = (torch.nn.Parameter(torch.zeros(8, 12)) for _ in range(2))
    optimizer = Muon([weight, idle], lr=0.1)
    losses = []
    for step in range(150):
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - step / 150)
        loss = (weight - target).square().mean()
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.02 * losses[0]
    assert torch.equal(idle, torch.zeros(8, 12))


def test_the_first_muon_step_has_the_size_of_the_rate():
    """A semi-orthogonal update: ‖ΔW‖_F ≈ lr·√rank, times √(rows/columns) if the matrix is tall."""
    for shape, scale in (((32, 128), 1.0), ((128, 32), 2.0)):
        weight = torch.nn.Parameter(torch.zeros(shape))
        weight.grad = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        Muon([weight], lr=0.01).step()
        size = float(weight.detach().norm()) / (0.01 * 32**0.5 * scale)
        assert 0.7 < size < 1.2
