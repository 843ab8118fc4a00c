"""Moments of data that lie on several ranks."""

from __future__ import annotations

from torch import Tensor

from flotilla.compute.ranks import Ranks


def moments(ranks: Ranks, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean (...), biased variance (...) and count () of x (B, ...) where weight (B) is 1, over all ranks.

    Two passes, since the sum of squares minus the square of the sum loses digits when the mean is large.
    """
    x = x.float()
    weight_B = weight.float().view(-1, *(1,) * (x.dim() - 1))
    count = ranks.sum_(weight_B.sum())
    safe = count.clamp(min=1.0)
    mean = ranks.sum_((x * weight_B).sum(0)) / safe
    var = ranks.sum_(((x - mean).square() * weight_B).sum(0)) / safe
    return mean, var, count
