"""Qwen3's forward pass over a static KV cache: what the torch engine needs, and no more.

Weights are copied from a state dict with Hugging Face names; a test holds the result equal to
transformers' own. Rows are sequences; row r of the cache holds its keys and values.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen3 model."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    norm_eps: float
    rope_base: float

    @classmethod
    def of(cls, config) -> "Shape":
        """From a transformers `Qwen3Config`."""
        return cls(
            layers=config.num_hidden_layers,
            width=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_width=config.head_dim,
            norm_eps=config.rms_norm_eps,
            rope_base=float(config.rope_parameters["rope_theta"]),
        )


@dataclass(frozen=True)
class _Layer:
    norm: Tensor
    qkv: Tensor
    qk_norm: Tensor  # [heads + kv_heads, head_width]; the queries' part holds their scale too
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Places:
    """Where K new tokens belong: tokens of one row follow each other, rows are `rows`, in order.

    mask_R1SL: 0 where new token S of a row may look at its stored token L, else -inf.
    """

    row_K: Tensor
    step_K: Tensor  # which of its row's new tokens
    position_K: Tensor
    rows: slice
    mask_R1SL: Tensor

    @classmethod
    def of(cls, first_row: int, starts_R: np.ndarray, counts_R: np.ndarray, device) -> "Places":
        """Row first_row + r gets counts_R[r] tokens, from position starts_R[r] on."""
        row_K = np.repeat(np.arange(len(counts_R)), counts_R)
        step_K = np.arange(len(row_K)) - (np.cumsum(counts_R) - counts_R)[row_K]
        position_K = starts_R[row_K] + step_K
        last_RS = np.zeros((len(counts_R), int(counts_R.max())), np.int64)  # padding sees token 0
        last_RS[row_K, step_K] = position_K
        reach_L, last_RS = torch.arange(int(position_K.max()) + 1), torch.from_numpy(last_RS)
        mask_RSL = torch.zeros(1).where(reach_L <= last_RS[..., None], float("-inf"))
        tensors = (torch.from_numpy(x).to(device) for x in (row_K + first_row, step_K, position_K))
        rows = slice(first_row, first_row + len(counts_R))
        return cls(*tensors, rows, mask_RSL[:, None].to(device))


class KvCache:
    """Keys and values, `[layers, 2]` tensors of shape `[rows, kv_heads, tokens, head_width]`."""

    def __init__(self, shape: Shape, rows: int, max_tokens: int, device="cpu", dtype=torch.float32):
        size = (rows, shape.kv_heads, max_tokens, shape.head_width)
        self.layers = [
            tuple(torch.zeros(size, device=device, dtype=dtype) for _ in range(2))
            for _ in range(shape.layers)
        ]

    def read(self, row: int, length: int) -> list[Tensor]:
        """A copy of one row's first `length` tokens."""
        return [half[row, :, :length].clone() for layer in self.layers for half in layer]

    def write(self, row: int, saved: list[Tensor], length: int) -> None:
        halves = (half for layer in self.layers for half in layer)
        for half, tensor in zip(halves, saved, strict=True):
            half[row, :, :length] = tensor[:, :length]

    def move(self, source: int, target: int, length: int) -> None:
        for layer in self.layers:
            for half in layer:
                half[target, :, :length] = half[source, :, :length]


