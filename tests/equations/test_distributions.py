"""Action distributions against torch.distributions, and the frequencies of their draws."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import distributions as reference

from flotilla.core.errors import UsageError
from flotilla.nets.distributions import Categorical, DiagonalGaussian, MultiCategorical, distribution, parameter_size

DISCRETE, MULTI, BOX = gym.spaces.Discrete(5), gym.spaces.MultiDiscrete([2, 3]), gym.spaces.Box(-1, 1, (5,))
LEADING = [(), (7,), (4, 2)]


@pytest.mark.parametrize("leading", LEADING)
def test_categorical(leading: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    logits = 3 * torch.randn(*leading, 5)
    ours, theirs = distribution(DISCRETE, logits, torch.zeros(0)), reference.Categorical(logits=logits)
    assert isinstance(ours, Categorical)
    action = ours.sample()
    assert (action.shape, action.dtype) == (leading, torch.int64)
    torch.testing.assert_close(ours.log_prob(action), theirs.log_prob(action))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    assert torch.equal(ours.mode(), theirs.mode)


@pytest.mark.parametrize("leading", LEADING)
def test_multi_categorical(leading: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    logits = 3 * torch.randn(*leading, 5)
    ours = distribution(MULTI, logits, torch.zeros(0))
    first, second = reference.Categorical(logits=logits[..., :2]), reference.Categorical(logits=logits[..., 2:])
    assert isinstance(ours, MultiCategorical)
    action = ours.sample()
    assert (action.shape, action.dtype) == ((*leading, 2), torch.int64)
    torch.testing.assert_close(ours.log_prob(action), first.log_prob(action[..., 0]) + second.log_prob(action[..., 1]))
    torch.testing.assert_close(ours.entropy(), first.entropy() + second.entropy())
    assert torch.equal(ours.mode(), torch.stack([first.mode, second.mode], -1))


@pytest.mark.parametrize("leading", LEADING)
def test_diagonal_gaussian(leading: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    mean, log_std = torch.randn(*leading, 5), torch.randn(5)
    ours = distribution(BOX, mean, log_std)
    theirs = reference.Independent(reference.Normal(mean, log_std.exp()), 1)
    assert isinstance(ours, DiagonalGaussian)
    action = ours.sample()
    assert action.shape == (*leading, 5)
    torch.testing.assert_close(ours.log_prob(action), theirs.log_prob(action))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    assert torch.equal(ours.mode(), mean)


def test_extreme_logits_give_no_nan() -> None:
    logits = torch.tensor([[1000.0, -1000.0, 0.0]], requires_grad=True)
    policy = Categorical(logits)
    assert policy.sample().tolist() == [0]
    assert policy.entropy().item() == 0
    (policy.entropy() + policy.log_prob(torch.tensor([1]))).sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def chi_square(counts: list[int], probabilities: list[float]) -> float:
    expected = sum(counts) * np.asarray(probabilities)
    return float(((np.asarray(counts) - expected) ** 2 / expected).sum())


def test_frequencies_of_draws() -> None:
    """Chi-square below its 99.9 % point; also a choice of one in a thousand has its share."""
    torch.manual_seed(0)
    probabilities = [0.001, 0.099, 0.2, 0.3, 0.4]
    logits = torch.tensor(probabilities).log() + 3  # not normalised
    action = Categorical(logits.expand(50_000, 5)).sample()
    assert chi_square(torch.bincount(action, minlength=5).tolist(), probabilities) < 18.5  # 4 degrees of freedom
    wrong = [0.011, 0.089, 0.2, 0.3, 0.4]
    assert chi_square(torch.bincount(action, minlength=5).tolist(), wrong) > 18.5

    pair = MultiCategorical(torch.tensor([0.5, 0.5, 0.2, 0.3, 0.5]).log().expand(50_000, 5), (2, 3)).sample()
    joint = torch.bincount(pair[:, 0] * 3 + pair[:, 1], minlength=6).tolist()
    assert chi_square(joint, [0.1, 0.15, 0.25] * 2) < 20.5  # 5 degrees of freedom: independent, too


def test_moments_of_gaussian_draws() -> None:
    torch.manual_seed(0)
    mean, log_std = torch.tensor([1.0, -2.0]), torch.tensor([0.0, -1.0])
    draws = DiagonalGaussian(mean.expand(50_000, 2), log_std).sample()
    torch.testing.assert_close(draws.mean(0), mean, atol=0.02, rtol=0)
    torch.testing.assert_close(draws.std(0), log_std.exp(), atol=0.01, rtol=0)
    assert abs(torch.corrcoef(draws.T)[0, 1]) < 0.02


def test_parameter_size() -> None:
    assert [parameter_size(space) for space in (DISCRETE, MULTI, BOX)] == [5, 5, 5]


@pytest.mark.parametrize(
    "space",
    [
        gym.spaces.Box(-1, 1, (2, 2)),
        gym.spaces.Box(-1, 1, ()),
        gym.spaces.MultiDiscrete([[2, 3], [2, 3]]),
        gym.spaces.MultiBinary(3),
        gym.spaces.Dict(a=DISCRETE),
    ],
)
def test_unsupported_action_space(space: gym.Space) -> None:
    with pytest.raises(UsageError, match="is not supported") as caught:
        parameter_size(space)
    assert str(space).split("\n")[0] in str(caught.value)
