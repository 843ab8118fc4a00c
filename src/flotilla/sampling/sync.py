"""The in-process backend: a loop over Gymnasium environments, for cheap simulators and for debugging."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from flotilla.core.errors import UsageError
from flotilla.core.seeding import episode_seed
from flotilla.core.types import Spec
from flotilla.sampling.base import Array, Finished, Restarted, RowArrays, split
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

    def reset(self, out: RowArrays, start: int = 0) -> Sequence[Restarted]:
        self.episodes[:] = start - 1
        self.begin(range(self.num_envs), out)
        return ()

    def send(self, action: Array, group: int = 0) -> None:
        self._action = action.tolist() if self._as_list else action

    def recv(self, out: RowArrays, group: int = 0) -> Sequence[Finished]:
        out.is_first[:] = self._ended
        out.is_last[:] = out.is_terminal[:] = False
        return self._advance(range(self.num_envs), self._action, out)

    def resume(
        self, episodes: Sequence[int], actions: Sequence[Array], out: RowArrays, limit_s: float
    ) -> Sequence[int]:
        self.episodes[:] = np.asarray(episodes) - 1
        self.begin(range(self.num_envs), out)
        end, t = time.monotonic() + limit_s, 0
        played = [each.tolist() if self._as_list else each for each in actions]
        while behind := [i for i, each in enumerate(played) if len(each) > t]:
            if time.monotonic() > end:
                break
            self._advance_some(behind, [played[i][t] for i in behind], out)
            t += 1
        return behind

    def begin(self, env_index: Sequence[int], out: RowArrays) -> None:
        index = list(env_index)
        self._ended[index] = self._whole[index] = True
        self._advance_some(index, [None] * len(index), out)

    def _advance_some(self, env_index: list[int], actions: Sequence[Any], out: RowArrays) -> None:
        """A step of some environments that nobody is told of, into the rows of all."""
        out.is_first[env_index] = self._ended[env_index]
        out.is_last[env_index] = out.is_terminal[env_index] = False
        self._advance(env_index, actions, out)

    def _advance(self, env_index: Sequence[int], actions: Sequence[Any], out: RowArrays) -> Sequence[Finished]:
        """A step of environments whose flags in the rows say so far that nothing ends."""
        ended, finished = self._ended, ()  # type: tuple[Any, Sequence[Finished]]
        obs_out, is_dict = out.obs, isinstance(out.obs, dict)
        i = -1
        try:
            for i, action in zip(env_index, actions, strict=False):
                if ended[i]:
                    obs, info = self._reset(i)
                    out.reward[i] = 0
                    ended[i] = False
                else:
                    obs, reward, terminated, truncated, info = self._steps[i](action)
                    try:
                        out.reward[i] = reward
                    except ValueError:  # of shape (1,), as some environments have them
                        out.reward[i] = np.asarray(reward).item()
                    if terminated or truncated:
                        ended[i] = out.is_last[i] = True
                        out.is_terminal[i] = terminated
                        self._whole[i] = "episode" in info
                if "episode" in info:  # rarely in a reset's: an Atari game that ends while a lost life restarts
                    finished = [*finished, Finished(i, float(info["episode"]["r"]), int(info["episode"]["l"]))]
                if is_dict:
                    for key, array in out.obs.items():  # type: ignore[union-attr]
                        array[i] = obs[key]
                else:
                    obs_out[i] = obs  # type: ignore[index]
        except UsageError:
            raise
        except Exception as error:
            call = "reset" if ended[i] else "step"
            raise RuntimeError(f"environment {i} ({self._envs[i]}) raised {error!r} in {call}()") from error
        return finished

    def _reset(self, i: int) -> Any:
        """What an environment says at the start of its next episode, or after a lost life."""
        if not self._whole[i]:
            return self._envs[i].reset()
        self.episodes[i] += 1
        return self._envs[i].reset(seed=episode_seed(self._seeds[i], int(self.episodes[i])))

    def close(self) -> None:
        while self._envs:
            self._envs.pop().close()
