"""A sweep is a grid over one parameterized notebook, executed by papermill.

Points run in parallel processes, two at a time on two cores: a nano run keeps one core busy. A
finished point is skipped, an unfinished one resumes from its checkpoint, so a sweep can be killed
at any time and started again with the same command. Parameters that the notebook does not declare
are refused before anything runs.
"""

import ctypes
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from . import config as cfg
from . import runs

TEMPLATE = Path(__file__).parents[1] / "experiments" / "templates" / "run_arm.ipynb"
_POLL_SECONDS = 0.5


class SweepError(RuntimeError):
    """A sweep that cannot run, or points that failed; the message names them."""


@dataclass(frozen=True)
class Point:
    """One run of the grid. `settings` are `section.key=value` texts on top of base and arm."""

    arm: str
    seed: int
    config: str
    folder: str
    cold_start_dir: str
    settings: tuple[str, ...] = ()
    parameters: dict = field(default_factory=dict)
    label: str = ""

    @property
    def name(self) -> str:
        return Path(self.folder).name

    def load_config(self) -> cfg.Config:
        settings = dict(cfg.parse_setting(text) for text in self.settings)
        return cfg.load(self.config, self.arm, settings | {"run.seed": self.seed})

    def steps_done(self) -> int:
        return max((row["step"] for row in runs.RunFolder(self.folder).rows()), default=0)

    @property
    def is_done(self) -> bool:
        return runs.RunFolder(self.folder).is_done

    @property
    def command(self) -> str:
        """The command that makes this point alone."""
        words = ["rstar2lab", "sweep", "--config", self.config, "--arms", self.arm]
        words += ["--seeds", str(self.seed), "--out", str(Path(self.folder).parent)]
        words += ["--label", self.label] if self.label else []
        for setting in self.settings:
            words += ["--set", setting]
        for name, value in self.parameters.items():
            words += ["--parameter", f"{name}={json.dumps(value)}"]
        return shlex.join(words)

    def notebook_parameters(self) -> dict:
        return self.own_parameters() | self.parameters

    def own_parameters(self) -> dict:
        """The parameters that the sweep itself sets: what makes this point this point."""
        return {
            "config": self.config,
            "arm": self.arm,
            "seed": self.seed,
            "folder": self.folder,
            "cold_start_dir": self.cold_start_dir,
            "settings": list(self.settings),
            "command": self.command,
        }


def grid(
    config: str,
    arms: Sequence[str],
    seeds: Sequence[int],
    out: str | Path,
    *,
    settings: Sequence[str] = (),
    parameters: dict | None = None,
    label: str = "",
) -> list[Point]:
    """All points, seeds first: the first seed of every arm is complete before the second starts.

    With a label the folders are `<arm>_<label>-s<seed>`: variants of one arm in one sweep.

    Raises:
        cfg.ConfigError: a point's configuration is not valid.
        SweepError: no arm, no seed, or one of them twice; a label that is no word; a parameter
            that the sweep itself sets.
    """
    cfg.read_toml(config)
    if label and not re.fullmatch(r"\w+", label, re.ASCII):
        raise SweepError(f"label {label!r}: expected letters, digits and underscores")
    if not arms or not seeds or len(set(seeds)) < len(seeds) or len(set(arms)) < len(arms):
        raise SweepError(
            f"expected distinct arms and seeds, at least one each; found arms {list(arms)}, "
            f"seeds {list(seeds)}"
        )
    out, config, suffix = Path(out), runs.relative(config), f"_{label}" if label else ""
    folders = {(arm, seed): out / f"{arm}{suffix}-s{seed}" for seed in seeds for arm in arms}
    points = [
        Point(
            arm,
            seed,
            config,
            str(folder),
            str(runs.cold_start_dir(folder)),
            tuple(settings),
            dict(parameters or {}),
            label,
        )
        for (arm, seed), folder in folders.items()
    ]
    if owned := sorted(points[0].own_parameters().keys() & points[0].parameters.keys()):
        raise SweepError(
            f"the sweep itself sets {', '.join(owned)} for every point; use --config, --arms, "
            "--seeds, --set or --out"
        )
    for point in points:
        point.load_config()
    return points


def check_parameters(template: str | Path, parameters: dict) -> None:
    """Refuse names that the notebook's parameters cell does not declare; papermill would only warn.

    Raises:
        SweepError: with the unknown names and the declared ones; or it is no notebook.
    """
    import papermill

    try:
        declared = papermill.inspect_notebook(str(template))
    except Exception as error:  # of whatever kind: the reader takes any JSON for a notebook
        raise SweepError(f"{template} is not a notebook that can be read: {error}") from error
    unknown = sorted(set(parameters) - set(declared))
    if unknown or not declared:
        raise SweepError(
            f"{Path(template).name} does not declare {', '.join(unknown) or 'any parameter'}; "
            f"it declares {', '.join(sorted(declared)) or 'none'}"
        )


