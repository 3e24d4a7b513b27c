"""The command line: help that teaches, faults as one message, an interrupt that can be resumed."""

import functools
import inspect
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from tiny import tiny_config

from rstar2lab import ablation, cli, extras, runs, sft, sweep
from rstar2lab import config as cfg

ROOT = Path(cli.__file__).parents[1]


def call(monkeypatch, capsys, *words):
    """Exit code, standard output and standard error of `rstar2lab <words>`, in this process."""
    monkeypatch.setattr(sys, "argv", ["rstar2lab", *map(str, words)])
    code = 0
    try:
        cli.main()
    except SystemExit as stopped:
        code = stopped.code or 0
    said = capsys.readouterr()
    return code, said.out, said.err


# --- help ----------------------------------------------------------------------------------------


def test_the_program_s_help_names_every_command(monkeypatch, capsys):
    code, out, _ = call(monkeypatch, capsys, "--help")
    assert code == 0
    for name in ("reproduce", "train", "sweep", "evaluate", "figures", "doctor"):
        assert name in out


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_every_command_s_help_says_what_it_does_and_explains_each_argument(
    monkeypatch, capsys, command
):
    code, out, _ = call(monkeypatch, capsys, command, "--help")
    shown = "".join(out.replace("│", " ").split())
    docstring = cli.COMMANDS[command].__doc__
    assert code == 0 and "".join(docstring.split("\n")[0].split()) in shown
    explained = dict(re.findall(r"^ {8}(\w+): (.*)$", docstring, re.MULTILINE))
    assert set(explained) == set(inspect.signature(cli.COMMANDS[command]).parameters)
    for name, explanation in explained.items():
        if name in ("settings", "parameters"):
            assert "repeatable" in shown
        else:
            assert "".join(explanation.split())[:30] in shown, name


def examples() -> list[str]:
    docs = "\n".join(command.__doc__ for command in cli.COMMANDS.values())
    return re.findall(r"^ +\$ rstar2lab (.*)$", docs, re.MULTILINE)


def test_every_command_has_an_example():
    assert {line.split()[0] for line in examples()} == set(cli.COMMANDS)


@pytest.mark.parametrize("line", examples())
def test_an_example_of_the_help_is_a_line_of_it_and_a_valid_command(monkeypatch, capsys, line):
    words, given = shlex.split(line), []
    _, out, _ = call(monkeypatch, capsys, words[0], "--help")
    assert f"$ rstar2lab {line}" in out.splitlines()
    command = functools.wraps(cli.COMMANDS[words[0]])(lambda **values: given.append(values))
    monkeypatch.setitem(cli.COMMANDS, words[0], command)
    code, _, err = call(monkeypatch, capsys, *words)
    assert code == 0 and len(given) == 1, err


def test_the_help_names_every_arm(monkeypatch, capsys):
    _, out, _ = call(monkeypatch, capsys, "--help")
    assert re.findall(r"^- (\w+):", out, re.MULTILINE) == list(ablation.ARMS)
    assert sorted(ablation.ARMS) == sweep.arm_names(cli.NANO)


# --- faults --------------------------------------------------------------------------------------


def test_a_typo_in_a_setting_names_the_nearest_key_before_anything_runs(
    monkeypatch, capsys, tmp_path
):
    monkeypatch.chdir(tmp_path)
    for words in (["train", "grpo_roc"], ["sweep", "--arms", "grpo_roc"]):
        code, _, err = call(monkeypatch, capsys, *words, "--set", "optimzer.lr=1e-4")
        assert code == 2
        assert "unknown key 'optimzer.lr' (did you mean 'optimizer.lr'?)" in err
        assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"cells": 3, "nbformat": 4}'])
