"""GRPO-RoC in the small: train, compare and look, from the command line.

Start with `rstar2lab doctor`, then `rstar2lab reproduce`. The arms, one small file each in
experiments/configs/arms:
- dapo_no_tool: no tool, as a baseline
- grpo_tool: GRPO with a Python tool
- grpo_tool_2g_uniform: twice the rollouts, half of them kept at random
- grpo_roc: twice the rollouts, half of them kept by resample-on-correct

Every value of the configuration can be set with `--set section.key=value`; the keys are those of
experiments/configs/nano.toml and rstar2lab/config.py.
"""

import os
import shlex
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

if TYPE_CHECKING:
    from .config import SandboxLimits

Level = Literal["L0", "L1", "L2", "L3", "L4"]
NANO = Path(__file__).parents[1] / "experiments" / "configs" / "nano.toml"
Settings = Annotated[
    tyro.conf.UseAppendAction[tuple[str, ...]],
    tyro.conf.arg(name="set", metavar="SECTION.KEY=VALUE", help="override one value; repeatable"),
]
# Small values that walk every part of the path in about a minute; their numbers mean nothing.
SMOKE = (
    "run.scale=nano 0.4M, smoke",
    "run.steps=2",
    "cold_start.steps=40",
    "cold_start.dialogues=800",
    "problems.train=200",
    "problems.held_out=20",
    "evaluation.every=1",
    "evaluation.samples=1",
    "rollout.prompts_per_step=4",
)


def reproduce(
    smoke: bool = False,
    seeds: int = 1,
    out: Path | None = None,
    jobs: int = 2,
    require_isolation: Level | None = None,
) -> None:
    """Train the four arms at nano scale against a real sandbox; print the table, draw the figures.

    Cold-starts the nano model (once; kept in cold_start/ below --out), runs every arm and seed
    through papermill, and executes the notebooks on the results. Stop it at any time: the same
    command goes on where it was.

    For example:
    $ rstar2lab reproduce --smoke
    $ rstar2lab reproduce --seeds 5 --require-isolation L3

    Args:
        smoke: walk the whole path in about a minute; the numbers mean nothing.
        seeds: how many RL seeds per arm; intervals need at least 2, the committed results have 5.
        out: where results go; runs/reproduce or runs/smoke by default.
        jobs: runs at the same time, one core each.
        require_isolation: refuse to start below this sandbox level.
    """
    from . import reproduction
    from .config import ConfigError

    if seeds < 1:
        raise ConfigError(f"--seeds {seeds}: expected how many RL seeds each arm gets, at least 1")
    out = out or Path("runs") / ("smoke" if smoke else "reproduce")
    check_isolation(require_isolation)
    reproduction.run(NANO, out, seeds=range(seeds), jobs=jobs, settings=SMOKE if smoke else ())


def train(
    arm: tyro.conf.Positional[str],
    config: Path = NANO,
    seed: int = 0,
    out: Path | None = None,
    resume: bool = False,
    settings: Settings = (),
    require_isolation: Level | None = None,
) -> None:
    """Train one arm with one seed.

    It begins from a cold start, made when first needed and kept in cold_start/ beside the folder of
    the run folders, here runs/cold_start.

    For example:
    $ rstar2lab train grpo_roc
    $ rstar2lab train grpo_roc --seed 1 --set run.steps=80 --out runs/mine/grpo_roc-s1
    $ rstar2lab train grpo_roc --resume

    Args:
        arm: a file in arms/ beside the configuration, such as grpo_roc.
        config: base configuration.
        seed: of the reinforcement learning.
        out: run folder; runs/train/<arm>-s<seed> by default.
        resume: continue from the newest checkpoint; without it an existing run is refused.
        settings: further values.
        require_isolation: refuse to start below this sandbox level.
    """
    from tqdm.auto import tqdm

    from . import config as cfg
    from . import grpo, reproduction, runs, trainer

    loaded = cfg.load(config, arm, _chosen(settings, {"run.seed": seed}))
    print(f"loss: {grpo.describe(loaded.loss)}")
    folder = out or Path("runs") / "train" / f"{arm}-s{seed}"
    trainer.check_run(loaded, runs.RunFolder(folder), resume=resume)
    check_isolation(require_isolation, loaded.sandbox)
    model_path = reproduction.make_cold_start(loaded, runs.cold_start_dir(folder))
    with tqdm(total=loaded.run.steps, desc=f"{arm} seed {seed}", unit="step") as bar:

        def report(row: dict) -> None:
            shown = {
                k: row[k] for k in ("train_accuracy", "eval_accuracy") if row.get(k) is not None
            }
            _advance(bar, row["step"], **shown)

        trainer.Trainer(loaded, folder, arm=arm, model_path=model_path, report=report).run(
            resume=resume
        )
    print(f"done: {folder}")


