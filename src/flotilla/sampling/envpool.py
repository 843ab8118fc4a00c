"""The EnvPool backend: its C++ simulators (Atari, MuJoCo, DeepMind Control, Procgen, classic, MiniGrid) as rows."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from flotilla.core.errors import UsageError, nearest
from flotilla.core.seeding import episode_seed
from flotilla.core.types import Spec
from flotilla.envs import atari
from flotilla.envs.make import EnvOptions, suite_of
from flotilla.sampling.base import Array, Finished, RawEpisodes, Restarted, RowArrays, split

DROPPED = ("mission",)  # text, which no network here takes


def task_of(env_id: str, options: EnvOptions) -> tuple[str, dict[str, Any]] | None:
    """EnvPool's name and settings for an id of ours, or None where EnvPool has nothing that is the same."""
    import envpool

    if game := atari.parse(env_id):
        name, settings = (
            f"{''.join(word.capitalize() for word in game.rom.split('_'))}-v5",
            {
                "repeat_action_probability": game.sticky,
                "full_action_space": game.full_action_space,
                "noop_max": game.noop_max,
                "use_fire_reset": game.fire_reset,
                "episodic_life": options.training and game.life_loss,
            },
        )
    elif found := re.fullmatch(r"dmc[_/]([a-z_]+?)[_-]([a-z_]+)", env_id):
        if options.obs_type == "pixels":
            return None
        words = "_".join(found.groups()).split("_")
        name, settings = (
            f"{''.join(word.capitalize() for word in words)}-v1",
            {"frame_skip": options.action_repeat},
        )
    else:
        name, settings = env_id, {}
    return (name, settings) if name in set(envpool.list_all_envs()) else None


class EnvPoolBackend:
    """One EnvPool a group, in its synchronous mode; NEXT_STEP autoreset is the row contract already."""

    name = "envpool"

    def __init__(
        self, env_id: str, options: EnvOptions, seeds: Sequence[int], num_threads: int, num_groups: int = 1
    ) -> None:
        import envpool

        task = task_of(env_id, options)
        if task is None:
            raise UsageError(
                f"backend 'envpool' has no environment '{env_id}' ({nearest(env_id, envpool.list_all_envs())}); "
                "use --backend sync"
            )
        self._is_atari = suite_of(env_id) == "atari"
        self._clip = self._is_atari and options.training
        self.num_envs = len(seeds)
        self.groups = split(self.num_envs, num_groups)
        self._seeds = list(seeds)
        settings = {"env_type": "gymnasium", "num_envs": self.num_envs // num_groups, "num_threads": num_threads}
        self._make = functools.partial(envpool.make, task[0], **settings, **task[1])
        try:
            self._envs = self._pools(start=0)
        except ImportError as error:  # Procgen's need of Qt's libraries
            raise UsageError(f"backend 'envpool' cannot make '{env_id}': {error}") from error
        with warnings.catch_warnings():
            # Some of its float64 bounds have no equal in float32, which is nothing that a user can change.
            warnings.filterwarnings("ignore", ".*precision lowered by casting", UserWarning)
            # Each pool makes its own at the first use, and warns then.
            spaces = [(envs.observation_space, envs.action_space) for envs in self._envs]
        obs_space, space = spaces[0]
        self._action_dtype = space.dtype
        self._bounds = (space.low, space.high) if isinstance(space, gym.spaces.Box) else None
        self._sizes: dict[str, int] = {}  # one-hot sizes of Discrete observation keys
        self.spec = Spec(self._adapt_space(obs_space), _float32(space))
        self._ended = np.zeros((num_groups, self.num_envs // num_groups), bool)
        self._raw = [RawEpisodes(envs) for envs in self.groups]

    def _pools(self, start: int) -> list[Any]:
        seeds = np.array([episode_seed(seed, start) for seed in self._seeds], np.int32)
        return [self._make(seed=seeds[envs]) for envs in self.groups]

    def reset(self, out: RowArrays, start: int = 0) -> Sequence[Restarted]:
        if start:  # a pool takes seeds only when it is made
            self.close()
            self._envs = self._pools(start)
        for envs, group in zip(self._envs, self.groups, strict=True):
            self._write(envs.reset()[0], out.at(group))
        out.reward[:] = 0
        out.is_first[:] = True
        out.is_last[:] = out.is_terminal[:] = self._ended[:] = False
        return ()

    def send(self, action: Array, group: int = 0) -> None:
        if self._bounds is not None:
            action = np.clip(action, *self._bounds)
        self._envs[group].send(action.astype(self._action_dtype, copy=False))

    def recv(self, out: RowArrays, group: int = 0) -> Sequence[Finished]:
        ended = self._ended[group]
        obs, reward, terminated, truncated, info = self._envs[group].recv()
        self._write(obs, out)
        out.is_first[:] = ended
        out.is_terminal[:] = terminated & ~truncated
        np.logical_or(terminated, truncated, out=ended)
        out.is_last[:] = ended
        out.reward[:] = np.sign(reward) if self._clip else reward
        out.reward[out.is_first] = 0
        # With episodic_life `terminated` is a lost life, and info's is the end of the game.
        whole = truncated | info["terminated"].astype(bool) if self._is_atari else ended
        return self._raw[group].step(reward, out.is_first, whole)

    def close(self) -> None:
        for envs in self._envs:
            envs.close()

    def _adapt_space(self, space: gym.Space[Any]) -> gym.Space[Any]:
        """The space of what `_write` gives: float32 vectors, one-hot choices, no text; DMC's dict as one vector."""
        if isinstance(space, gym.spaces.Dict):
            parts = {key: part for key, part in space.spaces.items() if key not in DROPPED}
            if all(isinstance(part, gym.spaces.Box) and part.dtype == np.float64 for part in parts.values()):
                size = sum(int(np.prod(part.shape or (1,))) for part in parts.values())
                return gym.spaces.Box(-np.inf, np.inf, (size,), np.float32)
            for key, part in parts.items():
                if isinstance(part, gym.spaces.Discrete):
                    self._sizes[key] = int(part.n)
                    parts[key] = gym.spaces.Box(0, 1, (int(part.n),), np.float32)
            return gym.spaces.Dict(parts)
        return _float32(space)

    def _write(self, obs: Any, out: RowArrays) -> None:
        if isinstance(out.obs, dict):
            for key, array in out.obs.items():
                array[...] = np.eye(self._sizes[key])[obs[key]] if key in self._sizes else obs[key]
        elif isinstance(obs, dict):
            np.concatenate([x.reshape(len(out.reward), -1) for x in obs.values()], 1, out=out.obs, casting="same_kind")
        else:
            out.obs[...] = obs


def _float32(space: gym.Space[Any]) -> gym.Space[Any]:
    """The space, with float32 in place of float64."""
    if isinstance(space, gym.spaces.Box) and space.dtype == np.float64:
        return gym.spaces.Box(space.low.astype(np.float32), space.high.astype(np.float32), dtype=np.float32)
    return space
