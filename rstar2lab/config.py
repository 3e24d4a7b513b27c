"""Every number of a run, validated, with its unit. TOML → frozen models.

A configuration is a base file, plus at most one arm file, plus `section.key=value` settings. An
unknown key fails before anything runs and names the nearest known one. Where the paper and its
release differ, the choice is a named value (`"paper"` or `"release"`), and the default is the
paper's.
"""

import difflib
import json
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator


class ConfigError(ValueError):
    """A configuration that cannot run; the message says what was expected, found, and to do."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Run(_Section):
    """What is run, and for how long."""

    scale: str = Field(description="stated on every figure and in every run folder")
    steps: int = Field(gt=0, description="rollout steps; each makes `loss.minibatches` updates")
    seed: int = Field(0, ge=0)


class Model(_Section):
    """A plain Qwen3, no custom code. `source`: "cold_start", or a checkpoint's path."""

    source: str = "cold_start"
    layers: int = Field(2, gt=0)
    width: int = Field(128, gt=0)
    heads: int = Field(3, gt=0)
    kv_heads: int = Field(3, gt=0)
    head_width: int = Field(32, gt=0)
    mlp_width: int = Field(256, gt=0)
    rope_base: float = Field(200.0, gt=0, description="small, because the contexts are short")
    max_tokens: int = Field(512, gt=0, description="context: prompt and response together")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="of the learner's passes and of vLLM; weights and optimizer stay float32",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU if any")
    gradient_checkpointing: bool = Field(
        False, description="recompute activations in the backward pass"
    )


class ColdStart(_Section):
    """The non-reasoning SFT (§4.1) at nano scale; see `nano.corpus` for what the rates do."""

    dialogues: int = Field(16_000, gt=0)
    seed: int = 0
    steps: int = Field(gt=0)
    batch: int = Field(32, gt=0, description="dialogues per step")
    muon_lr: float = Field(0.02, gt=0, description="hidden matrices")
    adamw_lr: float = Field(5e-3, gt=0, description="embeddings and norms")
    warmup_steps: int = Field(30, ge=0)
    constant_fraction: float = Field(0.37, ge=0, le=1, description="then linear decay to 5 %")
    clip_norm: float = Field(1.0, gt=0)
    threads: int = Field(2, gt=0)
    no_tool: float = Field(0.20, ge=0, le=1)
    right_plan_easy: float = Field(0.30, ge=0, le=1)
    right_plan_hard: float = Field(0.135, ge=0, le=1)
    bad_first_call: float = Field(0.50, ge=0, le=1)
    bad_retry: float = Field(0.05, ge=0, lt=1)
    verify: float = Field(0.15, ge=0, le=1)
    verify_again: float = Field(0.35, ge=0, lt=1)
    second_answer: float = Field(0.08, ge=0, le=1)


class Problems(_Section):
    """The questions. The held-out side is fixed by a hash of the question, whatever the seed."""

    train: int = Field(4000, gt=0)
    held_out: int = Field(200, gt=0)
    level: Literal["all", "easy", "hard"] = Field("all", description="families by difficulty")
    seed: int = 0


class Chat(_Section):
    """Prompt format and turn limits (§2.1, Fig 3)."""

    style: Literal["nano", "paper", "release", "template"] = Field(
        "paper", description='"template": the checkpoint\'s own, if it passes `templates.check`'
    )
    tools: bool = True
    max_turns: int = Field(10, gt=0, description="T; 10 / 10 / 15 by stage (§5.1), release 5")
    max_calls_per_turn: int = Field(
        1, gt=0, description="executed; further ones are refused, counted"
    )
    response_chars: int = Field(20_000, gt=0, description="cap on a tool response; release 256")


class Rollout(_Section):
    """Sampling (§5.1)."""

    prompts_per_step: int = Field(gt=0, description="512 in the paper")
    samples_per_prompt: int = Field(gt=0, description="N = 2G; 32 in the paper")
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    max_response_tokens: int = Field(
        gt=0, description="model and tool tokens together; 8K / 12K / 12K"
    )


