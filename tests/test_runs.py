"""The run folder: whole files, one writer, what resuming keeps, the parquet schema."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

from rstar2lab import runs
from rstar2lab.runs import RunError, RunFolder, write_atomic
from rstar2lab.types import StopReason, ToolCall, ToolResult, ToolStatus, Trajectory, Turn

CONFIG = json.dumps({"loss": {"ddof": 0, "clip_low": 0.2}, "run": {"seed": 1}})
COLUMNS = (
    "problem_id question answer sample step arm reward reason stop penalty kept weight_version "
    "prompt_ids response_ids loss_mask logprobs entropies roles turns"
).split()


def opened(path: Path, config: str = CONFIG, *, resume: bool = False) -> RunFolder:
    folder = RunFolder(path)
    folder.open(config, command="rstar2lab train", scale="test", resume=resume)
    return folder


# --- files ---------------------------------------------------------------------------------------


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "file.json"
    write_atomic(path, "old")

    def full(descriptor):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        write_atomic(path, "new" * 1000)
    assert path.read_text() == "old" and os.listdir(path.parent) == ["file.json"]


def test_a_write_replaces_text_by_bytes_and_is_readable_by_others(tmp_path):
    write_atomic(tmp_path / "a", "text")
    write_atomic(tmp_path / "a", b"\x00\xff")
    assert (tmp_path / "a").read_bytes() == b"\x00\xff"
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644


def test_what_a_kill_in_the_middle_of_a_write_left_behind_is_swept_at_the_next_open(
    tmp_path, monkeypatch
):
    folder = opened(tmp_path / "a-s0")

    def killed(*arguments):
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        patch.setattr(Path, "unlink", lambda *arguments, **settings: None)
        with pytest.raises(SystemExit):
            folder.save_checkpoint(1, {"x": torch.zeros(2)})
    assert len(list((tmp_path / "a-s0" / "checkpoints").iterdir())) == 1
    assert folder.load_checkpoint() is None
    folder.close()
    opened(tmp_path / "a-s0", resume=True).close()
    assert list((tmp_path / "a-s0" / "checkpoints").iterdir()) == []


# --- opening -------------------------------------------------------------------------------------


def test_a_new_folder_says_what_it_is_and_how_it_came_about(tmp_path):
    opened(tmp_path / "sweep" / "a-s0").close()
    assert (tmp_path / "sweep" / "a-s0" / "config.json").read_text() == CONFIG
    found = json.loads((tmp_path / "sweep" / "a-s0" / "provenance.json").read_text())
    assert set(found) >= {"command", "git_sha", "versions", "scale"}
    assert found["command"] == "rstar2lab train" and found["scale"] == "test"
    assert found["versions"]["torch"] == torch.__version__
    assert len(found["git_sha"].removesuffix("+changes")) in (40, len("unknown"))


def test_a_second_process_is_refused_while_the_first_writes(tmp_path):
    folder = opened(tmp_path / "a-s0")
    program = (
        "import sys; from rstar2lab import runs\n"
        "try: runs.RunFolder(sys.argv[1]).open(sys.argv[2], command='', scale='', resume=True)\n"
        "except runs.RunError as error: print(error)\n"
        "else: print('opened')"
    )

    def other_process() -> str:
        return subprocess.run(
            [sys.executable, "-c", program, folder.path, CONFIG],
            capture_output=True, text=True, check=True, cwd=Path(runs.__file__).parents[1],
        ).stdout  # fmt: skip

    assert "another process is writing" in other_process()
    folder.append_row({"step": 1})
    folder.close()
    assert "opened" in other_process()
    assert folder.rows() == [{"step": 1}]


def test_two_handles_of_one_process_exclude_each_other_too(tmp_path):
    folder = opened(tmp_path / "a-s0")
    with pytest.raises(RunError, match="another process is writing"):
        opened(tmp_path / "a-s0", resume=True)
    folder.close()
    opened(tmp_path / "a-s0", resume=True).close()
    assert not (tmp_path / "a-s0" / ".lock").exists()


def test_another_configuration_is_refused_with_every_difference(tmp_path):
    folder = opened(tmp_path / "a-s0")
    folder.append_row({"step": 0})
    folder.close()
    other = json.dumps({"loss": {"ddof": 1, "clip_low": 0.2}, "run": {"seed": 2}})
    with pytest.raises(RunError) as caught:
        opened(tmp_path / "a-s0", other, resume=True)
    assert "loss.ddof: 0 there, 1 asked" in str(caught.value)
    assert "run.seed: 1 there, 2 asked" in str(caught.value)
    assert "clip_low" not in str(caught.value)
    opened(tmp_path / "a-s0", resume=True).close()  # the refusal released the lock


def test_a_run_that_failed_before_its_first_row_gives_its_folder_to_another(tmp_path):
    opened(tmp_path / "a-s0").close()
    other = json.dumps({"loss": {"ddof": 1, "clip_low": 0.2}, "run": {"seed": 2}})
    opened(tmp_path / "a-s0", other).close()
    assert (tmp_path / "a-s0" / "config.json").read_text() == other


def test_only_a_run_s_own_half_written_files_are_removed(tmp_path):
    mine, strange = tmp_path / "parts" / ".eval.partial", tmp_path / "photos" / ".x.partial"
    for path in (mine, strange):
        write_atomic(path, "")
    opened(tmp_path).close()
    assert not mine.exists() and strange.exists()


def test_folders_that_are_no_runs_are_left_out_of_the_metrics(tmp_path):
    for name in ("grpo_roc_hard-s3", "x-sfoo", "x-s²", "notes"):
        folder = opened(tmp_path / name)
        folder.append_row({"step": 0, "eval_accuracy": 0.5})
        folder.close()
    frame = runs.metrics_frame(tmp_path)
    assert list(frame.arm) == ["grpo_roc_hard"] and list(frame.run_seed) == [3]


def test_a_folder_with_rows_or_a_done_marker_is_continued_only_when_asked(tmp_path):
    folder = opened(tmp_path / "a-s0")
    folder.close()
    folder = opened(tmp_path / "a-s0")  # nothing was written: not yet a run
    folder.append_row({"step": 0})
    folder.close()
    with pytest.raises(RunError, match="already holds a run; continue it with --resume"):
        opened(tmp_path / "a-s0")
    opened(tmp_path / "a-s0", resume=True).close()
    done = opened(tmp_path / "b-s0")
    assert not done.is_done
    done.mark_done({"steps": 3})
    done.close()
    assert done.is_done
    with pytest.raises(RunError, match="already holds a run"):
        opened(tmp_path / "b-s0")


# --- metrics -------------------------------------------------------------------------------------


def test_rows_come_back_as_written_and_a_half_written_last_line_is_left_out(tmp_path):
    folder = opened(tmp_path / "a-s0")
    assert folder.rows() == []
    rows = [{"step": 0, "eval_accuracy": 0.25}, {"step": 1, "loss": None}]
    for row in rows:
        folder.append_row(row)
    with open(tmp_path / "a-s0" / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "lo')
    assert folder.rows() == rows
    folder.keep_rows_up_to(1)
    folder.append_row({"step": 2})
    assert [row["step"] for row in folder.rows()] == [0, 1, 2]


def test_rows_after_the_checkpoint_are_forgotten(tmp_path):
    folder = opened(tmp_path / "a-s0")
    for step in range(6):
        folder.append_row({"step": step})
    folder.keep_rows_up_to(3)
    assert [row["step"] for row in folder.rows()] == [0, 1, 2, 3]
    folder.keep_rows_up_to(0)
    assert [row["step"] for row in folder.rows()] == [0]


def test_the_metrics_of_many_runs_are_one_frame_with_arm_and_seed(tmp_path):
    for arm, seed in (("grpo_roc", 0), ("grpo_roc", 11), ("grpo_tool", 0)):
        folder = opened(tmp_path / "ablation" / f"{arm}-s{seed}")
        folder.append_row({"step": 1, "train_accuracy": 0.5})
        folder.close()
    frame = runs.metrics_frame(tmp_path)
    assert sorted(zip(frame.arm, frame.run_seed, strict=True)) == [
        ("grpo_roc", 0), ("grpo_roc", 11), ("grpo_tool", 0)
    ]  # fmt: skip
    assert set(frame.sweep) == {"ablation"}
    assert len(runs.metrics_frame(tmp_path / "ablation" / "grpo_tool-s0")) == 1
    assert runs.metrics_frame(tmp_path / "nothing").empty


def test_runs_of_sibling_folders_share_their_cold_starts():
    found = {runs.cold_start_dir(f"runs/{name}/a-s0") for name in ("train", "sweep")}
    assert found == {Path("runs/cold_start")}


# --- parts ---------------------------------------------------------------------------------------


def with_parts(path: Path) -> RunFolder:
    folder = opened(path)
    for step in (10, 2):
        folder.write_part("eval", step, pd.DataFrame({"step": [step] * 2, "sample": [0, 1]}))
    folder.write_part("trajectories", 2, pd.DataFrame({"step": [2]}))
    return folder


def test_parts_merge_in_the_order_of_their_steps(tmp_path):
    folder = with_parts(tmp_path / "a-s0")
    before = folder.read_table("eval")
    folder.merge_parts()
    assert folder.read_table("eval").step.tolist() == [2, 2, 10, 10] == before.step.tolist()
    assert folder.read_table("trajectories").step.tolist() == [2]
    assert not (tmp_path / "a-s0" / "parts").exists()
    folder.merge_parts()  # a second call changes nothing
    assert len(folder.read_table("eval")) == 4


def test_a_step_written_again_replaces_its_part(tmp_path):
    folder = with_parts(tmp_path / "a-s0")
    folder.write_part("eval", 2, pd.DataFrame({"step": [2], "sample": [7]}))
    folder.merge_parts()
    assert folder.read_table("eval")["sample"].tolist() == [7, 0, 1]


def test_a_kill_while_the_parts_are_removed_loses_no_row(tmp_path, monkeypatch):
    folder = with_parts(tmp_path / "a-s0")

    def one_file_then_killed(path, **settings):
        if path.exists():
            sorted(path.iterdir())[0].unlink()
            raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(runs.shutil, "rmtree", one_file_then_killed)
        with pytest.raises(SystemExit):
            folder.merge_parts()
    folder.close()
    again = opened(tmp_path / "a-s0", resume=True)
    again.merge_parts()
    assert again.read_table("eval").step.tolist() == [2, 2, 10, 10]
    assert not [p for p in (tmp_path / "a-s0").iterdir() if "parts" in p.name]


def test_a_table_that_does_not_exist_is_empty(tmp_path):
    assert opened(tmp_path / "a-s0").read_table("eval").empty


# --- checkpoints ---------------------------------------------------------------------------------


def test_the_newest_checkpoint_is_loaded_and_older_ones_are_removed(tmp_path):
    folder = opened(tmp_path / "a-s0")
    assert folder.load_checkpoint() is None
    for step in (1, 2, 10):
        folder.save_checkpoint(step, {"weight": torch.full((2,), float(step))})
    state = folder.load_checkpoint()
    assert state["step"] == 10 and state["weight"].tolist() == [10.0, 10.0]
    assert len(list((tmp_path / "a-s0" / "checkpoints").iterdir())) == 1
    folder.remove_checkpoints()
    assert folder.load_checkpoint() is None


# --- trajectories.parquet ------------------------------------------------------------------------


def recorded() -> Trajectory:
    ids, floats = np.asarray([5, 6], np.int32), np.asarray([-0.5, -0.25], np.float32)
    call = ToolCall("python", "1/0", raw='{"name": "python"}')
    result = ToolResult(ToolStatus.ERROR, "", "ZeroDivisionError", seconds=0.125)
    turns = (
        Turn("<tool_call>…</tool_call>", ids, floats, floats, call, result, ids),
        Turn(r"<answer>\boxed{1}</answer>", ids, floats, floats),
    )
    return Trajectory(
        "p7", 3, np.asarray([1, 2, 3], np.int32), np.asarray([5, 6, 5, 6, 5, 6], np.int32),
        np.asarray([1, 1, 0, 0, 1, 1], bool), np.asarray([*floats, 0, 0, *floats], np.float32),
        np.zeros(6, np.float32), turns, StopReason.ANSWERED, 1.0, "exact_integer", 4,
    )  # fmt: skip


def test_a_trajectory_row_has_exactly_the_contract_s_columns_and_survives_parquet(tmp_path):
    row = runs.trajectory_row(
        recorded(), question="6 * 7?", answer="42", step=9, arm="grpo_roc", penalty=1.0, kept=True
    )
    assert list(row) == COLUMNS
    folder = opened(tmp_path / "a-s0")
    folder.write_part("trajectories", 9, pd.DataFrame([row]))
    folder.merge_parts()
    assert pq.read_schema(tmp_path / "a-s0" / "trajectories.parquet").names == COLUMNS
    found = folder.read_table("trajectories").iloc[0]
    scalars = "problem_id sample step arm reward reason stop penalty kept weight_version".split()
    assert [found[name] for name in scalars] == [
        "p7", 3, 9, "grpo_roc", 1.0, "exact_integer", "ANSWERED", 1.0, True, 4
    ]  # fmt: skip
    assert found.prompt_ids.tolist() == [1, 2, 3]
    assert found.response_ids.tolist() == [5, 6, 5, 6, 5, 6]
    assert found.loss_mask.tolist() == [True, True, False, False, True, True]
    assert found.logprobs.tolist() == [-0.5, -0.25, 0, 0, -0.5, -0.25]
    assert [dict(turn) for turn in found.turns] == [
        {
            "text": "<tool_call>…</tool_call>", "call": '{"name": "python"}', "status": "ERROR",
            "stdout": "", "stderr": "ZeroDivisionError", "seconds": 0.125,
        },
        {
            "text": r"<answer>\boxed{1}</answer>", "call": None, "status": None, "stdout": None,
            "stderr": None, "seconds": None,
        },
    ]  # fmt: skip


def test_the_recorded_command_can_be_pasted_into_a_shell(monkeypatch):
    words = ["rstar2lab", "train", "--set", "run.scale=nano 0.4M, smoke"]
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/rstar2lab", *words[1:]])
    assert shlex.split(runs.command_line()) == words
