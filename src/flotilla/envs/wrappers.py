"""Wrappers of one environment that any suite may need: raw episode statistics, and spaces that a network can take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from flotilla.core.errors import UsageError

Space = spaces.Space[Any]
Convert = Callable[[Any], NDArray[Any]]
StepResult = tuple[Any, Any, bool, bool, dict[str, Any]]


class RecordEpisode(gym.Wrapper[Any, Any, Any, Any]):
    """Adds `info["episode"] = {"r": return, "l": steps}` to the step on which the episode ends.

    It stands under the wrappers that clip rewards or end an episode early, so that it scores as the simulator.
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self._return = 0.0
        self._length = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._return = 0.0
        self._length = 0
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> StepResult:
        result: Any = self.env.step(action)  # passed on as it is: this runs on every step of every environment
        self._return += result[1]
        self._length += 1
        if result[2] or result[3]:
            result[4]["episode"] = {"r": float(np.asarray(self._return).item()), "l": self._length}
        return result  # type: ignore[no-any-return]


class ClipAction(gym.Wrapper[Any, Any, Any, Any]):
    """Clips a Box action to its bounds, which stay the action space: a Gaussian policy may overshoot them."""

    def __init__(self, env: gym.Env[Any, Any], space: spaces.Box) -> None:
        super().__init__(env)
        self._low, self._high = space.low, space.high
        self.action_space = _float32(space)

    def step(self, action: Any) -> StepResult:
        # Four times faster than np.clip on a short vector, and it gives the dtype of the bounds.
        return self.env.step(np.minimum(np.maximum(action, self._low), self._high))


class ConvertObservation(gym.Wrapper[Any, Any, Any, Any]):
    """Gives observations as float32 or uint8 arrays, or a flat dict of them."""

    def __init__(self, env: gym.Env[Any, Any], space: Space, convert: Callable[[Any], Any]) -> None:
        super().__init__(env)
        self.observation_space = space
        self._convert = convert

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(seed=seed, options=options)
        return self._convert(obs), info

    def step(self, action: Any) -> StepResult:
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self._convert(obs), reward, terminated, truncated, info


def adapt(env: gym.Env[Any, Any], env_id: str) -> gym.Env[Any, Any]:
    """The environment behind spaces that a network can take; nothing is added where they are so already."""
    space, convert = _observation(env.observation_space, env_id)
    if convert is not None:
        env = ConvertObservation(env, space, convert)
    action_space = env.action_space
    if isinstance(action_space, spaces.Box) and action_space.dtype in (np.float32, np.float64):
        return ClipAction(env, action_space)
    if isinstance(action_space, spaces.Discrete) and action_space.start == 0:
        return env
    if isinstance(action_space, spaces.MultiDiscrete) and action_space.nvec.ndim == 1 and not action_space.start.any():
        return env
    raise UsageError(
        f"environment '{env_id}' has the action space {action_space}: "
        "wrap it so that it is Discrete or MultiDiscrete from 0, or a Box of floats"
    )


def _observation(space: Space, env_id: str) -> tuple[Space, Callable[[Any], Any] | None]:
    """The space as a network takes it, and what turns an observation into it (None: it is so already)."""
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        return _leaf(space, env_id)
    parts = {".".join(map(str, path)): (path, *_leaf(leaf, env_id)) for path, leaf in _leaves(space)}
    flat = spaces.Dict({key: leaf for key, (_, leaf, _) in parts.items()})
    if isinstance(space, spaces.Dict) and all(
        len(path) == 1 and convert is None for path, _, convert in parts.values()
    ):
        return flat, None

    def convert_dict(obs: Any) -> dict[str, NDArray[Any]]:
        result = {}
        for key, (path, _, convert) in parts.items():
            value = obs
            for step in path:
                value = value[step]
            result[key] = value if convert is None else convert(value)
        return result

    return flat, convert_dict


def _leaves(space: Space, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Space]]:
    """Every space under nested Dicts and Tuples, with the keys that lead to it."""
    if isinstance(space, spaces.Dict):
        for key, child in space.items():
            yield from _leaves(child, (*path, key))
    elif isinstance(space, spaces.Tuple):
        for index, child in enumerate(space):
            yield from _leaves(child, (*path, index))
    else:
        yield path, space


def _leaf(space: Space, env_id: str) -> tuple[Space, Convert | None]:
    if isinstance(space, spaces.Box):
        if space.shape == ():
            box = spaces.Box(np.float32(space.low), np.float32(space.high), (1,), np.float32)
            return box, lambda obs: np.array([obs], np.float32)
        if space.dtype in (np.float32, np.uint8):
            return space, None
        return _float32(space), lambda obs: np.asarray(obs, np.float32)
    if isinstance(space, spaces.Discrete):
        size, start = int(space.n), int(space.start)
        return _unit((size,)), lambda obs: _one_hot(int(obs) - start, size)
    if isinstance(space, spaces.MultiBinary):
        return _unit(space.shape), lambda obs: np.asarray(obs, np.float32)
    if isinstance(space, spaces.MultiDiscrete):
        ends = np.cumsum(space.nvec.ravel())
        size, offsets = int(ends[-1]), (ends - space.nvec.ravel()) - space.start.ravel()
        return _unit((size,)), lambda obs: _one_hot(offsets + np.ravel(obs), size)
    raise UsageError(
        f"environment '{env_id}' has the observation space {space}: no network here takes a "
        f"{type(space).__name__}; wrap it so that it gives boxes, discrete values or a dict of them"
    )


def _unit(shape: tuple[int, ...]) -> spaces.Box:
    return spaces.Box(0.0, 1.0, shape, np.float32)


def _float32(space: spaces.Box) -> spaces.Box:
    if space.dtype == np.float32:
        return space
    with np.errstate(over="ignore"):  # a bound beyond float32 is no bound
        return spaces.Box(space.low.astype(np.float32), space.high.astype(np.float32), dtype=np.float32)


def _one_hot(index: Any, size: int) -> NDArray[np.float32]:
    vector = np.zeros(size, np.float32)
    vector[index] = 1.0
    return vector
