"""Selection and its books, one tiny training run and its files, guards, kill and resume."""

import json
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import odd_lengths_win, tiny_config

from rstar2lab import config as cfg
from rstar2lab import rollout, runs, sandbox, trainer, workbench
from rstar2lab.engines.torch_engine import TorchEngine
from rstar2lab.trainer import Trainer, TrainingError, select, selection_metrics
from rstar2lab.types import Group, Problem, StopReason, ToolResult, ToolStatus, Trajectory, Turn

CONTRACT_KEYS = (
    "step stage train_accuracy tool_error_rate tool_error_rate_when_correct mean_response_tokens "
    "mean_response_tokens_when_correct truncated_rate calls_per_trajectory groups_trained "
    "groups_rejected voided entropy seconds_rollout seconds_tools seconds_learner"
).split()
EVALUATION_KEYS = (
    "eval_accuracy eval_tool_error_rate_when_correct eval_mean_response_tokens".split()
)
EVAL_COLUMNS = "problem_id sample step correct reason tokens calls failed_calls truncated".split()


# --- selection -----------------------------------------------------------------------------------


def made(sample: int, reward: float | None, errors: int = 0, calls: int = 1) -> Trajectory:
    """A trajectory of ten tokens with this reward (None: void) and these tool outcomes."""
    statuses = [ToolStatus.ERROR] * errors + [ToolStatus.OK] * (calls - errors)
    if reward is None:
        statuses = [ToolStatus.SERVICE_FAILURE]
    empty = np.zeros(0, np.int32)
    turns = tuple(
        Turn("", empty, empty.astype(np.float32), call="call", result=ToolResult(status))
        for status in statuses
    ) + (Turn(r"<answer>\boxed{1}</answer>", empty, empty.astype(np.float32)),)
    zeros = np.zeros(10, np.float32)
    stop = StopReason.VOID if reward is None else StopReason.ANSWERED
    return Trajectory("p", sample, np.zeros(3, np.int32), np.zeros(10, np.int32), np.ones(10, bool),
                      zeros, zeros, turns, stop, reward, "")  # fmt: skip


def group_of(rewards) -> Group:
    return Group(Problem("p", "q", "1"), tuple(made(i, r) for i, r in enumerate(rewards)))


def choose(rewards, keep=2, **settings):
    settings = cfg.Selection(keep=keep, **settings)
    return select(group_of(rewards), settings, cfg.Loss(), np.random.default_rng(0))


rewards_of_a_group = st.lists(st.sampled_from([0.0, 1.0, None]), min_size=1, max_size=12)


@given(
    st.lists(rewards_of_a_group, min_size=1, max_size=5),
    st.integers(1, 6),
    st.sampled_from(["roc_paper", "roc_release", "uniform", "gfpo_length", "gfpo_efficiency"]),
)
def test_every_sampled_trajectory_is_kept_or_dropped_for_one_named_reason(groups, keep, selector):
    found = [choose(rewards, keep, selector=selector) for rewards in groups]
    lost = {"rejected": 0, "too_small": 0, "void": 0, "not selected": 0, "kept": 0}
    for rewards, s in zip(groups, found, strict=True):
        void = rewards.count(None)
        scored = len(rewards) - void
        lost["void"] += void
        if s.status == "trained":
            assert len(s.kept) == len(s.samples) == keep <= scored
            lost["kept"] += keep
            lost["not selected"] += scored - keep
        else:
            assert len(s.kept) == 0 and s.samples == ()
            lost[s.status] += scored
            assert (s.status == "too_small") == (scored < keep)
    metrics = selection_metrics(found)
    assert metrics["trajectories_sampled"] == sum(map(len, groups)) == sum(lost.values())
    assert metrics["trajectories_kept"] == lost["kept"]
    assert metrics["trajectories_not_selected"] == lost["not selected"]
    assert metrics["trajectories_rejected"] == lost["rejected"]
    assert metrics["trajectories_too_small"] == lost["too_small"]
    assert metrics["voided"] == lost["void"]
    assert sum(metrics[f"groups_{s}"] for s in ("trained", "rejected", "too_small")) == len(groups)


