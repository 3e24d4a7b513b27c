"""What a configuration may change between rollout and loss: refill, overlong, losses, roles."""

import ast
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_trainer import group_of, made
from tiny import odd_lengths_win, tiny_config

from rstar2lab import config as cfg
from rstar2lab import entropy, grpo, rollout, runs, sft
from rstar2lab.trainer import Trainer, TrainingError, credited, select, selection_metrics
from rstar2lab.types import Group, Problem, StopReason

# --- advantages and trained tokens ---------------------------------------------------------------


def chosen(rewards, loss, keep=4, max_tokens=20):
    settings = cfg.Selection(keep=keep, selector="all")
    return select(group_of(rewards), settings, loss, np.random.default_rng(0), max_tokens)


def truncated(sample, reward):
    return replace(made(sample, reward), stop=StopReason.LENGTH)


def test_the_named_loss_decides_how_rewards_become_advantages():
    found = chosen([1.0, 0.0, 0.0, 0.0], cfg.Loss(name="dr_grpo")).samples
    assert [s.advantage for s in found] == [0.75, -0.25, -0.25, -0.25]
    found = chosen([1.0, 0.0, 0.0, 0.0], cfg.Loss(ddof=1)).samples
    expected = grpo.group_advantages(np.array([1, 0, 0, 0]), ddof=1)
    assert [s.advantage for s in found] == pytest.approx(expected)


def test_the_overlong_filter_trains_no_truncated_token_but_keeps_it_in_the_group():
    group = [made(0, 1.0), made(1, 0.0), truncated(2, 0.0), truncated(3, 0.0)]
    kept, filtered = (credited(group, cfg.Loss(overlong=o), 20) for o in ("keep", "filter"))
    assert [s.num_trained_tokens for s in kept] == [10, 10, 10, 10]
    assert [s.num_trained_tokens for s in filtered] == [10, 10, 0, 0]
    assert [s.advantage for s in filtered] == [s.advantage for s in kept]


def test_the_soft_penalty_lowers_the_reward_of_long_responses_after_the_selection():
    """Ten tokens of twelve, a buffer of four: half way through, −0.5."""
    loss = cfg.Loss(name="dr_grpo", overlong_buffer_tokens=4)
    found = credited([made(0, 1.0), made(1, 0.0)], loss, 12)
    assert [s.advantage for s in found] == [0.5, -0.5]  # both are as long
    assert grpo.soft_overlong_penalty(10, 12, 4) == -0.5
    s = chosen([1.0, 0.0, 1.0, 0.0], loss, max_tokens=10)  # −1 each: still successes
    assert s.status == "trained" and sorted(s.kept) == [0, 1, 2, 3]


def test_masked_trajectories_and_solved_groups_are_counted():
    loss = cfg.Loss(overlong="filter")
    group = Group(Problem("p", "q", "1"), (made(0, 1.0), truncated(1, 0.0)))
    settings, rng = cfg.Selection(keep=2, selector="all"), np.random.default_rng(0)
    cut = select(group, settings, loss, rng, 20)
    solved, failed = chosen([1.0] * 4, loss), chosen([0.0] * 4, loss)
    metrics = selection_metrics([cut, solved, failed])
    assert metrics["trajectories_kept"] == 2 and metrics["trajectories_masked"] == 1
    assert metrics["groups_rejected"] == 2 and metrics["groups_solved"] == 1


# --- refill --------------------------------------------------------------------------------------


class FakeBench:
    """Rollouts whose rewards depend on the problem's number alone."""

    def __init__(self, mixed, solved=True, pool=20):
        self.train_problems = [Problem(f"p{i}", "q", "1") for i in range(pool)]
        self.mixed, self.rest, self.asked = set(mixed), float(solved), []

    def rollout(self, problems, samples, key):
        self.asked.append((key, [p.id for p in problems]))
        return [
            Group(p, tuple(made(i, float(i % 2) if p.id in self.mixed else self.rest)
                           for i in range(samples)))
            for p in problems
        ]  # fmt: skip


def collecting(tmp_path, bench, **changes):
    trainer = Trainer(tiny_config(**changes), tmp_path, arm="a", model_path=tmp_path)
    trainer._bench = bench
    return trainer


def test_without_refill_the_batch_shrinks(tmp_path):
    bench = FakeBench(mixed=[])
    selected, refills = collecting(tmp_path, bench)._collect(1)
    assert refills == 0 and len(bench.asked) == 1
    assert [s.status for s in selected] == ["rejected"] * 3


def test_refill_samples_as_many_new_prompts_as_groups_are_missing(tmp_path):
    bench = FakeBench(mixed=[f"p{i}" for i in range(0, 20, 2)])
    trainer = collecting(tmp_path, bench, selection__refill_rounds=10)
    selected, refills = trainer._collect(1)
    assert sum(s.status == "trained" for s in selected) == 3
    assert refills == len(bench.asked) - 1
    keys = [key for key, _ in bench.asked]
    assert keys[0] == "train/1" and keys[1:] == [f"train/1/refill-{i + 1}" for i in range(refills)]
    asked = [p for _, ids in bench.asked for p in ids]
    assert len(asked) == len(set(asked))
    missing = 3 - sum(p in bench.mixed for p in bench.asked[0][1])
    assert len(bench.asked) == 1 or len(bench.asked[1][1]) == missing
    again = FakeBench(mixed=bench.mixed)
    collecting(tmp_path, again, selection__refill_rounds=10)._collect(1)
    assert again.asked == bench.asked  # from seed and step alone


