"""Crafter, with and without its reward: images of a world to survive in, for at most 10,000 steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from flotilla.envs.make import EnvOptions, unknown
from flotilla.envs.wrappers import RecordEpisode

NAME = "crafter"
EXTRA = "crafter"
PACKAGES = ("crafter",)
OPTIONS = ("image_size",)
TRAINING_ONLY: tuple[Any, ...] = ()
FRAME_STACK = 1
CHECK_IDS = ("crafter_reward",)  # making worlds is slow

IDS = ("crafter_reward", "crafter_noreward")


class OrderedSet(dict[Any, None]):
    """The part of a set's interface that Crafter uses, iterated in the order of insertion."""

    def add(self, item: Any) -> None:
        self[item] = None

    def remove(self, item: Any) -> None:
        del self[item]


class Crafter(gym.Env[Any, Any]):
    """Crafter's own class behind Gymnasium's interface."""

    def __init__(self, reward: bool, image_size: int, render_mode: str | None) -> None:
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
        self.render_mode = render_mode
        self._arguments = {"reward": reward, "size": (image_size, image_size)}
        self._env = self._create(seed=0)
        self._seeded = False
        self.observation_space = spaces.Box(0, 255, (image_size, image_size, 3), np.uint8)
        self.action_space = spaces.Discrete(self._env.action_space.n)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None or not self._seeded:
            # Crafter derives the seed of each episode from one number, given at construction, and a counter.
            self._env = self._create(seed=int(self.np_random.integers(2**31)))
            self._seeded = True
        return self._env.reset(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, done, info = self._env.step(int(action))
        died = info["discount"] == 0
        return obs, float(reward), died, bool(done) and not died, {"achievements": info["achievements"]}

    def render(self) -> Any:
        return self._env.render((512, 512)) if self.render_mode == "rgb_array" else None

    def _create(self, seed: int) -> Any:
        import crafter
        from crafter.engine import World

        class OrderedWorld(World):  # type: ignore[misc]
            """Crafter draws a creature from a set ordered by memory address: a seed would not repeat a run."""

            def reset(self, seed: int | None = None) -> None:
                super().reset(seed)
                self._chunks: defaultdict[Any, OrderedSet] = defaultdict(OrderedSet)

        env = crafter.Env(seed=seed, **self._arguments)
        env._world.__class__ = OrderedWorld
        return env


def ids() -> Sequence[str]:
    return IDS


def matches(env_id: str) -> bool:
    return env_id.startswith("crafter_")


def frames_per_step(env_id: str, options: EnvOptions) -> int:
    return 1


def make(env_id: str, options: EnvOptions) -> gym.Env[Any, Any]:
    if env_id not in IDS:
        raise unknown(env_id, IDS)
    return RecordEpisode(Crafter(env_id == "crafter_reward", options.image_size, options.render_mode))
