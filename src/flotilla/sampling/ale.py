"""ALE's own C++ vectoriser as a backend: Atari with emulation and preprocessing in threads; one vectoriser a group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flotilla.core.seeding import episode_seed
from flotilla.core.types import Spec
from flotilla.envs.atari import AtariGame
from flotilla.sampling.base import Array, Finished, RawEpisodes, Restarted, RowArrays, split

NOOP, FIRE = 0, 1


class AleBackend:
    """Atari games in ale_py's thread pool, with the reference preprocessing.

    A lost life ends the row's episode in training, but the game goes on (`life_loss_info`; ALE's
    `episodic_life` would restart it).  As in the reference wrappers, the step after it is not the policy's: it
    presses FIRE where the game starts with it, else nothing, and its reward is not the policy's either.
    """

    name = "ale"

    def __init__(
        self, game: AtariGame, seeds: Sequence[int], num_threads: int, num_groups: int = 1, *, training: bool
    ) -> None:
        from ale_py.vector_env import AtariVectorEnv

        self.num_envs = len(seeds)
        self.groups = split(self.num_envs, num_groups)
        self._clip = training and game.reward_clip
        self._seeds = list(seeds)
        self._envs = [
            AtariVectorEnv(
                game.rom,
                self.num_envs // num_groups,
                num_threads=num_threads,
                repeat_action_probability=game.sticky,
                full_action_space=game.full_action_space,
                noop_max=game.noop_max,
                use_fire_reset=game.fire_reset,
                life_loss_info=training and game.life_loss,
                reward_clipping=False,  # clipped below, after the raw return was counted
            )
            for _ in self.groups
        ]
        one = self._envs[0]
        self.spec = Spec(one.single_observation_space, one.single_action_space)
        has_fire = game.fire_reset and one.ale.get_action_set()[FIRE].value == FIRE
        self._after_life = FIRE if has_fire else NOOP
        self._ended = np.zeros((num_groups, self.num_envs // num_groups), bool)
        self._raw = [RawEpisodes(envs) for envs in self.groups]

    def reset(self, out: RowArrays, start: int = 0) -> Sequence[Restarted]:
        seeds = np.array([episode_seed(seed, start) for seed in self._seeds], np.int64)
        for envs, group in zip(self._envs, self.groups, strict=True):
            out.obs[group], _ = envs.reset(seed=seeds[group])  # type: ignore[index]
        out.reward[:] = 0
        out.is_first[:] = True
        out.is_last[:] = out.is_terminal[:] = self._ended[:] = False
        return ()

    def send(self, action: Array, group: int = 0) -> None:
        ended = self._ended[group]
        self._envs[group].send(np.where(ended, self._after_life, action) if ended.any() else action)

    def recv(self, out: RowArrays, group: int = 0) -> Sequence[Finished]:
        ended = self._ended[group]
        out.obs[...], reward, terminated, truncated, info = self._envs[group].recv()  # type: ignore[index]
        out.is_first[:] = ended
        out.is_terminal[:] = terminated
        np.logical_or(terminated, truncated, out=ended)
        out.is_last[:] = ended
        out.reward[:] = np.sign(reward) if self._clip else reward
        out.reward[out.is_first] = 0
        return self._raw[group].step(reward, out.is_first, truncated | (terminated & (info["lives"] == 0)))

    def close(self) -> None:
        for envs in self._envs:
            envs.close()
