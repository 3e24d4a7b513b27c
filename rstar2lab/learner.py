"""The policy on the learner's side: log-probs, micro-batches, the optimizer step.

The head runs only on trained tokens and in chunks, so no full logits tensor exists. Micro-batches
are cut by padded tokens and their gradients add up to that of the whole batch, because the loss is
told its denominator. Weights and optimizer are float32; the passes through the model may run in
bfloat16, and may recompute activations instead of keeping them.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from . import config as cfg
from . import entropy, grpo, logprobs
from .types import Trajectory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Sample:
    """A trajectory with its advantage: what one row of a batch needs; arrays are by response token.

    mask: the trained tokens; None means all sampled ones. old_logprobs: denominators of the ratio;
    None means the engine's. weights: of the policy term; reference_logprobs: for a KL term.
    """

    trajectory: Trajectory
    advantage: float
    mask: np.ndarray | None = None
    old_logprobs: np.ndarray | None = None
    weights: np.ndarray | None = None
    reference_logprobs: np.ndarray | None = None

    @property
    def trained_mask(self) -> np.ndarray:
        return self.trajectory.loss_mask if self.mask is None else self.mask

    @property
    def num_trained_tokens(self) -> int:
        return int(np.sum(self.trained_mask))


@dataclass(frozen=True)
class Batch:
    """Padded tensors of several trajectories. Axis T is over prompt and response tokens."""

    ids_BT: Tensor
    mask_BT: Tensor  # True on trained tokens
    old_logprobs_BT: Tensor
    advantages_B: Tensor
    engine_logprobs_BT: Tensor
    weights_BT: Tensor | None
    reference_logprobs_BT: Tensor | None


@dataclass(frozen=True)
class Precision:
    """How the model runs: precision of its passes, and whether activations are recomputed."""

    dtype: torch.dtype = torch.float32
    gradient_checkpointing: bool = False


@dataclass(frozen=True)
class UpdateStats:
    """What a step's updates did; ratios before clipping; `parity`: max |engine − learner|, nats.

    kl: the estimate per trained token; token_weight: mean of the policy term's weights.
    """

    loss: float
    clip_fraction: float
    ratio_mean: float
    ratio_max: float
    gradient_norm: float
    parity: float
    updates: int
    trained_tokens: int
    ratio_min: float = 1.0
    kl: float = 0.0
    token_weight: float = 1.0


def make_batch(samples: Sequence[Sample], device: str | torch.device = "cpu") -> Batch:
    """Right-padded tensors; old log-probs are the engine's, recorded at sampling, unless given."""
    starts = [len(s.trajectory.prompt_ids) for s in samples]
    ends = [at + len(s.trajectory.response_ids) for at, s in zip(starts, samples, strict=True)]
    spans = list(zip(starts, ends, strict=True))
    size = (len(samples), max(ends))

    def responses(arrays: Sequence[np.ndarray | None], dtype) -> Tensor | None:
        """[B, T], each array at its response's place, zeros elsewhere; None if one is missing."""
        if any(array is None for array in arrays):
            return None
        padded_BT = np.zeros(size, dtype)
        for row_T, array, (start, end) in zip(padded_BT, arrays, spans, strict=True):
            row_T[start:end] = array
        return torch.from_numpy(padded_BT).to(device)

    ids_BT = responses([s.trajectory.response_ids for s in samples], np.int64)
    for ids_T, sample, start in zip(ids_BT, samples, starts, strict=True):
        ids_T[:start] = torch.from_numpy(np.asarray(sample.trajectory.prompt_ids, np.int64))
    engine = [s.trajectory.logprobs for s in samples]
    old = [e if s.old_logprobs is None else s.old_logprobs
           for e, s in zip(engine, samples, strict=True)]  # fmt: skip
    advantages = np.asarray([s.advantage for s in samples], np.float32)
    return Batch(
        ids_BT=ids_BT,
        mask_BT=responses([s.trained_mask for s in samples], bool),
        old_logprobs_BT=responses(old, np.float32),
        advantages_B=torch.from_numpy(advantages).to(device),
        engine_logprobs_BT=responses(engine, np.float32),
        weights_BT=responses([s.weights for s in samples], np.float32),
        reference_logprobs_BT=responses([s.reference_logprobs for s in samples], np.float32),
    )


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


