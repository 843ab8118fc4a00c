"""`check_env`: whether an environment made by `make_env` keeps what the rooms above it rely on."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.utils import env_checker

from flotilla.envs.make import EnvOptions, make_env, suite_of, suites

# What Gymnasium warns about and is meant to be so.
BY_DESIGN = (
    "is different from the unwrapped version",  # the wrapped environment is what is to be checked
    "minimum value is -infinity",  # joint velocities have no bounds
    "maximum value is infinity",
    "we recommend using a symmetric and normalized space",  # the simulator's own bounds are kept
)
TRACE_STEPS = 50
EPISODE_STEPS = 3000  # an episode of random actions is over by then, except where it has no end of its own

Step = tuple[Any, float, bool, bool, dict[str, Any]]


def check_env(env: gym.Env[Any, Any], skip_render_check: bool = False) -> None:
    """AssertionError, or Gymnasium's warning as an error, where `env` is not as it should be; leaves it open.

    Gymnasium's own checks; spaces and dtypes along whole episodes; statistics on the last step and only there;
    the same seed gives the same steps; training and evaluation differ only as the suite says.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for message in BY_DESIGN:
            warnings.filterwarnings("ignore", f".*{re.escape(message)}", UserWarning)
        env_checker.check_env(env, skip_render_check=skip_render_check)
    _check_episode(env)
    _check_repeats(env)
    _check_evaluation(env)


def steps(env: gym.Env[Any, Any], seed: int, limit: int) -> Iterator[Step]:
    """Seeded random actions until `limit`; resets after the end of an episode; the first one is the reset."""
    env.action_space.seed(seed)
    obs, info = env.reset(seed=seed)
    yield obs, 0.0, False, False, info
    for _ in range(limit):
        obs, reward, terminated, truncated, info = env.step(env.action_space.sample())
        yield obs, float(reward), terminated, truncated, info
        if terminated or truncated:
            obs, info = env.reset()
            yield obs, 0.0, False, False, info


def _check_episode(env: gym.Env[Any, Any]) -> None:
    """Raw statistics appear with the end of a raw episode, and count its steps."""
    whole = make_env(*_arguments(env, training=False))
    total, length, episodes = 0.0, 0, 0
    for obs, reward, terminated, truncated, info in steps(whole, seed=1, limit=EPISODE_STEPS):
        _check_observation(obs, whole.observation_space)
        assert {type(terminated), type(truncated)} <= {bool, np.bool_}, f"{terminated!r}, {truncated!r}"
        assert ("episode" in info) == (terminated or truncated), f"statistics at the wrong step: {info}"
        total, length = total + reward, length + 1
        if "episode" in info:
            said, steps_taken = info["episode"], length - 1  # the reset is no step
            assert said["l"] == steps_taken, f"{said} is not of {steps_taken} steps"
            assert np.isclose(said["r"], total), f"{said} is not a return of {total}"
            total, length, episodes = 0.0, 0, episodes + 1
            if episodes == 2:
                break
    whole.close()


def _check_observation(obs: Any, space: spaces.Space[Any]) -> None:
    leaves = obs.items() if isinstance(space, spaces.Dict) else [("", obs)]
    for key, leaf in leaves:
        box = space[key] if isinstance(space, spaces.Dict) else space
        assert isinstance(box, spaces.Box), f"{key}: {box}"
        assert box.dtype in (np.float32, np.uint8), f"{key}: {box}"
        assert isinstance(leaf, np.ndarray), f"{key}: {leaf!r}"
        assert leaf.dtype == box.dtype, f"{key}: {leaf.dtype} in {box}"
        assert box.contains(leaf), f"{key}: {leaf} is not in {box}"


def _check_repeats(env: gym.Env[Any, Any]) -> None:
    first, second = (list(steps(env, seed=7, limit=TRACE_STEPS)) for _ in range(2))
    for index, (a, b) in enumerate(zip(first, second, strict=True)):
        assert _same(a[0], b[0]), f"observation {index} differs between two runs of one seed"
        assert a[1:4] == b[1:4], f"reward or end {index} differs between two runs of one seed"


def _check_evaluation(env: gym.Env[Any, Any]) -> None:
    """Until the first end, training sees what evaluation sees and is paid the same, or its sign."""
    training, whole = (make_env(*_arguments(env, training=mode)) for mode in (True, False))
    only = suites()[suite_of(_arguments(env)[0])].TRAINING_ONLY
    assert training.observation_space == whole.observation_space
    assert training.action_space == whole.action_space
    for a, b in zip(steps(training, 3, TRACE_STEPS), steps(whole, 3, TRACE_STEPS), strict=False):
        reward = np.sign(b[1]) if "reward_clip" in only else b[1]
        assert _same(a[0], b[0]), "training and evaluation see different things"
        assert a[1] == reward, f"training pays {a[1]}, evaluation {b[1]}"
        if a[2] and not b[2]:
            assert "life_loss" in only, "training ends where evaluation does not"
            break
        assert a[2:4] == b[2:4], "training and evaluation end differently"
    training.close()
    whole.close()


def _arguments(env: gym.Env[Any, Any], **changes: Any) -> tuple[str, EnvOptions]:
    """What `make_env` was called with, with changes to its options."""
    assert env.spec is not None, "make it with make_env"
    env_id, options = env.spec.kwargs["env_id"], env.spec.kwargs["options"]
    return env_id, replace(options, **changes)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return bool(np.array_equal(a, b))
