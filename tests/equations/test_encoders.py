"""Encoders: sizes from the papers, the same numbers whatever the layout, dict observations part by part."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from flotilla.compute.precision import place
from flotilla.core.errors import UsageError
from flotilla.nets.encoders import CnnKind, Encoder, ImageEncoder, has_image, is_image

ATARI = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
COLOUR = gym.spaces.Box(0, 255, (64, 48, 3), np.uint8)
VECTOR = gym.spaces.Box(-1, 1, (5,), np.float32)


def weights(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def images(space: gym.spaces.Box, *leading: int) -> torch.Tensor:
    return torch.randint(0, 256, (*leading, *space.shape), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("cnn", "expected", "features"),
    [
        # 32 x 4 x 8 x 8, 64 x 32 x 4 x 4, 64 x 64 x 3 x 3, 64 x 7 x 7 x 512, and the biases
        ("nature", 8_224 + 32_832 + 36_928 + 1_606_144, 512),
        # 16 x 4 x 8 x 8, 32 x 16 x 4 x 4, 32 x 9 x 9 x 256, and the biases
        ("a3c", 4_112 + 8_224 + 663_808, 256),
        # per block one convolution and two residual blocks of two; 32 x 11 x 11 x 256, and the biases
        ("impala", (592 + 4 * 2_320) + (4_640 + 4 * 9_248) + 5 * 9_248 + 991_488, 256),
    ],
)
def test_number_of_weights_on_atari(cnn: CnnKind, expected: int, features: int) -> None:
    encoder = ImageEncoder(ATARI, cnn)
    assert weights(encoder) == expected
    assert encoder.output_dim == features
    for leading in ((2,), (3, 2)):
        out = encoder(images(ATARI, *leading))
        assert (out.shape, out.dtype) == ((*leading, features), torch.float32)


def test_nature_has_the_published_number_of_weights() -> None:
    assert weights(ImageEncoder(ATARI, "nature")) == 1_684_128


@pytest.mark.parametrize("cnn", ["nature", "a3c", "impala"])
def test_a_colour_picture_is_the_transposed_stack(cnn: CnnKind) -> None:
    stack = gym.spaces.Box(0, 255, (3, 64, 48), np.uint8)
    last, first = ImageEncoder(COLOUR, cnn), ImageEncoder(stack, cnn)
    first.load_state_dict(last.state_dict())
    x = images(COLOUR, 3)
    before = x.clone()
    out = last(x)
    torch.testing.assert_close(out, first(x.permute(0, 3, 1, 2).contiguous()), atol=1e-5, rtol=1e-5)
    assert torch.equal(x, before), "the observation is not written to"
    assert not torch.allclose(out[0], out[1])


@pytest.mark.parametrize("cnn", ["nature", "a3c", "impala"])
def test_leading_dimensions_do_not_mix(cnn: CnnKind) -> None:
    encoder = ImageEncoder(ATARI, cnn)
    x = images(ATARI, 2, 3)
    expected = torch.stack([encoder(x[0]), encoder(x[1])])
    torch.testing.assert_close(encoder(x), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("channels_last", [True, False])
def test_images_are_scaled_and_lie_in_memory_as_the_weights_do(channels_last: bool) -> None:
    torch.manual_seed(0)
    encoder = place(ImageEncoder(ATARI, "nature"), torch.device("cpu"), channels_last=channels_last)
    seen: list[torch.Tensor] = []
    encoder.net.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].clone()))
    encoder(torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 4, 84, 84))
    assert [(x.min().item(), x.max().item()) for x in seen[0]] == [(0, 0), (1, 1)]
    layout = torch.channels_last if channels_last else torch.contiguous_format
    convolutions = [layer for layer in encoder.modules() if isinstance(layer, nn.Conv2d)]
    assert all(x.is_contiguous(memory_format=layout) for x in [seen[0], *(layer.weight for layer in convolutions)])
    torch.manual_seed(0)
    plain, image = ImageEncoder(ATARI, "nature"), images(ATARI, 3)
    torch.testing.assert_close(encoder(image), plain(image), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("cnn", "smallest"), [("nature", 36), ("a3c", 20)])
def test_an_image_that_is_too_small(cnn: CnnKind, smallest: int) -> None:
    ImageEncoder(gym.spaces.Box(0, 255, (smallest, smallest, 3), np.uint8), cnn)
    with pytest.raises(UsageError, match=f"{smallest - 1}x{smallest} are too small.*impala"):
        ImageEncoder(gym.spaces.Box(0, 255, (smallest - 1, smallest, 3), np.uint8), cnn)
    small = gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)
    assert ImageEncoder(small, "impala")(images(small, 2)).shape == (2, 256)


def test_what_is_an_image() -> None:
    assert is_image(ATARI)
    assert not is_image(gym.spaces.Box(0, 1, (4, 84, 84), np.float32))
    assert not is_image(gym.spaces.Box(0, 255, (128,), np.uint8))
    assert has_image(gym.spaces.Dict(a=VECTOR, b=COLOUR))
    assert not has_image(gym.spaces.Dict(a=VECTOR))


def test_dict_observations() -> None:
    """Keys that modules cannot bear as names, numbers of any rank, bytes that are no image."""
    space = gym.spaces.Dict(
        {
            "a.b": VECTOR,
            "values": gym.spaces.Box(-1, 1, (2, 3)),
            "number": gym.spaces.Box(-1, 1, ()),
            "ram": gym.spaces.Box(0, 255, (4,), np.uint8),
            "items": COLOUR,
            "type": ATARI,
        }
    )
    encoder = Encoder(space, (16, 7), "nature")
    assert encoder.output_dim == 2 * 512 + 7
    obs = {
        "a.b": torch.randn(3, 5),
        "values": torch.randn(3, 2, 3),
        "number": torch.randn(3),
        "ram": torch.randint(0, 256, (3, 4), dtype=torch.uint8),
        "items": images(COLOUR, 3),
        "type": images(ATARI, 3),
    }
    out = encoder(obs)
    assert out.shape == (3, encoder.output_dim)
    for key, x in obs.items():
        changed = encoder(obs | {key: x.flip(0)})
        assert not torch.equal(changed[0], out[0]), f"{key} is not seen"
        torch.testing.assert_close(changed[1], out[1])  # the middle one stays in place
    twice = encoder({key: x.unsqueeze(1).expand(-1, 2, *x.shape[1:]) for key, x in obs.items()})
    torch.testing.assert_close(twice[:, 1], out, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("shape", "leading"), [((), (4,)), ((5,), (4, 2)), ((2, 3), (4, 2))])
def test_vector_observations(shape: tuple[int, ...], leading: tuple[int, ...]) -> None:
    space = gym.spaces.Box(-1, 1, shape)
    x = torch.randn(*leading, *shape)
    assert Encoder(space, (8,), "nature")(x).shape == (*leading, 8)
    flat = x.reshape(*leading, -1)
    assert torch.equal(Encoder(space, (), "nature")(x), flat), "without hidden layers, the features are the vector"


@pytest.mark.parametrize("space", [gym.spaces.Discrete(3), gym.spaces.Dict(a=VECTOR, b=gym.spaces.Discrete(3))])
def test_unsupported_observation_space(space: gym.Space) -> None:
    with pytest.raises(UsageError, match="is not supported"):
        Encoder(space, (8,), "nature")
