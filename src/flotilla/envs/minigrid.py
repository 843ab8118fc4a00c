"""MiniGrid and BabyAI: the agent's partial view as uint8 and its direction; the mission's words are dropped."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from flotilla.envs import registered
from flotilla.envs.make import EnvOptions

NAME = "minigrid"
EXTRA = "minigrid"
PACKAGES = ("minigrid",)
OPTIONS: tuple[str, ...] = ()
TRAINING_ONLY: tuple[Any, ...] = ()
FRAME_STACK = 1
CHECK_IDS = ("MiniGrid-Empty-5x5-v0", "MiniGrid-MemoryS7-v0")

frames_per_step = registered.frames_per_step


class DropMission(gym.ObservationWrapper[Any, Any, Any]):
    """`image` (7, 7, 3) of object, colour and state codes, and `direction` one-hot (4,)."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        seen = env.observation_space
        assert isinstance(seen, spaces.Dict)
        self.observation_space = spaces.Dict(
            {"image": seen["image"], "direction": spaces.Box(0.0, 1.0, (4,), np.float32)}
        )

    def observation(self, observation: Any) -> dict[str, Any]:
        direction = np.zeros(4, np.float32)
        direction[observation["direction"]] = 1.0
        return {"image": observation["image"], "direction": direction}


def ids() -> Sequence[str]:
    if importlib.util.find_spec("minigrid") is None:
        return CHECK_IDS
    importlib.import_module("minigrid")  # registers its ids
    # The wave-function-collapse worlds need pictures that minigrid's wheel has not got.
    return [env_id for env_id in registered.from_module("minigrid.") if not env_id.startswith("MiniGrid-WFC")]


def matches(env_id: str) -> bool:
    return env_id.startswith(("MiniGrid-", "BabyAI-"))


def make(env_id: str, options: EnvOptions) -> gym.Env[Any, Any]:
    importlib.import_module("minigrid")
    return DropMission(registered.make(env_id, options))
