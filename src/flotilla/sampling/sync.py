"""The in-process backend: a loop over Gymnasium environments, for cheap simulators and for debugging."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from flotilla.core.types import Spec
from flotilla.sampling.base import Array, Finished, RowArrays, split
from flotilla.sampling.shm import same_spaces


class SyncBackend:
    """Steps environments one after another in this process, in one group: nothing runs while the policy acts."""

    name = "sync"

    def __init__(self, makers: Sequence[Callable[[], gym.Env[Any, Any]]], seeds: Sequence[int]) -> None:
        self._envs: list[gym.Env[Any, Any]] = []
        try:
            self._envs.extend(maker() for maker in makers)
            self.spec = Spec(*same_spaces([(env.observation_space, env.action_space) for env in self._envs]))
        except BaseException:
            self.close()
            raise
        self._seeds = list(seeds)
        self._steps = [env.step for env in self._envs]
        self._ended = np.zeros(len(self._envs), bool)
        self.num_envs = len(self._envs)
        self.groups = split(self.num_envs, 1)
        self._action: Any = ()
        # A Python int is what most simulators want, and tolist() makes all of them in one call.
        self._as_list = isinstance(self.spec.action_space, gym.spaces.Discrete)

    def reset(self, out: RowArrays) -> None:
        out.reward[:] = 0
        out.is_first[:] = True
        out.is_last[:] = out.is_terminal[:] = False
        self._ended[:] = False
        for i, (env, seed) in enumerate(zip(self._envs, self._seeds, strict=True)):
            _write(out, i, env.reset(seed=seed)[0])

    def send(self, action: Array, group: int = 0) -> None:
        self._action = action.tolist() if self._as_list else action

    def recv(self, out: RowArrays, group: int = 0) -> Sequence[Finished]:
        actions = self._action
        ended, finished = self._ended, ()  # type: tuple[Any, Sequence[Finished]]
        out.is_first[:] = ended
        out.is_last[:] = out.is_terminal[:] = False
        obs_out, is_dict = out.obs, isinstance(out.obs, dict)
        i = -1
        try:
            for i, step in enumerate(self._steps):
                if ended[i]:
                    obs, info = self._envs[i].reset()
                    out.reward[i] = 0
                    ended[i] = False
                else:
                    obs, out.reward[i], terminated, truncated, info = step(actions[i])
                    if terminated or truncated:
                        ended[i] = out.is_last[i] = True
                        out.is_terminal[i] = terminated
                if "episode" in info:  # rarely in a reset's: an Atari game that ends while a lost life restarts
                    finished = [*finished, Finished(i, float(info["episode"]["r"]), int(info["episode"]["l"]))]
                if is_dict:
                    _write(out, i, obs)
                else:
                    obs_out[i] = obs  # type: ignore[index]
        except Exception as error:
            raise RuntimeError(f"environment {i} ({self._envs[i]}) raised {error!r} in step()") from error
        return finished

    def close(self) -> None:
        while self._envs:
            self._envs.pop().close()


def _write(out: RowArrays, index: int, obs: Any) -> None:
    """One environment's observation into its place in the row."""
    if isinstance(out.obs, dict):
        for key, array in out.obs.items():
            array[index] = obs[key]
    else:
        out.obs[index] = obs
