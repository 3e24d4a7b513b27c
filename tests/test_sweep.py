"""Sweeps: order, refusals before anything runs, points that fail, points that are done, kills."""

import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from tiny import TINY

from rstar2lab import cli, config, runs, sweep
from rstar2lab.sweep import SweepError

ROOT = Path(sweep.__file__).parents[1]
PARAMETERS = """config: str = ""
arm: str = ""
seed: int = 0
folder: str = ""
cold_start_dir: str = ""
settings: list = []
command: str = ""
"""
STEPS = """
import time
from pathlib import Path
from rstar2lab import runs
run = runs.RunFolder(folder)
done = max((row["step"] for row in run.rows()), default=0)
for step in range(done + 1, 4):
    run.append_row({"step": step})
    if (Path(folder).parent / f"{arm} fails").exists():
        raise ValueError(f"{arm} cannot train")
    while (Path(folder).parent / "wait").exists():
        time.sleep(0.05)
run.mark_done({"steps": 3})
"""


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    """A notebook that takes a run's parameters and writes a run folder of three steps."""
    path = tmp_path_factory.mktemp("template") / "run.ipynb"
    notebook = nbformat.v4.new_notebook()
    cell = nbformat.v4.new_code_cell(PARAMETERS)
    cell.metadata["tags"] = ["parameters"]
    notebook.cells = [cell, nbformat.v4.new_code_cell(STEPS)]
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "", "language": "python"}
    nbformat.write(notebook, path)
    return path


def points(config_file, out, *, arms=("grpo_roc", "grpo_tool"), seeds=(0,), **more):
    return sweep.grid(config_file, arms, seeds, out / "ablation", **more)


def test_the_first_seed_of_every_arm_comes_before_the_second(config_file, tmp_path):
    found = points(config_file, tmp_path, seeds=(0, 1, 2))
    assert [p.name for p in found] == [
        f"{arm}-s{seed}" for seed in (0, 1, 2) for arm in ("grpo_roc", "grpo_tool")
    ]
    assert {p.cold_start_dir for p in found} == {str(tmp_path / "cold_start")}
    assert found[5].load_config().run.seed == 2
    assert found[5].load_config().selection.selector == "uniform"


def test_a_point_s_command_makes_the_same_point_again(config_file, tmp_path, monkeypatch):
    settings = ("run.scale=nano, two words", "optimizer.lr=1e-4")
    parameters = {"note": 'it\'s "so"', "ratio": 0.5, "deep": True, "levels": [1, 2]}
    point = points(
        config_file, tmp_path, settings=settings, label="lr_low", parameters=parameters
    )[1]
    words, made = shlex.split(point.command), []
    monkeypatch.setattr(sys, "argv", [*words, "--plan"])
    monkeypatch.setattr(sweep, "status", lambda found: made.extend(found) or [])
    monkeypatch.setattr(sweep, "check_parameters", lambda template, given: None)
    cli.main()
    assert [p.parameters for p in made] == [parameters]
    assert [p.load_config() for p in made] == [point.load_config()]
    assert [Path(p.folder) for p in made] == [Path(point.folder)]
    assert point.name == "grpo_tool_lr_low-s0" and point.arm == "grpo_tool"


@pytest.mark.parametrize("label", ["a-s1", "../up", "two words"])
def test_a_label_that_would_not_be_one_folder_name_is_refused(config_file, tmp_path, label):
    with pytest.raises(SweepError, match="expected letters, digits and underscores"):
        points(config_file, tmp_path, label=label)


def test_a_configuration_that_cannot_run_is_refused_when_the_grid_is_made(config_file, tmp_path):
    with pytest.raises(config.ConfigError, match="did you mean 'optimizer.lr'"):
        points(config_file, tmp_path, settings=("optimizer.lrr=1",))
    with pytest.raises(config.ConfigError, match="selection.keep=9 but only"):
        points(config_file, tmp_path, settings=("selection.keep=9",))
    with pytest.raises(config.ConfigError, match="found there: grpo_roc, grpo_tool"):
        points(config_file, tmp_path, arms=("gspo",))


def test_every_parameter_that_the_sweep_itself_sets_is_refused(config_file, tmp_path):
    own = points(config_file, tmp_path)[0].notebook_parameters()
    assert {"arm", "seed", "folder", "cold_start_dir", "settings", "command"} < set(own)
    for name in own:
        with pytest.raises(SweepError, match=f"the sweep itself sets {name} for every point"):
            points(config_file, tmp_path, parameters={name: 5})


def test_an_undeclared_parameter_is_refused_before_anything_runs(config_file, tmp_path, template):
    found = points(config_file, tmp_path, parameters={"sed": 3})
    with pytest.raises(SweepError, match="does not declare sed; it declares arm, .*seed"):
        sweep.run(found, template=template)
    assert not (tmp_path / "ablation").exists()


def test_the_kit_s_own_template_declares_what_a_point_passes(config_file, tmp_path):
    sweep.check_parameters(sweep.TEMPLATE, points(config_file, tmp_path)[0].notebook_parameters())