def test_a_file_that_is_no_notebook_is_no_template(monkeypatch, capsys, tmp_path, text):
    (tmp_path / "odd.ipynb").write_text(text)
    words = ("sweep", "--template", tmp_path / "odd.ipynb", "--out", tmp_path / "s", "--plan")
    code, _, err = call(monkeypatch, capsys, *words)
    assert code == 2 and "odd.ipynb is not a notebook that can be read" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "grpo_rock"], "found there: dapo_no_tool, grpo_roc, grpo_tool"),
        (["train", "grpo_roc", "--config", "nano.tml"], "no configuration file nano.tml"),
        (["train", "grpo_roc", "--set", "optimizer.lr"], "expected section.key=value"),
        (["train", "grpo_roc", "--set", "optimizer.lr=-1"], "optimizer.lr"),
        (["train", "grpo_roc", "--set", "selection.keep=99"], "lower keep"),
        (["sweep", "--parameter", "stpes=3", "--plan"], "does not declare stpes; it declares"),
        (["figures", "--results", "nothing"], "no finished run"),
        (["train", "grpo_roc", "--set", "optimizer.lr=inf"], "optimizer.lr"),
        (["train", "grpo_roc", "--set", "model.heads=3", "--set", "model.kv_heads=2"],
         "must be a multiple of model.kv_heads=2"),
        (["train", "grpo_roc", "--set", "model.head_width=31"], "model.head_width=31 must be even"),
        (["sweep", "--parameter", "seed=5", "--plan"], "the sweep itself sets seed"),
        (["sweep", "--parameter", "cold_start_dir=x", "--plan"], "itself sets cold_start_dir"),
        (["sweep", "--template", "no.ipynb", "--plan"], "no.ipynb is not a notebook"),
        (["sweep", "--template", str(cli.NANO), "--plan"], "is not a notebook that can be read"),
        (["sweep", "--jobs", "0", "--arms", "grpo_roc"], "jobs=0, expected at least 1"),
        (["reproduce", "--seeds", "0"], "expected how many RL seeds each arm gets, at least 1"),
        (["reproduce", "--jobs", "0"], "jobs=0, expected at least 1"),
        (["evaluate", "nothing"], "no checkpoint at nothing"),
        (["sandbox", "serve", "--port", "99999"], "--port 99999: expected 0 to 65535"),
        (["sandbox", "serve", "--workers", "0"], "workers=0, expected at least 1"),
        (["sandbox", "serve", "--cpu-seconds", "inf"], "sandbox.cpu_seconds: Input should be"),
        (["sandbox", "serve", "--memory-mb", "0"], "sandbox.memory_mb: Input should be"),
    ],
)  # fmt: skip
def test_a_fault_of_the_caller_is_one_message_and_exit_code_2(
    monkeypatch, capsys, tmp_path, words, said
):
    monkeypatch.chdir(tmp_path)
    code, _, err = call(monkeypatch, capsys, *words)
    assert code == 2 and said in err and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_command_or_option_is_refused_with_a_hint(monkeypatch, capsys):
    for words in (["trian"], ["train", "grpo_roc", "--sed", "3"]):
        code, out, err = call(monkeypatch, capsys, *words)
        assert code == 2 and "Traceback" not in out + err


def test_a_bug_of_ours_keeps_its_traceback(monkeypatch):
    def broken():
        raise ZeroDivisionError

    monkeypatch.setitem(cli.COMMANDS, "doctor", broken)
    monkeypatch.setattr(sys, "argv", ["rstar2lab", "doctor"])
    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_isolation_below_what_is_required_is_refused_and_a_weak_one_is_announced(
    monkeypatch, capsys, tmp_path, config_file
):
    import rstar2lab.sandbox as sandbox

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sandbox, "detect_level", lambda: "L2")
    words = ("train", "grpo_roc", "--config", config_file, "--require-isolation", "L3")
    code, _, err = call(monkeypatch, capsys, *words)
    assert code == 2 and "reaches L2 here, but L3 was required" in err
    assert list(tmp_path.iterdir()) == []
    cli.check_isolation("L2")
    assert "WARNING: sandbox isolation is only L2" in capsys.readouterr().err
    monkeypatch.setattr(sandbox, "detect_level", lambda: "L4")
    cli.check_isolation("L3")
    assert capsys.readouterr().out == "sandbox isolation L4\n"


@pytest.mark.parametrize("rows", [[], [{"step": 0}]])
def test_an_unfinished_run_has_no_model_to_evaluate_yet(monkeypatch, capsys, tmp_path, rows):
    folder = runs.RunFolder(tmp_path / "grpo_roc-s0")
    folder.open(cfg.to_json(tiny_config()), command="", scale="", resume=False)
    for row in rows:
        folder.append_row(row)
    folder.close()
    code, _, err = call(monkeypatch, capsys, "evaluate", folder.path)
    assert code == 2 and "is not finished" in err and "--resume" in err


@pytest.mark.parametrize("is_installed", [False, True])
def test_the_doctor_goes_on_when_vllm_is_missing_or_cannot_load(
    monkeypatch, capsys, tmp_path, is_installed
):
    monkeypatch.setattr(extras, "is_installed", lambda package: is_installed)
    monkeypatch.setitem(sys.modules, "vllm", None)  # its import raises
    code, out, _ = call(monkeypatch, capsys, "doctor", "--vllm", tmp_path)
    assert code == 1 and "FAIL  vllm parity" in out and "sandbox" in out


def test_a_missing_extra_is_one_line_with_the_command_that_installs_it(monkeypatch, capsys):
    monkeypatch.setattr(extras, "is_installed", lambda package: False)
    for package, extra in (("ray", "cluster"), ("vllm", "vllm")):
        with pytest.raises(extras.MissingExtra) as caught:
            extras.load(package)
        message = str(caught.value)
        assert f"{package} is not installed" in message and f"-e '.[{extra}]'" in message
        assert "\n" not in message
    monkeypatch.setitem(cli.COMMANDS, "doctor", lambda: extras.load("ray"))
    code, _, err = call(monkeypatch, capsys, "doctor")
    assert code == 2 and "pip install" in err and "Traceback" not in err


def test_an_installed_optional_package_is_returned(monkeypatch):
    monkeypatch.setitem(extras.EXTRAS, "json", "test")
    assert extras.load("json") is json


# --- the commands --------------------------------------------------------------------------------


