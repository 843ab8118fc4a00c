"""Small building blocks: initialisations, MLPs, running normalisation, a resettable memory.

Shape legend: ... leading dimensions, B batch, T steps, D features, S size of the memory's state.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from flotilla.functional import discounted_sum

MemoryKind = Literal["none", "lstm", "gru"]
Moments = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]  # data, weight -> mean, variance, count
Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)


class Init(Protocol):
    """Gives a new layer its first weights."""

    def __call__(self, layer: Layer, /) -> Layer: ...


def as_made(layer: Layer) -> Layer:
    """The layer as PyTorch makes it: weights and biases uniform within 1 / sqrt(inputs)."""
    return layer


def orthogonal(layer: Layer, gain: float = math.sqrt(2)) -> Layer:
    """The layer with orthogonal weights and zero bias (the initialisation of the reference PPO)."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def full(x: Tensor) -> Tensor:
    """A network's output for a loss: half precision becomes single, what is more precise stays as it is."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class Mlp(nn.Module):
    """Hidden layers, each followed by the activation; input (..., D), output (..., hidden_sizes[-1])."""

    def __init__(
        self,
        input_dim: int,
        hidden_sizes: Sequence[int],
        activation: Callable[[Tensor], Tensor] = torch.tanh,
        init: Init = orthogonal,
    ) -> None:
        super().__init__()
        sizes = [input_dim, *hidden_sizes]
        layers = [init(nn.Linear(a, b)) for a, b in itertools.pairwise(sizes)]
        self.layers = nn.ModuleList(layers)
        self.activation = activation
        self.output_dim = sizes[-1]
        # The same parameters without their modules: calling nn.Linear costs twice what a small product does.
        self._weights = [(layer.weight, layer.bias) for layer in layers]

    def forward(self, x: Tensor) -> Tensor:
        for weight, bias in self._weights:
            x = self.activation(nn.functional.linear(x, weight, bias))
        return x


class RunningNorm(nn.Module):
    """Standardises features (..., D) by the mean and variance of all data seen, and clips to +-10.

    The identity until the first `update`.  The statistics are buffers: saved, and used at evaluation.
    """

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, shape: tuple[int, ...], clip: float = 10.0) -> None:
        super().__init__()
        self.clip = clip
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("var", torch.ones(shape))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return ((x - self.mean) * torch.rsqrt(self.var + 1e-8)).clamp(-self.clip, self.clip)

    @torch.no_grad()
    def update(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        """Merge the moments of new data (Chan et al. 1979: parallel variance)."""
        share = count / (self.count + count).clamp(min=1.0)
        delta = mean - self.mean
        self.var.lerp_(var, share).add_(delta.square() * (share * (1 - share)))
        self.mean.add_(delta * share)
        self.count.add_(count)


class Memory(nn.Module):
    """A recurrent layer whose state is one tensor (B, S), zeroed where `is_first`; "none" passes through (S = 0)."""

    def __init__(self, kind: MemoryKind, input_dim: int, size: int) -> None:
        super().__init__()
        self.cell: nn.LSTMCell | nn.GRUCell | None = None
        self.state_dim, self.output_dim = 0, input_dim
        if kind != "none":
            self.cell = nn.LSTMCell(input_dim, size) if kind == "lstm" else nn.GRUCell(input_dim, size)
            for name, parameter in self.cell.named_parameters():
                nn.init.zeros_(parameter) if "bias" in name else nn.init.orthogonal_(parameter, 1.0)
            self.state_dim, self.output_dim = (2 * size if kind == "lstm" else size), size

    def forward(self, x_BTD: Tensor, state_BS: Tensor, is_first_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Features (B, T, size) and the state after the last step (B, S)."""
        if self.cell is None:
            return x_BTD, state_BS
        x_BTD = full(x_BTD)  # as is the state, which lasts
        keep_BT = (~is_first_BT).to(x_BTD.dtype)
        outputs = []
        # A copy with time first: from slices of a (B, T, D) tensor, torch 2.13's compiler silently loses most of the
        # gradient of the cell's input weights.
        x_TBD = x_BTD.transpose(0, 1).contiguous()
        for x_BD, keep_B in zip(x_TBD.unbind(0), keep_BT.unbind(1), strict=True):
            state_BS = state_BS * keep_B.unsqueeze(-1)
            if isinstance(self.cell, nn.LSTMCell):
                hidden, cell = state_BS.chunk(2, -1)
                state_BS = torch.cat(self.cell(x_BD, (hidden, cell)), -1)
            else:
                state_BS = self.cell(x_BD, state_BS)
            outputs.append(state_BS[:, : self.output_dim])
        return torch.stack(outputs, 1), state_BS


class RewardScale(nn.Module):
    """Divides rewards by the running standard deviation of the discounted return, and clips to +-10.

    The statistics are those of all environments together; `total_N` is each one's discounted return so far.
    """

    total_N: Tensor

    def __init__(self, num_envs: int, gamma: float, clip: float = 10.0) -> None:
        super().__init__()
        self.gamma, self.clip = gamma, clip
        self.returns = RunningNorm(())
        self.register_buffer("total_N", torch.zeros(num_envs))

    def forward(self, reward_T1N: Tensor, is_first_T1N: Tensor, moments: Moments) -> Tensor:
        """Scaled rewards (T + 1, N), after the statistics took in these rows."""
        total_TN = discounted_sum(reward_T1N, is_first_T1N, self.total_N, self.gamma)
        self.total_N.copy_(total_TN[-1])
        self.returns.update(*moments(total_TN.flatten(), (~is_first_T1N[1:]).flatten()))
        return (reward_T1N * torch.rsqrt(self.returns.var + 1e-8)).clamp(-self.clip, self.clip)