class Selection(_Section):
    """Which G of the N rollouts are trained (§2.2.3). The names are those of `roc.SELECTORS`."""

    selector: Literal[
        "roc_paper", "roc_release", "uniform", "gfpo_length", "gfpo_efficiency", "all"
    ] = "roc_paper"
    keep: int = Field(gt=0, description="G; 16 in the paper")
    penalty: Literal["paper", "release"] = "paper"
    refill_rounds: int = Field(
        0, ge=0, description="more prompts for rejected groups (DAPO); 0 (§4.3), release alike"
    )
    max_void_fraction: float = Field(0.01, ge=0, le=1, description="above it the run stops")


class Loss(_Section):
    """Eq 6 and 7: Clip-Higher, token mean over the selected groups, no KL, no entropy term.

    Every default is the paper's; where the release has another value it is named. The formula that
    a section stands for is `grpo.describe`.
    """

    name: Literal["dapo", "grpo", "dr_grpo", "gspo", "cispo"] = Field(
        "dapo", description="of `grpo.LOSSES`; dapo is Eq 6, and the release's"
    )
    clip_low: float = Field(
        0.2, ge=0, description="§2.2.1, release alike; GSPO 3e-4; >= 1 is no lower bound (CISPO)"
    )
    clip_high: float = Field(0.28, ge=0, description="§2.2.1, release alike; GSPO 4e-4")
    dual_clip: float | None = Field(
        None, gt=1, description="bound on negative advantages (1912.09729); none; release 3.0"
    )
    ddof: Literal[0, 1] = Field(0, description="of the deviation in Eq 7; the release uses 1")
    kl_coefficient: float = Field(
        0.0, ge=0, description="β against the initial model; 0 (§2.2.1), release alike"
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        "k3", description="of `grpo.KL_ESTIMATORS`; k3 is Eq 1, and verl's low_var_kl"
    )
    importance_cap: float | None = Field(
        None, gt=0, description="C of the engine/learner correction; none; release: none"
    )
    overlong: Literal["keep", "filter"] = Field(
        "keep", description="truncated rollouts stay negatives (§4.3.1), release alike"
    )
    overlong_buffer_tokens: int = Field(
        0, ge=0, description="soft overlong penalty; 0: none, release alike; DAPO 4,096 of 20,480"
    )
    entropy_mask: Literal["none", "sequence", "batch"] = Field(
        "none", description="of `entropy.MASKS`; none, release alike; 2506.01939: batch"
    )
    entropy_fraction: float = Field(
        0.2, gt=0, le=1, description="share of tokens that the entropy mask keeps (2506.01939)"
    )
    minibatches: int = Field(
        2, gt=0, description="updates per rollout step; at 1 (release) clipping is inert"
    )
    tokens_per_microbatch: int = Field(8192, gt=0, description="padded tokens of one forward pass")

    @model_validator(mode="after")
    def _is_one_objective(self):
        if self.name == "cispo" and self.dual_clip is not None:
            raise ValueError(
                "loss.dual_clip bounds a clipped objective, and cispo clips weights; leave it out"
            )
        if self.name == "gspo" and self.entropy_mask != "none":
            raise ValueError(
                "loss.entropy_mask chooses tokens, and gspo has one ratio per sequence; "
                "set entropy_mask=\"none\" or another loss.name"
            )
        return self