def sweep(
    config: Path = NANO,
    arms: tuple[str, ...] = (),
    seeds: tuple[int, ...] = (0,),
    out: Path = Path("runs") / "sweep",
    jobs: int = 2,
    settings: Settings = (),
    label: str = "",
    plan: bool = False,
    template: Path | None = None,
    require_isolation: Level | None = None,
    parameters: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]],
        tyro.conf.arg(
            name="parameter", metavar="NAME=VALUE", help="notebook parameter; repeatable"
        ),
    ] = (),
) -> None:
    """Run a grid of arms × seeds, each through the notebook experiments/templates/run_arm.ipynb.

    Finished points are skipped, unfinished ones resume; parameters that the notebook does not
    declare are refused before anything runs.

    The cold start is kept in cold_start/ beside --out, here runs/cold_start: `train` finds it too.

    For example:
    $ rstar2lab sweep --arms grpo_tool grpo_roc --seeds 0 1 2
    $ rstar2lab sweep --arms grpo_roc --label slow --set optimizer.lr=5e-4 --plan

    Args:
        config: base configuration; its arms are the files in arms/ beside it.
        arms: which of them, such as grpo_tool grpo_roc; all by default.
        seeds: the RL seeds themselves, such as 0 1 2.
        out: folder of the sweep, one run folder <arm>-s<seed> per point.
        jobs: points at the same time, one core each.
        settings: values for every point.
        label: added to the folders, <arm>_<label>-s<seed>: variants of one arm in one sweep.
        plan: only print what would run.
        template: another parameterized notebook.
        parameters: further parameters of the notebook.
        require_isolation: refuse to start below this sandbox level.
    """
    from . import reproduction
    from . import sweep as sweeps

    extra = dict(_split_parameter(text) for text in parameters)
    arms = arms or sweeps.arm_names(config)
    points = sweeps.grid(
        str(config), arms, seeds, out, settings=settings, parameters=extra, label=label
    )
    template = template or sweeps.TEMPLATE
    sweeps.check_parameters(template, points[0].notebook_parameters())
    sweeps.check_configurations(points)
    for point, state in sweeps.status(points):
        print(f"{point.name:32} {state}")
    if not plan:
        for settings in {point.load_config().sandbox for point in points}:
            check_isolation(require_isolation, settings)
        reproduction.run_points(points, jobs=jobs, template=template)
        print(f"done: {out}")


def evaluate(
    model: tyro.conf.Positional[Path],
    config: Path | None = None,
    arm: str | None = None,
    samples: int = 4,
    temperature: float = 1.0,
    seed: int = 0,
    out: Path | None = None,
    settings: Settings = (),
) -> None:
    """Evaluate a nano checkpoint on held-out problems; accuracy with an interval over problems.

    For example:
    $ rstar2lab evaluate experiments/results/ablation/grpo_roc-s0 --samples 8
    $ rstar2lab evaluate runs/train/grpo_roc-s0 --temperature 0.6 --out rows.parquet

    Args:
        model: a finished run folder (a cold start's too), or a checkpoint folder.
        config: base configuration (problems, chat format, limits); a run folder brings its own.
        arm: an arm whose chat format and limits apply.
        samples: k per problem.
        temperature: the paper evaluates at 0.6 (§5.1), the nano training at 1.0.
        seed: of the sampling.
        out: parquet file for the per-sample rows.
        settings: further values.
    """
    import numpy as np

    from . import config as cfg
    from . import evaluate as evaluation
    from . import runs, trainer

    chosen = _chosen(settings, {
        "run.seed": seed, "evaluation.samples": samples, "evaluation.temperature": temperature,
    })  # fmt: skip
    folder = runs.RunFolder(model)
    path = folder.model_path() if folder.is_run else model
    recorded = folder.configuration() if config is None and arm is None else None
    loaded = cfg.from_flat(recorded | chosen) if recorded else cfg.load(config or NANO, arm, chosen)
    if loaded.chat.tools:
        check_isolation(None, loaded.sandbox)
    rows = trainer.evaluate_checkpoint(loaded, path)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        rows.to_parquet(out, index=False)
    print(f"{len(rows)} samples, temperature {temperature}, {loaded.run.scale}")
    print(evaluation.table(rows, rng=np.random.default_rng(seed)).round(3).to_string())
    print("\n".join(f"{k:42} {v:.3f}" for k, v in evaluation.summarize(rows).items()))


