r"""Muon+ in PyTorch, to be pasted into a training script that may import no optimizer.

For each weight W of shape (out, in) with gradient G:

    M = mu M + (1 - mu) G
    O = normalize(polar factor of mu M + (1 - mu) G)
    W = W - lr (sqrt(max(1, out / in)) O + weight_decay W)

`normalize` divides each column (input feature), then each row (output unit), by its Euclidean
norm, and restores the Frobenius norm that the polar factor had, so that a rate found for Muon stays
right.

Source: Zhang et al., Muon+, arXiv:2602.21545. Needs PyTorch alone.
"""

import torch
import torch.distributed as dist

# Converges to the exact polar factor: 1 is a fixed point of 2 s - 1.5 s^3 + 0.5 s^5, with slope 0.
COEFFICIENTS = (2.0, -1.5, 0.5)
STEPS = 12
NORM_EPS = 1e-8  # inside the root of the row and column norms


def polar_factor(x: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Returns U V^T for x = U S V^T by Newton-Schulz, with products in `dtype`."""
    tall = x.size(-2) > x.size(-1)
    x = x.to(dtype)
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def normalize(x: torch.Tensor) -> torch.Tensor:
    """Divides columns, then rows, by their norms; the Frobenius norm stays."""
    y = x.float()
    before = y.norm(dim=(-2, -1), keepdim=True)
    for dim in (-2, -1):
        y = y * torch.rsqrt(y.square().sum(dim=dim, keepdim=True) + NORM_EPS)
    return y * (before / y.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-30))


def muonplus_update(
    grad: torch.Tensor,
    momentum: torch.Tensor,
    mu: float = 0.95,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Returns the update before rate and decay; advances `momentum` in place."""
    momentum.lerp_(grad, 1 - mu)
    o = normalize(polar_factor(torch.lerp(grad, momentum, mu), dtype))
    return max(1.0, grad.size(-2) / grad.size(-1)) ** 0.5 * o


class MuonPlus(torch.optim.Optimizer):
    """Muon+ for weights of two axes, with the arguments of the script's `Muon`.

    With several processes each computes every n-th update and sends the new weight to the others.
    """

    def __init__(
        self,
        params: list[torch.nn.Parameter],
        lr: float = 0.025,
        weight_decay: float = 0.05,
        mu: float = 0.95,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Sets one rate, decay and momentum for all of `params`; `dtype` is that of products."""
        largest_first = sorted(params, key=lambda p: p.numel(), reverse=True)
        super().__init__(largest_first, {"lr": lr, "weight_decay": weight_decay, "mu": mu})
        self.dtype = dtype

    @torch.no_grad()
    def step(self) -> None:
        """Updates the weights that this process owns, then exchanges all of them."""
        several = dist.is_available() and dist.is_initialized()
        rank, size = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                if i % size == rank:
                    state = self.state[p]
                    if not state:
                        state["momentum"] = torch.zeros_like(p)
                    update = muonplus_update(p.grad, state["momentum"], group["mu"], self.dtype)
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(update.to(p.dtype), alpha=-group["lr"])
            if several:
                for i, p in enumerate(group["params"]):
                    dist.broadcast(p, src=i % size)