def test_a_plan_says_what_would_run_and_runs_nothing(monkeypatch, capsys, tmp_path, config_file):
    words = ("sweep", "--config", config_file, "--seeds", 0, 1, "--out", tmp_path / "s", "--plan")
    code, out, _ = call(monkeypatch, capsys, *words)
    assert code == 0
    assert [line.split() for line in out.splitlines()] == [
        [f"{arm}-s{seed}", "new"] for seed in (0, 1) for arm in ("grpo_roc", "grpo_tool")
    ]
    assert not (tmp_path / "s").exists()


def test_evaluate_prints_the_table_and_writes_the_rows(
    monkeypatch, capsys, tmp_path, config_file, cold_model
):
    out = tmp_path / "deep" / "rows.parquet"
    words = ("evaluate", cold_model, "--config", config_file, "--samples", 2, "--out", out)
    code, said, _ = call(monkeypatch, capsys, *words)
    assert code == 0
    assert "8 samples, temperature 1.0, test" in said
    assert "accuracy" in said and "problems" in said and "eval_truncated_rate" in said
    assert len(pd.read_parquet(out)) == 8


def test_a_run_folder_brings_its_configuration_and_a_cold_start_s_takes_the_base_s(
    monkeypatch, capsys, tmp_path, config_file, cold_model
):
    run = tmp_path / "grpo_roc-s0"
    run.mkdir()
    (run / "config.json").write_text(cfg.to_json(tiny_config(run__scale="of the run")))
    (run / "provenance.json").write_text("{}")
    (run / "DONE.json").write_text("{}")
    (run / "model").symlink_to(cold_model)
    code, said, _ = call(monkeypatch, capsys, "evaluate", run, "--samples", 1)
    assert code == 0 and "4 samples, temperature 1.0, of the run" in said
    monkeypatch.setattr(cli, "NANO", config_file)
    assert cold_model.parent.name == f"nano-{sft.cache_key(tiny_config())}"
    code, said, _ = call(monkeypatch, capsys, "evaluate", cold_model.parent, "--samples", 1)
    assert code == 0 and "4 samples, temperature 1.0, test" in said


def test_train_makes_a_run_and_refuses_to_overwrite_it(
    monkeypatch, capsys, tmp_path, config_file, cold_start_dir
):
    (tmp_path / "cold_start").symlink_to(cold_start_dir)
    out = tmp_path / "train" / "grpo_roc-s3"
    words = ["train", "grpo_roc", "--config", config_file, "--seed", 3, "--out", out]
    words += ["--set", "run.steps=1", "--set", "run.scale=two words"]
    code, said, err = call(monkeypatch, capsys, *words)
    assert code == 0 and f"done: {out}" in said
    assert f"starts from {tmp_path / 'cold_start'}" in said and "corpus" not in err
    provenance = json.loads((out / "provenance.json").read_text())
    assert shlex.split(provenance["command"]) == ["rstar2lab", *map(str, words)]
    assert provenance["scale"] == "two words"
    code, _, err = call(monkeypatch, capsys, *words)
    assert code == 2 and "already holds a run; continue it with --resume" in err
    code, _, err = call(monkeypatch, capsys, *words, "--set", "optimizer.lr=1e-4", "--resume")
    assert code == 2 and "optimizer.lr: 0.0005 there, 0.0001 asked" in err


def test_the_command_that_continues_can_be_pasted(monkeypatch):
    assert cli.resume_command(["rstar2lab", "train", "grpo_roc"]) == (
        "rstar2lab train grpo_roc --resume"
    )
    assert cli.resume_command(["rstar2lab", "reproduce"]) == "rstar2lab reproduce"
    words = ["rstar2lab", "train", "grpo_roc", "--set", "run.scale=two words"]
    assert shlex.split(cli.resume_command(words)) == [*words, "--resume"]


def test_an_interrupt_leaves_a_whole_folder_and_says_how_to_go_on(
    tmp_path, config_file, cold_start_dir
):
    (tmp_path / "cold_start").symlink_to(cold_start_dir)
    out = tmp_path / "train" / "grpo_roc-s0"
    words = ["train", "grpo_roc", "--config", config_file, "--out", out, "--set", "run.steps=9999"]
    process = subprocess.Popen(
        [sys.executable, "-m", "rstar2lab.cli", *words],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    folder, deadline = runs.RunFolder(out), time.monotonic() + 60
    while len(folder.rows()) < 3 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert f"stopped; to go on: rstar2lab train grpo_roc --config {config_file}" in err
    assert err.rstrip().endswith("--resume") and "Traceback" not in err
    steps = [row["step"] for row in folder.rows()]
    assert steps == list(range(len(steps))) and len(steps) >= 3
    assert not (out / ".lock").exists() and not folder.is_done
    assert folder.load_checkpoint()["step"] in (steps[-1], steps[-1] - 1)


def test_a_sweep_asks_the_service_that_it_will_use_before_the_cold_start(
    monkeypatch, capsys, tmp_path
):
    code, _, err = call(
        monkeypatch, capsys, "sweep", "--arms", "grpo_tool", "--seeds", "0", "--out", tmp_path,
        "--set", "sandbox.address=http://127.0.0.1:9",
    )  # fmt: skip
    assert code != 0 and "no sandbox service answers" in err
    assert not list(tmp_path.glob("*"))