def figures(
    results: Path = Path("experiments/results/ablation"), out: Path = Path("runs/figures")
) -> None:
    """Draw the figures of a sweep again from its run folders: PNG, SVG, and the numbers as CSV.

    For example:
    $ rstar2lab figures --results runs/reproduce/ablation --out runs/figures

    Args:
        results: folder of a sweep: its run folders <arm>-s<seed> lie directly in it.
        out: where the figures go.
    """
    from . import figures as drawing

    for path in drawing.ablation_figures(results, out):
        print(path)


def doctor(vllm: Path | None = None, template: str | None = None) -> None:
    """Check Python, torch, the sandbox, the verifier, the engine and the optional packages.

    For example:
    $ rstar2lab doctor
    $ rstar2lab doctor --template Qwen/Qwen3-0.6B

    Args:
        vllm: a checkpoint folder: also load it in vLLM and compare log-probs.
        template: only check the chat template of this tokenizer folder, or of a model in the local
            Hugging Face cache: whether a rollout may append to what it renders.
    """
    from . import doctor as checks

    found = checks.examine() if template is None else checks.template_checks(template)
    if vllm is not None:
        found.append(checks.vllm_check(vllm))
    width = max(16, *(len(check.name) for check in found))
    for check in found:
        print(f"{check.verdict:5} {check.name:{width}} {check.found}")
    if any(check.verdict == "FAIL" for check in found):
        raise SystemExit(1)


def sandbox(
    action: tyro.conf.Positional[Literal["serve"]],
    port: int = 8765,
    host: str = "127.0.0.1",
    workers: int = 8,
    token_file: Path | None = None,
    cpu_seconds: float = 4.0,
    wall_seconds: float = 4.0,
    memory_mb: int = 512,
    output_chars: int = 20_000,
    require_isolation: Level | None = None,
) -> None:
    """Serve the sandbox over HTTP, until SIGTERM; what was accepted is still answered.

    Speaks the formats of code-judge (/run, /run/batch, /run/long-batch, /judge…) and SandboxFusion
    (/run_code), for their clients, and its own (/v1/calls, streamed).

    For example:
    $ rstar2lab sandbox serve --port 8765 --workers 8

    Args:
        action: serve.
        port: to listen on.
        host: any other than a loopback address needs a token.
        workers: programs at the same time; with programs that loop, about four per core.
        token_file: a file whose content clients must send as a bearer token.
        cpu_seconds: limit of a call.
        wall_seconds: limit of a call.
        memory_mb: limit of a call.
        output_chars: kept of each stream; the head of the output, the tail of the errors.
        require_isolation: refuse to start below this sandbox level.
    """
    from . import config as cfg
    from .sandbox import Limits, Sandbox, server

    if not 0 <= port <= 65_535:
        raise cfg.ConfigError(f"--port {port}: expected 0 to 65535")
    limits = {
        "cpu_seconds": cpu_seconds, "wall_seconds": wall_seconds, "memory_mb": memory_mb,
        "output_chars": output_chars,
    }  # fmt: skip
    cfg.load(NANO, settings={f"sandbox.{key}": value for key, value in limits.items()})
    token = token_file.read_text().strip() if token_file else None
    server.check_address(host, token)
    with Sandbox(workers, Limits(**limits), require_level=require_isolation) as pool:
        print(f"sandbox {pool.level}, {workers} workers, on http://{host}:{port}", flush=True)
        server.serve(pool, host=host, port=port, token=token)


