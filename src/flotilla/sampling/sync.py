"""The in-process backend: a loop over Gymnasium environments, for cheap simulators and for debugging."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from flotilla.core.seeding import episode_seed
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
        self._whole = np.zeros(len(self._envs), bool)  # whether what has ended is an episode, and not only a life
        self.episodes = np.zeros(len(self._envs), np.int64)
        self.num_envs = len(self._envs)
        self.groups = split(self.num_envs, 1)
        self._action: Any = ()
        # A Python int is what most simulators want, and tolist() makes all of them in one call.
        self._as_list = isinstance(self.spec.action_space, gym.spaces.Discrete)

    def reset(self, out: RowArrays) -> None:
        for i, (env, seed) in enumerate(zip(self._envs, self._seeds, strict=True)):
            _write(out, i, env.reset(seed=seed)[0])
        _begin_rows(out, slice(None))
        self._ended[:] = self._whole[:] = False
        self.episodes[:] = 0

    def send(self, action: Array, group: int = 0) -> None:
        self._action = action.tolist() if self._as_list else action

    def recv(self, out: RowArrays, group: int = 0) -> Sequence[Finished]:
        finished: Sequence[Finished] = ()
        out.is_first[:] = self._ended
        out.is_last[:] = out.is_terminal[:] = False
        i = -1
        try:
            for i, action in enumerate(self._action):
                info = self._step(i, action, out)
                if "episode" in info:  # rarely in a reset's: an Atari game that ends while a lost life restarts
                    finished = [*finished, Finished(i, float(info["episode"]["r"]), int(info["episode"]["l"]))]
        except Exception as error:
            raise RuntimeError(f"environment {i} ({self._envs[i]}) raised {error!r} in step()") from error
        return finished

    def _step(self, i: int, action: Any, out: RowArrays) -> dict[str, Any]:
        """A step of one environment, whose flags in the row say False so far."""
        if self._ended[i]:
            seed = None
            if self._whole[i]:
                self.episodes[i] += 1
                seed = episode_seed(self._seeds[i], int(self.episodes[i]))
            obs, info = self._envs[i].reset(seed=seed)
            out.reward[i] = 0
            self._ended[i] = False
        else:
            obs, out.reward[i], terminated, truncated, info = self._steps[i](action)
            if terminated or truncated:
                self._ended[i] = out.is_last[i] = True
                out.is_terminal[i] = terminated
                self._whole[i] = "episode" in info
        _write(out, i, obs)
        return info

    def resume(self, episodes: Sequence[int], actions: Sequence[Array], out: RowArrays, limit_s: float) -> None:
        self.episodes[:] = np.asarray(episodes) - 1
        self.begin(range(self.num_envs), out)
        end = time.monotonic() + limit_s
        for i, played in enumerate(actions):
            for action in played.tolist() if self._as_list else played:
                out.is_first[i], out.is_last[i], out.is_terminal[i] = self._ended[i], False, False
                self._step(i, action, out)
                if time.monotonic() > end:
                    return

    def begin(self, env_index: Sequence[int], out: RowArrays) -> None:
        _begin_rows(out, list(env_index))
        for i in env_index:
            self._ended[i] = self._whole[i] = True
            self._step(i, None, out)

    def close(self) -> None:
        while self._envs:
            self._envs.pop().close()


def _begin_rows(out: RowArrays, index: Any) -> None:
    out.reward[index] = 0
    out.is_first[index] = True
    out.is_last[index] = out.is_terminal[index] = False


def _write(out: RowArrays, index: int, obs: Any) -> None:
    """One environment's observation into its place in the row."""
    if isinstance(out.obs, dict):
        for key, array in out.obs.items():
            array[index] = obs[key]
    else:
        out.obs[index] = obs
