"""Qwen3's forward pass over a static KV cache: the torch engine's fast path.

Weights are copied from a state dict with Hugging Face names; a test holds the result equal to
transformers' own. Other models, and Qwen3 with other settings than ours, take `causal`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from .kv import KvCache, Places


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


class Qwen3:
    """The model's arithmetic. `load` may be called again with new weights of the same shape."""

    def __init__(self, config, tensors: Mapping[str, Tensor], rows: int, max_tokens: int):
        self.shape = shape = Shape.of(config)
        self.load(tensors)
        size = (rows, shape.kv_heads, max_tokens, shape.head_width)
        self.cache = KvCache([
            (self.embedding.new_zeros(size), self.embedding.new_zeros(size)) for _ in self.layers
        ])  # fmt: skip
        exponents = torch.arange(0, shape.head_width, 2).float() / shape.head_width
        angles = torch.outer(torch.arange(max_tokens).float(), shape.rope_base**-exponents)
        angles = torch.cat((angles, angles), -1).to(self.embedding.device)
        self._cos, self._sin = angles.cos(), angles.sin()

    @staticmethod
    def fits(config) -> bool:
        """Whether this arithmetic is the configuration's: plain RoPE, no bias, no window."""
        return (
            config.model_type == "qwen3"
            and config.rope_parameters.get("rope_type", "default") == "default"
            and config.hidden_act == "silu"
            and not config.attention_bias
            and not getattr(config, "sliding_window", None)
        )

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

    def store(self, ids_K: Tensor, places: Places) -> None:
        """Store keys and values. What the last layer does after that reaches no other token."""
        self._last_queries(ids_K, places)

    def logits(self, ids_K: Tensor, places: Places) -> Tensor:
        """Logits `[K, vocabulary]`; the tokens' keys and values are stored."""
        hidden_KW, q_KHD = self._last_queries(ids_K, places)
        hidden_KW = self._rest_of_layer(-1, hidden_KW, q_KHD, places)
        return linear(self._norm(hidden_KW, self.norm), self.head)

    def _last_queries(self, ids_K: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """All layers up to the last one's attention: hidden states and queries."""
        rotation = [table[places.position_K][:, None] for table in (self._cos, self._sin)]
        hidden_KW = self.embedding[ids_K]
        for number in range(self.shape.layers - 1):
            q_KHD = self._project(number, hidden_KW, rotation, places)
            hidden_KW = self._rest_of_layer(number, hidden_KW, q_KHD, places)
        return hidden_KW, self._project(-1, hidden_KW, rotation, places)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return rms_norm(x, x.shape[-1:], weight, self.shape.norm_eps)

    def _project(self, number: int, hidden_KW: Tensor, rotation, places: Places) -> Tensor:
        """Store the tokens' keys and values; return their queries `[K, heads, head_width]`."""
        layer, (keys, values) = self.layers[number], self.cache.layers[number]
        heads, kv_heads, width = self.shape.heads, self.shape.kv_heads, self.shape.head_width
        qkv = linear(self._norm(hidden_KW, layer.norm), layer.qkv).unflatten(-1, (-1, width))
        qk, v = qkv.split((heads + kv_heads, kv_heads), dim=1)
        qk = self._norm(qk, None) * layer.qk_norm
        q, k = _rotate(qk, *rotation).split((heads, kv_heads), dim=1)
        keys[places.row_K, :, places.position_K] = k
        values[places.row_K, :, places.position_K] = v
        return q

    def _rest_of_layer(self, number: int, hidden_KW, q_KHD, places: Places) -> Tensor:
        layer = self.layers[number]
        keys, values = (half[places.rows] for half in self.cache.layers[number])
        mixed_KHD = self._attend(q_KHD, keys, values, places)
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
            q_RSHD[places.place_K, places.step_K] = q_KHD
        q = q_RSHD.transpose(1, 2).reshape(rows, shape.kv_heads, -1, shape.head_width)
        scores = q @ keys[:, :, :length].transpose(-1, -2)
        scores = scores.view(rows, shape.heads, steps, length) + places.mask_R1SL
        weights = scores.softmax(-1).view(rows, shape.kv_heads, -1, length)
        mixed = (weights @ values[:, :, :length]).view(rows, shape.heads, steps, -1)
        if steps == 1:
            return mixed[:, :, 0]
        return mixed[places.place_K, :, places.step_K]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin
