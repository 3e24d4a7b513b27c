"""Qwen3's forward pass over a static KV cache: what the torch engine needs, and no more.

Weights are copied from a state dict with Hugging Face names; a test holds the result equal to
transformers' own. Rows are sequences; row r of the cache holds its keys and values.
"""

from collections.abc import Mapping
from dataclasses import dataclass

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
    q_norm: Tensor
    k_norm: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


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
                    q_norm=get(f"{at}.self_attn.q_norm.weight").clone(),
                    k_norm=get(f"{at}.self_attn.k_norm.weight").clone(),
                    out=get(f"{at}.self_attn.o_proj.weight").clone(),
                    mlp_norm=get(f"{at}.post_attention_layernorm.weight").clone(),
                    gate_up=fused(f"{at}.mlp", "gate up"),
                    down=get(f"{at}.mlp.down_proj.weight").clone(),
                )
            )
        self.norm = get("model.norm.weight").clone()
        self.embedding = get("model.embed_tokens.weight").clone()
        self.head = get("lm_head.weight").clone() if "lm_head.weight" in tensors else self.embedding

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), -1)
        return x * cos + turned * sin

    def forward(
        self,
        ids_RS: Tensor,
        positions_RS: Tensor,
        valid_RS: Tensor | None,
        cache: KvCache,
        first_row: int,
    ) -> Tensor:
        """Hidden states `[R, S, width]` of rows `first_row …`; their keys and values are stored.

        Padded tokens (`valid_RS` False) leave no trace in the cache.
        """
        rows, steps = ids_RS.shape
        window = slice(first_row, first_row + rows)
        length = int(positions_RS.max()) + 1
        reach = torch.arange(length, device=ids_RS.device)
        mask = torch.zeros(
            (rows, 1, steps, length), dtype=self.embedding.dtype, device=ids_RS.device
        )
        mask.masked_fill_(reach > positions_RS[:, None, :, None], float("-inf"))
        cos, sin = self._cos[positions_RS][:, None], self._sin[positions_RS][:, None]
        if valid_RS is None:
            index = (torch.arange(rows, device=ids_RS.device)[:, None], positions_RS)
        else:
            row, step = valid_RS.nonzero(as_tuple=True)
            index = (row, positions_RS[row, step])
        hidden = self.embedding[ids_RS]
        for layer, (keys, values) in zip(self.layers, cache.layers, strict=True):
            hidden = self._layer(
                layer, hidden, (cos, sin), mask, keys[window], values[window], index, valid_RS
            )
        return rms_norm(hidden, (self.shape.width,), self.norm, self.shape.norm_eps)

    def _layer(self, layer, hidden, rotation, mask, keys, values, index, valid_RS):
        shape = self.shape
        rows, steps, _ = hidden.shape
        groups = shape.heads // shape.kv_heads
        x = rms_norm(hidden, (shape.width,), layer.norm, shape.norm_eps)
        qkv = linear(x, layer.qkv).view(rows, steps, -1, shape.head_width)
        q, k, v = qkv.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=2)
        q = rms_norm(q, (shape.head_width,), layer.q_norm, shape.norm_eps).transpose(1, 2)
        k = rms_norm(k, (shape.head_width,), layer.k_norm, shape.norm_eps).transpose(1, 2)
        q, k = self._rotate(q, *rotation), self._rotate(k, *rotation).transpose(1, 2)
        stored = (k, v) if valid_RS is None else (k[valid_RS], v[valid_RS])
        keys[index[0], :, index[1]] = stored[0]
        values[index[0], :, index[1]] = stored[1]
        length = mask.shape[-1]
        q = q.reshape(rows, shape.kv_heads, groups * steps, shape.head_width)
        scores = (q * shape.head_width**-0.5) @ keys[:, :, :length].transpose(-1, -2)
        scores = scores + mask.repeat(1, 1, groups, 1)
        mixed = scores.softmax(-1) @ values[:, :, :length]
        mixed = mixed.view(rows, shape.heads, steps, shape.head_width).transpose(1, 2)
        hidden = hidden + linear(mixed.reshape(rows, steps, -1), layer.out)
        x = rms_norm(hidden, (shape.width,), layer.mlp_norm, shape.norm_eps)
        gate, up = linear(x, layer.gate_up).chunk(2, -1)
        return hidden + linear(silu(gate) * up, layer.down)

    def logits(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.head)
