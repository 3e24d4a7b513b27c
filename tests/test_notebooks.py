"""Notebooks: static rules over the committed files, and a run of each with small parameters.

A run is judged by whether it ends and by what it shows, not by comparing outputs.
"""

import ast
import importlib
import json
import re
from functools import cache
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import papermill
import pytest
from recorded import write_recorded_run

from rstar2lab import notebook, types

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TEMPLATES = sorted((ROOT / "experiments" / "templates").glob("*.ipynb"))
EVERY = NOTEBOOKS + TEMPLATES
MAX_BYTES, MAX_CELL_LINES = 600_000, 12
MAX_CELLS, MAX_CODE_LINES, MAX_DEFINITIONS = 60, 150, 2
MAGIC = re.compile(r"^\s*[%!].*$", re.MULTILINE)
MACHINE = re.compile(
    r"(?<![\w.:/<])/(?:home|root|work|tmp|Users|mnt|usr|var|opt|private)/[\w.-]|[A-Z]:\\\\Users"
)
TOKEN = re.compile(r"hf_[A-Za-z0-9]{20}|sk-[A-Za-z0-9]{20}|ghp_[A-Za-z0-9]{20}|AKIA[0-9A-Z]{16}")

SMALL_PARAMETERS = {
    "00_tour": {"train_steps": 1},
    "01_protocol": {},
    "02_sandbox": {"workers": 2, "loads": [0.2, 1.2], "seconds_each": 0.5},
    "03_rollout": {"samples": 2, "slow_seconds": 0.1, "small_kv_tokens": 256},
    "04_scheduler": {"trajectories": 16, "layers": 1, "sim_engines": 1, "seeds": 2},
    "05_reward_noise": {"resamples": 200},
    "06_grpo": {"ratios": 41, "longest": 200},
    "07_roc": {"draws": 300, "replays": 2},
    "11_ablation": {},
}


@cache
def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(path):
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def tags(cell):
    return cell.metadata.get("tags", [])


def tree(cell):
    return ast.parse(MAGIC.sub("pass", cell.source))


def outputs(path):
    return [output for cell in code_cells(path) for output in cell.outputs]


def figures(path):
    return [o for o in outputs(path) if "image/png" in o.get("data", {})]


def on_every(paths):
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.stem)


# Static rules


@on_every(EVERY)
def test_it_is_valid_with_ids_and_the_python3_kernel(path):
    found = read(path)
    nbformat.validate(found)
    ids = [cell["id"] for cell in found.cells]
    assert len(set(ids)) == len(ids)
    assert found.metadata.kernelspec.name == "python3"
    assert path.stat().st_size <= MAX_BYTES


@on_every(EVERY)
def test_the_first_code_cell_holds_typed_literal_parameters_with_comments(path):
    first, *others = code_cells(path)
    assert "parameters" in tags(first)
    assert not any("parameters" in tags(cell) for cell in others)
    for statement in tree(first).body:
        assert isinstance(statement, ast.AnnAssign), ast.unparse(statement)
        ast.literal_eval(statement.value)
    assert all("#" in line for line in first.source.splitlines())
    inferred = papermill.inspect_notebook(str(path))
    assert set(inferred) == {statement.target.id for statement in tree(first).body}
    assert all(parameter["help"] for parameter in inferred.values())


@on_every(EVERY)
def test_no_machine_path_and_no_token_is_in_it(path):
    text = path.read_text()
    texts = [cell.source for cell in read(path).cells] + [json.dumps(o) for o in outputs(path)]
    assert not [found for t in texts if (found := MACHINE.search(t))]
    assert not TOKEN.search(text)


