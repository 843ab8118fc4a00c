"""Encoders: from vector, image and dict observations to one feature vector.

Shape legend: ... leading dimensions, B batch, D features, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from flotilla.core.errors import UsageError
from flotilla.core.types import Obs, Row
from flotilla.nets.layers import Init, Mlp, Moments, RunningNorm, orthogonal

CnnKind = Literal["nature", "a3c", "impala"]


def is_image(space: gym.Space[Any]) -> bool:
    """Whether a space is a stack of uint8 frames or a uint8 colour picture."""
    return isinstance(space, gym.spaces.Box) and space.dtype == np.uint8 and len(space.shape) == 3


def has_image(space: gym.Space[Any]) -> bool:
    """Whether an observation space is or contains an image."""
    parts = space.spaces.values() if isinstance(space, gym.spaces.Dict) else (space,)
    return any(is_image(part) for part in parts)


STRIDED = {  # (channels, kernel, stride) of each convolution, and the number of features
    "nature": (((32, 8, 4), (64, 4, 2), (64, 3, 1)), 512),
    "a3c": (((16, 8, 4), (32, 4, 2)), 256),  # a third of the arithmetic
}


class Strided(nn.Sequential):
    """Strided convolutions and one linear layer: the networks of Mnih et al. 2015 ("nature") and 2016 ("a3c").

    flat: without the linear layer, which would have `features`.
    """

    def __init__(self, kind: str, channels: int, height: int, width: int, init: Init, flat: bool) -> None:
        convolutions, features = STRIDED[kind]
        layers: list[nn.Module] = []
        size = [height, width]
        for out, kernel, stride in convolutions:
            layers += [init(nn.Conv2d(channels, out, kernel, stride)), nn.ReLU(inplace=True)]
            channels, size = out, [(side - kernel) // stride + 1 for side in size]
        if min(size) < 1:
            raise UsageError(f"images of {height}x{width} are too small for --cnn {kind}; use --cnn impala")
        super().__init__(*layers, *flattened(channels * size[0] * size[1], features, init, flat))
        self.features, self.output_dim = features, channels * size[0] * size[1] if flat else features


def flattened(size: int, features: int, init: Init, flat: bool) -> list[nn.Module]:
    """What comes after convolutions: `size` numbers, and unless `flat` a linear layer to the features."""
    layers: list[nn.Module] = [nn.Flatten()]
    return layers if flat else [*layers, init(nn.Linear(size, features)), nn.ReLU(inplace=True)]


class Residual(nn.Module):
    """Two 3x3 convolutions added to their input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.second(torch.relu(self.first(torch.relu(x))))
        return x + change


class Impala(nn.Sequential):
    """The residual convolutions of Espeholt et al. 2018 (16, 32, 32 channels), 256 features."""

    features = 256

    def __init__(self, channels: int, height: int, width: int, init: Init, flat: bool) -> None:
        layers: list[nn.Module] = []
        for out in (16, 32, 32):
            layers += [
                nn.Conv2d(channels, out, 3, padding=1),
                nn.MaxPool2d(3, stride=2, padding=1),
                Residual(out),
                Residual(out),
            ]
            channels, height, width = out, (height + 1) // 2, (width + 1) // 2
        size = channels * height * width
        super().__init__(*layers, nn.ReLU(), *flattened(size, self.features, init, flat))
        self.output_dim = size if flat else self.features


class ImageEncoder(nn.Module):
    """A convolutional network on uint8 images (..., C, H, W) or (..., H, W, C): scaled to [0, 1]."""

    def __init__(self, space: gym.spaces.Box, cnn: CnnKind, init: Init = orthogonal, *, flat: bool = False) -> None:
        super().__init__()
        first, _, last = space.shape
        self.channels_first = first < last
        channels, height, width = space.shape if self.channels_first else (last, *space.shape[:2])
        size = (channels, height, width)
        self.net = Impala(*size, init, flat) if cnn == "impala" else Strided(cnn, *size, init, flat)
        self.output_dim, self.features = self.net.output_dim, self.net.features

    def forward(self, image: Tensor) -> Tensor:
        leading = image.shape[:-3]
        x = image.flatten(0, -4) if len(leading) > 1 else image
        if not self.channels_first:
            x = x.movedim(-1, -3)
        weight = self.net[0].weight
        assert isinstance(weight, Tensor)
        last = weight.is_contiguous(memory_format=torch.channels_last)
        layout = torch.channels_last if last else torch.contiguous_format
        x = x.to(torch.float32, memory_format=layout).mul_(1 / 255)
        features: Tensor = self.net(x)
        return features.unflatten(0, leading) if len(leading) > 1 else features  # type: ignore[no-untyped-call]