def _chosen(settings: tuple[str, ...], options: dict) -> dict:
    """Values of `--set` with those of the command's own options; a value is said in one place.

    Raises:
        ConfigError: `--set` names what an option sets.
    """
    from .config import ConfigError, parse_setting

    chosen = dict(parse_setting(text) for text in settings)
    for key in sorted(chosen.keys() & options.keys()):
        raise ConfigError(f"--set {key}: use the option --{key.split('.')[-1]}")
    return chosen | options


def _advance(bar, step: int, **shown: float) -> None:
    bar.update(step - bar.n)
    bar.set_postfix({key: f"{value:.3f}" for key, value in shown.items()})


def _split_parameter(text: str) -> tuple[str, object]:
    from .config import ConfigError, parse_value

    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"expected NAME=VALUE, found {text!r}")
    return name.strip(), parse_value(value)


def check_isolation(required: str | None, settings: "SandboxLimits | None" = None) -> None:
    """Say which isolation level is in force; warn below L3; refuse below what is required.

    settings: where programs run; None stands for this machine.

    Raises:
        SandboxError: the level reached is below the required one, or no service answers.
    """
    from .sandbox import detect_level
    from .sandbox.levels import SandboxError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if settings is not None and settings.address:
            from .workbench import code_environment

            with code_environment(settings) as services:
                level = services.level
        else:
            level = detect_level()
    if required is not None and level < required:
        raise SandboxError(
            f"the sandbox reaches {level} here, but {required} was required; run as root or allow "
            "user namespaces, or lower --require-isolation"
        )
    if level == "L0":
        raise SandboxError(
            "no isolation works here, and model-written programs are not run without; see "
            "`rstar2lab doctor`, and run as root or allow user namespaces"
        )
    if level < "L3":
        print(
            f"WARNING: sandbox isolation is only {level}: model-written programs are not fully "
            "confined. See `rstar2lab doctor`.",
            file=sys.stderr,
        )
    else:
        print(f"sandbox isolation {level}")


COMMANDS: dict[str, Callable] = {
    "reproduce": reproduce,
    "train": train,
    "sweep": sweep,
    "evaluate": evaluate,
    "figures": figures,
    "sandbox": sandbox,
    "doctor": doctor,
}


def main() -> None:
    """Entry point of `rstar2lab`. Known faults are one message, not a traceback."""
    # Threads that wait by spinning make a busy machine six times slower; read when torch loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        tyro.extras.subcommand_cli_from_dict(
            COMMANDS, prog="rstar2lab", description=__doc__, config=(tyro.conf.AvoidSubcommands,)
        )
    except KeyboardInterrupt:
        print(f"\nstopped; to go on: {resume_command(sys.argv)}", file=sys.stderr)
        raise SystemExit(130) from None
    except Exception as error:
        if not isinstance(error, _known_errors()):
            raise
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def resume_command(argv: list[str]) -> str:
    """The command that continues what was stopped."""
    words = ["rstar2lab", *argv[1:]]
    if "train" in argv[1:2] and "--resume" not in argv:
        words.append("--resume")
    return shlex.join(words)


def _known_errors() -> tuple[type[Exception], ...]:
    from .config import ConfigError
    from .extras import MissingExtra
    from .runs import RunError
    from .sandbox.levels import SandboxError

    known: list[type[Exception]] = [ConfigError, MissingExtra, RunError, SandboxError, OSError]
    for module, name in (
        ("engines", "EngineError"),
        ("rewards", "ServiceFailure"),
        ("sweep", "SweepError"),
        ("templates", "TemplateError"),
        ("trainer", "TrainingError"),
    ):
        loaded = sys.modules.get(f"rstar2lab.{module}")
        if loaded is not None:
            known.append(getattr(loaded, name))
    return tuple(known)


if __name__ == "__main__":
    main()
