"""Any transformers causal language model behind the torch engine, by its own forward pass.

The model gets a cache of ours, in which every row has its own length, and a mask that says which
stored tokens each new one may see. Whether an architecture works this way is tried when it is
loaded: cached logits must equal those of its own pass over the whole text.
"""

import inspect
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache, CacheLayerMixin

from . import EngineError
from .kv import KvCache, Places

_TRIAL_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3}  # nats of a log-prob


class _RowLayer(CacheLayerMixin):
    """One layer's keys and values; new ones go where the owner's `places` say."""

    def __init__(self, owner: "CausalLM"):
        super().__init__()
        self._owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, max_tokens = self._owner.size
        self.keys, self.values = (
            x.new_zeros(rows, x.shape[1], max_tokens, x.shape[3])
            for x in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_, **__) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        places = self._owner.places
        place_K = places.place_K
        for stored, new in ((self.keys, key_states), (self.values, value_states)):
            stored[places.row_K, :, places.position_K] = new[place_K, :, places.step_K]
        length = places.mask_R1SL.shape[-1]
        return self.keys[places.rows, :, :length], self.values[places.rows, :, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._owner.places.mask_R1SL.shape[-1], 0

    def get_seq_length(self) -> int:
        return 0  # rows differ; positions and mask are given to the model

    def get_max_length(self) -> int:
        return self._owner.size[1]


class CausalLM:
    """`rows` sequences of up to `max_tokens` tokens on one model.

    Raises:
        EngineError: the architecture cannot be decoded row by row, or not to this length.
    """

    def __init__(self, config, tensors: Mapping[str, Tensor], rows: int, max_tokens: int):
        self.size, self.places = (rows, max_tokens), None
        first = next(iter(tensors.values()))
        net = AutoModelForCausalLM.from_config(config, dtype=first.dtype)
        _check_architecture(net, max_tokens)
        self._net = net.to(first.device).eval().requires_grad_(False)
        self._base = net.base_model
        self.load(tensors)
        layers = [_RowLayer(self) for _ in range(config.num_hidden_layers)]
        self._rows = Cache(layers=layers)
        self._try_out(first.dtype)
        self.cache = KvCache([(layer.keys, layer.values) for layer in layers])

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the weights.

        Raises:
            EngineError: a weight is missing, or there is one too many.
        """
        found = self._net.load_state_dict(dict(tensors), strict=False)
        self._net.tie_weights()
        tied = self._net.all_tied_weights_keys
        missing = [name for name in found.missing_keys if name not in tied]
        if missing or found.unexpected_keys:
            raise EngineError(
                f"the weights do not fit {type(self._net).__name__}: missing {missing[:3]}, "
                f"unexpected {found.unexpected_keys[:3]}"
            )

    def store(self, ids_K: Tensor, places: Places) -> None:
        """Store the keys and values of K new tokens."""
        self._base(**self._inputs(ids_K, places))

    def logits(self, ids_K: Tensor, places: Places) -> Tensor:
        """Logits `[K, vocabulary]` of one new token per row, which is stored."""
        return self._net(**self._inputs(ids_K, places)).logits[:, 0]

    def _inputs(self, ids_K: Tensor, places: Places) -> dict:
        """Packed tokens as padded rows; what is padded is neither stored nor read."""
        self.places = places
        rows, _, steps, _ = places.mask_R1SL.shape
        ids_RS, positions_RS = ids_K.new_zeros(2, rows, steps)
        ids_RS[places.place_K, places.step_K] = ids_K
        positions_RS[places.place_K, places.step_K] = places.position_K
        return {
            "input_ids": ids_RS,
            "position_ids": positions_RS,
            "attention_mask": places.mask_R1SL.to(self._net.dtype),
            "past_key_values": self._rows,
            "use_cache": True,
        }

    @torch.no_grad()
    def _try_out(self, dtype: torch.dtype) -> None:
        """Two rows of different lengths in three steps, against the model's own full pass."""
        device, rng = self._net.device, np.random.default_rng(0)
        lengths = np.minimum((6, 4), self.size[1] - 1)[: self.size[0]]
        ids_RT = torch.from_numpy(rng.integers(0, self._net.config.vocab_size, (len(lengths), 7)))
        ids_RT, largest = ids_RT.to(device), 0.0
        self.store(
            torch.cat([ids_RT[r, : n - 2] for r, n in enumerate(lengths)]),
            Places.of(0, np.zeros_like(lengths), lengths - 2, device),
        )
        for at in (lengths - 2, lengths - 1):
            places = Places.of(0, at, np.ones_like(at), device)
            found_RV = self.logits(ids_RT[range(len(at)), at], places)
            for row, place in enumerate(at):
                full = self._net(ids_RT[row : row + 1, : place + 1], use_cache=False).logits
                gap = found_RV[row].float().log_softmax(-1) - full[0, -1].float().log_softmax(-1)
                largest = max(largest, float(gap.abs().nan_to_num(nan=np.inf).max()))
        if largest > _TRIAL_TOLERANCE.get(dtype, _TRIAL_TOLERANCE[torch.bfloat16]):
            raise EngineError(
                f"{type(self._net).__name__} decoded row by row gives other log-probs than its own "
                f"full pass (largest difference {largest:.2g} nats): this architecture needs "
                "another engine, such as vLLM"
            )


def _check_architecture(net, max_tokens: int) -> None:
    name, config = type(net).__name__, net.config
    accepted = inspect.signature(net.forward).parameters
    needed = {"position_ids", "attention_mask", "past_key_values"}
    if getattr(net, "_is_stateful", False) or not needed <= accepted.keys():
        raise EngineError(
            f"{name} keeps a state that is not keys and values by position, or places tokens "
            "itself; the torch engine serves attention models; use vLLM for this one"
        )
    longest = getattr(config, "max_position_embeddings", None) or max_tokens
    types = getattr(config, "layer_types", None) or ["sliding_attention"]
    window = getattr(config, "sliding_window", None)
    if window and "sliding_attention" in types:
        longest = min(longest, window)
    if max_tokens > longest:
        raise EngineError(
            f"model.max_tokens={max_tokens}, but {name} sees {longest} tokens (its positions, or "
            "its attention window); lower max_tokens"
        )
