"""Every figure against the installed matplotlib and pandas; colors, settings, saved bytes."""

import math
import subprocess
import sys

import matplotlib

matplotlib.use("Agg")

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex

from rstar2lab import plots, stats

METRICS = [
    "eval_accuracy", "eval_tool_error_rate_when_correct", "eval_mean_response_tokens"
]


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    plt.close("all")


def runs_frame():
    """Two seeds of each arm, evaluated at steps 0 and 10; the no-tool arm has no failed calls."""
    rows = []
    for place, arm in enumerate(plots.ARM_LABELS):
        for seed in (0, 1):
            for step in (0, 5, 10):
                has_value, has_calls = step != 5, arm != "dapo_no_tool"
                rows.append({
                    "arm": arm, "run_seed": seed, "step": step,
                    METRICS[0]: 0.1 * place + 0.01 * step + 0.02 * seed if has_value else None,
                    METRICS[1]: 0.2 - 0.01 * seed if has_value and has_calls else None,
                    METRICS[2]: 60.0 + seed if has_value else None,
                })
    return pd.DataFrame(rows)


def keep_frame():
    return pd.DataFrame({
        "selector": ["roc_paper"] * 2 + ["mine"] * 2, "penalty": [0.0, 0.5] * 2,
        "rate": [0.9, 0.2, 0.5, 0.5], "low": [0.88, 0.18, 0.48, 0.48],
        "high": [0.92, 0.22, 0.52, 0.52],
    })


def selector_frame():
    rows = [
        {"metric": metric, "selector": name, "mean": 0.2, "low": 0.1, "high": 0.3, "n": 12}
        for metric in ("tool_error_ratio", "penalty") for name in ("roc_paper", "uniform")
    ]
    return pd.DataFrame(rows)


def failed_calls_frame():
    """Right answers by failed calls: two arms, the second without a trajectory of two."""
    rows = [("grpo_tool", k, 0.8 - 0.2 * k, 0.7 - 0.2 * k, 0.9 - 0.2 * k, 5) for k in range(3)]
    rows += [("grpo_roc", k, 0.9, 0.8, 1.0, 5) for k in range(2)]
    return pd.DataFrame(rows, columns=["arm", "failed", "mean", "low", "high", "n"])


def quadrant_frame():
    rows = [
        {"quantity": quantity, "advantage": sign, "loss": loss, "ratio": ratio, "value": ratio}
        for quantity in ("objective", "gradient") for sign in (1, -1)
        for loss in ("unclipped", "mine") for ratio in (0.5, 1.5)
    ]
    return pd.DataFrame(rows)


def weight_frame():
    rows = [
        {"loss": loss, "length": length, "weight": 1 / length}
        for loss in ("dapo", "grpo") for length in (10, 1000)
    ]
    return pd.DataFrame(rows)


def span_frame():
    rows = [("a", "sampling", 0.0, 1.0), ("a", "tool", 1.0, 3.0), ("b", "sampling", 0.0, 2.0)]
    return pd.DataFrame(rows, columns=["request_id", "kind", "start", "end"])


def origin_frame():
    rows = [(0, 30, 9, "ANSWERED", 2), (1, 12, 0, "CONTEXT", 1), (2, 40, 9, "ANSWERED", 2)]
    return pd.DataFrame(rows, columns=["x", "trained", "tool", "stop", "turns"])


def difference_frame():
    rows = [("hard", METRICS[0], s, v, 0.02, -0.01, 0.05, 2) for s, v in enumerate((0.01, 0.03))]
    rows += [("hard", METRICS[1], s, -0.1, -0.1, -0.2, 0.0, 2) for s in (0, 1)]
    columns = ["label", "metric", "run_seed", "value", "mean", "low", "high", "n"]
    return pd.DataFrame(rows, columns=columns)


def load_frame():
    return pd.DataFrame({"offered": [10, 40], "mean": [0.01, 0.2], "p99": [0.05, 1.0]})


def answer_frame():
    return pd.DataFrame({"dispatch": ["each", "each", "batch"], "seconds": [0.1, 0.4, 2.0]})


