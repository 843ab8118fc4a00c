"""What DQN and C51 share: a network with an output for each action, dueling and with noise where asked.

Shape legend: ... leading dimensions, B batch, A actions, K atoms (1 for plain values), D features.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor, nn

from flotilla.core.errors import UsageError
from flotilla.core.types import Obs, Spec
from flotilla.nets.encoders import CnnKind, Encoder
from flotilla.nets.layers import as_made, full


class NoisyLinear(nn.Module):
    """A linear layer with factorised Gaussian noise in its weights (Fortunato et al. 2018); without it in eval mode.

    The noise is the same for a whole batch, and stays until `resample`.
    """

    noise_in: Tensor
    noise_out: Tensor

    def __init__(self, inputs: int, outputs: int, sigma_0: float) -> None:
        super().__init__()
        bound = 1 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(outputs, inputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(outputs).uniform_(-bound, bound))
        self.weight_sigma = nn.Parameter(torch.full((outputs, inputs), sigma_0 * bound))
        self.bias_sigma = nn.Parameter(torch.full((outputs,), sigma_0 * bound))
        self.register_buffer("noise_in", torch.zeros(inputs))
        self.register_buffer("noise_out", torch.zeros(outputs))
        self.resample()

    @torch.no_grad()
    def resample(self) -> None:
        for noise in (self.noise_in, self.noise_out):
            x = noise.normal_()
            noise.copy_(x.sign() * x.abs().sqrt())

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return nn.functional.linear(x, self.weight, self.bias)
        weight = torch.addcmul(self.weight, self.weight_sigma, torch.outer(self.noise_out, self.noise_in))
        return nn.functional.linear(x, weight, torch.addcmul(self.bias, self.bias_sigma, self.noise_out))


class ActionValues(nn.Module):
    """One number for each action (B, A), or K of them (B, A, K), of observations; UsageError unless Discrete.

    dueling: a stream for the state and one for the advantages of actions, each with a hidden layer (Wang et al. 2016).
    noisy: these layers are noisy, and explore by themselves; sigma_0 is the noise's first scale.
    """

    def __init__(
        self,
        spec: Spec,
        hidden_sizes: Sequence[int],
        cnn: CnnKind,
        *,
        num_atoms: int = 1,
        dueling: bool,
        noisy: bool,
        sigma_0: float,
    ) -> None:
        super().__init__()
        self.num_actions = _count(spec.action_space)
        self.shape = (self.num_actions, num_atoms) if num_atoms > 1 else (self.num_actions,)
        self.encoder = Encoder(spec.obs_space, hidden_sizes[:-1], cnn, torch.relu, as_made, flat=True)
        images = self.encoder.images
        hidden = [images[0].features] if len(images) else list(hidden_sizes[-1:])

        def stream(outputs: int) -> nn.Sequential:
            sizes = [self.encoder.output_dim, *hidden, outputs]
            layers: list[nn.Module] = []
            for a, b in itertools.pairwise(sizes):
                layers += [NoisyLinear(a, b, sigma_0) if noisy else nn.Linear(a, b), nn.ReLU()]
            return nn.Sequential(*layers[:-1])

        self.advantage = stream(self.num_actions * num_atoms)
        self.value = stream(num_atoms) if dueling else None
        self.noisy_layers = [layer for layer in self.modules() if isinstance(layer, NoisyLinear)]

    def forward(self, obs: Obs) -> Tensor:
        features = self.encoder(obs)
        advantage: Tensor = full(self.advantage(features))
        advantage = advantage.view(*features.shape[:-1], *self.shape)
        if self.value is None:
            return advantage
        state: Tensor = full(self.value(features))
        state = state.view(*features.shape[:-1], 1, *self.shape[1:])
        return state + advantage - advantage.mean(-len(self.shape), keepdim=True)

    def resample(self) -> None:
        """New noise, where there is any."""
        for layer in self.noisy_layers:
            layer.resample()


def _count(space: gym.Space[Any]) -> int:
    if not isinstance(space, gym.spaces.Discrete):
        raise UsageError(f"action space {space} is not supported (Discrete; ppo or sac take others)")
    return int(space.n)
