"""Configurations: what is refused and how it is said, arms, settings, the paper's numbers."""

import math
from pathlib import Path
from typing import get_args

import pytest

from rstar2lab import config as cfg
from rstar2lab import roc

CONFIGS = Path(__file__).parents[1] / "experiments" / "configs"
NANO = CONFIGS / "nano.toml"
ARMS = sorted(path.stem for path in (CONFIGS / "arms").glob("*.toml"))
THE_FOUR_ARMS = {"dapo_no_tool", "grpo_tool", "grpo_tool_2g_uniform", "grpo_roc"}

# Without a tool a rollout is one turn: the prompt changes, and the freed budget buys more prompts.
NO_TOOL_MAY_CHANGE = {
    "chat.tools",
    "rollout.prompts_per_step",
    "rollout.samples_per_prompt",
    "rollout.max_response_tokens",
    "run.steps",
    "selection.selector",
}


def nano(**changes) -> cfg.Config:
    """The nano configuration; `loss__ddof=1` sets `loss.ddof`."""
    return cfg.load(NANO, settings={key.replace("__", "."): v for key, v in changes.items()})


def field(key: str):
    section, name = key.split(".")
    return cfg.Config.model_fields[section].annotation.model_fields[name]


def differences(one: cfg.Config, other: cfg.Config) -> set[str]:
    first, second = cfg.flatten(one.model_dump()), cfg.flatten(other.model_dump())
    return {key for key in first if first[key] != second[key]}


# -- what is refused


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("loss.clip_hi", "loss.clip_high"),
        ("rollout.temprature", "rollout.temperature"),
        ("selection.kepe", "selection.keep"),
        ("keep", "keep"),
    ],
)
def test_an_unknown_key_names_the_nearest(key, nearest):
    with pytest.raises(cfg.ConfigError, match=f"unknown key {key!r}.*{nearest}"):
        cfg.load(NANO, settings={key: 1})


def test_an_unknown_key_in_a_file_names_the_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[optimizer]\nlearning_rate = 1e-4\n")
    with pytest.raises(cfg.ConfigError, match="mine.toml: unknown key 'optimizer.learning_rate'"):
        cfg.read_toml(path)


def test_a_missing_file_lists_its_siblings():
    with pytest.raises(cfg.ConfigError, match="found there:.*nano"):
        cfg.read_toml(CONFIGS / "nanno.toml")


def test_a_file_that_is_not_toml_is_told_apart(tmp_path):
    path = tmp_path / "broken.toml"
    for content in (b"[loss\n", b"\xff\x00"):
        path.write_bytes(content)
        with pytest.raises(cfg.ConfigError, match="not valid TOML"):
            cfg.read_toml(path)


def test_a_wrong_type_says_where_and_what_was_found():
    with pytest.raises(cfg.ConfigError, match=r"run\.steps: .*integer.*found 'many'"):
        nano(run__steps="many")


def test_a_missing_value_says_which():
    flat = cfg.read_toml(NANO)
    del flat["optimizer.lr"]
    with pytest.raises(cfg.ConfigError, match=r"optimizer\.lr: Field required"):
        cfg.from_flat(flat)


def test_every_fault_is_told_at_once():
    with pytest.raises(cfg.ConfigError) as caught:
        nano(run__steps=0, loss__ddof=2)
    assert "run.steps" in str(caught.value) and "loss.ddof" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"selection__keep": 16, "rollout__samples_per_prompt": 12},
            "keep=16 but only rollout.samples_per_prompt=12 are sampled; "
            "raise samples_per_prompt or lower keep",
        ),
        (
            {"selection__selector": "all"},
            "selector 'all' keeps every rollout: set selection.keep=16",
        ),
        (
            {"rollout__max_response_tokens": 512},
            "max_response_tokens=512 leaves no room for the prompt",
        ),
        ({"engine__kv_tokens": 0}, "the torch engine needs a number of tokens"),
        ({"problems__train": 4}, "prompts_per_step=8 exceeds problems.train=4"),
        ({"model__kv_heads": 2}, "model.heads=3 must be a multiple of model.kv_heads=2"),
        ({"model__head_width": 31}, "model.head_width=31 must be even"),
    ],
)
def test_values_that_do_not_fit_together_say_what_to_do(changes, message):
    with pytest.raises(cfg.ConfigError) as caught:
        nano(**changes)
    assert message in str(caught.value)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_no_number_may_be_infinite_or_missing(value):
    floats = [key for key in cfg.known_keys() if "float" in str(field(key).annotation)]
    assert {"optimizer.lr", "loss.dual_clip", "model.rope_base"} < set(floats)
    for key in floats:
        with pytest.raises(cfg.ConfigError, match=f"{key}: Input should be"):
            cfg.load(NANO, settings={key: value})


