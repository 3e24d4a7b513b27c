"""Muon: momentum, orthogonalized, for hidden matrices. In fp32, which a CPU runs at full speed.

After Jordan et al. (2024). `torch.optim.Muon` iterates in bf16, emulated and slow on most CPUs.
"""

import torch
from torch import Tensor


def orthogonalize(matrix: Tensor, steps: int = 5) -> Tensor:
    """The nearest semi-orthogonal matrix, roughly: singular values end between about 0.7 and 1.2.

    Newton–Schulz iteration with the quintic coefficients (3.4445, −4.7750, 2.0315).
    """
    x = matrix / (matrix.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.mT
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.7750 * gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum whose matrix updates are orthogonalized; only for 2-D parameters."""

    def __init__(self, params, lr: float, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].mul_(group["momentum"]).add_(parameter.grad)
                update = parameter.grad.add(state["momentum"], alpha=group["momentum"])
                scale = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
                parameter.add_(orthogonalize(update), alpha=-group["lr"] * scale)
