"""What notebooks share: the repository's folder, library source on the page, recorded rollouts.

A notebook shows the code it talks about and never types it again; it runs from any working
directory without an absolute path in it; and what it knows of a run it reads from the run's folder.
"""

import inspect
import json
import textwrap
from collections.abc import Callable
from pathlib import Path

import pandas as pd
from IPython.display import Markdown

from . import runs
from .types import StopReason, ToolStatus

_MARKS = ("rstar2lab/roc.py", "notebooks")


def repository(start: str | Path = ".") -> Path:
    """The root of the repository that `start` lies in; of the installed sources otherwise.

    Raises: FileNotFoundError if neither has notebooks beside the package.
    """
    here = Path(start).resolve()
    for folder in (here, *here.parents, Path(__file__).resolve().parents[1]):
        if all((folder / mark).exists() for mark in _MARKS):
            return folder
    raise FileNotFoundError(
        f"expected the rstar2lab repository at or above {here}; start Jupyter inside it"
    )


def show_source(shown: Callable | type) -> Markdown:
    """The source of a function or class of the library, highlighted by the notebook's front end."""
    source = textwrap.dedent(inspect.getsource(shown))
    return Markdown(f"*`{shown.__module__}.{shown.__qualname__}`*\n\n```python\n{source}```")


def recorded_trajectories(sweep: str | Path, arm: str) -> pd.DataFrame:
    """The recorded trajectories of all seeds of an arm, void ones left out.

    The columns of `trajectories.parquet`, and: run (folder name), scale (from its provenance),
    calls, failed (tool calls answered, and those that count as errors), tokens (of the response,
    tool responses included), trained_tokens (written by the model).

    Raises: FileNotFoundError if the sweep has no run of the arm.
    """
    folders = sorted(Path(sweep).glob(f"{arm}-s*"))
    if not folders:
        raise FileNotFoundError(
            f"no run {arm}-s… in {Path(sweep).name}; run the sweep, or point to another folder"
        )
    tables = [
        runs.RunFolder(folder).read_table("trajectories").assign(
            run=folder.name, scale=json.loads((folder / "provenance.json").read_text())["scale"]
        )
        for folder in folders
    ]
    df = pd.concat(tables, ignore_index=True)
    df = df[df.stop != StopReason.VOID.name].reset_index(drop=True)
    statuses = [
        [ToolStatus[turn["status"]] for turn in turns if turn["status"]] for turns in df.turns
    ]
    return df.assign(
        calls=[len(found) for found in statuses],
        failed=[sum(status.is_tool_error for status in found) for found in statuses],
        tokens=df.response_ids.map(len), trained_tokens=df.loss_mask.map(sum),
    )
