"""What notebooks share: the repository's folder, library source on the page, rollouts as tables.

A notebook shows the code it talks about and never types it again; it runs from any working
directory without an absolute path in it; and what it knows of a run it reads from the run's folder.
"""

import html
import inspect
import json
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pandas as pd
from IPython.display import HTML, Markdown

from . import protocol, runs
from .types import StopReason, ToolStatus, Trajectory

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


def trajectory_table(trajectories: Iterable[Trajectory]) -> pd.DataFrame:
    """One row per trajectory: how it ended, what it called, whose tokens it has, its reward.

    trained: tokens that the model wrote; tool: those that the environment appended.
    """
    return pd.DataFrame(
        {
            "stop": each.stop.name,
            "turns": len(each.turns),
            "calls": each.num_calls,
            "failed": each.num_tool_errors,
            "trained": each.num_trained_tokens,
            "tool": len(each.response_ids) - each.num_trained_tokens,
            "reward": each.reward,
            "reason": each.reason,
        }
        for each in trajectories
    )


def token_boxes(trajectory: Trajectory, tokenizer: protocol.Tokenizer) -> HTML:
    """The response, one box per token: green if sampled, the darker the less likely; else gray.

    Pointing at a box shows its place and its log-prob.
    """
    boxes = []
    for place, token_id in enumerate(trajectory.response_ids):
        logprob, color = float(trajectory.logprobs[place]), "#e4e4e4"
        if trajectory.loss_mask[place]:
            color = f"rgba(30,140,60,{0.2 + 0.7 * (1 - np.exp(logprob)):.2f})"
        boxes.append(
            f'<span title="{place}: {logprob:.3f}" style="background:{color};'
            f'border:1px solid #fff;white-space:pre-wrap">'
            f"{html.escape(tokenizer.decode([token_id]))}</span>"
        )
    style = "font-family:monospace;color:#222;line-height:1.8"
    return HTML(f'<div style="{style}">{"".join(boxes)}</div>')


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
