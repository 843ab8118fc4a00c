"""Moments with weights, and the running normalisers that take them, against numpy over all of the data."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flotilla.compute.ranks import Ranks
from flotilla.compute.statistics import moments
from flotilla.core.types import Row
from flotilla.nets.encoders import ObsNorm
from flotilla.nets.layers import RewardScale, RunningNorm


def moments_here(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return moments(Ranks(), x, weight)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_moments_with_weights(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    x, weight = 1000 + rng.normal(size=(50, *shape)), rng.random(50) < 0.7
    mean, var, count = moments_here(torch.tensor(x, dtype=torch.float32), torch.tensor(weight))
    assert mean.shape == var.shape == shape
    assert count.item() == weight.sum()
    np.testing.assert_allclose(mean, x[weight].mean(0), rtol=1e-6)
    np.testing.assert_allclose(var, x[weight].var(0), rtol=1e-3)  # E[x^2] - E[x]^2 would be off by a tenth


def test_moments_of_nothing_and_of_bytes() -> None:
    mean, var, count = moments_here(torch.randn(4, 2), torch.zeros(4))
    assert (mean.tolist(), var.tolist(), count.item()) == ([0, 0], [0, 0], 0)
    mean, var, _ = moments_here(torch.tensor([200, 250], dtype=torch.uint8), torch.ones(2))
    assert (mean.item(), var.item()) == (225, 625)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(0, 10_000))
def test_running_norm_in_parts_is_all_at_once(sizes: list[int], seed: int) -> None:
    """Also where a part is empty."""
    rng = np.random.default_rng(seed)
    data = rng.normal(rng.normal(size=(1, 3)) * 5, 2, size=(sum(sizes), 3)).astype(np.float32)
    norm = RunningNorm((3,))
    for part in np.split(data, np.cumsum(sizes)[:-1]):
        norm.update(*moments_here(torch.from_numpy(part), torch.ones(len(part))))
    assert norm.count.item() == len(data)
    expected_mean, expected_var = (data.mean(0), data.var(0)) if len(data) else (np.zeros(3), np.ones(3))
    np.testing.assert_allclose(norm.mean, expected_mean, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(norm.var, expected_var, rtol=1e-3, atol=1e-4)


def test_running_norm_standardises_and_clips() -> None:
    norm, x = RunningNorm((2,)), torch.tensor([[0.0, 10.0], [4.0, 30.0]])
    assert torch.equal(norm(x / 10), x / 10), "the identity before any data"
    norm.update(*moments_here(x, torch.ones(2)))
    torch.testing.assert_close(norm(x), torch.tensor([[-1.0, -1.0], [1.0, 1.0]]))
    assert norm(torch.tensor([[1e6, -1e6]])).tolist() == [[10, -10]]


def test_running_norm_is_saved() -> None:
    norm, other = RunningNorm((2,)), RunningNorm((2,))
    norm.update(*moments_here(torch.randn(9, 2), torch.ones(9)))
    other.load_state_dict(norm.state_dict())
    x = torch.randn(5, 2)
    assert torch.equal(norm(x), other(x))
    assert not list(norm.parameters()), "statistics are no weights"


def test_obs_norm_knows_each_row_once() -> None:
    """The last row of a rollout is the first of the next; images and keys without statistics pass through."""
    image = gym.spaces.Box(0, 255, (4, 9, 9), np.uint8)
    space = gym.spaces.Dict({"a.b": gym.spaces.Box(-9, 9, (2,)), "values": gym.spaces.Box(-9, 9, ()), "image": image})
    norm = ObsNorm(space)
    rng = np.random.default_rng(0)
    seen = {key: [] for key in ("a.b", "values")}
    for _ in range(3):
        obs = {key: torch.from_numpy(rng.normal(2, 3, (6, 4, *space[key].shape)).astype(np.float32)) for key in seen}
        flags = torch.zeros(6, 4, dtype=torch.bool)
        frames = torch.randint(0, 255, (6, 4, *image.shape), dtype=torch.uint8)
        norm.update(moments_here, Row(obs | {"image": frames}, torch.zeros(6, 4), flags, flags, flags))
        for key, x in obs.items():
            seen[key].append(x[:-1].flatten(0, 1).numpy())
    out = norm(obs | {"image": frames})
    for key, parts in seen.items():
        data = np.concatenate(parts)
        np.testing.assert_allclose(out[key], (obs[key].numpy() - data.mean(0)) / data.std(0), atol=1e-4)
    assert out["image"] is frames


def test_reward_scale_is_a_slow_loop() -> None:
    """Three rollouts of three environments: discounted returns restart at each episode, statistics never do."""
    rng = np.random.default_rng(0)
    gamma, num_envs = 0.9, 3
    scale = RewardScale(num_envs, gamma)
    totals, every, last_was_end = np.zeros(num_envs), [], np.zeros(num_envs, bool)
    reward_row = np.zeros(num_envs)
    for _ in range(3):
        ends = rng.random((7, num_envs)) < 0.3
        is_first = np.vstack([last_was_end * 0, ends[:-1]]).astype(bool)
        reward = np.vstack([reward_row, rng.normal(5, 2, (6, num_envs))])
        reward[1:][is_first[1:]] = 0
        for t in range(1, 7):
            for n in range(num_envs):
                totals[n] = 0.0 if is_first[t, n] else reward[t, n] + gamma * totals[n]
                if not is_first[t, n]:
                    every.append(totals[n])
        scaled = scale(torch.tensor(reward, dtype=torch.float32), torch.from_numpy(is_first), moments_here)
        reward_row = reward[-1]
        np.testing.assert_allclose(scaled, np.clip(reward / np.std(every), -10, 10), rtol=1e-4)
    np.testing.assert_allclose(scale.total_N, totals, rtol=1e-5)


def test_reward_scale_clips() -> None:
    scale = RewardScale(1, 0.0)
    reward = torch.zeros(201, 1)
    reward[-1] = 100.0
    assert scale(reward, torch.zeros(201, 1, dtype=torch.bool), moments_here)[-1].item() == 10