def sampled_logprobs(
    model, batch: Batch, temperature: float = 1.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Log-probs [B, T] of the trained tokens at the sampling temperature; 0 elsewhere.

    Token t is predicted from the tokens before it, tool tokens included: the loss mask is not an
    attention mask. `dtype`: precision of the passes; the result is float32.
    """
    return _statistics(model, batch, temperature, dtype, entropies=False)[0]


def sampled_entropies(
    model, batch: Batch, temperature: float = 1.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Entropies [B, T] of the distributions of the trained tokens, in nats; 0 elsewhere."""
    return _statistics(model, batch, temperature, dtype, entropies=True)[1]


def _statistics(
    model, batch: Batch, temperature: float, dtype: torch.dtype, entropies: bool
) -> tuple[Tensor, ...]:
    is_half = dtype != torch.float32
    with torch.autocast(batch.ids_BT.device.type, dtype if is_half else None, enabled=is_half):
        # No attention mask: padding is on the right, where no token of a causal model looks.
        hidden = model.base_model(input_ids=batch.ids_BT, use_cache=False).last_hidden_state
    predicts_BT = batch.mask_BT[:, 1:]
    found = logprobs.token_statistics(
        hidden[:, :-1][predicts_BT].to(dtype) if is_half else hidden[:, :-1][predicts_BT],
        model.get_output_embeddings().weight,
        batch.ids_BT[:, 1:][predicts_BT],
        temperature=temperature,
        entropies=entropies,
    )
    positions = torch.cat((torch.zeros_like(batch.mask_BT[:, :1]), predicts_BT), 1)
    zeros_BT = torch.zeros(batch.ids_BT.shape, dtype=torch.float32, device=positions.device)
    return tuple(zeros_BT.masked_scatter(positions, x.float()) for x in found if x is not None)


@torch.no_grad()
def check_head(model) -> None:
    """The log-probs here are those of a plain output layer: hidden states times one matrix.

    Raises:
        ConfigError: the model scales, caps or shifts its logits after that.
    """
    ids = torch.arange(4, device=next(model.parameters()).device)[None]
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    plain = hidden @ model.get_output_embeddings().weight.T
    logits = model(input_ids=ids, use_cache=False).logits
    if not torch.allclose(plain, logits, rtol=1e-4, atol=1e-5, equal_nan=True):
        raise cfg.ConfigError(
            f"{type(model).__name__} does more than one matrix product after its hidden states "
            "(a cap, a scale or a bias on the logits), which the learner does not compute; choose "
            "another model"
        )


class LocalLearner:
    """One model and one AdamW on this machine; `max_tokens`: the longest response (Dr. GRPO).

    Any causal language model of transformers with a plain output layer (`check_head`).
    With a KL term the reference is a copy of the model as it is given, before any state is loaded.
    """

    def __init__(
        self,
        model,
        optimizer: cfg.Optimizer,
        loss: cfg.Loss,
        temperature: float,
        *,
        precision: Precision = Precision(),
        max_tokens: int = 0,
    ):
        check_head(model)
        self.model = model.train(precision.gradient_checkpointing)  # it needs training mode
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0  # the engine samples without, and the ratio must start at 1
        self._settings, self._loss, self._temperature = optimizer, loss, temperature
        self._rule, self._max_tokens = grpo.rule_of(loss), max_tokens
        self._dtype = precision.dtype
        if precision.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self._reference = copy.deepcopy(model).eval() if loss.kl_coefficient else None
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

        Every minibatch's loss is a mean over its own trained tokens (or as `loss.name` divides).
        """
        samples = self._with_weights(self._with_logprobs(samples))
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
            ratio_min=min(o.ratio_min for o in outputs),
            kl=mean("kl"),
            token_weight=mean("weight_mean"),
        )

    def _with_logprobs(self, samples: Sequence[Sample]) -> list[Sample]:
        """Log-probs that the loss needs besides the engine's, under the weights before the update.

        With an importance cap the ratio starts from the learner's own; with a KL term the
        reference's are added. Without either nothing is computed.
        """
        samples = list(samples)
        if self._loss.importance_cap is not None:
            own = self._responses(self.model, samples, sampled_logprobs)
            samples = [replace(s, old_logprobs=x) for s, x in zip(samples, own, strict=True)]
        if self._reference is not None:
            its = self._responses(self._reference, samples, sampled_logprobs)
            samples = [replace(s, reference_logprobs=x) for s, x in zip(samples, its, strict=True)]
        return samples

    def _with_weights(self, samples: list[Sample]) -> list[Sample]:
        """Weights of the policy term: importance correction times entropy mask, if either is on."""
        if self._loss.importance_cap is None and self._loss.entropy_mask == "none":
            return samples
        weights = [s.trained_mask.astype(np.float32) for s in samples]
        if self._loss.importance_cap is not None:
            weights = [self._importance(s) for s in samples]
        if self._loss.entropy_mask != "none":
            masks = entropy.MASKS[self._loss.entropy_mask](
                self._entropies(samples),
                [s.trained_mask for s in samples],
                self._loss.entropy_fraction,
            )
            weights = [w * mask for w, mask in zip(weights, masks, strict=True)]
        return [replace(s, weights=w) for s, w in zip(samples, weights, strict=True)]

    def _importance(self, sample: Sample) -> np.ndarray:
        tensors = (sample.old_logprobs, sample.trajectory.logprobs, sample.trained_mask)
        cap = self._loss.importance_cap
        return grpo.truncated_importance(*map(torch.as_tensor, tensors), cap).numpy()

    def _entropies(self, samples: list[Sample]) -> list[np.ndarray]:
        """The engine's, or the learner's own where an engine gives none."""
        if all(s.trajectory.entropies is not None for s in samples):
            return [s.trajectory.entropies for s in samples]
        return self._responses(self.model, samples, sampled_entropies)

    def _responses(self, model, samples: list[Sample], compute) -> list[np.ndarray]:
        """One array per sample over its response tokens, computed without gradient."""
        found: dict[int, np.ndarray] = {}
        for part in microbatches(samples, self._loss.tokens_per_microbatch):
            batch = make_batch(part, self._device)
            with torch.no_grad():
                values_BT = compute(model, batch, self._temperature, self._dtype).cpu().numpy()
            for sample, values_T in zip(part, values_BT, strict=True):
                start = len(sample.trajectory.prompt_ids)
                found[id(sample)] = values_T[start : start + len(sample.trajectory.response_ids)]
        return [found[id(sample)] for sample in samples]

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _accumulate(self, samples, on_microbatch) -> tuple[list[grpo.LossOutput], float]:
        """Gradients of one minibatch; also the largest gap between engine and learner log-probs."""
        size = grpo.UpdateSize(
            num_tokens=sum(s.num_trained_tokens for s in samples),
            num_sequences=sum(s.num_trained_tokens > 0 for s in samples),
            max_tokens=self._max_tokens,
        )
        outputs, gap = [], 0.0
        for part in microbatches(samples, self._loss.tokens_per_microbatch):
            batch = make_batch(part, self._device)
            logprobs_BT = sampled_logprobs(self.model, batch, self._temperature, self._dtype)
            output = grpo.policy_loss(
                logprobs_BT,
                batch.old_logprobs_BT,
                batch.advantages_B,
                batch.mask_BT,
                self._rule,
                size,
                weights_BT=batch.weights_BT,
                reference_logprobs_BT=batch.reference_logprobs_BT,
            )
            output.loss.backward()
            difference = (logprobs_BT.detach() - batch.engine_logprobs_BT)[batch.mask_BT].abs()
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