def check_configurations(points: Sequence[Point]) -> None:
    """Refuse folders that hold a run of another configuration: they would pass for these points.

    Raises:
        runs.RunError: with what differs, for the first such folder.
    """
    for point in points:
        runs.RunFolder(point.folder).check_configuration(cfg.to_json(point.load_config()))


def check_jobs(jobs: int) -> None:
    """Raises: SweepError if no point could run."""
    if jobs < 1:
        raise SweepError(f"jobs={jobs}, expected at least 1")


def run(
    points: Sequence[Point],
    *,
    jobs: int = 2,
    template: str | Path = TEMPLATE,
    report: Callable[[Point, int, int], None] | None = None,
) -> None:
    """Execute the points that are not done. `report` receives (point, step, steps).

    Raises:
        runs.RunError: a folder holds a run of another configuration.
        SweepError: an undeclared parameter, or points that failed (the others have finished).
        KeyboardInterrupt: after the running points have been stopped.
    """
    check_jobs(jobs)
    report = report or (lambda point, step, steps: None)
    check_configurations(points)
    waiting = [point for point in points if not point.is_done]
    if not waiting:
        return
    check_parameters(template, waiting[0].notebook_parameters())
    running: dict[subprocess.Popen, Point] = {}
    failed: list[tuple[Point, str]] = []
    steps = {_key(point): point.load_config().run.steps for point in waiting}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                point = waiting.pop(0)
                running[_start(point, template)] = point
            time.sleep(_POLL_SECONDS)
            for process, point in list(running.items()):
                report(point, point.steps_done(), steps[_key(point)])
                if process.poll() is not None:
                    del running[process]
                    if process.returncode or not point.is_done:
                        failed.append((point, _last_words(point)))
    finally:
        _stop(running)
    if failed:
        causes = "\n".join(f"  {point.name}: {cause}" for point, cause in failed)
        raise SweepError(
            f"{len(failed)} of {len(points)} points failed and are not done:\n{causes}"
        )


def _key(point: Point) -> tuple[str, str, tuple[str, ...]]:
    """Points of one arm have one number of steps."""
    return point.config, point.arm, point.settings


def _start(point: Point, template: str | Path) -> subprocess.Popen:
    folder = Path(point.folder)
    folder.mkdir(parents=True, exist_ok=True)
    task = json.dumps({"point": asdict(point), "template": str(template), "parent": os.getpid()})
    with open(folder / "run.log", "ab") as log:
        return subprocess.Popen(
            (sys.executable, "-m", "rstar2lab.sweep", task),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )


def _stop(running: dict[subprocess.Popen, Point]) -> None:
    for process in running:
        process.send_signal(signal.SIGINT)
    for process in running:
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _last_words(point: Point) -> str:
    lines = (Path(point.folder) / "run.log").read_text(errors="replace").strip().splitlines()
    return f"{lines[-1] if lines else 'no output'} (see {point.folder}/run.log)"


def _die_with_parent(parent: int) -> None:
    """Ask the kernel to end this process when the sweep dies, even by SIGKILL."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit("the sweep that started this point is gone")


def execute_point(point: Point, template: str | Path) -> None:
    """Run one point's notebook, saved after every cell as `run.ipynb` in the run folder."""
    import papermill

    papermill.execute_notebook(
        runs.relative(template),
        str(Path(point.folder) / "run.ipynb"),
        point.notebook_parameters(),
        progress_bar=False,
        cwd=os.getcwd(),
        autosave_cell_every=0,
        kernel_name="python3",
    )


def _main(task: str) -> None:
    arguments = json.loads(task)
    if sys.platform == "linux":
        _die_with_parent(arguments["parent"])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    point = arguments["point"]
    point["settings"] = tuple(point["settings"])
    execute_point(Point(**point), arguments["template"])


def arm_names(config: str | Path) -> list[str]:
    """The arms beside a base configuration."""
    return sorted(path.stem for path in (Path(config).parent / "arms").glob("*.toml"))


def status(points: Sequence[Point]) -> Iterator[tuple[Point, str]]:
    """What a sweep would do with each point."""
    for point in points:
        done = point.steps_done()
        state = "done" if point.is_done else f"resume after step {done}" if done else "new"
        yield point, state


if __name__ == "__main__":
    _main(sys.argv[1])