def imported_names(trees):
    """Name in the notebook → the rstar2lab object it stands for."""
    found = {}
    for node in (node for parsed in trees for node in ast.walk(parsed)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rstar2lab":
            for alias in node.names:
                found[alias.asname or alias.name] = resolved(node.module, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "rstar2lab":
                    module = importlib.import_module(alias.name)
                    found[alias.asname or "rstar2lab"] = (
                        module if alias.asname else importlib.import_module("rstar2lab")
                    )
    return found


def resolved(module, name):
    parent = importlib.import_module(module)
    return getattr(parent, name) if hasattr(parent, name) else importlib.import_module(
        f"{module}.{name}"
    )


def attribute_chain(node):
    """`roc.SELECTORS` → ("roc", ["SELECTORS"]); None if it does not start at a name."""
    names = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return (node.id, names) if isinstance(node, ast.Name) else None


@on_every(EVERY)
def test_every_library_name_it_uses_exists(path):
    trees = [tree(cell) for cell in code_cells(path)]
    known = imported_names(trees)
    for parsed in trees:
        for node in ast.walk(parsed):
            chain = attribute_chain(node) if isinstance(node, ast.Attribute) else None
            if chain and chain[0] in known:
                thing = known[chain[0]]
                assert hasattr(thing, chain[1][0]), f"{chain[0]}.{chain[1][0]} does not exist"


@cache
def library_names():
    """Public functions and classes that the library defines."""
    names = set()
    for source in (ROOT / "rstar2lab").rglob("*.py"):
        names |= {
            node.name for node in ast.parse(source.read_text()).body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        }
    return {name for name in names if not name.startswith("_")}


@on_every(EVERY)
def test_it_defines_little_and_nothing_that_the_library_has(path):
    defined = [
        node.name for cell in code_cells(path) for node in ast.walk(tree(cell))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    assert len(defined) <= MAX_DEFINITIONS
    assert not set(defined) & library_names()


@on_every(EVERY)
def test_cells_are_short(path):
    lines = [[x for x in cell.source.splitlines() if x.strip()] for cell in code_cells(path)]
    assert max(map(len, lines)) <= MAX_CELL_LINES
    assert len(read(path).cells) <= MAX_CELLS
    assert sum(map(len, lines)) <= MAX_CODE_LINES


@on_every(NOTEBOOKS)
def test_at_least_half_of_a_notebook_is_prose_and_prose_comes_first(path):
    cells = read(path).cells
    assert cells[0].cell_type == "markdown"
    prose = sum(len(cell.source) for cell in cells if cell.cell_type == "markdown")
    assert prose >= 0.5 * sum(len(cell.source) for cell in cells)


@on_every(NOTEBOOKS)
def test_it_was_committed_executed_from_top_to_bottom(path):
    counts = [cell.execution_count for cell in code_cells(path)]
    assert counts == list(range(1, len(counts) + 1))


@on_every(TEMPLATES)
def test_a_template_is_committed_without_outputs(path):
    assert all(c.execution_count is None and not c.outputs for c in code_cells(path))


@on_every(EVERY)
def test_errors_are_shown_only_on_purpose(path):
    # Papermill reports even a tagged error as a failure when all cells are done: better catch it.
    for cell in code_cells(path):
        failed = any(output.output_type == "error" for output in cell.outputs)
        assert failed <= ("raises-exception" in tags(cell)), cell.source


@on_every([path for path in NOTEBOOKS if path.stem[:2] >= "02"])
def test_it_shows_a_figure(path):
    assert figures(path)


def test_numbers_are_unique_and_every_notebook_has_small_parameters():
    numbers = [path.stem[:2] for path in NOTEBOOKS]
    assert len(set(numbers)) == len(numbers)
    assert {path.stem for path in NOTEBOOKS} == set(SMALL_PARAMETERS)
    for path in NOTEBOOKS:
        assert set(SMALL_PARAMETERS[path.stem]) <= set(papermill.inspect_notebook(str(path)))


# Runs


@pytest.fixture(autouse=True)
def backend_of_notebooks(monkeypatch):
    """A kernel draws inline unless the variable says otherwise, as it does in headless jobs."""
    monkeypatch.delenv("MPLBACKEND", raising=False)


def run(name, out, parameters, cwd):
    """Execute a notebook as a person would with papermill, in a folder that is not its own."""
    papermill.execute_notebook(
        str(ROOT / "notebooks" / f"{name}.ipynb"), str(out), parameters=parameters,
        cwd=str(cwd), progress_bar=False, start_timeout=120, execution_timeout=240,
    )
    return out


def test_smoke_the_roc_notebook_runs_on_any_recorded_sweep(tmp_path):
    sweep = tmp_path / "sweep"
    for seed in (0, 1):
        write_recorded_run(sweep / f"grpo_roc-s{seed}", groups=6, seed=seed)
    small = SMALL_PARAMETERS["07_roc"] | {"results": str(sweep)}
    out = run("07_roc", tmp_path / "out.ipynb", small, ROOT / "tests")
    assert len(figures(out)) >= 2
    shown = json.dumps([output.get("data", {}) for output in outputs(out)])
    assert "stand-in data" in shown and "12 of 12 recorded groups" in shown


@pytest.mark.full
def test_the_reward_noise_notebook_runs_on_any_recorded_sweep(tmp_path):
    for name in ("grpo_tool-s0", "grpo_tool-s1", "grpo_roc-s0"):
        write_recorded_run(tmp_path / "sweep" / name, groups=6, seed=len(name))
    small = SMALL_PARAMETERS["05_reward_noise"] | {"results": str(tmp_path / "sweep")}
    out = run("05_reward_noise", tmp_path / "out.ipynb", small, ROOT / "tests")
    assert len(figures(out)) == 2
    shown = json.dumps([output.get("data", {}) for output in outputs(out)])
    assert "stand-in data" in shown and "arms grpo_tool, grpo_roc" in shown


@pytest.mark.full
@pytest.mark.parametrize("name", SMALL_PARAMETERS)
def test_it_runs_alone_with_small_parameters(name, tmp_path):
    out = run(name, tmp_path / "out.ipynb", SMALL_PARAMETERS[name], ROOT / "notebooks")
    assert name[:2] < "02" or figures(out)


# What notebooks share


def test_the_repository_is_found_from_inside_and_from_elsewhere(tmp_path):
    assert notebook.repository(ROOT / "notebooks") == ROOT
    assert notebook.repository(tmp_path) == ROOT  # by the place of the sources


def test_source_is_shown_as_it_stands_in_the_library():
    shown = notebook.show_source(notebook.repository).data
    assert shown.startswith("*`rstar2lab.notebook.repository`*")
    assert "```python\ndef repository(" in shown


def two_turns(**changed):
    """A trajectory of one call with its response, and of an answer."""
    call = types.ToolCall("python", "1 < 2")
    result = types.ToolResult(types.ToolStatus.ERROR)
    first = types.Turn("", np.arange(2), np.zeros(2), call=call, result=result)
    mask = np.array([True, True, False, True])
    return types.Trajectory(
        "p", 0, np.arange(3), np.arange(4), mask, np.log([1, 0.5, 1, 1]), None,
        (first, types.Turn("", np.arange(1), np.zeros(1))), types.StopReason.ANSWERED, **changed,
    )  # fmt: skip


def test_a_table_of_trajectories_has_one_row_each_with_calls_and_origins():
    rows = notebook.trajectory_table([two_turns(reward=1.0, reason="exact_integer"), two_turns()])
    assert rows.iloc[0].to_dict() == {
        "stop": "ANSWERED", "turns": 2, "calls": 1, "failed": 1, "trained": 3, "tool": 1,
        "reward": 1.0, "reason": "exact_integer",
    }
    assert len(rows) == 2 and pd.isna(rows.reward[1])


def test_token_boxes_are_green_where_sampled_darker_where_unlikely_and_escaped():
    class Letters:
        def decode(self, token_ids):
            return "a<b&"[token_ids[0]]

    shown = notebook.token_boxes(two_turns(), Letters()).data
    colors = re.findall("background:([^;]*);", shown)
    assert colors == [f"rgba(30,140,60,{a})" for a in ("0.20", "0.55")] + ["#e4e4e4"] + [
        "rgba(30,140,60,0.20)"
    ]
    assert re.findall(">([^<>]*)</span>", shown) == ["a", "&lt;", "b", "&amp;"]


def test_recorded_trajectories_count_calls_by_status_and_leave_void_ones_out(tmp_path):
    folder = write_recorded_run(tmp_path / "grpo_roc-s0", groups=2)
    df = notebook.recorded_trajectories(tmp_path, "grpo_roc")
    assert len(df) == 32 and set(df.run) == {"grpo_roc-s0"}
    assert (df.failed <= df.calls).all() and (df.trained_tokens <= df.tokens).all()
    assert (df.calls == df.turns.map(len) - 1).all()  # every turn but the answer has a call
    raw = pd.read_parquet(folder / "trajectories.parquet")
    not_ok = [sum(t["status"] not in (None, "OK") for t in turns) for turns in raw.turns]
    assert df.failed.tolist() == not_ok and sum(not_ok) > 0
    raw.loc[0, "stop"] = "VOID"
    raw.to_parquet(folder / "trajectories.parquet")
    assert len(notebook.recorded_trajectories(tmp_path, "grpo_roc")) == 31
    with pytest.raises(FileNotFoundError, match="no run dapo_no_tool-s"):
        notebook.recorded_trajectories(tmp_path, "dapo_no_tool")