def test_refill_ends_with_its_rounds_or_with_the_pool(tmp_path):
    bench = FakeBench(mixed=["p0"])
    trainer = collecting(tmp_path, bench, selection__refill_rounds=40)
    selected, _ = trainer._collect(1)
    assert len(selected) == 20 and sum(s.status == "trained" for s in selected) == 1
    bench = FakeBench(mixed=[], pool=40)
    trainer = collecting(tmp_path, bench, selection__refill_rounds=2)
    bench.mixed = {trainer._prompts(1)[0].id}
    selected, refills = trainer._collect(1)
    assert refills == 2 and len(selected) == 3 + 2 + 2


@pytest.mark.parametrize(("solved", "said"), [(True, "9 solved"), (False, "0 solved")])
def test_when_nothing_is_left_to_learn_the_run_stops_and_says_why(tmp_path, solved, said):
    """L11: never an index error, never an endless search."""
    bench = FakeBench(mixed=[], solved=solved)
    trainer = collecting(tmp_path, bench, selection__refill_rounds=2)
    with pytest.raises(TrainingError, match=f"none of 9 groups in 3 rounds.*{said}"):
        trainer._collect(1)


# --- runs ----------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def mixed_rewards(monkeypatch):
    monkeypatch.setattr(rollout, "score_or_void", odd_lengths_win)


def run(folder, cold_model, **changes):
    Trainer(tiny_config(**changes), folder, arm="grpo_roc", model_path=cold_model).run()
    return runs.RunFolder(folder)


def test_every_option_at_once_makes_a_run_that_says_what_it_did(tmp_path, cold_model):
    folder = run(
        tmp_path / "grpo_roc-s0", cold_model, run__steps=2, loss__name="grpo", loss__dual_clip=3.0,
        loss__kl_coefficient=0.01, loss__importance_cap=2.0, loss__overlong="filter",
        loss__overlong_buffer_tokens=8, loss__entropy_mask="batch", selection__refill_rounds=2,
        model__gradient_checkpointing=True,
    )  # fmt: skip
    rows = folder.rows()[1:]
    assert all(row["kl"] >= 0 and row["ratio_min"] > 0 for row in rows)
    assert all(0.2 <= row["token_weight"] < 0.25 for row in rows)  # the top fifth, weights near 1
    assert all(row["groups_trained"] == 3 or row["refill_rounds"] == 2 for row in rows)
    loss = json.loads((tmp_path / "grpo_roc-s0" / "DONE.json").read_text())["loss"]
    assert loss.startswith("grpo: J = 1/n") and "KL (k3)" in loss and "top 20%" in loss


def test_recorded_trajectories_have_a_role_for_every_token(tmp_path, cold_model):
    folder = run(tmp_path / "grpo_roc-s0", cold_model, run__steps=1)
    rows = folder.read_table("trajectories")
    for row in rows.itertuples():
        assert len(row.roles) == len(row.response_ids) and set(row.roles) <= set(entropy.ROLES)
        is_tool = np.asarray(row.roles) == "tool_response"
        assert (is_tool == ~row.loss_mask.astype(bool)).all()
        calls = sum(turn["call"] is not None for turn in row.turns)
        assert ("tool_call" in row.roles) == (calls > 0)
    assert any("tool_call" in roles for roles in rows.roles)
    assert any("answer" in roles for roles in rows.roles)


def test_a_learner_in_half_precision_stays_within_its_limit(tmp_path, cold_model):
    folder = run(tmp_path / "grpo_roc-s0", cold_model, run__steps=2, model__dtype="bfloat16")
    gaps = [row["engine_learner_gap"] for row in folder.rows()[1:]]
    assert all(1e-4 < gap < 0.3 for gap in gaps)


def test_precision_does_not_change_the_cold_start():
    keys = {
        sft.cache_key(tiny_config(**changes))
        for changes in ({}, {"model__dtype": "bfloat16"}, {"model__gradient_checkpointing": True})
    }
    assert len(keys) == 1


def test_a_run_recorded_before_a_key_existed_can_be_resumed(tmp_path):
    new = cfg.to_json(tiny_config())
    old = json.loads(new)
    for key in ("name", "kl_coefficient", "importance_cap"):
        del old["loss"][key]
    (tmp_path / "config.json").write_text(json.dumps(old))
    folder = runs.RunFolder(tmp_path)
    folder.append_row({"step": 0})
    folder.check_configuration(new)
    with pytest.raises(runs.RunError, match="loss.name: 'dapo' there, 'gspo' asked"):
        folder.check_configuration(cfg.to_json(tiny_config(loss__name="gspo")))


# --- every option is read ------------------------------------------------------------------------


@pytest.mark.parametrize("section", ["Loss", "Selection", "Model", "Records"])
def test_every_option_is_read_somewhere(section):
    sources = Path(cfg.__file__).parent.rglob("*.py")
    trees = [ast.parse(p.read_text()) for p in sources if p.name != "config.py"]
    read = {n.attr for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    assert set(getattr(cfg, section).model_fields) <= read
