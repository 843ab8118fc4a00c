"""Action distributions over Discrete, MultiDiscrete and Box spaces: sample, mode, log-probability, entropy.

Leaner than torch.distributions: no validation and no broadcasting machinery, which cost more than the
arithmetic for small batches.  Shape legend: ... leading dimensions, A actions (choices or dimensions).
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import gymnasium as gym
import torch
from torch import Tensor

from flotilla.core.errors import UsageError
from flotilla.nets.layers import full

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


class Distribution(Protocol):
    """A batch of distributions; `log_prob` and `entropy` have shape (...)."""

    def sample(self) -> Tensor: ...
    def mode(self) -> Tensor: ...
    def log_prob(self, action: Tensor) -> Tensor: ...
    def entropy(self) -> Tensor: ...


class Categorical:
    """One of A choices, from logits (..., A); actions are int64 (...)."""

    def __init__(self, logits: Tensor) -> None:
        self.log_p = torch.log_softmax(logits, -1)

    def sample(self) -> Tensor:
        # Gumbel-max in its exponential form: argmax p / Exp(1) is distributed as p.
        return (self.log_p.exp() / torch.empty_like(self.log_p).exponential_()).argmax(-1)

    def mode(self) -> Tensor:
        return self.log_p.argmax(-1)

    def log_prob(self, action: Tensor) -> Tensor:
        return self.log_p.gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        return -(self.log_p.exp() * self.log_p).sum(-1)


class MultiCategorical:
    """Several independent choices; actions are int64 (..., number of choices)."""

    def __init__(self, logits: Tensor, sizes: tuple[int, ...]) -> None:
        self.parts = [Categorical(x) for x in torch.split(logits, list(sizes), -1)]

    def sample(self) -> Tensor:
        return torch.stack([part.sample() for part in self.parts], -1)

    def mode(self) -> Tensor:
        return torch.stack([part.mode() for part in self.parts], -1)

    def log_prob(self, action: Tensor) -> Tensor:
        return torch.stack([part.log_prob(a) for part, a in zip(self.parts, action.unbind(-1), strict=True)], -1).sum(
            -1
        )

    def entropy(self) -> Tensor:
        return torch.stack([part.entropy() for part in self.parts], -1).sum(-1)


class DiagonalGaussian:
    """Independent normals: mean (..., A), log standard deviation (A,); the environment clips, not this."""

    def __init__(self, mean: Tensor, log_std: Tensor) -> None:
        self.mean, self.log_std = mean, log_std

    def sample(self) -> Tensor:
        return torch.addcmul(self.mean, self.log_std.exp(), torch.randn_like(self.mean))

    def mode(self) -> Tensor:
        return self.mean

    def log_prob(self, action: Tensor) -> Tensor:
        z = (action - self.mean) * torch.exp(-self.log_std)
        return -0.5 * z.square().sum(-1) - (self.log_std.sum() + self.mean.shape[-1] * LOG_SQRT_2PI)

    def entropy(self) -> Tensor:
        total = self.log_std.sum() + self.mean.shape[-1] * (0.5 + LOG_SQRT_2PI)
        return total.expand(self.mean.shape[:-1])


def parameter_size(space: gym.Space[Any]) -> int:
    """How many numbers a network must give for one action of `space` (log standard deviations apart)."""
    match space:
        case gym.spaces.Discrete():
            return int(space.n)
        case gym.spaces.MultiDiscrete() if space.nvec.ndim == 1:
            return int(space.nvec.sum())
        case gym.spaces.Box() if len(space.shape) == 1:
            return int(space.shape[0])
    raise UsageError(f"action space {space} is not supported (Discrete, flat MultiDiscrete or flat Box)")


def distribution(space: gym.Space[Any], parameters: Tensor, log_std: Tensor) -> Distribution:
    """The distribution over `space` with the network's output (..., parameter_size(space))."""
    parameters = full(parameters)
    if isinstance(space, gym.spaces.Discrete):
        return Categorical(parameters)
    if isinstance(space, gym.spaces.MultiDiscrete):
        return MultiCategorical(parameters, tuple(int(n) for n in space.nvec))
    return DiagonalGaussian(parameters, log_std)