@given(rewards_of_a_group, st.integers(1, 6))
def test_no_void_trajectory_is_trained_and_kept_ones_are_in_ascending_order(rewards, keep):
    s = choose(rewards, keep)
    assert all(rewards[i] is not None for i in s.kept)
    assert list(s.kept) == sorted(set(s.kept))
    assert [sample.trajectory.sample for sample in s.samples] == list(s.kept)


@pytest.mark.parametrize("rewards", [[1.0] * 4, [0.0] * 4, [1.0, None, 1.0, 1.0]])
def test_a_group_of_equal_rewards_is_rejected(rewards):
    assert choose(rewards).status == "rejected"


def test_a_group_that_lost_rollouts_is_used_as_long_as_enough_are_left():
    assert choose([1.0, 0.0, None, None], keep=2).status == "trained"
    assert choose([1.0, 0.0, None, None], keep=3).status == "too_small"


def test_advantages_are_those_of_the_kept_rollouts_by_equation_7():
    s = choose([1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], keep=4)  # 1 of 4 kept is a success
    rewards = [sample.trajectory.reward for sample in s.samples]
    assert sorted(rewards) == [0.0, 0.0, 0.0, 1.0]
    deviation = np.sqrt(3) / 4
    expected = [(r - 0.25) / deviation for r in rewards]
    assert [x.advantage for x in s.samples] == pytest.approx(expected, rel=1e-4)


def test_penalties_are_recorded_for_all_scored_rollouts_and_for_no_void_one():
    group = Group(
        Problem("p", "q", "1"),
        (made(0, 1.0, 1, 2), made(1, 0.0, 0, 1), made(2, None), made(3, 1.0, 3, 3)),
    )
    s = select(group, cfg.Selection(keep=2), cfg.Loss(), np.random.default_rng(0))
    np.testing.assert_array_equal(s.penalties_N, [0.5, 0.0, np.nan, 1.0])


def test_rates_are_over_all_scored_rollouts_before_selection():
    """The correct ones failed 1 of 4 calls, all of them 3 of 6; the void one counts nowhere."""
    found = trainer.rollout_metrics(
        [made(0, 1.0, 0, 2), made(1, 1.0, 1, 2), made(2, 0.0, 2, 2), made(3, None)]
    )
    assert found["train_accuracy"] == pytest.approx(2 / 3)
    assert found["tool_error_rate"] == pytest.approx(3 / 6)
    assert found["tool_error_rate_when_correct"] == pytest.approx(1 / 4)
    assert found["calls_per_trajectory"] == pytest.approx(2.0)
    assert found["mean_response_tokens"] == 10 and found["truncated_rate"] == 0


def test_entropy_is_over_those_trajectories_for_which_the_engine_gave_it():
    known = replace(made(0, 1.0, 0, 1), entropies=np.linspace(0, 9, 10, dtype=np.float32))
    unknown = replace(made(1, 0.0, 0, 1), entropies=None)
    assert trainer.rollout_metrics([known, unknown])["entropy"] == pytest.approx(
        known.entropies[known.loss_mask].mean()
    )
    assert trainer.rollout_metrics([unknown])["entropy"] is None


def test_rates_without_a_denominator_are_null_and_not_zero():
    found = trainer.rollout_metrics([made(0, 0.0, 0, 0)])
    assert found["tool_error_rate"] is None and found["tool_error_rate_when_correct"] is None
    assert trainer.rollout_metrics([])["train_accuracy"] is None


