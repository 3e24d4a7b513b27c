"""`make reproduce`: cold start, the four arms through papermill, one table, figures, notebooks."""

import time
from collections.abc import Sequence
from pathlib import Path

from tqdm.auto import tqdm

from . import ablation, figures, runs, sft, sweep, trainer
from . import config as cfg

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
ON_RESULTS = ("11_ablation.ipynb",)  # notebooks that read a sweep's folder


def run(
    config: Path, out: Path, *, seeds: Sequence[int], jobs: int, settings: Sequence[str]
) -> None:
    """Everything, with progress; prints the table and the paths of what was made.

    Raises:
        sweep.SweepError: a point failed.
    """
    started = time.monotonic()
    results = out / "ablation"
    points = sweep.grid(str(config), ablation.ARMS, seeds, results, settings=settings)
    run_points(points, jobs=jobs)
    final = ablation.final_rows(results)
    drawn = figures.ablation_figures(results, out / "figures")
    notebooks = run_notebooks(results, out / "notebooks")
    found = ablation.table(final)
    runs.write_atomic(out / "table.csv", found.to_csv(index=False))
    scale = points[0].load_config().run.scale
    print(f"\nHeld out, last step, {scale}, {final.run_seed.nunique()} seed(s), 95 % over seeds\n")
    print(ablation.format_table(found))
    claims = ablation.claims(final).round(3).to_string(index=False)
    print(f"\nThe paper's findings, here\n\n{claims}")
    print(f"\nmade in {(time.monotonic() - started) / 60:.1f} minutes:")
    for path in [out / "table.csv", *drawn, *notebooks, results]:
        print(f"  {path}")


def run_points(
    points: Sequence[sweep.Point], *, jobs: int, template: Path = sweep.TEMPLATE
) -> None:
    """The cold start, then the points, each under one progress bar.

    What can be refused is refused before the cold start.

    Raises:
        sweep.SweepError, runs.RunError: as `sweep.run`.
    """
    sweep.check_jobs(jobs)
    sweep.check_configurations(points)
    waiting = [point for point in points if not point.is_done]
    if waiting:
        make_cold_start(waiting[0].load_config(), waiting[0].cold_start_dir)
    totals = {point.name: point.load_config().run.steps for point in points}
    steps = {point.name: point.steps_done() for point in points}
    with tqdm(
        total=sum(totals.values()), initial=sum(steps.values()), desc="arms", unit="step"
    ) as bar:

        def report(point: sweep.Point, step: int, total: int) -> None:
            steps[point.name] = step
            bar.update(sum(steps.values()) - bar.n)
            busy = [n for n in steps if 0 < steps[n] < totals[n]]
            bar.set_postfix_str(", ".join(f"{n} {steps[n]}/{totals[n]}" for n in busy[:3]))

        sweep.run(points, jobs=jobs, template=template, report=report)


def make_cold_start(config: cfg.Config, cold_start_dir: str | Path) -> Path:
    """The checkpoint that runs start from, made under a progress bar unless it is there; said."""
    is_there = config.model.source != "cold_start" or sft.cached(config, cold_start_dir) is not None
    with tqdm(
        total=config.cold_start.steps, desc="cold start", unit="step", disable=is_there
    ) as bar:
        bar.set_postfix_str("making the corpus")

        def report(row: dict) -> None:
            bar.update(row["step"] - bar.n)
            bar.set_postfix_str(f"loss {row['loss']:.3f}")

        path = trainer.initial_model(config, cold_start_dir, report)
    print(f"starts from {path}")
    return path


def run_notebooks(results: Path, out: Path) -> list[Path]:
    """Execute the notebooks that show a sweep on this sweep."""
    import papermill

    out.mkdir(parents=True, exist_ok=True)
    made = []
    for name in ON_RESULTS:
        papermill.execute_notebook(
            str(NOTEBOOKS / name),
            str(out / name),
            {"results": str(results.resolve())},
            progress_bar=False,
            kernel_name="python3",
        )
        made.append(out / name)
    return made
