"""Gymnasium's classic control: CartPole, Acrobot, MountainCar, Pendulum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym

from flotilla.envs import registered
from flotilla.envs.make import EnvOptions, require

NAME = "classic"
EXTRA = "classic"
PACKAGES: tuple[str, ...] = ()  # pygame draws, and is not needed otherwise
OPTIONS: tuple[str, ...] = ()
TRAINING_ONLY: tuple[Any, ...] = ()
FRAME_STACK = 1
CHECK_IDS = ("CartPole-v1", "Pendulum-v1", "MountainCarContinuous-v0")

frames_per_step = registered.frames_per_step


def ids() -> Sequence[str]:
    return registered.from_module("gymnasium.envs.classic_control")


def matches(env_id: str) -> bool:
    return env_id in ids()


def make(env_id: str, options: EnvOptions) -> gym.Env[Any, Any]:
    if options.render_mode is not None:
        require("pygame", env_id, EXTRA)
    return registered.make(env_id, options)
