"""Keys and values of many rows, and where new tokens go: shared by the torch engine's models."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


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

    @property
    def place_K(self) -> Tensor:
        """Which of `rows` each token belongs to, from 0."""
        return self.row_K - self.rows.start

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
    """Keys and values by layer, each `[rows, kv_heads, tokens, head_width]`."""

    def __init__(self, layers: list[tuple[Tensor, Tensor]]):
        self.layers = layers

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


class CachedModel(Protocol):
    """What the engine needs of a model."""

    cache: KvCache

    def store(self, ids_K: Tensor, places: Places) -> None:
        """Store the keys and values of K new tokens."""

    def logits(self, ids_K: Tensor, places: Places) -> Tensor:
        """The same for one new token per row; their logits `[K, vocabulary]`."""

    def load(self, tensors) -> None:
        """Copy new weights of the same shapes."""