def test_an_epoch_shows_every_problem_once_in_an_order_of_its_own(tmp_path):
    config = tiny_config(rollout__prompts_per_step=3)
    made_trainer = Trainer(config, tmp_path, arm="a", model_path=tmp_path)
    made_trainer._bench = SimpleNamespace(train_problems=list(range(13)))
    epochs = [[made_trainer._prompts(step) for step in range(1 + 4 * e, 5 + 4 * e)] for e in (0, 1)]
    flat = [[p for step in epoch for p in step] for epoch in epochs]
    assert all(len(set(epoch)) == 12 for epoch in flat) and flat[0] != flat[1]
    assert made_trainer._prompts(2) == epochs[0][1]


# --- one run -------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def mixed_rewards():
    before = rollout.score_or_void
    rollout.score_or_void = odd_lengths_win
    yield
    rollout.score_or_void = before


def run(folder: Path, model_path: Path, *, resume=False, arm="grpo_roc", **changes) -> list[dict]:
    made_trainer = Trainer(tiny_config(**changes), folder, arm=arm, model_path=model_path)
    made_trainer.run(resume=resume)
    return runs.RunFolder(folder).rows()


@pytest.fixture(scope="module")
def finished(tmp_path_factory, cold_model) -> Path:
    """A run of four steps that nothing disturbed."""
    folder = tmp_path_factory.mktemp("runs") / "grpo_roc-s0"
    run(folder, cold_model)
    return folder


def test_metrics_have_one_row_per_step_with_the_contract_s_keys(finished):
    rows = runs.RunFolder(finished).rows()
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    for row in rows[1:]:
        assert set(CONTRACT_KEYS) <= set(row)
        assert {f"kept_{k}" for k in ("tool_error_rate", "train_accuracy")} <= set(row)
    evaluated = [row["step"] for row in rows if set(EVALUATION_KEYS) <= set(row)]
    assert evaluated == [0, 2, 4]


def test_training_took_place_and_the_engine_ran_the_learner_s_model(finished):
    rows = runs.RunFolder(finished).rows()[1:]
    assert sum(row["groups_trained"] for row in rows) > 4
    trained = [row for row in rows if row["updates"]]
    assert all(row["engine_learner_gap"] < 1e-4 for row in trained)
    assert sum(row["calls_per_trajectory"] for row in rows) > 0
    for row in rows:
        assert row["trajectories_sampled"] == 12
        assert row["trajectories_kept"] == 2 * row["groups_trained"]


def test_a_finished_folder_holds_the_contract_s_files_and_no_scaffolding(finished):
    names = {path.name for path in finished.iterdir()}
    assert names == {
        "config.json", "provenance.json", "metrics.jsonl", "eval.parquet", "trajectories.parquet",
        "DONE.json", "model",
    }  # fmt: skip
    assert json.loads((finished / "DONE.json").read_text())["sandbox_level"].startswith("L")
    assert json.loads((finished / "config.json").read_text())["run"]["steps"] == 4


def test_evaluation_rows_have_the_contract_s_columns_one_per_problem_sample_and_step(finished):
    rows = pd.read_parquet(finished / "eval.parquet")
    assert list(rows.columns) == EVAL_COLUMNS
    assert len(rows) == 4 * 3 and not rows.duplicated(["problem_id", "sample", "step"]).any()
    assert rows.problem_id.str.startswith("nano-test-").all()
    assert rows.correct.dtype == bool and rows.truncated.dtype == bool
    assert (rows.failed_calls <= rows.calls).all() and (rows.tokens <= 96).all()


def test_recorded_trajectories_are_from_recorded_steps_with_their_group_whole(finished):
    rows = runs.RunFolder(finished).read_table("trajectories")
    assert set(rows.step) == {1, 2, 4}
    assert (rows.groupby(["step", "problem_id"]).size() == 4).all()
    kept = rows.groupby(["step", "problem_id"]).kept.sum()
    assert set(kept) <= {0, 2}
    assert (rows.arm == "grpo_roc").all() and rows.penalty.between(0, 2).all()


