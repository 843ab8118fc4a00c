"""Gymnasium's MuJoCo robots, versions 4 and 5."""

from __future__ import annotations

import ctypes.util
import os
import sys
from collections.abc import Sequence
from typing import Any

import gymnasium as gym

from flotilla.envs import registered
from flotilla.envs.make import EnvOptions

NAME = "mujoco"
EXTRA = "mujoco"
PACKAGES = ("mujoco",)
OPTIONS: tuple[str, ...] = ()
TRAINING_ONLY: tuple[Any, ...] = ()
FRAME_STACK = 1
CHECK_IDS = ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v4")

# Simulator steps per environment step; the classes say so only once they are made.
FRAME_SKIP = {"Reacher": 2, "InvertedPendulum": 2, "Hopper": 4, "Swimmer": 4, "Walker2d": 4}
FRAME_SKIP_OF_OTHERS = 5


def ids() -> Sequence[str]:
    return registered.from_module("gymnasium.envs.mujoco")


def matches(env_id: str) -> bool:
    return env_id in ids()


def frames_per_step(env_id: str, options: EnvOptions) -> int:
    return FRAME_SKIP.get(env_id.partition("-")[0], FRAME_SKIP_OF_OTHERS)


def make(env_id: str, options: EnvOptions) -> gym.Env[Any, Any]:
    if options.render_mode == "rgb_array":
        draw_without_display()
    return registered.make(env_id, options)


def draw_without_display() -> None:
    """Where there is no screen and the user chose nothing: MuJoCo draws through EGL, or not at all."""
    if sys.platform == "linux" and not {"DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL"} & os.environ.keys():
        os.environ["MUJOCO_GL"] = "egl" if ctypes.util.find_library("EGL") else "off"
