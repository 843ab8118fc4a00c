"""Every option of DDPG, TD3 and SAC, turned once: training goes on, and ends with other weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.pendulum import PendulumEnv
from torch import nn

from flotilla.core.names import ALGORITHMS, load

Train = Callable[..., Any]

# A run in which each option has something to do, and another value for each of them.
BASE: dict[str, Any] = {
    "num_envs": 3,
    "total_timesteps": 96,
    "learning_starts": 32,
    "batch_size": 8,
    "buffer_size": 200,
    "train_frequency": 4,
    "gradient_steps": 4,
    "hidden_sizes": (16,),
}
TURNED: dict[str, Any] = {
    "learning_rate": 1e-3,
    "policy_lr": 1e-3,
    "q_lr": 3e-3,
    "adam_eps": 1e-3,
    "buffer_size": 30,
    "learning_starts": 0,
    "batch_size": 9,
    "train_frequency": 8,
    "gradient_steps": 2,
    "gamma": 0.5,
    "tau": 1.0,
    "target_frequency": 3,
    "policy_frequency": 3,
    "exploration_noise": 0.0,
    "policy_noise": 0.0,
    "noise_clip": 0.1,
    "autotune": False,
    "alpha": 0.05,
    "target_entropy": -3.0,
    "target_entropy_scale": 0.3,
    "hidden_sizes": (),
    "cnn": "a3c",
}
# Where the environment or another option decides whether there is anything to do.
NEEDS: dict[str, dict[str, Any]] = {
    "alpha": {"autotune": False},
    "target_entropy_scale": {"env_id": "CartPole-v1"},
    "cnn": {"env_id": "pictures/Pendulum-v0", "total_timesteps": 48},
}


class Pictures(gym.ObservationWrapper[Any, Any, Any]):
    """Pendulum, of which one sees a picture as bright as the angle says; large enough for every CNN."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(PendulumEnv(render_mode))
        self.observation_space = gym.spaces.Box(0, 255, (36, 36, 3), np.uint8)

    def observation(self, observation: Any) -> Any:
        return np.full((36, 36, 3), 127 * (1 + observation[0]), np.uint8)


gym.register("pictures/Pendulum-v0", entry_point=f"{__name__}:Pictures", max_episode_steps=20)

OPTIONS = [
    (algorithm, field.name)
    for algorithm in ("ddpg", "td3", "sac")
    for field in fields(load("algorithm", ALGORITHMS, algorithm).Config)
]


def weights(agent: nn.Module) -> list[torch.Tensor]:
    return [*agent.parameters()]


@pytest.mark.parametrize(("algorithm", "name"), OPTIONS)
def test_an_option_changes_what_is_learned(train: Train, algorithm: str, name: str) -> None:
    values = {"env_id": "Pendulum-v1"} | BASE | NEEDS.get(name, {})
    before = weights(train(algorithm, **values))
    after = weights(train(algorithm, **values | {name: TURNED[name]}))
    assert all(torch.isfinite(x).all() for x in after)
    assert len(before) != len(after) or any(
        x.shape != y.shape or not torch.equal(x, y) for x, y in zip(before, after, strict=True)
    )
