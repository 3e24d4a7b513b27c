"""Figures of the committed or reproduced results: load → statistics → draw → PNG, SVG and CSV."""

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


def ablation_figures(results: str | Path, out: str | Path) -> list[Path]:
    """Training curves, failed calls in correct trajectories, end points. Returns the PNG paths.

    Raises:
        runs.RunError: there is no finished run below `results`.
    """
    final = ablation.final_rows(results)
    frame = runs.metrics_frame(results)
    caption = describe(results, frame)
    drawn = []
    with plots.style():
        drawn.append(_curves(frame, caption, Path(out) / "training_curves"))
        drawn.append(_errors(frame, caption, Path(out) / "tool_errors_when_correct"))
        drawn.append(_end_points(final, caption, Path(out) / "ablation"))
    return drawn


def describe(results: str | Path, frame: pd.DataFrame) -> str:
    """Scale, steps and seeds of the runs, for a caption."""
    import json

    provenance = next(Path(results).glob("*/provenance.json"), None)
    scale = json.loads(provenance.read_text())["scale"] if provenance else "unknown scale"
    return plots.caption(
        scale=scale,
        steps=int(frame[frame.arm != "dapo_no_tool"].step.max())
        if (frame.arm != "dapo_no_tool").any()
        else int(frame.step.max()),
        seeds=frame.run_seed.nunique(),
    )


def _curves(frame: pd.DataFrame, caption: str, path: Path) -> Path:
    figure, axes = plt.subplots(2, 3, figsize=(10, 5.4), layout="constrained")
    used = []
    for ax, (metric, label) in zip(axes.flat, CURVES.items(), strict=True):
        data = stats.seed_curve(frame, metric)
        plots.curve(data, ax, metric_label=label)
        if ax is not axes.flat[0] and ax.get_legend():
            ax.get_legend().remove()
        used.append(data.assign(metric=metric))
    return _save(figure, caption, path, pd.concat(used))


def _errors(frame: pd.DataFrame, caption: str, path: Path) -> Path:
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained", sharey=True)
    used = []
    for ax, metric, where in zip(
        axes,
        ("eval_tool_error_rate_when_correct", "tool_error_rate_when_correct"),
        ("held-out", "training rollouts, before selection"),
        strict=True,
    ):
        data = stats.seed_curve(frame[frame.arm != "dapo_no_tool"], metric)
        plots.tool_errors_when_correct(data, ax, paper=metric.startswith("eval"))
        ax.set_title(where)
        used.append(data.assign(metric=metric))
    return _save(figure, caption, path, pd.concat(used))


def _end_points(final: pd.DataFrame, caption: str, path: Path) -> Path:
    figure, axes = plt.subplots(1, 3, figsize=(9, 3), layout="constrained")
    plots.ablation(final, axes)
    return _save(figure, caption, path, final)


def _save(figure, caption: str, path: Path, data: pd.DataFrame) -> Path:
    figure.suptitle(caption, fontsize="small")
    plots.save(figure, path, data)
    plt.close(figure)
    return path.with_suffix(".png")