class Optimizer(_Section):
    """AdamW (§5.1: constant 1e-6, 20 warm-up steps)."""

    lr: float = Field(gt=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    warmup_steps: int = Field(0, ge=0, description="updates")
    clip_norm: float = Field(1.0, gt=0)


class Engine(_Section):
    """The inference engine: ours in torch, which repeats a run bit by bit, or vLLM."""

    kind: Literal["torch", "vllm"] = Field("torch", description="vllm is an extra; see the README")
    kv_tokens: int = Field(
        65_536, ge=0, description="capacity of the KV cache; 0: all of memory_fraction (vllm)"
    )
    max_sequences: int = Field(256, gt=0, description="requests in one decoding step")
    tool_steps: int = Field(
        8,
        ge=0,
        description="decoding steps after which a tool result is delivered, ready or awaited"
        " (torch; vllm takes it when it is there)",
    )
    block_tokens: int = Field(32, gt=0, description="of a KV block (vllm); CPU: multiples of 32")
    memory_fraction: float = Field(0.9, gt=0, le=1, description="of the device's memory (vllm)")
    tensor_parallel: int = Field(1, gt=0, description="devices that share the model (vllm)")
    threads: int = Field(0, ge=0, description="of a worker on a CPU (vllm); 0: torch's choice")
    eager: bool = Field(False, description="no compilation (vllm): starts sooner, decodes slower")


class SandboxLimits(_Section):
    """Limits per call; the paper's release gives 4 s. A service has limits of its own."""

    address: str = Field(
        "",
        description="of services (`rstar2lab sandbox serve`), separated by spaces: programs run and"
        " answers are verified there; empty: by workers of this process",
    )
    token_file: str = Field("", description="holds the token that the services ask for")
    workers: int = Field(2, gt=0)
    cpu_seconds: float = Field(4.0, gt=0)
    wall_seconds: float = Field(4.0, gt=0)
    memory_mb: int = Field(512, gt=0)
    output_chars: int = Field(20_000, gt=0)


class Evaluation(_Section):
    """Held-out evaluation during training, at the training temperature unless set."""

    every: int = Field(gt=0, description="steps; step 0 and the last step are always evaluated")
    samples: int = Field(gt=0, description="k per problem")
    temperature: float = Field(1.0, gt=0, description="the paper evaluates at 0.6 (§5.1)")


class Records(_Section):
    """What a run folder keeps."""

    checkpoint_every: int = Field(10, gt=0, description="steps")
    trajectory_groups: int = Field(4, ge=0, description="groups recorded per recorded step")
    trajectories_every: int = Field(10, gt=0, description="steps")
    reflection_tokens: int = Field(
        20, ge=0, description="k: sampled tokens after a tool response with a role of their own"
    )
    forking_fraction: float = Field(
        0.2, ge=0, le=1, description="top share of tokens by entropy that may be forking (§5.4)"
    )


class Config(_Section):
    """The whole configuration of one run."""

    run: Run
    model: Model
    cold_start: ColdStart
    problems: Problems
    chat: Chat
    rollout: Rollout
    selection: Selection
    loss: Loss
    optimizer: Optimizer
    engine: Engine
    sandbox: SandboxLimits
    evaluation: Evaluation
    records: Records

    @model_validator(mode="after")
    def _fits_together(self):
        n, keep, selector = (
            self.rollout.samples_per_prompt,
            self.selection.keep,
            self.selection.selector,
        )
        if self.model.heads % self.model.kv_heads:
            raise ValueError(
                f"model.heads={self.model.heads} must be a multiple of "
                f"model.kv_heads={self.model.kv_heads}: equally many heads share each key"
            )
        if self.model.head_width % 2:
            raise ValueError(
                f"model.head_width={self.model.head_width} must be even: positions turn pairs "
                "of numbers (RoPE)"
            )
        if keep > n:
            raise ValueError(
                f"selection.keep={keep} but only rollout.samples_per_prompt={n} are sampled; "
                "raise samples_per_prompt or lower keep"
            )
        if selector == "all" and keep != n:
            raise ValueError(
                f"selector 'all' keeps every rollout: set selection.keep={n} or "
                f"rollout.samples_per_prompt={keep}"
            )
        response, context = self.rollout.max_response_tokens, self.model.max_tokens
        if response >= context:
            raise ValueError(
                f"rollout.max_response_tokens={response} leaves no room for the prompt in "
                f"model.max_tokens={context}; lower it or raise max_tokens"
            )
        if self.chat.style == "template" and self.model.source == "cold_start":
            raise ValueError(
                "chat.style='template' takes the checkpoint's own template, and a cold start has "
                "none; set model.source to a checkpoint folder, or choose nano, paper or release"
            )
        if self.loss.overlong_buffer_tokens > response:
            raise ValueError(
                f"loss.overlong_buffer_tokens={self.loss.overlong_buffer_tokens} exceeds "
                f"rollout.max_response_tokens={response}: every response would be punished"
            )
        if self.engine.kind == "torch" and not self.engine.kv_tokens:
            raise ValueError(
                "engine.kv_tokens=0 lets vLLM take what memory_fraction leaves; the torch engine "
                "needs a number of tokens"
            )
        if self.rollout.prompts_per_step > self.problems.train:
            raise ValueError(
                f"rollout.prompts_per_step={self.rollout.prompts_per_step} exceeds "
                f"problems.train={self.problems.train}"
            )
        return self


def _nearest(name: str, known) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def known_keys() -> list[str]:
    """All `section.key` names."""
    return [
        f"{section}.{key}"
        for section, field in Config.model_fields.items()
        for key in field.annotation.model_fields
    ]


def flatten(tree: dict[str, Any]) -> dict[str, Any]:
    """`{"loss": {"ddof": 1}}` → `{"loss.ddof": 1}`."""
    flat = {}
    for section, values in tree.items():
        if not isinstance(values, dict):
            values = {"": values}
        flat |= {f"{section}.{key}".rstrip("."): value for key, value in values.items()}
    return flat


def _check_keys(flat: dict[str, Any], origin: str) -> None:
    known = known_keys()
    for key in flat:
        if key not in known:
            by_name = {k.split(".")[-1]: k for k in known}
            close = difflib.get_close_matches(key.split(".")[-1], by_name, n=1, cutoff=0.5)
            hint = _nearest(key, known) if "." in key else ""
            if not hint and close:
                hint = f" (did you mean {by_name[close[0]]!r}?)"
            raise ConfigError(f"{origin}: unknown key {key!r}{hint}")


def read_toml(path: str | Path) -> dict[str, Any]:
    """A TOML file as flat `section.key` values, its keys checked.

    Raises:
        ConfigError: the file is missing, is not TOML, or has an unknown key.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"no configuration file {path}{_siblings(path)}")
    try:
        flat = flatten(tomllib.loads(path.read_text()))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    _check_keys(flat, str(path))
    return flat


def _siblings(path: Path) -> str:
    names = sorted(p.stem for p in path.parent.glob("*.toml")) if path.parent.is_dir() else []
    return f"; found there: {', '.join(names)}" if names else ""


def parse_setting(setting: str) -> tuple[str, Any]:
    """`"optimizer.lr=1e-4"` → `("optimizer.lr", 0.0001)`; what is not TOML is a string."""
    key, equals, text = setting.partition("=")
    if not equals:
        raise ConfigError(f"expected section.key=value, found {setting!r}")
    value = parse_value(text)
    _check_keys({key.strip(): value}, "--set")
    return key.strip(), value


def parse_value(text: str) -> Any:
    """A TOML value; what is not one is a plain string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()


def from_flat(flat: dict[str, Any]) -> Config:
    """Validate flat values.

    Raises:
        ConfigError: a value is missing, of the wrong type, out of range, or does not fit the
        others.
    """
    tree: dict[str, dict[str, Any]] = {section: {} for section in Config.model_fields}
    for key, value in flat.items():
        section, name = key.split(".", 1)
        tree[section][name] = value
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, e['loc'])) or 'config'}: {e['msg'].removeprefix('Value error, ')}"
            + (f" (found {e['input']!r})" if e["loc"] and e["type"] != "missing" else "")
            for e in error.errors()
        ]
        raise ConfigError("\n".join(lines)) from error


def load(
    base: str | Path, arm: str | None = None, settings: dict[str, Any] | None = None
) -> Config:
    """Base file, then `arms/<arm>.toml` beside it, then settings by `section.key`."""
    flat = read_toml(base)
    if arm is not None:
        flat |= read_toml(Path(base).parent / "arms" / f"{arm}.toml")
    _check_keys(settings or {}, "settings")
    return from_flat(flat | (settings or {}))


def to_json(config: Config) -> str:
    """Canonical text: what `config.json` holds, and what a resumed run is compared with."""
    return json.dumps(config.model_dump(), indent=1, sort_keys=True)