def test_yes_is_no_number_and_one_is_no_yes():
    with pytest.raises(cfg.ConfigError) as caught:
        nano(run__steps=True, optimizer__lr=True, chat__tools=1)
    for key in ("run.steps", "optimizer.lr", "chat.tools"):
        assert f"{key}: Input should be a valid" in str(caught.value)


def test_a_configuration_cannot_be_changed_in_place():
    with pytest.raises(ValueError, match="frozen"):
        nano().loss.clip_low = 0.3


# -- arms


def test_the_four_arms_are_there():
    assert set(ARMS) >= THE_FOUR_ARMS


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_changes_few_keys(arm):
    changed = differences(cfg.load(NANO), cfg.load(NANO, arm))
    if arm == "dapo_no_tool":
        assert changed <= NO_TOOL_MAY_CHANGE
        assert "chat.tools" in changed
    else:
        assert len(changed) <= 3


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_trains_the_same_number_of_rollouts_per_prompt(arm):
    assert cfg.load(NANO, arm).selection.keep == cfg.load(NANO).selection.keep


def test_an_unknown_arm_lists_the_known():
    with pytest.raises(cfg.ConfigError, match="grpo_roc"):
        cfg.load(NANO, "grpo_rock")


def test_settings_win_over_the_arm_and_the_arm_over_the_base():
    assert cfg.load(NANO, "grpo_tool_2g_uniform").selection.selector == "uniform"
    config = cfg.load(NANO, "grpo_tool_2g_uniform", {"selection.selector": "gfpo_length"})
    assert config.selection.selector == "gfpo_length"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_committed_base_file_is_valid(path):
    cfg.load(path)


# -- settings


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("optimizer.lr=1e-4", ("optimizer.lr", 1e-4)),
        ("run.steps = 12", ("run.steps", 12)),
        ("chat.tools=false", ("chat.tools", False)),
        ("selection.selector=uniform", ("selection.selector", "uniform")),
        ('selection.selector="uniform"', ("selection.selector", "uniform")),
        ("run.scale=nano 0.4M, seed = 3", ("run.scale", "nano 0.4M, seed = 3")),
    ],
)
def test_a_setting_is_a_key_and_a_toml_value_or_else_text(text, expected):
    key, value = cfg.parse_setting(text)
    assert (key, value) == expected
    assert type(value) is type(expected[1])


def test_a_setting_without_an_equals_sign_is_refused():
    with pytest.raises(cfg.ConfigError, match="expected section.key=value, found 'run.steps'"):
        cfg.parse_setting("run.steps")


def test_a_setting_with_a_typo_names_the_nearest():
    with pytest.raises(cfg.ConfigError, match="did you mean 'run.steps'"):
        cfg.parse_setting("run.step=3")


def test_flatten_joins_sections_and_keys():
    assert cfg.flatten({"loss": {"ddof": 1, "clip_low": 0.2}, "run": {"seed": 3}}) == {
        "loss.ddof": 1,
        "loss.clip_low": 0.2,
        "run.seed": 3,
    }


def test_a_value_outside_any_section_is_an_unknown_key(tmp_path):
    path = tmp_path / "flat.toml"
    path.write_text("steps = 3\n")
    with pytest.raises(cfg.ConfigError, match="unknown key 'steps'.*steps"):
        cfg.read_toml(path)


def test_a_configuration_survives_its_text():
    import json

    config = nano(loss__ddof=1)
    assert cfg.from_flat(cfg.flatten(json.loads(cfg.to_json(config)))) == config


# -- the paper's numbers


def test_the_selectors_are_those_of_roc():
    literal = cfg.Selection.model_fields["selector"].annotation
    assert set(get_args(literal)) == set(roc.SELECTORS)


def test_defaults_are_the_papers():
    config = cfg.load(NANO)
    assert (config.loss.clip_low, config.loss.clip_high) == (0.2, 0.28)  # §5.1, Clip-Higher
    assert config.loss.ddof == 0  # Eq 7, the plain standard deviation
    assert config.rollout.temperature == 1.0  # §5.1
    assert config.rollout.top_p == 1.0
    assert (config.selection.selector, config.selection.penalty) == ("roc_paper", "paper")
    assert config.chat.max_calls_per_turn == 1


def test_roc_samples_twice_what_it_keeps():
    config = cfg.load(NANO, "grpo_roc")
    assert config.rollout.samples_per_prompt == 2 * config.selection.keep
