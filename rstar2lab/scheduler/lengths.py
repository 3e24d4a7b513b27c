"""How long will a trajectory become? The survival curve of response lengths (Kaplan, Meier 1958).

A trajectory that was cut or is still running is censored: it says only that it is longer. Plain
means over what has finished are biased low, for the short ones finish first.
"""

from collections.abc import Iterable
from typing import Protocol

import numpy as np


class LengthPrior(Protocol):
    """What a policy may know of lengths before they are seen, in bins of `bin_tokens`."""

    bin_tokens: int

    def survival(self, age, horizon, cls: int = 0) -> np.ndarray:
        """P(length > age + horizon | length > age), ages and horizons broadcast."""
        ...

    def observe(self, total: int, group: str, censored: bool) -> None:
        """A trajectory has ended at `total` response tokens. censored: cut, cancelled, failed."""
        ...


def bin_width(longest: int) -> int:
    """Tokens of a bin for responses of at most `longest`: a 32nd, never above 256."""
    return max(1, min(256, longest // 32))


class KaplanMeier:
    """The survival curve in bins of `bin_tokens`, S(bin) = Π (1 - ended / at risk).

    What is beyond the longest observation, or was never observed, survives for certain: without
    data a policy plans for the worst. `observe` refines the curve.
    """

    def __init__(self, lengths: Iterable[int] = (), censored: Iterable[bool] = (), bin_tokens=256):
        self.bin_tokens = bin_tokens
        self._ended, self._cut = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self._curve: np.ndarray | None = None
        lengths = np.asarray(list(lengths), np.int64)
        flags = np.asarray(list(censored), bool)
        if len(flags) not in (0, len(lengths)):
            raise ValueError(f"expected a flag per length: {len(lengths)} and {len(flags)}")
        flags = flags if len(flags) else np.zeros(len(lengths), bool)
        if len(lengths):
            bins = lengths // bin_tokens
            self._ended = np.bincount(bins[~flags], minlength=bins.max() + 1)
            self._cut = np.bincount(bins[flags], minlength=bins.max() + 1)

    def observe(self, total: int, group: str, censored: bool) -> None:
        place = total // self.bin_tokens
        if place >= len(self._ended):
            more = place + 1 - len(self._ended)
            self._ended, self._cut = (np.pad(x, (0, more)) for x in (self._ended, self._cut))
        (self._cut if censored else self._ended)[place] += 1
        self._curve = None

    def curve(self, bins: int) -> np.ndarray:
        """S at the start of bins 0 … bins - 1; S[0] = 1."""
        if self._curve is None:
            at_risk = (self._ended + self._cut)[::-1].cumsum()[::-1]
            factors = 1 - self._ended / np.maximum(at_risk, 1)
            self._curve = np.concatenate([[1.0], factors.cumprod()])
        padded = np.pad(self._curve, (0, max(0, bins - len(self._curve))), mode="edge")
        return padded[:bins]

    def survival(self, age, horizon, cls: int = 0) -> np.ndarray:
        """Lengths count in whole bins; a curve at zero is taken as certain to go on."""
        now = np.asarray(age) // self.bin_tokens
        then = (np.asarray(age) + np.asarray(horizon)) // self.bin_tokens
        curve = self.curve(int(np.max(then)) + 1)
        base = curve[now]
        return np.where(base > 0, curve[then] / np.where(base > 0, base, 1), 1.0)