def test_the_saved_model_is_the_trained_one_and_can_be_evaluated(finished, cold_model):
    from rstar2lab.nano import model

    before, after = (model.load(path).state_dict() for path in (cold_model, finished / "model"))
    moved = max(float((before[k] - after[k]).abs().max()) for k in before)
    assert 1e-5 < moved < 0.1
    rows = trainer.evaluate_checkpoint(tiny_config(), finished / "model")
    last = pd.read_parquet(finished / "eval.parquet").query("step == 4")
    assert rows.tokens.tolist() == last.tokens.tolist()


def test_a_finished_run_is_not_run_again_nor_overwritten(finished, cold_model):
    before = (finished / "metrics.jsonl").read_bytes()
    run(finished, cold_model, resume=True)
    assert (finished / "metrics.jsonl").read_bytes() == before
    with pytest.raises(runs.RunError, match=r"run.steps: 4 there, 5 asked"):
        run(finished, cold_model, resume=True, run__steps=5)
    with pytest.raises(runs.RunError, match="already holds a run.*--resume"):
        run(finished, cold_model)
    with pytest.raises(runs.RunError, match=r"optimizer.lr: 0.0005 there, 0.001 asked"):
        run(finished, cold_model, optimizer__lr=1e-3)


def test_a_run_without_tools_needs_no_sandbox(tmp_path, cold_model, monkeypatch):
    def refuse(*arguments, **settings):
        raise AssertionError("a sandbox was started")

    monkeypatch.setattr(workbench, "Sandbox", refuse)
    rows = run(
        tmp_path / "dapo_no_tool-s0", cold_model, arm="dapo_no_tool", chat__tools=False,
        selection__selector="all", selection__keep=4, run__steps=2,
    )  # fmt: skip
    assert all(row["calls_per_trajectory"] == 0 for row in rows[1:])
    assert all(row["tool_error_rate"] is None for row in rows[1:])
    done = json.loads((tmp_path / "dapo_no_tool-s0" / "DONE.json").read_text())
    assert done["sandbox_level"] == "no sandbox"


# --- guards --------------------------------------------------------------------------------------


def test_an_engine_that_misses_an_update_stops_the_run(tmp_path, cold_model, monkeypatch):
    async def forget(self, version, tensors):
        self._version = version

    monkeypatch.setattr(TorchEngine, "update_weights", forget)
    with pytest.raises(TrainingError, match="engine and learner log-probs differ by"):
        run(tmp_path / "a-s0", cold_model, optimizer__lr=5e-3)
    assert not (tmp_path / "a-s0" / "DONE.json").exists()


def test_training_on_a_truncated_distribution_is_refused_before_it_starts(tmp_path, cold_model):
    with pytest.raises(cfg.ConfigError, match="rollout.top_p=0.9.*train with rollout.top_p=1"):
        run(tmp_path / "a-s0", cold_model, rollout__top_p=0.9)
    assert not (tmp_path / "a-s0").exists()


def outage_every(number: int):
    """`Sandbox.arun`, of which one call in `number` ends in a service failure."""
    calls = []
    original = sandbox.Sandbox.arun

    async def arun(self, code, stdin=""):
        calls.append(code)
        if len(calls) % number == 0:
            return ToolResult(ToolStatus.SERVICE_FAILURE, stderr="worker died twice")
        return await original(self, code, stdin)

    return arun


def test_too_many_void_trajectories_stop_the_run_and_name_the_cause(
    tmp_path, cold_model, monkeypatch
):
    monkeypatch.setattr(sandbox.Sandbox, "arun", outage_every(1))
    with pytest.raises(TrainingError, match=r"of 12 trajectories are void.*worker died twice"):
        run(tmp_path / "a-s0", cold_model)