class Qwen3:
    """The model's arithmetic. `load` may be called again with new weights of the same shape."""

    def __init__(self, shape: Shape, tensors: Mapping[str, Tensor], max_tokens: int):
        self.shape = shape
        self.load(tensors)
        exponents = torch.arange(0, shape.head_width, 2).float() / shape.head_width
        angles = torch.outer(torch.arange(max_tokens).float(), shape.rope_base**-exponents)
        angles = torch.cat((angles, angles), -1).to(self.embedding.device)
        self._cos, self._sin = angles.cos(), angles.sin()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the weights, with the projections that read one input fused."""

        def get(name: str) -> Tensor:
            return tensors[name].detach()

        def fused(prefix: str, names: str) -> Tensor:
            return torch.cat([get(f"{prefix}.{name}_proj.weight") for name in names.split()])

        self.layers = []
        for number in range(self.shape.layers):
            at = f"model.layers.{number}"
            self.layers.append(
                _Layer(
                    norm=get(f"{at}.input_layernorm.weight").clone(),
                    qkv=fused(f"{at}.self_attn", "q k v"),
                    qk_norm=self._qk_norm(*(get(f"{at}.self_attn.{x}_norm.weight") for x in "qk")),
                    out=get(f"{at}.self_attn.o_proj.weight").clone(),
                    mlp_norm=get(f"{at}.post_attention_layernorm.weight").clone(),
                    gate_up=fused(f"{at}.mlp", "gate up"),
                    down=get(f"{at}.mlp.down_proj.weight").clone(),
                )
            )
        self.norm = get("model.norm.weight").clone()
        self.embedding = get("model.embed_tokens.weight").clone()
        self.head = get("lm_head.weight").clone() if "lm_head.weight" in tensors else self.embedding

    def _qk_norm(self, q_D: Tensor, k_D: Tensor) -> Tensor:
        shape = self.shape
        scaled_D = q_D * shape.head_width**-0.5
        return torch.cat((scaled_D.expand(shape.heads, -1), k_D.expand(shape.kv_heads, -1)))

    def forward(
        self, ids_K: Tensor, places: Places, cache: KvCache, *, store_only: bool = False
    ) -> Tensor | None:
        """Hidden states `[K, width]` of K new tokens; their keys and values are stored.

        `store_only` stops there: what the last layer does after that reaches no other token.
        """
        rotation = [table[places.position_K][:, None] for table in (self._cos, self._sin)]
        hidden_KW = self.embedding[ids_K]
        for layer, (keys, values) in zip(self.layers, cache.layers, strict=True):
            q_KHD = self._project(layer, hidden_KW, rotation, places, keys, values)
            if store_only and layer is self.layers[-1]:
                return None
            mixed_KHD = self._attend(q_KHD, keys[places.rows], values[places.rows], places)
            hidden_KW = self._combine(layer, hidden_KW, mixed_KHD)
        return self._norm(hidden_KW, self.norm)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return rms_norm(x, x.shape[-1:], weight, self.shape.norm_eps)

    def _project(self, layer, hidden_KW, rotation, places, keys, values) -> Tensor:
        """Store the tokens' keys and values; return their queries `[K, heads, head_width]`."""
        heads, kv_heads, width = self.shape.heads, self.shape.kv_heads, self.shape.head_width
        qkv = linear(self._norm(hidden_KW, layer.norm), layer.qkv).unflatten(-1, (-1, width))
        qk, v = qkv.split((heads + kv_heads, kv_heads), dim=1)
        qk = self._norm(qk, None) * layer.qk_norm
        q, k = _rotate(qk, *rotation).split((heads, kv_heads), dim=1)
        keys[places.row_K, :, places.position_K] = k
        values[places.row_K, :, places.position_K] = v
        return q

    def _combine(self, layer, hidden_KW: Tensor, mixed_KHD: Tensor) -> Tensor:
        hidden_KW = hidden_KW + linear(mixed_KHD.flatten(1), layer.out)
        gate, up = linear(self._norm(hidden_KW, layer.mlp_norm), layer.gate_up).chunk(2, -1)
        return hidden_KW + linear(silu(gate) * up, layer.down)

    def _attend(self, q_KHD: Tensor, keys: Tensor, values: Tensor, places: Places) -> Tensor:
        """Attention output `[K, heads, head_width]`; only here tokens are padded to rows."""
        shape = self.shape
        rows, _, steps, length = places.mask_R1SL.shape
        if steps == 1:
            q_RSHD = q_KHD[:, None]
        else:
            q_RSHD = q_KHD.new_zeros(rows, steps, *q_KHD.shape[1:])
            q_RSHD[places.row_K - places.rows.start, places.step_K] = q_KHD
        q = q_RSHD.transpose(1, 2).reshape(rows, shape.kv_heads, -1, shape.head_width)
        scores = q @ keys[:, :, :length].transpose(-1, -2)
        scores = scores.view(rows, shape.heads, steps, length) + places.mask_R1SL
        weights = scores.softmax(-1).view(rows, shape.kv_heads, -1, length)
        mixed = (weights @ values[:, :, :length]).view(rows, shape.heads, steps, -1)
        if steps == 1:
            return mixed[:, :, 0]
        return mixed[places.row_K - places.rows.start, :, places.step_K]

    def logits(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.head)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin
