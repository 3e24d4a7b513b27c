"""One function per figure: tidy data and axes in, axes out.

The last of three stages: load (`runs`) → statistics (`stats`) → draw. Nothing here reads a run
folder, computes a statistic or shows a window. Each arm has one color and one line style in every
figure; the paper's numbers are dashed lines or hollow markers labelled "paper", and never stand in
one column with ours. Importing changes no settings: every function draws inside `style()`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

ARM_LABELS = {
    "dapo_no_tool": "DAPO, no tool",
    "grpo_tool": "GRPO with tool",
    "grpo_tool_2g_uniform": "GRPO with tool, 2G uniform",
    "grpo_roc": "GRPO-RoC",
}
ARM_COLORS = {
    "dapo_no_tool": "#7f7f7f",
    "grpo_tool": "#0173b2",
    "grpo_tool_2g_uniform": "#56b4e9",
    "grpo_roc": "#de8f05",
}
ARM_LINES = {
    "dapo_no_tool": ":",
    "grpo_tool": "--",
    "grpo_tool_2g_uniform": "-.",
    "grpo_roc": "-",
}
SELECTOR_LABELS = {
    "roc_paper": "RoC, paper",
    "roc_paper_soft": "RoC, paper, softening 0.5",
    "roc_release": "RoC, release",
    "uniform": "uniform",
    "gfpo_length": "GFPO, shortest",
    "gfpo_efficiency": "GFPO, reward per token",
    "all": "all",
}
SELECTOR_COLORS = {
    "roc_paper": ARM_COLORS["grpo_roc"],
    "roc_paper_soft": "#ca9161",
    "roc_release": "#d55e00",
    "uniform": ARM_COLORS["grpo_tool_2g_uniform"],
    "gfpo_length": "#029e73",
    "gfpo_efficiency": "#cc78bc",
    "all": ARM_COLORS["grpo_tool"],
}
LOSS_LABELS = {
    "unclipped": "no clip",
    "dapo": "DAPO, the paper: Σ|o|",
    "token_clip": "clip, the paper (Eq 6)",
    "dual_clip": "clip, dual clip 3",
    "grpo": "GRPO: n · |o|",
    "dr_grpo": "Dr. GRPO: n · L_max",
    "gspo": "GSPO: n · |o|",
    "cispo": "CISPO, weight clipped",
}
LOSS_COLORS = {
    "unclipped": ARM_COLORS["dapo_no_tool"],
    "dapo": ARM_COLORS["grpo_roc"],
    "token_clip": ARM_COLORS["grpo_roc"],
    "dual_clip": ARM_COLORS["grpo_tool"],
    "grpo": ARM_COLORS["grpo_tool"],
    "dr_grpo": "#029e73",
    "gspo": "#cc78bc",
    "cispo": "#cc78bc",
}
SPAN_LOOKS = {"sampling": ("sampling", "#0173b2"), "tool": ("waiting for the tool", "#ca9161")}
STOP_COLORS = {
    "ANSWERED": "#029e73",
    "LENGTH": "#d55e00",
    "MAX_TURNS": "#cc78bc",
    "CONTEXT": "#333333",
    "VOID": "#bbbbbb",
}
_OTHER_COLORS = ("#029e73", "#cc78bc", "#ca9161", "#d55e00", "#ece133")
_OTHER_LINES = ((0, (3, 1, 1, 1, 1, 1)), (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1)), (0, (8, 2)))
_MARKERS = ("o", "s", "^", "D", "v", "P")

METRIC_LABELS = {
    "eval_accuracy": "held-out accuracy (%)",
    "eval_tool_error_rate_when_correct": "failed calls in correct\ntrajectories (%)",
    "eval_mean_response_tokens": "response length (tokens)",
    "eval_mean_response_tokens_when_correct": "length of correct\nresponses (tokens)",
    "eval_calls_per_trajectory": "calls per trajectory",
    "eval_truncated_rate": "truncated (%)",
    "tool_error_ratio": "failed calls in\nkept successes (%)",
    "penalty": "penalty of kept\nsuccesses, mean",
    "advantage": "advantage of a\nkept success",
    "token_share": "tokens of the group\ntrained on (%)",
}
PAPER_ERROR_PLATEAU = 0.10  # Fig 4a, naive GRPO on Qwen3-14B-Base, read from the figure
_PAPER_COLOR = "#333333"
_ROUND = (1, 2, 5, 10)  # tick steps

_HOUSE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.dpi": 110,
    "figure.constrained_layout.use": True,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "svg.hashsalt": "rstar2lab",  # element ids, and so the file, are the same on every run
}


@contextmanager
def style(**settings: object) -> Iterator[None]:
    """The one style of all figures, `settings` on top; rcParams come back as they were."""
    import seaborn

    # A backend starts with the first figure, and the notebook's then turns interactive mode on: it
    # must be running before the settings are saved, or restoring them turns it off again.
    plt.draw_if_interactive()
    base = seaborn.axes_style("ticks") | seaborn.plotting_context("paper")
    with mpl.rc_context(base | _HOUSE | settings):
        yield


@style()
def curve(df: pd.DataFrame, ax: Axes | None = None, *, metric_label: str, **named) -> Axes:
    """One line per arm over training steps, with its interval as a band.

    df: columns arm, step, mean, low, high, n (`stats.seed_curve`). n is in the legend. A single
    seed has no band. `named` goes to every line, e.g. `linewidth=2`.
    """
    ax = _axes(ax)
    for arm, rows in _by_arm(df):
        color, line = _look(arm, df.arm)
        look = {"color": color, "linestyle": line, "label": f"{_label(arm)} ({_count(rows.n)})"}
        ax.plot(rows.step, rows["mean"], **(look | named))
        ax.fill_between(rows.step, rows.low, rows.high, color=color, alpha=0.18, linewidth=0)
    ax.set(xlabel="training step", ylabel=metric_label)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=_ROUND))
    ax.margins(x=0.01)
    if len(df):
        ax.legend(fontsize="small")
    return ax


@style()
def tool_errors_when_correct(
    df: pd.DataFrame, ax: Axes | None = None, *, paper: bool = True, **named
) -> Axes:
    """Failed calls within correct trajectories against the step (as Fig 4), in percent.

    df: as `curve`, shares in [0, 1]. `paper` adds the plateau of naive GRPO that Fig 4a shows for
    the 14B model, as a dashed line: another model, other tasks, read from the figure.
    """
    label = "failed calls in correct trajectories (%)"
    ax = curve(df, _axes(ax), metric_label=label, **named)
    top = float(np.nanmax(df[["mean", "high"]].to_numpy(float), initial=0.0))
    if paper:
        ax.axhline(
            PAPER_ERROR_PLATEAU, color=_PAPER_COLOR, linestyle=(0, (6, 4)), linewidth=0.9,
            label=f"paper, 14B: GRPO plateau ≈ {PAPER_ERROR_PLATEAU:.0%} (Fig 4a)", zorder=1,
        )
        ax.legend(fontsize="small")
        top = max(top, PAPER_ERROR_PLATEAU)
    ax.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=_ROUND))
    ax.yaxis.set_major_formatter(_percent())
    is_shared = len(ax.get_shared_y_axes().get_siblings(ax)) > 1
    ax.set_ylim(0, max(1.05 * top, ax.get_ylim()[1] if is_shared else 0))
    return ax


@style()
def ablation(df: pd.DataFrame, axes: Sequence[Axes] | None = None) -> np.ndarray:
    """End of training, one panel per metric: mean and interval of each arm, seeds as small dots.

    df: columns metric, arm, run_seed, value, mean, low, high, n (`stats.seed_table`); panels follow
    the order of the metrics. An arm without a value (no tool, hence no failed calls) gets a dash.
    """
    metrics, arms = list(dict.fromkeys(df.metric)), [arm for arm, _ in _by_arm(df)]
    axes = _panels(axes, metrics, [f"{_label(arm)}\n{_count(df[df.arm == arm].n)}" for arm in arms])
    for ax, metric in zip(axes, metrics, strict=True):
        for place, arm in enumerate(arms):
            rows = df[(df.metric == metric) & (df.arm == arm)]
            color, _ = _look(arm, df.arm)
            if len(rows):
                _interval(ax, place, rows.iloc[0], color)
                _dots(ax, place + 0.3, rows.value, color)
            else:
                ax.text(0.03, place, "–", transform=ax.get_yaxis_transform(), va="center")
        _from_zero(ax)
    return axes


@style()
def latency_under_load(df: pd.DataFrame, ax: Axes | None = None, *, capacity: float) -> Axes:
    """Seconds until the answer against the calls offered per second (as Fig 6), mean and p99.

    df: columns offered, mean, p99; one row per load. `capacity`: calls/s that were reached with
    more waiting than could be served, as a dashed line.
    """
    ax = _axes(ax)
    looks = {"mean": ("o-", ARM_COLORS["grpo_tool"]), "p99": ("s--", ARM_COLORS["grpo_roc"])}
    for name, (marker, color) in looks.items():
        ax.plot(df.offered, df[name], marker, color=color, markersize=4, label=name)
    ax.axvline(capacity, color=_PAPER_COLOR, linewidth=0.9, linestyle=":", label="capacity")
    ax.set(xlabel="calls offered per second", ylabel="seconds until the answer", yscale="log")
    ax.set_xlim(left=0)
    ax.legend(fontsize="small")
    return ax


@style()
def answer_times(df: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Share of the calls answered within a time, one line per way to dispatch.

    df: columns dispatch, seconds; one row per call.
    """
    ax = _axes(ax)
    for place, (name, rows) in enumerate(df.groupby("dispatch", sort=False)):
        seconds = np.sort(rows.seconds.to_numpy())
        share = np.arange(1, len(seconds) + 1) / len(seconds)
        color = (ARM_COLORS["grpo_roc"], ARM_COLORS["grpo_tool"], *_OTHER_COLORS)[place]
        ax.plot(seconds, share, color=color, linestyle=_loss_line(place), label=name)
    ax.set(xlabel="seconds until the answer", ylabel="calls answered (%)", xscale="log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.yaxis.set_major_formatter(_percent())
    ax.legend(fontsize="small")
    return ax


@style()
def differences(df: pd.DataFrame, axes: Sequence[Axes] | None = None) -> np.ndarray:
    """GRPO-RoC − GRPO by variant, one panel per metric: mean, interval, seeds; a line at 0.

    df: columns metric, label, run_seed, value, mean, low, high, n (`ablation.variants`).
    """
    metrics, labels = list(dict.fromkeys(df.metric)), list(dict.fromkeys(df.label))
    names = [f"{label}\n{_count(df[df.label == label].n)}" for label in labels]
    axes = _panels(axes, metrics, names)
    for ax, metric in zip(axes, metrics, strict=True):
        ax.axvline(0, color=_PAPER_COLOR, linewidth=0.9, zorder=1)
        for place, label in enumerate(labels):
            rows = df[(df.metric == metric) & (df.label == label)]
            _interval(ax, place, rows.iloc[0], ARM_COLORS["grpo_roc"])
            _dots(ax, place + 0.3, rows.value, ARM_COLORS["grpo_roc"])
        ax.set_xlabel("RoC − GRPO\n" + ax.get_xlabel())
    return axes


@style()
def keep_rates(df: pd.DataFrame, ax: Axes | None = None, **named) -> Axes:
    """How often a success is kept, against its penalty, one line per selector.

    df: columns selector, penalty, rate, low, high (shares of draws). `named` goes to every line.
    """
    ax = _axes(ax)
    for place, selector in enumerate(dict.fromkeys(df.selector)):
        rows = df[df.selector == selector].sort_values("penalty")
        color = _selector_color(selector, place)
        look = {
            "color": color, "marker": _MARKERS[place % len(_MARKERS)], "markersize": 4.5,
            "label": SELECTOR_LABELS.get(selector, selector),
        }
        ax.plot(rows.penalty, rows.rate, **(look | named))
        ax.fill_between(rows.penalty, rows.low, rows.high, color=color, alpha=0.2, linewidth=0)
    ax.set(xlabel="penalty p_err + p_format of the success", ylabel="kept (% of draws)")
    ax.set_ylim(-0.03, 1.05)
    ax.yaxis.set_major_formatter(_percent())
    ax.legend(fontsize="small")
    return ax


@style()
def selectors(df: pd.DataFrame, axes: Sequence[Axes] | None = None) -> np.ndarray:
    """Selectors side by side on the same groups: one panel per metric, mean and interval.

    df: columns metric, selector, mean, low, high, n, with n the number of groups.
    """
    metrics, names = list(dict.fromkeys(df.metric)), list(dict.fromkeys(df.selector))
    axes = _panels(axes, metrics, [SELECTOR_LABELS.get(name, name) for name in names])
    for ax, metric in zip(axes, metrics, strict=True):
        rows = df[df.metric == metric].set_index("selector")
        for place, name in enumerate(names):
            _interval(ax, place, rows.loc[name], _selector_color(name, place))
        _from_zero(ax)
        ax.set_title(f"{_count(rows.n)} groups", fontsize="x-small", loc="right")
    return axes


@style()
def reward_by_failed_calls(df: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """How often a trajectory is right, by the number of its failed calls; one mark per arm.

    df: columns arm, failed, mean, low, high, n (shares of right ones, n trajectories or problems).
    A reward that saw failing calls would fall to 0 beyond the first mark.
    """
    ax = _axes(ax)
    arms = _by_arm(df)
    for place, (arm, rows) in enumerate(arms):
        color, _ = _look(arm, df.arm)
        x = rows.failed + 0.16 * (place - (len(arms) - 1) / 2)
        ax.vlines(x, rows.low, rows.high, color=color, linewidth=2)
        ax.plot(x, rows["mean"], _MARKERS[place % len(_MARKERS)], color=color, label=_label(arm))
    ax.set(xlabel="failed calls in the trajectory", ylabel="right answers (%)")
    ax.set_ylim(0, 1.03)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.yaxis.set_major_formatter(_percent())
    ax.legend(fontsize="small")
    return ax


@style()
def clip_quadrants(df: pd.DataFrame, axes: Sequence[Axes] | None = None) -> np.ndarray:
    """Objective and gradient of one token against its ratio: advantage +1 left, −1 right.

    df: columns quantity, advantage, loss, ratio, value; one row of panels per quantity.
    """
    quantities, signs = list(dict.fromkeys(df.quantity)), sorted(set(df.advantage), reverse=True)
    if axes is None:
        size = (6.4, 0.6 + 2.1 * len(quantities))
        axes = plt.subplots(len(quantities), len(signs), figsize=size, sharex=True, sharey="row")[1]
    axes = np.asarray(axes, object).reshape(len(quantities), len(signs))
    names = list(dict.fromkeys(df.loss))
    for (row, column), ax in np.ndenumerate(axes):
        here = df[(df.quantity == quantities[row]) & (df.advantage == signs[column])]
        for place, name in enumerate(names):
            rows = here[here.loss == name]
            look = {"color": _loss_color(name, place), "label": LOSS_LABELS.get(name, name)}
            look["linewidth"] = max(1.2, 4 - 0.9 * place)  # losses that agree stay visible:
            look["linestyle"] = ("-", "-", *_OTHER_LINES)[place % 7]  # wide below, broken above
            ax.plot(rows.ratio, rows.value, **look)
        ax.axvline(1, color="#bbbbbb", linewidth=0.7, zorder=0)
        ax.axhline(0, color="#bbbbbb", linewidth=0.7, zorder=0)
        if row == 0:
            ax.set_title(f"advantage {signs[column]:+g}".replace("-", "−"), fontsize="small")
        ax.set_xlabel("ratio ρ", visible=row == len(quantities) - 1)
        if column == 0:
            ax.set_ylabel(quantities[row])
    axes[0, 0].legend(fontsize="x-small")
    return axes.ravel()


@style()
def token_weights(df: pd.DataFrame, ax: Axes | None = None, **named) -> Axes:
    """How much one token of a response weighs in the loss, against the response's length.

    df: columns loss, length, weight. Both axes are logarithmic. `named` goes to every line.
    """
    ax = _axes(ax)
    for place, name in enumerate(dict.fromkeys(df.loss)):
        rows = df[df.loss == name].sort_values("length")
        look = {
            "color": _loss_color(name, place), "linestyle": _loss_line(place),
            "marker": _MARKERS[place % len(_MARKERS)], "markersize": 4,
            "label": LOSS_LABELS.get(name, name),
        }
        ax.plot(rows.length, rows.weight, **(look | named))
    ax.set(xscale="log", yscale="log", xlabel="length of the response (tokens)",
           ylabel="weight of one of its tokens")  # fmt: skip
    ax.legend(fontsize="small")
    return ax


@style()
def rollout_timelines(
    spans: Mapping[str, pd.DataFrame], axes: Sequence[Axes] | None = None
) -> np.ndarray:
    """When each trajectory sampled and when it waited for its tool: one panel per named batch.

    Each frame: columns request_id, kind ("sampling" or "tool"), start, end (seconds). One row per
    trajectory, the earliest to end at the bottom; all panels share the axis of time.
    """
    if axes is None:
        size = (7, 0.5 + 2.3 * len(spans))
        axes = plt.subplots(len(spans), 1, figsize=size, sharex=True, squeeze=False)[1]
    axes = np.asarray(axes, object).ravel()
    for ax, (name, df) in zip(axes, spans.items(), strict=True):
        rows = df.groupby("request_id").end.max().sort_values(kind="stable").index
        places = {request_id: place for place, request_id in enumerate(rows)}
        for kind, found in df.groupby("kind", sort=True):
            label, color = SPAN_LOOKS[kind]
            ax.barh(
                found.request_id.map(places), found.end - found.start, left=found.start,
                height=0.75, color=color, label=label,
            )  # fmt: skip
        ax.set(ylabel="trajectory", yticks=[])
        ax.set_xlabel("time (s)", visible=ax is axes[-1])
        ax.set_title(name, fontsize="medium", loc="left")
    axes[-1].set_xlim(0, 1.01 * max(df.end.max() for df in spans.values()))
    axes[0].legend(fontsize="small", loc="lower right")
    return axes


@style()
def engine_timelines(
    logs: Mapping[str, Mapping[str, pd.DataFrame]], capacity: int, axes: np.ndarray | None = None
) -> np.ndarray:
    """KV that each engine holds over time (as Fig 7): a row per policy, a column per kind of run.

    logs: policy → kind (such as "real", "simulated") → frame of `scheduler.timeline`. capacity:
    tokens of one engine, the dotted line. Ticks above it are preemptions; below the axis, moments
    at which held tool calls start. All panels share the axis of time.
    """
    kinds = list(next(iter(logs.values())))
    if axes is None:
        size = (3.5 * len(kinds) + 0.6, 1.15 * len(logs) + 0.6)
        axes = plt.subplots(len(logs), len(kinds), figsize=size, sharex=True, sharey=True,
                            squeeze=False)[1]  # fmt: skip
    for row, (policy, by_kind) in zip(axes, logs.items(), strict=True):
        for ax, kind in zip(row, kinds, strict=True):
            _engine_timeline(ax, by_kind[kind], capacity)
            seconds = by_kind[kind].time.max()
            ax.set_title(f"{policy}, {seconds:.2f} s", fontsize="small", loc="left")
        row[0].set_ylabel("KV held (%)")
    for ax, kind in zip(axes[-1], kinds, strict=True):
        ax.set_xlabel(f"{kind}: time (s)")
        ax.set_xlim(left=0)
        ax.set_ylim(-0.08, 1.14)
        ax.yaxis.set_major_formatter(_percent())
    handles = axes[0][0].get_legend_handles_labels()
    axes[0][0].figure.legend(*handles, fontsize="small", loc="outside upper right", ncols=2)
    return axes


def _engine_timeline(ax: Axes, df: pd.DataFrame, capacity: int) -> None:
    for place, (engine, rows) in enumerate(df.groupby("engine", sort=True)):
        color = _OTHER_COLORS[place % len(_OTHER_COLORS)] if place > 1 else (
            ARM_COLORS["grpo_tool"], ARM_COLORS["grpo_roc"]
        )[place]  # fmt: skip
        ax.step(rows.time, rows.kv_tokens / capacity, where="post", color=color, linewidth=0.8,
                label=f"engine {engine}")  # fmt: skip
        marks = {"preempt": (1.09 - 0.06 * place, "|"), "barrier": (-0.05, "^")}
        for mark, (height, sign) in marks.items():
            at = rows.time[rows["mark"] == mark].unique()
            ax.plot(at, np.full(len(at), height), sign, color=color, markersize=3.5, alpha=0.8)
    ax.axhline(1, color=_PAPER_COLOR, linewidth=0.7, linestyle=":")


@style()
def makespans(df: pd.DataFrame, axes: Sequence[Axes] | None = None) -> np.ndarray:
    """Time of a step over its lower bound, by policy: a panel per setting, mean and interval.

    df: columns setting, policy, mean, low, high. The dashed line is the bound, which no schedule
    reaches.
    """
    settings, policies = list(dict.fromkeys(df.setting)), list(dict.fromkeys(df.policy))
    axes = _panels(axes, settings, policies)
    for ax, (setting, rows) in zip(axes, df.groupby("setting", sort=False), strict=True):
        ax.set_title(setting, fontsize="medium", loc="left")
        ax.set_xlabel("time ÷ lower bound")
        for _, row in rows.iterrows():
            is_ours = row.policy.startswith("survival")
            color = ARM_COLORS["grpo_roc" if is_ours else "grpo_tool"]
            _interval(ax, policies.index(row.policy), row, color)
        ax.axvline(1, color=_PAPER_COLOR, linewidth=0.9, linestyle="--")
        ax.set_xlim(left=0.9)
    return axes


@style()
def token_origins(df: pd.DataFrame, ax: Axes | None = None, *, x_label: str) -> Axes:
    """Length of responses against `df.x`, from the model (trained) and from the tool (masked).

    df: columns x, trained, tool (tokens), stop; a strip below the axis shows the stop reason.
    """
    ax = _axes(ax)
    parts = (("trained", "sampling", "sampled, trained"), ("tool", "tool", "tool, masked"))
    floor = 0 * df.trained
    for column, kind, label in parts:
        ax.bar(df.x, df[column], 1.0, floor, color=SPAN_LOOKS[kind][1], label=label, linewidth=0)
        floor = floor + df[column]
    strip = 0.05 * float(floor.max())
    for stop, rows in df.groupby("stop", sort=False):
        color = STOP_COLORS[stop]
        ax.bar(rows.x, -strip, 1.0, -strip / 2, color=color, label=f"stop: {stop}", linewidth=0)
    ax.set(xlabel=x_label, ylabel="response (tokens)", xlim=(df.x.min() - 0.6, df.x.max() + 0.6))
    ax.legend(fontsize="x-small")
    return ax


@style()
def response_sizes(df: pd.DataFrame, axes: Sequence[Axes] | None = None) -> np.ndarray:
    """A batch as a population: every response by its length, and how many have 1, 2, … turns.

    df: one row per trajectory (`notebook.trajectory_table`), columns turns, trained, tool, stop.
    """
    if axes is None:
        axes = plt.subplots(1, 2, figsize=(8, 3.2), width_ratios=(2, 1))[1]
    left, right = axes = np.asarray(axes, object).ravel()
    order = (df.trained + df.tool).sort_values(kind="stable").index
    token_origins(
        df.loc[order].assign(x=range(1, len(df) + 1)), left, x_label="trajectory, by length"
    )
    counts = df.turns.value_counts().sort_index()
    right.bar(counts.index, counts, 0.7, color=SPAN_LOOKS["sampling"][1])
    right.set(xlabel="turns", ylabel="trajectories")
    for axis in (left.xaxis, right.xaxis, right.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    return axes


def caption(scale: str, steps: int, seeds: int, host: str = "2 CPU cores") -> str:
    """What a reader must know of a figure's data: model scale, steps, seeds, host."""
    return f"{scale} · {steps} steps · {seeds} seed{'s' * (seeds != 1)} · {host}"


def sign(drawn: Axes | Figure | Sequence[Axes], text: str) -> Figure:
    """Write the caption under a figure, given the figure or axes of it."""
    first = drawn if isinstance(drawn, Figure) else np.atleast_1d(np.asarray(drawn, object)).flat[0]
    figure = first if isinstance(first, Figure) else first.figure
    figure.supxlabel(text, x=0.01, ha="left", fontsize=7, color="#555555")
    return figure


def save(figure: Figure, path: str | Path, data: pd.DataFrame) -> tuple[Path, Path, Path]:
    """Write `path`.png, .svg and .csv, the last with the numbers drawn; same input, same bytes.

    The paper's numbers are not among them: they are in the code with their figure or table.
    """
    png, svg, csv = (Path(f"{path}{suffix}") for suffix in (".png", ".svg", ".csv"))
    png.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"svg.hashsalt": _HOUSE["svg.hashsalt"]}):
        figure.savefig(png, dpi=200, bbox_inches="tight", metadata={"Software": None})
        figure.savefig(svg, bbox_inches="tight", metadata={"Date": None, "Creator": None})
    data.to_csv(csv, index=False, lineterminator="\n")
    return png, svg, csv


# --- parts of figures -----------------------------------------------------------------------------


def _axes(ax: Axes | None) -> Axes:
    return ax if ax is not None else plt.subplots(figsize=(5.6, 3.3))[1]


def _panels(
    axes: Sequence[Axes] | None, metrics: Sequence[str], names: Sequence[str]
) -> np.ndarray:
    """One panel per metric, value axis across, `names` down; written once where panels are ours."""
    is_ours = axes is None
    if is_ours:
        size = (1.3 + 2.0 * len(metrics), 0.9 + 0.38 * len(names))
        axes = plt.subplots(1, len(metrics), figsize=size, squeeze=False)[1]
    axes = np.asarray(axes, object).ravel()
    if len(axes) != len(metrics):
        raise ValueError(f"the data have {len(metrics)} metrics but {len(axes)} axes were given")
    for ax, metric in zip(axes, metrics, strict=True):
        is_first = ax is axes[0]
        ax.set_yticks(range(len(names)), names if is_first or not is_ours else [""] * len(names))
        ax.set_ylim(len(names) - 0.4, -0.6)
        ax.tick_params(axis="y", length=0)
        ax.grid(axis="x", color="#e5e5e5", linewidth=0.6)
        ax.set_axisbelow(True)
        label = METRIC_LABELS.get(metric, metric)
        ax.set_xlabel(label)
        ax.xaxis.set_major_locator(MaxNLocator(nbins=4, steps=(1, 2, 2.5, 5, 10)))
        if "%" in label:
            ax.xaxis.set_major_formatter(_percent())
    return axes


def _by_arm(df: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """The rows of each arm: the four arms in their fixed order, then others by name."""
    found = set(df.arm)
    names = [arm for arm in ARM_LABELS if arm in found] + sorted(found - set(ARM_LABELS))
    return [(arm, df[df.arm == arm]) for arm in names]


def _look(arm: str, arms: pd.Series) -> tuple[str, object]:
    """Color and line style; an arm that is not one of the four takes the next free pair."""
    if arm in ARM_COLORS:
        return ARM_COLORS[arm], ARM_LINES[arm]
    place = sorted(set(arms) - set(ARM_COLORS)).index(arm) % len(_OTHER_COLORS)
    return _OTHER_COLORS[place], _OTHER_LINES[place]


def _label(arm: str) -> str:
    return ARM_LABELS.get(arm, arm)


def _count(n: pd.Series) -> str:
    least, most = int(n.min()), int(n.max())
    return f"n = {most}" if least == most else f"n = {least}–{most}"


def _selector_color(name: str, place: int) -> str:
    return SELECTOR_COLORS.get(name, _OTHER_COLORS[place % len(_OTHER_COLORS)])


def _loss_color(name: str, place: int) -> str:
    return LOSS_COLORS.get(name, _OTHER_COLORS[place % len(_OTHER_COLORS)])


def _loss_line(place: int) -> object:
    return ("-", "--", "-.", ":", *_OTHER_LINES)[place % (4 + len(_OTHER_LINES))]


def _percent() -> FuncFormatter:
    """Ticks of a share in [0, 1], in percent; the sign is in the axis label."""
    return FuncFormatter(lambda share, _: f"{100 * share:.4g}")


def _from_zero(ax: Axes) -> None:
    """The value axis from 0, with room for the marker at its far end."""
    ax.set_xlim(0, 1.04 * ax.get_xlim()[1])


def _interval(ax: Axes, place: float, row: Mapping, color: str) -> None:
    """A mean as a dot, and its interval, if it has one, as a bar."""
    ax.plot([row["mean"]], [place], "o", color=color, markersize=6, zorder=3)
    if np.isfinite(row["low"]):
        ax.hlines(place, row["low"], row["high"], color=color, linewidth=2, zorder=2)


def _dots(ax: Axes, place: float, values: pd.Series, color: str) -> None:
    ax.plot(values, [place] * len(values), "o", color=color, markersize=2.8, alpha=0.8, zorder=2)
