"""A run is a folder, and the only thing that notebooks and figures read.

`config.json`, `provenance.json`, `metrics.jsonl` (one object per step), `eval.parquet`,
`trajectories.parquet`, checkpoints, and `DONE.json`, written last. Every file appears whole or not
at all: it is written beside its place and then renamed.
"""

import fcntl
import importlib.metadata
import io
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from . import config as cfg
from .types import Trajectory

_PARTIAL = ".partial"  # of a file being written; what a kill leaves is swept at the next open
PACKAGES = ("torch", "transformers", "numpy", "pandas", "rstar2lab")


class RunError(RuntimeError):
    """A run folder cannot be used as asked; the message says what to do."""


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write a file that is never seen half-written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    payload = data.encode() if isinstance(data, str) else data
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=_PARTIAL)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def provenance(command: str, scale: str) -> dict:
    """How a result came about: command, git commit, versions, host kind, scale."""
    return {
        "command": command,
        "git_sha": _git_sha(),
        "scale": scale,
        "versions": {name: _version(name) for name in PACKAGES}
        | {"python": platform.python_version()},
        "host": f"{platform.machine()}, {os.cpu_count()} CPUs",
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _git_sha() -> str:
    here = Path(__file__).parent
    try:
        sha = subprocess.run(
            ("git", "rev-parse", "HEAD"), cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ("git", "status", "--porcelain", "--", "rstar2lab"),
            cwd=here.parent,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        return sha + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


class RunFolder:
    """One run on disk. Opening an existing folder with another configuration is refused."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._lock = None

    def open(self, config_json: str, *, command: str, scale: str, resume: bool) -> None:
        """Create the folder, or continue it, holding its lock until `close`.

        Raises:
            RunError: another process writes here; the folder holds a run and `resume` is False; or
                it was made with another configuration.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.path / ".lock", "w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(self._lock.fileno()), os.stat(self.path / ".lock")):
                raise OSError("the lock was removed in between")
        except OSError:
            self._lock.close()
            self._lock = None
            raise RunError(f"another process is writing {self.path}; stop it, or wait") from None
        self._remove_partials()
        existing = self.path / "config.json"
        if not existing.exists() or self.is_empty:
            write_atomic(
                self.path / "provenance.json", json.dumps(provenance(command, scale), indent=1)
            )
            write_atomic(existing, config_json)
            return
        try:
            self.check_configuration(config_json)
            self.check_resumable(resume=resume)
        except RunError:
            self.close()
            raise

    def check_resumable(self, *, resume: bool) -> None:
        """Raises: RunError if the folder holds a run that is not to be resumed."""
        if not resume and (self.is_done or self.rows()):
            raise RunError(
                f"{self.path} already holds a run; continue it with --resume, or remove the folder"
            )

    def check_configuration(self, config_json: str) -> None:
        """Refuse another configuration than the recorded one, naming what differs.

        A key that did not exist when the folder was written counts as its default. A folder in
        which nothing was recorded yet holds no run.

        Raises: RunError.
        """
        path = self.path / "config.json"
        if not path.exists() or self.is_empty:
            return
        if _with_defaults(path.read_text()) != _with_defaults(config_json):
            raise RunError(
                f"{self.path} holds a run with another configuration "
                f"({_difference(path.read_text(), config_json)}); "
                "choose another folder or remove this one"
            )

    @property
    def is_empty(self) -> bool:
        """True when nothing was recorded: such a folder may be taken for another configuration."""
        return not self.is_done and not self.rows()

    def close(self) -> None:
        if self._lock is not None:
            (self.path / ".lock").unlink(missing_ok=True)  # still held: no one gets an orphan
            self._lock.close()
            self._lock = None

    def _remove_partials(self) -> None:
        """Half-written files of a killed run, only where a run writes: --out may be any folder."""
        for folder in ("", "parts", "checkpoints", "model"):
            for path in (self.path / folder).glob(f".*{_PARTIAL}"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def model_path(self) -> Path:
        """The checkpoint folder that a finished run leaves.

        Raises: RunError: the run is not finished.
        """
        if not self.is_done:
            raise RunError(
                f"{self.path} is not finished, and the model is written at its end; continue the "
                "run with the command in its provenance.json (a sweep resumes by itself, `train` "
                "with --resume)"
            )
        return self.path / "model"

    def configuration(self) -> dict | None:
        """The recorded values by `section.key`; None if there are none, or not a whole run's.

        A cold start records only what decides its weights.
        """
        path = self.path / "config.json"
        if not self.is_run or not path.exists():
            return None
        flat = cfg.flatten(json.loads(path.read_text()))
        return flat if "run.steps" in flat else None

    @property
    def is_run(self) -> bool:
        """True for a run's folder, finished or not; a checkpoint's has no provenance."""
        return (self.path / "provenance.json").exists()

    @property
    def is_done(self) -> bool:
        return (self.path / "DONE.json").exists()

    def mark_done(self, summary: dict) -> None:
        write_atomic(self.path / "DONE.json", json.dumps(summary, indent=1))

    # metrics.jsonl

    def rows(self) -> list[dict]:
        """The metric rows written so far; a half-written last line is left out."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return []
        lines = path.read_text().split("\n")
        return [json.loads(line) for line in lines[:-1] if line]

    def append_row(self, row: dict) -> None:
        with open(self.path / "metrics.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")

    def keep_rows_up_to(self, step: int) -> None:
        """Forget what lies after a checkpoint: those steps run again."""
        kept = [row for row in self.rows() if row["step"] <= step]
        write_atomic(self.path / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in kept))

    # tables, in one part per step, merged at the end

    def write_part(self, table: str, step: int, frame: pd.DataFrame) -> None:
        """One step's rows of `eval` or `trajectories`; writing a step again replaces it."""
        buffer = io.BytesIO()
        frame.to_parquet(buffer, index=False)
        write_atomic(self.path / "parts" / f"{table}-{step:06d}.parquet", buffer.getvalue())

    def merge_parts(self, tables: Iterable[str] = ("eval", "trajectories")) -> None:
        """One file per table; safe to be killed at any point and called again."""
        merged = self.path / f".parts{_PARTIAL}"
        shutil.rmtree(merged, ignore_errors=True)
        for table in tables:
            parts = sorted((self.path / "parts").glob(f"{table}-*.parquet"))
            if parts:
                buffer = io.BytesIO()
                frame = pd.concat([pd.read_parquet(p) for p in parts], ignore_index=True)
                frame.to_parquet(buffer, index=False, compression="zstd")
                write_atomic(self.path / f"{table}.parquet", buffer.getvalue())
        if (self.path / "parts").exists():
            os.replace(self.path / "parts", merged)  # at once: a half-removed folder merges wrong
            shutil.rmtree(merged, ignore_errors=True)

    def read_table(self, table: str) -> pd.DataFrame:
        """`eval` or `trajectories`, also of a run that is still going on."""
        path = self.path / f"{table}.parquet"
        if path.exists():
            return pd.read_parquet(path)
        parts = sorted((self.path / "parts").glob(f"{table}-*.parquet"))
        return pd.concat([pd.read_parquet(p) for p in parts]) if parts else pd.DataFrame()

    # checkpoints

    def save_checkpoint(self, step: int, state: dict) -> None:
        """Save, then remove the older ones: at any moment one whole checkpoint exists."""
        import torch

        buffer = io.BytesIO()
        torch.save({"step": step, **state}, buffer)
        path = self._checkpoint_path(step)
        write_atomic(path, buffer.getvalue())
        for older in self._checkpoints():
            if older != path:
                older.unlink()

    def load_checkpoint(self) -> dict | None:
        """The newest checkpoint, None if there is none."""
        import torch

        found = self._checkpoints()
        return torch.load(found[-1], weights_only=True) if found else None

    def remove_checkpoints(self) -> None:
        shutil.rmtree(self.path / "checkpoints", ignore_errors=True)

    def _checkpoint_path(self, step: int) -> Path:
        return self.path / "checkpoints" / f"step-{step:06d}.pt"

    def _checkpoints(self) -> list[Path]:
        return sorted((self.path / "checkpoints").glob("step-*.pt"))


def _with_defaults(config_json: str) -> str:
    """The configuration with every key of today; other texts (a cold start's) as they are."""
    try:
        return cfg.to_json(cfg.from_flat(cfg.flatten(json.loads(config_json))))
    except (ValueError, KeyError):
        return config_json


def _difference(old_json: str, new_json: str) -> str:
    texts = (_with_defaults(text) for text in (old_json, new_json))
    old, new = (cfg.flatten(json.loads(text)) for text in texts)
    changed = [key for key in old | new if old.get(key) != new.get(key)]
    return ", ".join(f"{k}: {old.get(k)!r} there, {new.get(k)!r} asked" for k in changed[:5])


def trajectory_row(
    trajectory: Trajectory,
    *,
    question: str,
    answer: str,
    step: int,
    arm: str,
    penalty: float,
    kept: bool,
    roles=None,
) -> dict:
    """One row of `trajectories.parquet`. `roles` names each response token's role."""
    return {
        "problem_id": trajectory.problem_id,
        "question": question,
        "answer": answer,
        "sample": trajectory.sample,
        "step": step,
        "arm": arm,
        "reward": trajectory.reward,
        "reason": trajectory.reason,
        "stop": trajectory.stop.name,
        "penalty": penalty,
        "kept": kept,
        "weight_version": trajectory.weight_version,
        "prompt_ids": trajectory.prompt_ids,
        "response_ids": trajectory.response_ids,
        "loss_mask": trajectory.loss_mask,
        "logprobs": trajectory.logprobs,
        "entropies": trajectory.entropies,
        "roles": roles,
        "turns": [_turn_row(turn) for turn in trajectory.turns],
    }


def _turn_row(turn) -> dict:
    result = turn.result
    return {
        "text": turn.text,
        "call": turn.call.raw if turn.call else None,
        "status": result.status.name if result else None,
        "stdout": result.stdout if result else None,
        "stderr": result.stderr if result else None,
        "seconds": result.seconds if result else None,
    }


def relative(path: str | Path) -> str:
    """The path as seen from here, if it lies below; a record should not name the machine."""
    path, here = Path(path), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def cold_start_dir(run_folder: str | Path) -> Path:
    """Where a run looks for its cold start: `cold_start/` beside the folder of the run folders.

    `runs/train/grpo_roc-s0` and `runs/sweep/grpo_roc-s0` share `runs/cold_start`.
    """
    return Path(run_folder).parent.parent / "cold_start"


def command_line() -> str:
    """The command that started this process, as a person would type it."""
    name = Path(sys.argv[0]).name
    return shlex.join(["rstar2lab" if name == "cli.py" else name, *sys.argv[1:]])


def metrics_frame(path: str | Path) -> pd.DataFrame:
    """Metric rows of all run folders at or below `path`, with arm and run_seed columns.

    A run folder is named `<arm>-s<seed>`; folders with other names are left out.
    """
    frames = []
    for file in sorted(Path(path).glob("**/metrics.jsonl")):
        folder = RunFolder(file.parent)
        arm, _, seed = file.parent.name.rpartition("-s")
        if not (arm and seed.isdecimal()):
            continue
        frame = pd.DataFrame(folder.rows())
        never = [c for c in frame if frame[c].isna().all()]  # a rate that never had a denominator
        frame = frame.astype(dict.fromkeys(never, float))
        if len(frame):
            frames.append(frame.assign(arm=arm, run_seed=int(seed), sweep=file.parent.parent.name))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