class ObsNorm(nn.Module):
    """Running normalisation of each part of an observation that `space` has and that is no image."""

    def __init__(self, space: gym.Space[Any]) -> None:
        super().__init__()
        parts = dict(space.spaces) if isinstance(space, gym.spaces.Dict) else {"obs": space}
        self.keys = [key for key, part in parts.items() if not is_image(part)]
        # A list: the keys are the environment's, and a ModuleDict refuses some, such as "a.b" or "values".
        self.norms: Sequence[RunningNorm] = nn.ModuleList(  # type: ignore[assignment]
            RunningNorm(_box(parts[key]).shape) for key in self.keys
        )

    def forward(self, obs: Obs) -> Obs:
        if isinstance(obs, dict):
            return obs | {key: norm(obs[key]) for key, norm in zip(self.keys, self.norms, strict=True)}
        return self.norms[0](obs) if self.keys else obs

    def update(self, moments: Moments, rows: Row) -> None:
        """Add the observations of all rows (T + 1, N, ...) but the last, which the next rollout starts with."""
        if not self.keys:
            return
        parts = rows.obs if isinstance(rows.obs, dict) else {"obs": rows.obs}
        weight = torch.ones_like(rows.reward[:-1]).flatten()
        for key, norm in zip(self.keys, self.norms, strict=True):
            norm.update(*moments(parts[key][:-1].flatten(0, 1), weight))


class Encoder(nn.Module):
    """Features (..., output_dim) of any observation: images by convolutions, vectors by an MLP, concatenated.

    Without hidden sizes vectors go through as they are.  flat: images without the last linear layer.
    """

    def __init__(
        self,
        space: gym.Space[Any],
        hidden_sizes: Sequence[int],
        cnn: CnnKind,
        activation: Callable[[Tensor], Tensor] = torch.tanh,
        init: Init = orthogonal,
        *,
        flat: bool = False,
    ) -> None:
        super().__init__()
        parts = dict(space.spaces) if isinstance(space, gym.spaces.Dict) else {"obs": space}
        self.image_keys = [key for key, part in parts.items() if is_image(part)]
        self.vector_keys = [key for key in parts if key not in self.image_keys]
        self.images: Sequence[ImageEncoder] = nn.ModuleList(  # type: ignore[assignment]
            ImageEncoder(_box(parts[key]), cnn, init, flat=flat) for key in self.image_keys
        )
        self.output_dim = sum(net.output_dim for net in self.images)
        if self.vector_keys:
            input_dim = sum(int(np.prod(_box(parts[key]).shape)) for key in self.vector_keys)
            self.vectors = Mlp(input_dim, hidden_sizes, activation, init)
            self.output_dim += self.vectors.output_dim
        self.ranks = {key: len(_box(part).shape) for key, part in parts.items()}

    def forward(self, obs: Obs) -> Tensor:
        parts = obs if isinstance(obs, dict) else {"obs": obs}
        features = [net(parts[key]) for key, net in zip(self.image_keys, self.images, strict=True)]
        if self.vector_keys:
            flat = [_flatten(parts[key], self.ranks[key]) for key in self.vector_keys]
            features.append(self.vectors(flat[0] if len(flat) == 1 else torch.cat(flat, -1)))
        return features[0] if len(features) == 1 else torch.cat(features, -1)


def _box(space: gym.Space[Any]) -> gym.spaces.Box:
    if not isinstance(space, gym.spaces.Box):
        raise UsageError(f"observation space {space} is not supported (a Box, or a Dict of Boxes)")
    return space


def _flatten(x: Tensor, rank: int) -> Tensor:
    """The last `rank` dimensions as one, as numbers of the default type."""
    x = x.unsqueeze(-1) if rank == 0 else x if rank == 1 else x.flatten(-rank)
    return x.to(torch.get_default_dtype())
