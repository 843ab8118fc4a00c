"""Gymnasium's Box2D: LunarLander, BipedalWalker, CarRacing."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from typing import Any

import gymnasium as gym

from flotilla.envs import registered
from flotilla.envs.make import EnvOptions

NAME = "box2d"
EXTRA = "box2d"
PACKAGES = ("Box2D", "pygame")
OPTIONS: tuple[str, ...] = ()
TRAINING_ONLY: tuple[Any, ...] = ()
FRAME_STACK = 1
CHECK_IDS = ("LunarLander-v3", "BipedalWalker-v3")

frames_per_step = registered.frames_per_step


def ids() -> Sequence[str]:
    return registered.from_module("gymnasium.envs.box2d")


def matches(env_id: str) -> bool:
    return env_id in ids()


def make(env_id: str, options: EnvOptions) -> gym.Env[Any, Any]:
    with warnings.catch_warnings():
        # Its SWIG types have no __module__; where warnings are errors, the interpreter itself crashes on that.
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("Box2D")
    return registered.make(env_id, options)
