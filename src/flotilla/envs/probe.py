"""Tiny environments with a known answer, so that a test can tell what an algorithm or a vectoriser gets wrong.

Gymnasium's ids `probe/<Name>-v0`, registered when this module is imported.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from flotilla.envs import registered
from flotilla.envs.wrappers import StepResult

NAME = "probe"
EXTRA = None
PACKAGES: tuple[str, ...] = ()
OPTIONS: tuple[str, ...] = ()
TRAINING_ONLY: tuple[Any, ...] = ()
FRAME_STACK = 1

frames_per_step = registered.frames_per_step
make = registered.make

Reset = tuple[Any, dict[str, Any]]


class Probe(gym.Env[Any, Any]):
    """What the probes share: one number to see, two actions, a clock."""

    t: int

    observation_space: spaces.Space[Any] = spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space: spaces.Space[Any] = spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        self.observation_space = copy.deepcopy(type(self).observation_space)  # its generator is its own
        self.action_space = copy.deepcopy(type(self).action_space)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def observe(self) -> Any:
        return _array(0.0)

    def coin(self) -> float:
        """-1 or 1."""
        return float(2 * self.np_random.integers(2) - 1)


class Constant(Probe):
    """One step, reward 1, nothing to see: the value is 1."""

    def step(self, action: Any) -> StepResult:
        return self.observe(), 1.0, True, False, {}


class TwoStep(Probe):
    """Sees 0, then 1; reward 1 after the second step: the values are gamma, then 1."""

    def observe(self) -> NDArray[np.float32]:
        return _array(min(self.t, 1))

    def step(self, action: Any) -> StepResult:
        self.t += 1
        done = self.t == 2
        return self.observe(), float(done), done, False, {}


class ObsReward(Probe):
    """Sees -1 or 1 and is paid just that after one step: the value is the observation."""

    def observe(self) -> NDArray[np.float32]:
        self.cue = self.coin()
        return _array(self.cue)

    def step(self, action: Any) -> StepResult:
        return _array(self.cue), self.cue, True, False, {}


class Action(ObsReward):
    """Sees -1 or 1; action 0 is right for -1 and 1 for 1: reward 1 if right, else -1."""

    def step(self, action: Any) -> StepResult:
        right = int(action) == (self.cue > 0)
        return _array(self.cue), 1.0 if right else -1.0, True, False, {}


class TimeLimit(Probe):
    """Reward 1 for ever, cut after 10 steps: V = 1 / (1 - gamma); at most 10 where the cut counts as an end."""

    def step(self, action: Any) -> StepResult:
        return self.observe(), 1.0, False, False, {}


class Memory(Probe):
    """A cue (-1 or 1) at the first of 8 steps must be the action (0 or 1) of the last: reward 1 or -1.

    Sees (cue or 0, 1 at the last step): without memory the expected return is 0, with it 1.
    """

    LENGTH = 8
    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def observe(self) -> NDArray[np.float32]:
        if self.t == 0:
            self.cue = self.coin()
        return _array(self.cue if self.t == 0 else 0.0, float(self.t == self.LENGTH - 1))

    def step(self, action: Any) -> StepResult:
        self.t += 1
        done = self.t == self.LENGTH
        right = int(action) == (self.cue > 0)
        reward = (1.0 if right else -1.0) if done else 0.0
        return self.observe(), reward, done, False, {}


class Counter(Probe):
    """Counts, so that a test sees whether observation, action and episode belong together in a batch.

    `count`: (episode since the last seed, step, last action or -1, a tag drawn from the seed); `image` is
    filled with the step.  Reward: the step.  Episodes last 3 to 6 steps; where episode + tag is even they terminate,
    else they truncate.
    """

    observation_space = spaces.Dict(
        {"count": spaces.Box(-1.0, 1e6, (4,), np.float32), "image": spaces.Box(0, 255, (8, 8, 3), np.uint8)}
    )
    action_space = spaces.Discrete(5)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        fresh = seed is not None or self._np_random is None
        gym.Env.reset(self, seed=seed)
        if fresh:
            self.episode, self.tag = -1, int(self.np_random.integers(100_000))
        self.episode, self.t, self.last = self.episode + 1, 0, -1
        return self.observe(), {}

    def observe(self) -> dict[str, NDArray[Any]]:
        count = _array(self.episode, self.t, self.last, self.tag)
        return {"count": count, "image": np.full((8, 8, 3), self.t, np.uint8)}

    def step(self, action: Any) -> StepResult:
        self.t, self.last = self.t + 1, int(action)
        kind = self.episode + self.tag
        done, even = self.t == 3 + kind % 4, kind % 2 == 0
        return self.observe(), float(self.t), done and even, done and not even, {}


class Continuous(Probe):
    """Sees x in [-1, 1]; the reward of the one step is -(action - x / 2)^2: the best action is x / 2."""

    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def observe(self) -> NDArray[np.float32]:
        self.x = float(self.np_random.uniform(-1, 1))
        return _array(self.x)

    def step(self, action: Any) -> StepResult:
        return _array(self.x), -((float(action[0]) - self.x / 2) ** 2), True, False, {}


class MultiDiscrete(Probe):
    """Sees one one-hot of 2 and one of 3, which the two actions must name: reward 1/2 for each that is right."""

    observation_space = spaces.Box(0.0, 1.0, (5,), np.float32)
    action_space = spaces.MultiDiscrete([2, 3])

    def observe(self) -> NDArray[np.float32]:
        self.wanted = self.np_random.integers([2, 3])
        return _array(*np.eye(2)[self.wanted[0]], *np.eye(3)[self.wanted[1]])

    def step(self, action: Any) -> StepResult:
        reward = float(np.mean(np.asarray(action) == self.wanted))
        return np.zeros(5, np.float32), reward, True, False, {}


PROBES = (Constant, TwoStep, ObsReward, Action, TimeLimit, Memory, Counter, Continuous, MultiDiscrete)
CHECK_IDS = tuple(f"probe/{probe.__name__}-v0" for probe in PROBES)
for _env_id, _probe in zip(CHECK_IDS, PROBES, strict=True):
    gym.register(
        _env_id, entry_point=f"{__name__}:{_probe.__name__}", max_episode_steps=10 if _probe is TimeLimit else None
    )


def ids() -> Sequence[str]:
    return CHECK_IDS


def matches(env_id: str) -> bool:
    return env_id.startswith("probe/")


def _array(*numbers: float) -> NDArray[np.float32]:
    return np.array(numbers, np.float32)
