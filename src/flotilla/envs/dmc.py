"""dm_control's suite: joint states as one float32 vector, or a camera's image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from flotilla.envs.make import EnvOptions, unknown
from flotilla.envs.mujoco import draw_without_display
from flotilla.envs.wrappers import RecordEpisode, StepResult

NAME = "dmc"
EXTRA = "dmc"
PACKAGES = ("dm_control",)
OPTIONS = ("obs_type", "image_size", "action_repeat")
TRAINING_ONLY: tuple[Any, ...] = ()
FRAME_STACK = 1
CHECK_IDS = ("dmc_walker_walk", "dmc/cartpole-swingup")

# domain: its tasks; written out, because importing dm_control takes seconds.
TASKS = {
    "acrobot": "swingup swingup_sparse",
    "ball_in_cup": "catch",
    "cartpole": "balance balance_sparse swingup swingup_sparse two_poles three_poles",
    "cheetah": "run",
    "dog": "stand walk trot run fetch",
    "finger": "spin turn_easy turn_hard",
    "fish": "upright swim",
    "hopper": "stand hop",
    "humanoid": "stand walk run run_pure_state",
    "humanoid_CMU": "stand walk run",
    "lqr": "lqr_2_1 lqr_6_2",
    "manipulator": "bring_ball bring_peg insert_ball insert_peg",
    "pendulum": "swingup",
    "point_mass": "easy hard",
    "quadruped": "walk run escape fetch",
    "reacher": "easy hard",
    "stacker": "stack_2 stack_4",
    "swimmer": "swimmer6 swimmer15",
    "walker": "stand walk run",
}
CAMERAS = {"quadruped": 2}  # the one that follows the robot; elsewhere it is camera 0
RENDER_SIZE = 480  # pixels a side, of videos


class DmControl(gym.Env[Any, Any]):
    """One task of the suite behind Gymnasium's interface; its time limit truncates, its discount 0 terminates."""

    def __init__(self, domain: str, task: str, options: EnvOptions) -> None:
        draw_without_display()
        from dm_control import suite

        self._env = suite.load(domain, task)
        self._camera = CAMERAS.get(domain, 0)
        self._repeat = options.action_repeat
        self._image_size = options.image_size if options.obs_type == "pixels" else 0
        fps = 1 / (self._env.control_timestep() * self._repeat)
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": fps}
        self.render_mode = options.render_mode
        action = self._env.action_spec()
        self.action_space = spaces.Box(
            action.minimum.astype(np.float32), action.maximum.astype(np.float32), dtype=np.float32
        )
        self.observation_space: spaces.Box
        if self._image_size:
            shape = (self._image_size, self._image_size, 3)
            self.observation_space = spaces.Box(0, 255, shape, np.uint8)
        else:
            size = sum(int(np.prod(spec.shape)) for spec in self._env.observation_spec().values())
            self.observation_space = spaces.Box(-np.inf, np.inf, (size,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self._env.task.random.seed(int(self.np_random.integers(2**31)))
        return self._observe(self._env.reset().observation), {}

    def step(self, action: Any) -> StepResult:
        reward = 0.0
        for _ in range(self._repeat):
            arrived = self._env.step(action)
            reward += arrived.reward
            if arrived.last():
                break
        terminated = arrived.last() and arrived.discount == 0
        return self._observe(arrived.observation), reward, terminated, arrived.last() and not terminated, {}

    def render(self) -> NDArray[np.uint8] | None:
        return self._draw(RENDER_SIZE) if self.render_mode == "rgb_array" else None

    def close(self) -> None:
        self._env.close()

    def _observe(self, parts: dict[str, Any]) -> NDArray[Any]:
        if self._image_size:
            return self._draw(self._image_size)
        return np.concatenate([np.ravel(part) for part in parts.values()]).astype(np.float32)

    def _draw(self, size: int) -> NDArray[np.uint8]:
        image: NDArray[np.uint8] = self._env.physics.render(size, size, camera_id=self._camera)
        return image


def ids() -> Sequence[str]:
    return [f"dmc_{domain}_{task}" for domain, tasks in TASKS.items() for task in tasks.split()]


def matches(env_id: str) -> bool:
    return env_id.startswith(("dmc_", "dmc/"))


def frames_per_step(env_id: str, options: EnvOptions) -> int:
    return options.action_repeat


def make(env_id: str, options: EnvOptions) -> gym.Env[Any, Any]:
    plain = env_id.replace("/", "_", 1).replace("-", "_")
    for domain, tasks in TASKS.items():
        for task in tasks.split():
            if plain == f"dmc_{domain}_{task}":
                return RecordEpisode(DmControl(domain, task, options))
    raise unknown(env_id, ids())
