"""ALE's own C++ vectoriser as a backend: Atari with emulation and preprocessing in threads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flotilla.core.types import Spec
from flotilla.envs.atari import AtariGame
from flotilla.sampling.base import Array, Finished, RawEpisodes, RowArrays

NOOP, FIRE = 0, 1


class AleBackend:
    """Atari games in ale_py's thread pool, with the reference preprocessing.

    A lost life ends the row's episode in training, but the game goes on (`life_loss_info`; ALE's
    `episodic_life` would restart it).  As in the reference wrappers, the step after it is not the policy's: it
    presses FIRE where the game starts with it, else nothing, and its reward is not the policy's either.
    """

    name = "ale"

    def __init__(self, game: AtariGame, seeds: Sequence[int], num_threads: int, *, training: bool) -> None:
        from ale_py.vector_env import AtariVectorEnv

        self.num_envs = len(seeds)
        self._clip = training and game.reward_clip
        self._seeds = np.asarray(seeds, np.int64)
        self._envs = AtariVectorEnv(
            game.rom,
            self.num_envs,
            num_threads=num_threads,
            repeat_action_probability=game.sticky,
            full_action_space=game.full_action_space,
            noop_max=game.noop_max,
            use_fire_reset=game.fire_reset,
            life_loss_info=training and game.life_loss,
            reward_clipping=False,  # clipped below, after the raw return was counted
        )
        self.spec = Spec(self._envs.single_observation_space, self._envs.single_action_space)
        has_fire = game.fire_reset and self._envs.ale.get_action_set()[FIRE].value == FIRE
        self._after_life = FIRE if has_fire else NOOP
        self._ended = np.zeros(self.num_envs, bool)
        self._raw = RawEpisodes(self.num_envs)

    def reset(self, out: RowArrays) -> None:
        out.obs[...], _ = self._envs.reset(seed=self._seeds)  # type: ignore[index]
        out.reward[:] = 0
        out.is_first[:] = True
        out.is_last[:] = out.is_terminal[:] = self._ended[:] = False

    def step(self, action: Array, out: RowArrays) -> Sequence[Finished]:
        if self._ended.any():
            action = np.where(self._ended, self._after_life, action)
        out.obs[...], reward, terminated, truncated, info = self._envs.step(action)  # type: ignore[index]
        out.is_first[:] = self._ended
        out.is_terminal[:] = terminated
        np.logical_or(terminated, truncated, out=self._ended)
        out.is_last[:] = self._ended
        out.reward[:] = np.sign(reward) if self._clip else reward
        out.reward[out.is_first] = 0
        return self._raw.step(reward, out.is_first, truncated | (terminated & (info["lives"] == 0)))

    def close(self) -> None:
        self._envs.close()