def test_few_void_trajectories_are_counted_and_leave_the_rates(tmp_path, cold_model, monkeypatch):
    monkeypatch.setattr(sandbox.Sandbox, "arun", outage_every(3))
    rows = run(tmp_path / "a-s0", cold_model, selection__max_void_fraction=1.0, run__steps=2)
    voided = sum(row["voided"] for row in rows[1:])
    assert voided > 0
    recorded = runs.RunFolder(tmp_path / "a-s0").read_table("trajectories")
    void = recorded[recorded.stop == "VOID"]
    assert len(void) == voided and void.reward.isna().all() and not void.kept.any()


# --- kill and resume -----------------------------------------------------------------------------


def without_seconds(rows: list[dict]) -> list[dict]:
    return [{k: v for k, v in row.items() if not k.startswith("seconds_")} for row in rows]


def killed_and_resumed(folder: Path, model_path: Path, rng: random.Random, every: int) -> int:
    """Start the run in its own process, kill it after some row, go on here; the rows it had."""
    wanted, tests = rng.randint(1, 4), Path(__file__).parent
    with subprocess.Popen(
        [
            sys.executable,
            tests / "tiny.py",
            folder,
            model_path,
            f"records.checkpoint_every={every}",
        ],
        cwd=tests.parent,
        start_new_session=True,
    ) as process:
        path = folder / "metrics.jsonl"
        while process.poll() is None and (
            not path.exists() or path.read_bytes().count(b"\n") < wanted
        ):
            time.sleep(0.002)
        time.sleep(rng.random() * 0.2)
        process.send_signal(signal.SIGKILL)
    had = len(runs.RunFolder(folder).rows())
    run(folder, model_path, resume=True, records__checkpoint_every=every)
    return had


def assert_equal_but_for_seconds(folder: Path, reference: Path):
    found, expected = (runs.RunFolder(f) for f in (folder, reference))
    assert without_seconds(found.rows()) == without_seconds(expected.rows())
    pd.testing.assert_frame_equal(found.read_table("eval"), expected.read_table("eval"))
    tables = [f.read_table("trajectories") for f in (found, expected)]
    for table in tables:
        table["turns"] = [
            [{k: v for k, v in turn.items() if k != "seconds"} for turn in turns]
            for turns in table.turns
        ]
    pd.testing.assert_frame_equal(*tables)
    for name in ("model.safetensors", "tokenizer.json"):
        assert (folder / "model" / name).read_bytes() == (reference / "model" / name).read_bytes()


def test_a_killed_and_resumed_run_equals_an_undisturbed_one(tmp_path, cold_model, finished):
    had = killed_and_resumed(tmp_path / "grpo_roc-s0", cold_model, random.Random(1), every=1)
    assert had >= 1
    assert_equal_but_for_seconds(tmp_path / "grpo_roc-s0", finished)


@pytest.mark.full
@pytest.mark.parametrize(("seed", "every"), [(2, 1), (3, 2), (4, 2)])
def test_it_does_so_wherever_it_is_killed(tmp_path, cold_model, finished, seed, every):
    folder = tmp_path / "grpo_roc-s0"
    killed_and_resumed(folder, cold_model, random.Random(seed), every)
    assert_equal_but_for_seconds(folder, finished)


def test_a_run_stopped_by_an_error_goes_on_from_its_checkpoint(
    tmp_path, cold_model, finished, monkeypatch
):
    """A fault in step 3, after that step's rollouts: steps 1 and 2 are kept, 3 runs again."""
    original = Trainer._update

    def failing(self, samples, step):
        if step == 3:
            raise OSError("disk full")
        return original(self, samples, step)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_update", failing)
        with pytest.raises(OSError, match="disk full"):
            run(tmp_path / "a-s0", cold_model)
    folder = runs.RunFolder(tmp_path / "a-s0")
    assert [row["step"] for row in folder.rows()] == [0, 1, 2] and not folder.is_done
    assert not (tmp_path / "a-s0" / ".lock").exists()
    run(tmp_path / "a-s0", cold_model, resume=True)
    assert without_seconds(folder.rows()) == without_seconds(runs.RunFolder(finished).rows())