def draw_all():
    """Every public figure function once, by name."""
    df = runs_frame()
    errors = stats.seed_curve(df, METRICS[1])
    return {
        "curve": plots.curve(stats.seed_curve(df, METRICS[0]), metric_label="accuracy"),
        "tool_errors_when_correct": plots.tool_errors_when_correct(errors),
        "ablation": plots.ablation(stats.seed_table(df, METRICS)),
        "differences": plots.differences(difference_frame()),
        "latency_under_load": plots.latency_under_load(load_frame(), capacity=50),
        "answer_times": plots.answer_times(answer_frame()),
        "keep_rates": plots.keep_rates(keep_frame()),
        "selectors": plots.selectors(selector_frame()),
        "reward_by_failed_calls": plots.reward_by_failed_calls(failed_calls_frame()),
        "clip_quadrants": plots.clip_quadrants(quadrant_frame()),
        "token_weights": plots.token_weights(weight_frame()),
        "rollout_timelines": plots.rollout_timelines({"batch": span_frame()}),
        "token_origins": plots.token_origins(origin_frame(), x_label="budget"),
        "response_sizes": plots.response_sizes(origin_frame()),
    }


def legend_texts(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_every_figure_draws_and_labels_its_axes():
    for name, drawn in draw_all().items():
        for ax in np.atleast_1d(drawn):
            ax.figure.canvas.draw()
            assert ax.get_xlabel(), name


def test_drawing_and_importing_leave_the_settings_alone():
    before = dict(mpl.rcParams)
    draw_all()
    assert dict(mpl.rcParams) == before
    with pytest.raises(RuntimeError), plots.style():
        assert mpl.rcParams["svg.hashsalt"] == "rstar2lab"
        raise RuntimeError
    assert dict(mpl.rcParams) == before
    code = (
        "import matplotlib as m; b = dict(m.rcParams); import rstar2lab.plots;"
        "assert dict(m.rcParams) == b"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_axes_given_are_the_axes_drawn_on():
    figure, (left, right) = plt.subplots(1, 2)
    curve = stats.seed_curve(runs_frame(), METRICS[0])
    assert plots.curve(curve, left, metric_label="accuracy") is left
    assert plots.keep_rates(keep_frame(), right) is right
    assert list(plots.selectors(selector_frame(), figure.axes)) == [left, right]
    with pytest.raises(ValueError, match="2 metrics but 1 axes"):
        plots.selectors(selector_frame(), [left])


def test_each_arm_has_one_color_and_one_line_style_everywhere():
    ax = plots.curve(stats.seed_curve(runs_frame(), METRICS[0]), metric_label="accuracy")
    lines = dict(zip(plots.ARM_LABELS, ax.get_lines(), strict=True))
    for arm, line in lines.items():
        assert to_hex(line.get_color()) == plots.ARM_COLORS[arm]
        assert line.get_linestyle() == plots.ARM_LINES[arm]
    panels = plots.ablation(stats.seed_table(runs_frame(), METRICS))
    drawn = {to_hex(line.get_color()) for line in panels[0].get_lines()}
    assert set(plots.ARM_COLORS.values()) <= drawn
    assert len(set(plots.ARM_COLORS.values())) == len(set(plots.ARM_LINES.values())) == 4


def test_another_arm_gets_a_color_of_its_own():
    df = runs_frame().replace({"arm": {"grpo_tool": "overlong_drop"}})
    ax = plots.curve(stats.seed_curve(df, METRICS[0]), metric_label="accuracy")
    colors = [to_hex(line.get_color()) for line in ax.get_lines()]
    assert len(set(colors)) == 4 and legend_texts(ax)[-1] == "overlong_drop (n = 2)"


def test_keywords_reach_every_line():
    df = stats.seed_curve(runs_frame(), METRICS[1])
    drawn = [
        plots.curve(df, metric_label="errors", linewidth=7),
        plots.tool_errors_when_correct(df, paper=False, linewidth=7),
        plots.keep_rates(keep_frame(), linewidth=7),
    ]
    for ax in drawn:
        widths = [line.get_linewidth() for line in ax.get_lines()]
        assert len(widths) >= 2 and set(widths) == {7}


def test_the_share_of_right_answers_stands_at_its_number_of_failed_calls():
    ax = plots.reward_by_failed_calls(failed_calls_frame())
    marks = {line.get_label(): line.get_xydata() for line in ax.get_lines()}
    assert set(marks) == {"GRPO with tool", "GRPO-RoC"}
    assert marks["GRPO with tool"][:, 1].tolist() == pytest.approx([0.8, 0.6, 0.4])
    assert marks["GRPO-RoC"][:, 0].round().tolist() == [0, 1]
    assert not set(marks["GRPO-RoC"][:, 0]) & set(marks["GRPO with tool"][:, 0])  # side by side


def test_the_legend_counts_seeds_and_names_the_paper():
    df = stats.seed_curve(runs_frame(), METRICS[1])
    ax = plots.tool_errors_when_correct(df)
    assert legend_texts(ax)[0] == "GRPO with tool (n = 2)"
    assert legend_texts(ax)[-1].startswith("paper, 14B")
    paper_line = ax.get_lines()[-1]
    assert set(paper_line.get_ydata()) == {0.10} and paper_line.is_dashed()
    own = plots.tool_errors_when_correct(df, paper=False)
    assert not any("paper" in text for text in legend_texts(own))


def test_quadrants_have_a_row_per_quantity_and_the_positive_advantage_first():
    axes = plots.clip_quadrants(quadrant_frame())
    assert [ax.get_title() for ax in axes] == ["advantage +1", "advantage −1", "", ""]
    assert [ax.get_ylabel() for ax in axes] == ["objective", "", "gradient", ""]
    assert legend_texts(axes[0]) == ["no clip", "mine"]


def test_a_timeline_has_one_row_per_trajectory_and_the_earliest_to_end_at_the_bottom():
    (ax,) = plots.rollout_timelines({"batch": span_frame()})
    bars = {(round(bar.get_x(), 3), round(bar.get_width(), 3)): bar.get_y() + bar.get_height() / 2
            for bar in ax.patches}  # fmt: skip
    assert bars == pytest.approx({(0, 1): 1, (1, 2): 1, (0, 2): 0})
    assert legend_texts(ax) == ["sampling", "waiting for the tool"]


def test_tokens_are_stacked_by_origin_and_every_stop_is_named_once():
    ax = plots.token_origins(origin_frame(), x_label="budget")
    assert legend_texts(ax)[2:] == ["stop: ANSWERED", "stop: CONTEXT"]
    assert [bar.get_y() + bar.get_height() for bar in ax.containers[1]] == [39, 12, 49]


def test_response_sizes_are_sorted_by_length_and_turns_are_counted():
    left, right = plots.response_sizes(origin_frame())
    assert [bar.get_y() + bar.get_height() for bar in left.containers[1]] == [12, 39, 49]
    assert [bar.get_height() for bar in right.patches] == [1, 2]


def test_token_weights_are_drawn_on_logarithmic_axes_one_line_per_loss():
    ax = plots.token_weights(weight_frame())
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log") and len(ax.lines) == 2


def test_shares_are_shown_in_percent():
    ax = plots.tool_errors_when_correct(stats.seed_curve(runs_frame(), METRICS[1]))
    assert "%" in ax.get_ylabel() and ax.yaxis.get_major_formatter()(0.15, 0) == "15"


def test_two_panels_that_share_an_axis_show_both_curves():
    df = stats.seed_curve(runs_frame(), METRICS[1])
    _, (left, right) = plt.subplots(1, 2, sharey=True)
    plots.tool_errors_when_correct(df.assign(high=0.8), left)
    plots.tool_errors_when_correct(df.assign(high=0.2), right)
    assert left.get_ylim() == right.get_ylim() == (0, pytest.approx(0.84))


def test_a_single_seed_is_drawn_without_a_band():
    one = runs_frame().query("run_seed == 0")
    ax = plots.curve(stats.seed_curve(one, METRICS[0]), metric_label="accuracy")
    ax.figure.canvas.draw()
    assert legend_texts(ax)[0] == "DAPO, no tool (n = 1)"
    plots.ablation(stats.seed_table(one, METRICS))[0].figure.canvas.draw()


def test_the_caption_states_scale_steps_seeds_and_host():
    assert plots.caption("nano 0.4M", 30, 3) == "nano 0.4M · 30 steps · 3 seeds · 2 CPU cores"
    assert plots.caption("nano 0.4M", 30, 1, host="1 GPU").endswith("30 steps · 1 seed · 1 GPU")
    ax = plots.keep_rates(keep_frame())
    assert plots.sign(ax, "nano 0.4M") is ax.figure
    assert ax.figure.get_supxlabel() == "nano 0.4M"


def test_saving_twice_writes_the_same_bytes_and_the_numbers_come_back(tmp_path):
    table = stats.seed_table(runs_frame(), METRICS)
    for folder in ("a", "b"):
        figure = plots.sign(plots.ablation(table), plots.caption("nano 0.4M", 10, 2))
        written = plots.save(figure, tmp_path / folder / "ablation-0.05", table)
        assert [path.name for path in written] == [
            "ablation-0.05.png", "ablation-0.05.svg", "ablation-0.05.csv"
        ]
    for name in [path.name for path in written]:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    back = pd.read_csv(written[2], float_precision="round_trip")
    pd.testing.assert_frame_equal(back, table, check_exact=True)


# The tables that the figures draw.


def test_seed_curve_of_two_seeds_in_numbers():
    df = pd.DataFrame({
        "arm": ["a", "a", "a", "a"], "run_seed": [0, 1, 0, 1], "step": [0, 0, 10, 10],
        "accuracy": [0.2, 0.4, 0.7, None],
    })
    found = stats.seed_curve(df, "accuracy")
    assert list(found.columns) == ["arm", "step", "mean", "low", "high", "n"]
    half = 12.706205 * 0.1  # t with one degree of freedom; sd/√2 of 0.2 and 0.4 is 0.1
    first, second = found.to_dict("records")
    assert first == pytest.approx(
        {"arm": "a", "step": 0, "mean": 0.3, "low": 0.3 - half, "high": 0.3 + half, "n": 2}
    )
    assert second["mean"] == 0.7 and second["n"] == 1 and math.isnan(second["low"])


def test_seed_curve_takes_the_level():
    df = pd.DataFrame({"arm": "a", "run_seed": [0, 1], "step": 0, "x": [0.2, 0.4]})
    assert stats.seed_curve(df, "x", level=0.5).high[0] == pytest.approx(0.4)  # t(1) at 75 % is 1


def test_seed_table_takes_the_last_value_of_every_run():
    found = stats.seed_table(runs_frame(), METRICS)
    assert set(found.step) == {10}
    no_tool = found[found.arm == "dapo_no_tool"]
    assert list(no_tool.metric) == [METRICS[0]] * 2 + [METRICS[2]] * 2
    roc = found[(found.arm == "grpo_roc") & (found.metric == METRICS[0])]
    assert list(roc.value) == pytest.approx([0.4, 0.42])
    assert list(roc["mean"]) == pytest.approx([0.41, 0.41]) and set(roc.n) == {2}


def test_interval_table_has_one_interval_for_every_combination():
    df = pd.DataFrame({"a": ["x", "x", "y", "y"], "b": [0, 0, 0, 0], "v": [1, 1, 3, None]})
    found = stats.interval_table(df, ["a", "b"], "v", rng=np.random.default_rng(0))
    assert list(found.columns) == ["a", "b", "mean", "low", "high", "n"]
    assert found.a.tolist() == ["x", "y"] and found["mean"].tolist() == [1, 3]
    assert found.n.tolist() == [2, 1] and found.low[0] == 1 and math.isnan(found.low[1])


def test_tables_refuse_doubled_runs_and_missing_columns():
    df = runs_frame()
    with pytest.raises(ValueError, match="one sweep at a time"):
        stats.seed_curve(pd.concat([df, df]), METRICS[0])
    with pytest.raises(ValueError, match="missing.*is the folder empty"):
        stats.seed_curve(pd.DataFrame(), METRICS[0])


def test_importing_stats_does_not_load_pandas():
    code = "import sys; import rstar2lab.stats; assert not {'pandas', 'scipy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
