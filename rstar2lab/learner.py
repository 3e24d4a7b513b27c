"""The policy on the learner's side: log-probs, micro-batches, the optimizer step.

The head runs only on trained tokens, so no full logits tensor exists. Micro-batches are cut by
padded tokens and their gradients add up to that of the whole batch, because the loss is told its
denominator.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from . import config as cfg
from . import grpo
from .types import Trajectory


@dataclass(frozen=True)
class Sample:
    """A trajectory with its advantage: what one row of a batch needs."""

    trajectory: Trajectory
    advantage: float


@dataclass(frozen=True)
class Batch:
    """Padded tensors of several trajectories. Axis T is over prompt and response tokens."""

    ids_BT: Tensor
    attention_BT: Tensor
    mask_BT: Tensor  # True where the token was sampled
    old_logprobs_BT: Tensor
    advantages_B: Tensor


@dataclass(frozen=True)
class UpdateStats:
    """What a step's updates did; ratios before clipping; `parity`: max |engine − learner|, nats."""

    loss: float
    clip_fraction: float
    ratio_mean: float
    ratio_max: float
    gradient_norm: float
    parity: float
    updates: int
    trained_tokens: int


def make_batch(samples: Sequence[Sample]) -> Batch:
    """Right-padded tensors; old log-probs are the engine's, recorded at sampling."""
    rows = [(s.trajectory, len(s.trajectory.prompt_ids)) for s in samples]
    width = max(start + len(t.response_ids) for t, start in rows)
    size = (len(rows), width)
    ids, attention = np.zeros(size, np.int64), np.zeros(size, bool)
    mask, old = np.zeros(size, bool), np.zeros(size, np.float32)
    for row, (t, start) in enumerate(rows):
        end = start + len(t.response_ids)
        ids[row, :start], ids[row, start:end] = t.prompt_ids, t.response_ids
        attention[row, :end] = True
        mask[row, start:end], old[row, start:end] = t.loss_mask, t.logprobs
    advantages = np.asarray([s.advantage for s in samples], np.float32)
    return Batch(*(torch.from_numpy(a) for a in (ids, attention, mask, old, advantages)))


def microbatches(samples: Sequence[Sample], max_tokens: int) -> list[list[Sample]]:
    """Samples by length, cut so that rows × longest ≤ max_tokens (at least one row each)."""

    def length(sample: Sample) -> int:
        return len(sample.trajectory.prompt_ids) + len(sample.trajectory.response_ids)

    batches: list[list[Sample]] = []
    for sample in sorted(samples, key=length):
        if batches and (len(batches[-1]) + 1) * length(sample) <= max_tokens:
            batches[-1].append(sample)
        else:
            batches.append([sample])
    return batches


def sampled_logprobs(model, batch: Batch, temperature: float = 1.0) -> Tensor:
    """Log-probs [B, T] of the sampled tokens at the sampling temperature; 0 elsewhere.

    Token t is predicted from the tokens before it, tool tokens included: the loss mask is not an
    attention mask.
    """
    hidden = model.model(
        input_ids=batch.ids_BT, attention_mask=batch.attention_BT, use_cache=False
    ).last_hidden_state
    predicts_BT = batch.mask_BT[:, 1:]
    logits_KV = model.lm_head(hidden[:, :-1][predicts_BT]).float() / temperature
    targets_K = batch.ids_BT[:, 1:][predicts_BT]
    chosen_K = logits_KV.gather(1, targets_K[:, None])[:, 0] - logits_KV.logsumexp(-1)
    logprobs_BT = torch.zeros(batch.ids_BT.shape, dtype=torch.float32)
    positions = torch.cat((torch.zeros_like(batch.mask_BT[:, :1]), predicts_BT), 1)
    return logprobs_BT.masked_scatter(positions, chosen_K)


class LocalLearner:
    """One model and one AdamW on this machine."""

    def __init__(self, model, optimizer: cfg.Optimizer, loss: cfg.Loss, temperature: float):
        self.model = model.train()
        self._settings, self._loss, self._temperature = optimizer, loss, temperature
        self._optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=optimizer.lr,
            betas=(optimizer.beta1, optimizer.beta2),
            weight_decay=optimizer.weight_decay,
        )
        self._updates = 0

    def state_dict(self) -> dict:
        """Everything a resumed run needs, weights included."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "updates": self._updates,
        }

    def load_state_dict(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._updates = state["updates"]

    def update(
        self,
        samples: Sequence[Sample],
        rng: np.random.Generator,
        on_microbatch: Callable[[], None] | None = None,
    ) -> UpdateStats:
        """`loss.minibatches` optimizer steps over the samples, split at random (Eq 6).

        Every minibatch's loss is a mean over its own trained tokens.
        """
        order = rng.permutation(len(samples))
        parts = [p for p in np.array_split(order, self._loss.minibatches) if len(p)]
        outputs, norms, losses, parity = [], [], [], 0.0
        for number, part in enumerate(parts):
            chosen = [samples[i] for i in part]
            found, gap = self._accumulate(chosen, on_microbatch)
            parity = gap if number == 0 else parity
            outputs += found
            losses.append(sum(float(o.loss.detach()) for o in found))
            norms.append(self._step())
        tokens = sum(o.num_tokens_here for o in outputs)

        def mean(name: str) -> float:
            return sum(getattr(o, name) * o.num_tokens_here for o in outputs) / max(tokens, 1)

        return UpdateStats(
            loss=float(np.mean(losses)),
            clip_fraction=mean("clip_fraction"),
            ratio_mean=mean("ratio_mean"),
            ratio_max=max(o.ratio_max for o in outputs),
            gradient_norm=float(np.mean(norms)),
            parity=parity,
            updates=len(parts),
            trained_tokens=tokens,
        )

    def _accumulate(self, samples, on_microbatch) -> tuple[list[grpo.LossOutput], float]:
        """Gradients of one minibatch; also the largest gap between engine and learner log-probs."""
        num_tokens = sum(s.trajectory.num_trained_tokens for s in samples)
        outputs, gap = [], 0.0
        for part in microbatches(samples, self._loss.tokens_per_microbatch):
            batch = make_batch(part)
            logprobs_BT = sampled_logprobs(self.model, batch, self._temperature)
            output = grpo.grpo_loss(
                logprobs_BT,
                batch.old_logprobs_BT,
                batch.advantages_B,
                batch.mask_BT,
                clip_low=self._loss.clip_low,
                clip_high=self._loss.clip_high,
                num_tokens=num_tokens,
            )
            output.loss.backward()
            difference = (logprobs_BT.detach() - batch.old_logprobs_BT)[batch.mask_BT].abs()
            difference = difference.nan_to_num(nan=float("inf"))  # NaN would pass every limit
            gap = max(gap, float(difference.max()) if len(difference) else 0.0)
            outputs.append(output)
            if on_microbatch is not None:
                on_microbatch()
        return outputs, gap

    def _step(self) -> float:
        self._updates += 1
        warmup = min(1.0, self._updates / max(1, self._settings.warmup_steps))
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.lr * warmup
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._settings.clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(norm)
