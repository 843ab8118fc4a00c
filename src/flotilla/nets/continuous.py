"""What DDPG, TD3 and SAC share: the scale of bounded actions, a deterministic actor, critics of state and action.

Networks see and give actions in [-1, 1]; environments have their own bounds, and so has what is stored.
Shape legend: ... leading dimensions, B batch, A dimensions of an action, D features, K critics.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from flotilla.core.errors import UsageError
from flotilla.core.types import Obs, Spec
from flotilla.nets.encoders import CnnKind, Encoder
from flotilla.nets.layers import as_made, full


class ActionScale(nn.Module):
    """From [-1, 1] to the bounds of a box of one dimension, and back; UsageError for any other space."""

    middle_A: Tensor
    half_A: Tensor

    def __init__(self, space: gym.Space[Any]) -> None:
        super().__init__()
        if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
            raise UsageError(f"action space {space} is not supported (a Box of one dimension; ppo takes others)")
        if not space.is_bounded():
            raise UsageError(
                f"action space {space} has no bounds to scale to (wrap the environment in "
                "gymnasium.wrappers.RescaleAction or another with finite bounds, or use ppo)"
            )
        low, high = np.asarray(space.low, np.float64), np.asarray(space.high, np.float64)
        self.dim = int(space.shape[0])
        self.register_buffer("middle_A", torch.as_tensor((high + low) / 2, dtype=torch.float32))
        self.register_buffer("half_A", torch.as_tensor((high - low) / 2, dtype=torch.float32))

    def to_env(self, unit: Tensor) -> Tensor:
        return torch.addcmul(self.middle_A, self.half_A, unit)

    def to_unit(self, action: Tensor) -> Tensor:
        """A dimension whose bounds are equal is 0."""
        return (action - self.middle_A) / self.half_A.where(self.half_A > 0, 1.0)

    def uniform(self, count: int) -> Tensor:
        """Actions (count, A) of the environment, each within the bounds with equal probability."""
        unit = torch.rand(count, self.dim, device=self.half_A.device)
        return self.to_env(2 * unit - 1)


class Actor(nn.Module):
    """One action in [-1, 1] for each observation (Lillicrap et al. 2016)."""

    def __init__(self, spec: Spec, num_actions: int, hidden_sizes: Sequence[int], cnn: CnnKind) -> None:
        super().__init__()
        self.encoder = Encoder(spec.obs_space, hidden_sizes, cnn, torch.relu, as_made)
        self.head = nn.Linear(self.encoder.output_dim, num_actions)

    def forward(self, obs: Obs) -> Tensor:
        return full(self.head(self.encoder(obs))).tanh()


def with_noise(action: Tensor, deviation: float, most: float = math.inf) -> Tensor:
    """Actions in [-1, 1] with normal noise, each part of which is cut at +-`most`, and so are the actions at +-1."""
    noise = deviation * torch.randn_like(action)
    return (action + noise.clamp(-most, most)).clamp(-1, 1)


class Critics(nn.Module):
    """K networks of the same form, computed as one: their values (K, B, num_outputs) of features.

    An image is encoded once for all of them.  With actions these are inputs beside the features, and there is one
    output (K, B); without, one for each action.
    """

    def __init__(
        self,
        spec: Spec,
        num_critics: int,
        hidden_sizes: Sequence[int],
        cnn: CnnKind,
        *,
        num_actions: int = 0,
        num_outputs: int = 0,
    ) -> None:
        super().__init__()
        self.encoder = Encoder(spec.obs_space, (), cnn, torch.relu, as_made)
        self.num_critics, self.has_outputs = num_critics, num_outputs > 0
        sizes = [self.encoder.output_dim + num_actions, *hidden_sizes, num_outputs or 1]
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for inputs, outputs in itertools.pairwise(sizes):
            bound = 1 / math.sqrt(inputs)  # as `as_made` layers
            self.weights.append(torch.empty(num_critics, inputs, outputs).uniform_(-bound, bound))
            self.biases.append(torch.empty(num_critics, 1, outputs).uniform_(-bound, bound))

    def forward(self, obs: Obs, action: Tensor | None = None) -> Tensor:
        features = self.encoder(obs)
        x_BD = features if action is None else torch.cat([features, action], -1)
        x = x_BD.expand(self.num_critics, *x_BD.shape)
        last = len(self.weights) - 1
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias, x, weight)
            x = x if layer == last else torch.relu(x)
        return full(x if self.has_outputs else x.squeeze(-1))
