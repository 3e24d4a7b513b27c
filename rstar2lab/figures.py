"""Figures of the committed or reproduced results: load → statistics → draw → PNG, SVG and CSV."""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from . import ablation, plots, runs, stats

CURVES = {
    "eval_accuracy": "held-out accuracy",
    "eval_mean_response_tokens_when_correct": "response tokens, correct",
    "train_accuracy": "training accuracy",
    "mean_response_tokens": "response tokens, training",
    "truncated_rate": "truncated, training",
    "calls_per_trajectory": "calls per trajectory, training",
}


END_POINTS = (
    "eval_accuracy",
    "eval_tool_error_rate_when_correct",
    "eval_mean_response_tokens_when_correct",
)


def ablation_figures(results: str | Path, out: str | Path) -> list[Path]:
    """Training curves, failed calls in correct trajectories, end points. Returns the PNG paths.

    Raises:
        runs.RunError: there is no finished run in `results`.
    """
    final = ablation.final_rows(results)
    frame = runs.metrics_frame(results)
    caption, out = describe(results, frame), Path(out)
    with plots.style():
        return [
            _curves(frame, caption, out / "training_curves"),
            _errors(frame, caption, out / "tool_errors_when_correct"),
            _end_points(final, caption, out / "ablation"),
        ]


def describe(results: str | Path, frame: pd.DataFrame) -> str:
    """Scale, steps and seeds of the runs, for a caption."""
    provenance = next(Path(results).glob("*/provenance.json"), None)
    scale = json.loads(provenance.read_text())["scale"] if provenance else "unknown scale"
    with_tool = frame[frame.arm != "dapo_no_tool"]
    steps = int((with_tool if len(with_tool) else frame).step.max())
    return plots.caption(scale=scale, steps=steps, seeds=frame.run_seed.nunique())


def _curves(frame: pd.DataFrame, caption: str, path: Path) -> Path:
    figure, axes = plt.subplots(2, 3, figsize=(10, 5.6))
    used = []
    for ax, (metric, label) in zip(axes.flat, CURVES.items(), strict=True):
        data = stats.seed_curve(frame, metric)
        plots.curve(data, ax, metric_label=label)
        if ax is not axes.flat[0] and ax.get_legend():  # without a correct answer: no line
            ax.get_legend().remove()
        used.append(data.assign(metric=metric))
    return _save(figure, caption, path, pd.concat(used))


def _errors(frame: pd.DataFrame, caption: str, path: Path) -> Path:
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.3), sharey=True)
    with_tool, used = frame[frame.arm != "dapo_no_tool"], []
    panels = {
        "eval_tool_error_rate_when_correct": "held-out problems",
        "tool_error_rate_when_correct": "training rollouts, before selection",
    }
    for ax, (metric, where) in zip(axes, panels.items(), strict=True):
        data = stats.seed_curve(with_tool, metric)
        plots.tool_errors_when_correct(data, ax)
        ax.set_title(where, fontsize="medium")
        used.append(data.assign(metric=metric))
    axes[1].get_legend().remove()
    axes[1].set_ylabel("")
    return _save(figure, caption, path, pd.concat(used))


def _end_points(final: pd.DataFrame, caption: str, path: Path) -> Path:
    data = stats.seed_table(final, list(END_POINTS))
    figure = plots.ablation(data)[0].figure
    return _save(figure, caption, path, data)


def _save(figure, caption: str, path: Path, data: pd.DataFrame) -> Path:
    plots.sign(figure, caption)
    png, _, _ = plots.save(figure, path, data)
    plt.close(figure)
    return png
