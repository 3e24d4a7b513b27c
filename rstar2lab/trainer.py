"""One training run: sample → verify → select → update → sync → log → save.

Every random number depends on (seed, step, purpose) alone, so a run that was killed and resumed
from its last checkpoint writes the same metrics as one that was left alone, but for the `seconds_*`
keys.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from . import config as cfg
from . import entropy, evaluate, grpo, roc, runs, sft
from .learner import DTYPES, LocalLearner, Precision, Sample, UpdateStats
from .nano import model
from .types import Group, Problem, StopReason, Trajectory
from .workbench import Tick, Workbench, code_environment

Report = Callable[[dict], None]
_PURPOSES = {"prompts": 1, "selection": 2, "minibatches": 3, "refill": 4}
# Nats between engine and learner; more means a mask, shift or temperature is off. The engine runs
# in float32: bfloat16 passes of the learner differ from it by their rounding.
_MAX_PARITY = {"float32": 1e-3, "bfloat16": 0.5}


class TrainingError(RuntimeError):
    """The run cannot go on; the message says why and what to do."""


@dataclass(frozen=True)
class Selected:
    """One group after selection: what was kept, with penalties of all N (Eq 4–5)."""

    group: Group
    penalties_N: np.ndarray
    kept: np.ndarray  # indices into the group
    status: str  # "trained", "rejected" (equal rewards), or "too_small" (void rollouts)
    samples: tuple[Sample, ...]

    @property
    def is_solved(self) -> bool:
        """True if the group was rejected because every scored rollout succeeded."""
        scored = [t for t in self.group.trajectories if t.stop is not StopReason.VOID]
        return self.status == "rejected" and all(t.is_correct for t in scored)


def select(
    group: Group,
    settings: cfg.Selection,
    loss: cfg.Loss,
    rng: np.random.Generator,
    max_tokens: int = 0,
) -> Selected:
    """Reject, select, and normalize: the method between rollout and loss (§2.2, Eq 7).

    Void trajectories take no part. A group of equal rewards teaches nothing and is rejected before
    the selection. `loss` names the advantages and what happens to overlong trajectories of at most
    `max_tokens`.
    """
    scored = [i for i, t in enumerate(group.trajectories) if t.stop is not StopReason.VOID]
    penalties_N = np.full(len(group.trajectories), np.nan)
    for i in scored:
        penalties_N[i] = roc.penalties(group.trajectories[i], settings.penalty)
    rewards_N = np.asarray([group.trajectories[i].reward for i in scored])
    nothing = np.zeros(0, np.int64)
    if len(scored) < settings.keep:
        return Selected(group, penalties_N, nothing, "too_small", ())
    if roc.is_rejected(rewards_N):
        return Selected(group, penalties_N, nothing, "rejected", ())
    lengths_N = np.asarray([len(group.trajectories[i].response_ids) for i in scored])
    chosen = roc.SELECTORS[settings.selector](
        rewards_N, penalties_N[scored], settings.keep, rng, lengths_N
    )
    kept = np.asarray(scored)[chosen]
    samples = credited([group.trajectories[i] for i in kept], loss, max_tokens)
    return Selected(group, penalties_N, kept, "trained", samples)


def credited(
    trajectories: Sequence[Trajectory], loss: cfg.Loss, max_tokens: int
) -> tuple[Sample, ...]:
    """The kept trajectories of one group with their advantages and trained tokens (Eq 7).

    The soft overlong penalty, if there is one, is added to the rewards here, after the selection:
    a long success is still a success.
    """
    rewards_G = [
        t.reward
        + grpo.soft_overlong_penalty(len(t.response_ids), max_tokens, loss.overlong_buffer_tokens)
        for t in trajectories
    ]
    advantages_G = grpo.LOSSES[loss.name].advantages(rewards_G, ddof=loss.ddof)
    trained_tokens = grpo.OVERLONG[loss.overlong]
    return tuple(
        Sample(t, float(advantage), trained_tokens(t.loss_mask, t.is_truncated))
        for t, advantage in zip(trajectories, advantages_G, strict=True)
    )


def rollout_metrics(trajectories: Sequence[Trajectory], prefix: str = "") -> dict[str, float]:
    """Rates over the given trajectories, void ones left out (they are counted as `voided`).

    `entropy` is over the trajectories for which the engine gave entropies; None if for none.
    """
    scored = [t for t in trajectories if t.stop is not StopReason.VOID]
    correct = [t for t in scored if t.is_correct]

    def error_rate(some: Sequence[Trajectory]) -> float | None:
        calls = sum(t.num_calls for t in some)
        return sum(t.num_tool_errors for t in some) / calls if calls else None

    def mean(values) -> float | None:
        values = list(values)
        return float(np.mean(values)) if values else None

    entropies = [t.entropies[t.loss_mask] for t in scored if t.entropies is not None]
    found = {
        "train_accuracy": mean(t.is_correct for t in scored),
        "tool_error_rate": error_rate(scored),
        "tool_error_rate_when_correct": error_rate(correct),
        "mean_response_tokens": mean(len(t.response_ids) for t in scored),
        "mean_response_tokens_when_correct": mean(len(t.response_ids) for t in correct),
        "truncated_rate": mean(t.is_truncated for t in scored),
        "calls_per_trajectory": mean(t.num_calls for t in scored),
        "calls_not_executed": sum(
            result is None for t in scored for turn in t.turns for _, result in turn.more_calls
        ),
        "entropy": mean(e for values in entropies for e in values),
    }
    return {prefix + key: value for key, value in found.items()}


def selection_metrics(selected: Sequence[Selected]) -> dict[str, int]:
    """Where every sampled trajectory went: sampled = kept + dropped, each for one named reason.

    Of the rejected groups, `groups_solved` have only successes; of the kept trajectories,
    `trajectories_masked` have no trained token (overlong filter).
    """
    groups = {"trained": 0, "rejected": 0, "too_small": 0}
    scored = dict(groups)
    for s in selected:
        groups[s.status] += 1
        scored[s.status] += sum(t.stop is not StopReason.VOID for t in s.group.trajectories)
    sampled = sum(len(s.group.trajectories) for s in selected)
    masked = sum(sample.num_trained_tokens == 0 for s in selected for sample in s.samples)
    kept = sum(len(s.samples) for s in selected)
    return {f"groups_{status}": count for status, count in groups.items()} | {
        "groups_solved": sum(s.is_solved for s in selected),
        "trajectories_sampled": sampled,
        "trajectories_kept": kept,
        "trajectories_masked": masked,
        "trajectories_not_selected": scored["trained"] - kept,
        "trajectories_rejected": scored["rejected"],
        "trajectories_too_small": scored["too_small"],
        "voided": sampled - sum(scored.values()),
    }


def _seconds(rollout: float, trajectories: Sequence[Trajectory], learner: float) -> dict:
    """Wall seconds of the parts of a step; tool seconds are summed over calls that overlap."""
    results = [result for t in trajectories for _, result in t.outcomes]
    tools = sum(r.seconds + r.queue_seconds for r in results)
    return {"seconds_rollout": rollout, "seconds_tools": tools, "seconds_learner": learner}


def check_run(config: cfg.Config, folder: runs.RunFolder, *, resume: bool) -> None:
    """Refuse a run that cannot go on in this folder, before the cold start.

    Raises:
        ConfigError: top-p below 1, which the learner's log-probs do not follow.
        runs.RunError: the folder holds another run, or one to be resumed.
    """
    if config.rollout.top_p < 1:
        raise cfg.ConfigError(
            f"rollout.top_p={config.rollout.top_p}: the learner's log-probs are of the "
            "full distribution; train with rollout.top_p=1 (§5.1)"
        )
    folder.check_configuration(cfg.to_json(config))
    folder.check_resumable(resume=resume)


class Trainer:
    """One run. `report` receives every metric row, `tick` every finished rollout."""

    def __init__(
        self,
        config: cfg.Config,
        folder: str | Path,
        *,
        arm: str,
        model_path: Path,
        command: str | None = None,
        report: Report | None = None,
        tick: Tick | None = None,
    ):
        self.config, self.arm = config, arm
        self.folder = runs.RunFolder(folder)
        self._model_path, self._command = Path(model_path), command or runs.command_line()
        self._report = report or (lambda row: None)
        self._tick, self._bench = tick, None

    def run(self, *, resume: bool = False) -> None:
        """Train to the last step, from the newest checkpoint if `resume`.

        Raises:
            runs.RunError: the folder is in use, or holds another run.
            TrainingError: too many void trajectories, or engine and learner disagree.
            ConfigError: top-p below 1, which the learner's log-probs do not follow.
        """
        check_run(self.config, self.folder, resume=resume)
        config_json = cfg.to_json(self.config)
        if resume and self.folder.is_done:
            return
        self.folder.open(
            config_json,
            command=self._command,
            scale=self.config.run.scale,
            resume=resume,
        )
        try:
            self._prepare()
            self._loop()
        finally:
            self._release()

    def _prepare(self) -> None:
        import torch

        torch.set_num_threads(1)  # steps are small: a second thread costs more than it gives
        config = self.config
        self._bench = Workbench(config, self._model_path, self._tick)
        self._learner = LocalLearner(
            self._bench.net,
            config.optimizer,
            config.loss,
            config.rollout.temperature,
            precision=Precision(DTYPES[config.model.dtype], config.model.gradient_checkpointing),
            max_tokens=config.rollout.max_response_tokens,
        )
        self._step = 0
        if state := self.folder.load_checkpoint():
            self._learner.load_state_dict(state)
            self._step = state["step"]
            self._bench.update_weights(self._step, self._learner.model.state_dict())
        self.folder.keep_rows_up_to(self._step)

    def _release(self) -> None:
        if self._bench is not None:
            self._bench.close()
        self.folder.close()

    def _loop(self) -> None:
        every = self.config.records.checkpoint_every
        if self._step == 0 and not self.folder.rows():
            nothing = rollout_metrics([]) | selection_metrics([]) | _seconds(0.0, [], 0.0)
            self._log({"step": 0, "stage": 1} | nothing | self._evaluate(0))
        while self._step < self.config.run.steps:
            self._step += 1
            row = self._train_step(self._step)
            last = self._step == self.config.run.steps
            if last or self._step % self.config.evaluation.every == 0:
                row |= self._evaluate(self._step)
            self._log(row)
            if last or self._step % every == 0:
                self.folder.save_checkpoint(self._step, self._learner.state_dict())
        sandbox = self._bench.sandbox
        self.folder.merge_parts()
        model.save(self._learner.model, self._model_path, self.folder.path / "model")
        self.folder.mark_done(
            {
                "steps": self.config.run.steps,
                "arm": self.arm,
                "loss": grpo.describe(self.config.loss),
                "sandbox_level": sandbox.level if sandbox is not None else "no sandbox",
            }
        )
        self.folder.remove_checkpoints()

    def _log(self, row: dict) -> None:
        row = {key: _plain(value) for key, value in row.items()}
        self.folder.append_row(row)
        self._report(row)

    def _rng(self, purpose: str, step: int, *more: int) -> np.random.Generator:
        return np.random.default_rng([self.config.run.seed, step, _PURPOSES[purpose], *more])

    def _prompts(self, step: int) -> list[Problem]:
        """The step's problems: one permutation per epoch, no repetition inside it."""
        count = self.config.rollout.prompts_per_step
        pool = self._bench.train_problems
        epoch, place = divmod(step - 1, len(pool) // count)
        order = self._rng("prompts", epoch).permutation(len(pool))
        return [pool[i] for i in order[place * count : (place + 1) * count]]

    def _train_step(self, step: int) -> dict:
        started = time.monotonic()
        selected, refills = self._collect(step)
        sampled = time.monotonic()
        trajectories = [t for s in selected for t in s.group.trajectories]
        samples = [sample for s in selected for sample in s.samples]
        update = self._update([s for s in samples if s.num_trained_tokens], step)
        learned = time.monotonic()
        self._record(step, selected)
        return (
            {"step": step, "stage": 1}
            | rollout_metrics(trajectories)
            | rollout_metrics([s.trajectory for s in samples], "kept_")
            | selection_metrics(selected)
            | {"refill_rounds": refills}
            | update
            | _seconds(sampled - started, trajectories, learned - sampled)
        )

    def _collect(self, step: int) -> tuple[list[Selected], int]:
        """The step's groups after selection, and the refill rounds it took.

        While groups are missing, as many new prompts are sampled, for at most
        `selection.refill_rounds` rounds (dynamic sampling, DAPO §3.2); by default none are, and the
        batch shrinks (§4.3).
        """
        config, rng = self.config, self._rng("selection", step)
        wanted, rounds = config.rollout.prompts_per_step, config.selection.refill_rounds
        problems, selected, refills = self._prompts(step), [], 0
        while True:
            key = f"train/{step}" + (f"/refill-{refills}" if refills else "")
            groups = self._bench.rollout(problems, config.rollout.samples_per_prompt, key)
            tokens = config.rollout.max_response_tokens
            selected += [
                select(g, config.selection, config.loss, rng, tokens)
                for g in groups
            ]
            self._check_voids([t for s in selected for t in s.group.trajectories])
            missing = wanted - sum(s.status == "trained" for s in selected)
            problems = self._more_prompts(step, refills + 1, missing, selected)
            if refills == rounds or not problems:
                break
            refills += 1
        if rounds and missing == wanted:
            raise TrainingError(_nothing_to_learn(step, refills, selected))
        return selected, refills

    def _more_prompts(
        self, step: int, number: int, count: int, selected: Sequence[Selected]
    ) -> list[Problem]:
        """`count` problems that this step has not sampled yet, drawn from the whole pool."""
        seen = {s.group.problem.id for s in selected}
        unseen = [p for p in self._bench.train_problems if p.id not in seen]
        order = self._rng("refill", step, number).permutation(len(unseen))
        return [unseen[i] for i in order[:count]]

    def _check_voids(self, trajectories: Sequence[Trajectory]) -> None:
        void = [t for t in trajectories if t.stop is StopReason.VOID]
        limit = self.config.selection.max_void_fraction
        if len(void) > limit * len(trajectories):
            causes = {r.stderr for t in void for _, r in t.outcomes if r.stderr} | {
                t.reason for t in void if t.reason
            }
            raise TrainingError(
                f"{len(void)} of {len(trajectories)} trajectories are void (limit {limit:.1%}): "
                f"the code environment or the verifier failed; first causes: {sorted(causes)[:3]}"
            )

    def _update(self, samples: list[Sample], step: int) -> dict:
        """Train on the kept samples and send the weights to the engine, if there are any."""
        if not samples:
            return {"trained_tokens": 0, "updates": 0}
        stats: UpdateStats = self._learner.update(samples, self._rng("minibatches", step))
        limit = _MAX_PARITY[self.config.model.dtype]
        if stats.parity > limit:
            raise TrainingError(
                f"step {step}: engine and learner log-probs differ by {stats.parity:.2e} nats "
                f"(limit {limit}); the two no longer run the same model"
            )
        self._bench.update_weights(step, self._learner.model.state_dict())
        return {
            "loss": stats.loss,
            "clip_fraction": stats.clip_fraction,
            "ratio_mean": stats.ratio_mean,
            "ratio_max": stats.ratio_max,
            "ratio_min": stats.ratio_min,
            "kl": stats.kl,
            "token_weight": stats.token_weight,
            "gradient_norm": stats.gradient_norm,
            "engine_learner_gap": stats.parity,
            "updates": stats.updates,
            "trained_tokens": stats.trained_tokens,
        }

    def _evaluate(self, step: int) -> dict:
        started = time.monotonic()
        rows = self._bench.evaluate(step)
        self.folder.write_part("eval", step, rows)
        return evaluate.summarize(rows) | {"seconds_evaluation": time.monotonic() - started}

    def _record(self, step: int, selected: Sequence[Selected]) -> None:
        records = self.config.records
        if step not in (1, self.config.run.steps) and step % records.trajectories_every:
            return
        rows = [
            runs.trajectory_row(
                t,
                question=s.group.problem.question,
                answer=s.group.problem.answer,
                step=step,
                arm=self.arm,
                penalty=float(s.penalties_N[i]),
                kept=bool(i in s.kept),
                roles=self._roles(t),
            )
            for s in selected[: records.trajectory_groups]
            for i, t in enumerate(s.group.trajectories)
        ]
        if rows:
            self.folder.write_part("trajectories", step, pd.DataFrame(rows))

    def _roles(self, trajectory: Trajectory) -> list[str]:
        actors, records = self._bench.actors, self.config.records
        return entropy.token_roles(
            trajectory,
            actors.tokenizer.decode,
            reflection_tokens=records.reflection_tokens,
            forking_fraction=records.forking_fraction,
            prefixes=(actors.chat.first_prefix, actors.chat.next_prefix),
        )


def _nothing_to_learn(step: int, refills: int, selected: Sequence[Selected]) -> str:
    """Why no group of a step can be trained on, and what to do."""
    counts = selection_metrics(selected)
    solved, too_small = counts["groups_solved"], counts["groups_too_small"]
    failed = counts["groups_rejected"] - solved
    return (
        f"step {step}: none of {len(selected)} groups in {1 + refills} rounds can be trained on: "
        f"{solved} solved by every rollout, {failed} by none, {too_small} lost to void rollouts; "
        "give other problems or more rollout.samples_per_prompt, or set selection.refill_rounds=0 "
        "to go on without an update"
    )


def _plain(value):
    """JSON has no NaN: a rate without a denominator is null."""
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value.item() if isinstance(value, np.generic) else value


def train_arm(
    config: cfg.Config,
    folder: str | Path,
    *,
    arm: str,
    cold_start_dir: str | Path,
    resume: bool = False,
    report: Report | None = None,
    command: str | None = None,
) -> Path:
    """Cold start (cached) and train: what the sweep's notebook calls. Returns the run folder."""
    check_run(config, runs.RunFolder(folder), resume=resume)
    path = initial_model(config, cold_start_dir)
    trainer = Trainer(config, folder, arm=arm, model_path=path, report=report, command=command)
    trainer.run(resume=resume)
    return trainer.folder.path


def initial_model(
    config: cfg.Config, cold_start_dir: str | Path, report: Report | None = None
) -> Path:
    """The checkpoint a run starts from: `model.source`, or the cold start, trained if need be."""
    if config.model.source != "cold_start":
        return Path(config.model.source)
    if (found := sft.cached(config, cold_start_dir)) is not None:
        return found
    own = config.sandbox  # the corpus is the same whatever the limits of a run
    where = cfg.SandboxLimits(workers=own.workers, address=own.address, token_file=own.token_file)
    with code_environment(where) as sandbox:
        return sft.cold_start(config, cold_start_dir, sandbox.run_many, progress=report)


def evaluate_checkpoint(config: cfg.Config, path: str | Path) -> pd.DataFrame:
    """Evaluation rows of a checkpoint under a configuration."""
    with Workbench(config, path) as bench:
        return bench.evaluate(0)