def test_a_failing_point_is_named_and_not_done_the_others_finish_and_are_then_skipped(
    config_file, tmp_path, template
):
    found, seen = points(config_file, tmp_path), []
    (tmp_path / "ablation").mkdir()
    (tmp_path / "ablation" / "grpo_tool fails").touch()
    with pytest.raises(SweepError) as caught:
        sweep.run(found, template=template, report=lambda *row: seen.append(row))
    assert "1 of 2 points failed" in str(caught.value)
    assert "grpo_tool-s0: ValueError: grpo_tool cannot train" in str(caught.value)
    assert [p.is_done for p in found] == [True, False]
    assert (found[0], 3, 4) in seen
    assert [text for _, text in sweep.status(found)] == ["done", "resume after step 1"]
    notebook = nbformat.read(Path(found[0].folder) / "run.ipynb", as_version=4)
    assert any("injected-parameters" in cell.metadata.get("tags", []) for cell in notebook.cells)

    (tmp_path / "ablation" / "grpo_tool fails").unlink()
    before = (Path(found[0].folder) / "run.ipynb").stat().st_mtime_ns
    sweep.run(found, template=template)
    assert (Path(found[0].folder) / "run.ipynb").stat().st_mtime_ns == before
    assert [p.is_done for p in found] == [True, True]
    assert [row["step"] for row in runs.RunFolder(found[1].folder).rows()] == [1, 2, 3]


def test_a_finished_folder_of_another_configuration_is_not_taken_for_the_point(
    config_file, tmp_path, template
):
    old = points(config_file, tmp_path, arms=("grpo_roc",))[0]
    folder = runs.RunFolder(old.folder)
    folder.open(config.to_json(old.load_config()), command="", scale="", resume=False)
    folder.mark_done({})
    folder.close()
    sweep.run([old], template=template)  # done: nothing to do
    new = points(config_file, tmp_path, arms=("grpo_roc",), settings=("optimizer.lr=1e-4",))
    with pytest.raises(runs.RunError, match="optimizer.lr: 0.0005 there, 0.0001 asked"):
        sweep.run(new, template=template)


def test_what_a_sweep_would_do_is_said_per_point(config_file, tmp_path):
    found = points(config_file, tmp_path, seeds=(0, 1))
    done, begun = (runs.RunFolder(p.folder) for p in found[:2])
    for folder in (done, begun):
        folder.path.mkdir(parents=True)
        folder.append_row({"step": 2})
    done.mark_done({})
    assert [text for _, text in sweep.status(found)] == [
        "done", "resume after step 2", "new", "new"
    ]  # fmt: skip


def test_there_is_nothing_to_do_when_all_is_done(config_file, tmp_path):
    point = points(config_file, tmp_path)[0]
    Path(point.folder).mkdir(parents=True)
    runs.RunFolder(point.folder).mark_done({})
    sweep.run([point], template="no such notebook")


# --- kills ---------------------------------------------------------------------------------------


def descendants_of(folder: Path) -> list[psutil.Process]:
    """Processes whose command line names the folder, and everything below them."""
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        if str(folder) in " ".join(process.info["cmdline"] or []):
            found |= {process, *process.children(recursive=True)}
    return list(found)


def start_sweep(config_file, out, template) -> subprocess.Popen:
    program = (
        "import sys; from rstar2lab import sweep\n"
        "sweep.run(sweep.grid(sys.argv[1], ['grpo_roc', 'grpo_tool'], [0], sys.argv[2]),"
        " template=sys.argv[3])"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program, config_file, out / "ablation", template],
        cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip


def wait_for(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


@pytest.mark.full
@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_sweep_leaves_no_process_and_the_same_command_finishes_it(
    config_file, tmp_path, template, kill
):
    (tmp_path / "ablation").mkdir()
    (tmp_path / "ablation" / "wait").touch()
    found = points(config_file, tmp_path)
    with start_sweep(config_file, tmp_path, template) as process:
        wait_for(lambda: all(p.steps_done() == 1 for p in found))
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 4  # two points, two kernels
        process.send_signal(kill)
        process.wait(30)
    psutil.wait_procs(children, 15)
    assert not [c for c in children if c.is_running() and c.status() != psutil.STATUS_ZOMBIE]
    assert not [p for p in found if p.is_done]
    (tmp_path / "ablation" / "wait").unlink()
    sweep.run(found, template=template)
    for point in found:
        assert [r["step"] for r in runs.RunFolder(point.folder).rows()] == [1, 2, 3]


@pytest.mark.full
def test_a_real_point_trains_through_the_kit_s_notebook(config_file, tmp_path, cold_start_dir):
    (tmp_path / "cold_start").symlink_to(cold_start_dir)
    point = points(config_file, tmp_path, arms=("grpo_roc",), settings=("run.steps=1",))[0]
    sweep.run([point])
    assert point.is_done
    provenance = json.loads((Path(point.folder) / "provenance.json").read_text())
    assert provenance["command"] == point.command
    assert provenance["scale"] == TINY["run.scale"]
    notebook = nbformat.read(Path(point.folder) / "run.ipynb", as_version=4)
    assert not any(o.output_type == "error" for c in notebook.cells for o in c.get("outputs", []))
