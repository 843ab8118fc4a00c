"""The worker engine as a `VecEnv` of Stable-Baselines3: a drop-in for `SubprocVecEnv` (pip install 'flotilla[sb3]')."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from stable_baselines3.common import env_util
from stable_baselines3.common.vec_env.base_vec_env import VecEnv, VecEnvIndices, VecEnvObs, VecEnvStepReturn

from flotilla.vector import WorkerVectorEnv

Maker = Callable[[], gym.Env[Any, Any]]


def make_vec_env(
    env_id: str | Callable[..., gym.Env[Any, Any]],
    n_envs: int = 1,
    seed: int | None = None,
    *,
    num_workers: int | Literal["auto"] = "auto",
    start_method: str = "forkserver",
    max_env_restarts: int = 0,
    restart_window_s: float = 300.0,
    env_timeout_s: float = 0.0,
    **arguments: Any,
) -> VecEnv:
    """As `make_vec_env` of Stable-Baselines3, whose other arguments it takes, with `FlotillaVecEnv`."""
    settings = {
        "num_workers": num_workers,
        "start_method": start_method,
        "max_env_restarts": max_env_restarts,
        "restart_window_s": restart_window_s,
        "env_timeout_s": env_timeout_s,
    }
    return env_util.make_vec_env(
        env_id,
        n_envs,
        seed,
        vec_env_cls=FlotillaVecEnv,  # type: ignore[arg-type]
        vec_env_kwargs=settings,
        **arguments,
    )


class FlotillaVecEnv(VecEnv):
    """Environments in worker processes over shared memory; the arguments are those of WorkerVectorEnv.

    An environment that was restarted ends its episode as a time limit would: done, `TimeLimit.truncated`, and
    `restarted` in its info; `terminal_observation` is the last one that is known.
    """

    def __init__(
        self,
        env_fns: Sequence[Maker],
        start_method: str | None = None,
        *,
        num_workers: int | Literal["auto"] = "auto",
        max_env_restarts: int = 0,
        restart_window_s: float = 300.0,
        env_timeout_s: float = 0.0,
    ) -> None:
        self._envs = WorkerVectorEnv(
            env_fns,
            shared_memory=False,  # custom spaces, too
            context=start_method,
            observation_mode="same",
            autoreset_mode=AutoresetMode.SAME_STEP,
            num_workers=num_workers,
            max_env_restarts=max_env_restarts,
            restart_window_s=restart_window_s,
            env_timeout_s=env_timeout_s,
        )
        super().__init__(len(env_fns), self._envs.single_observation_space, self._envs.single_action_space)
        self.metadata = self._envs.metadata

    def step_async(self, actions: NDArray[Any]) -> None:
        self._envs.step_async(actions)

    def step_wait(self) -> VecEnvStepReturn:
        obs, rewards, terminated, truncated, infos = self._envs.step_wait_each()
        dones = terminated | truncated
        if dones.any():
            for i in map(int, np.flatnonzero(dones)):
                infos[i] = self._ended(i, infos[i])
        for info, cut in zip(infos, (truncated & ~terminated).tolist(), strict=True):
            info["TimeLimit.truncated"] = cut
        return obs, rewards.astype(np.float32), dones, infos

    def _ended(self, i: int, info: dict[str, Any]) -> dict[str, Any]:
        """The info of the last step of an episode; that of the reset after it goes where Stable-Baselines3 has it."""
        final = dict(info.pop("final_info"))
        final["terminal_observation"] = info.pop("final_obs")
        if info.pop("restarted", False):
            final["restarted"] = True
        self.reset_infos[i] = info
        return final

    def reset(self) -> VecEnvObs:
        """Start an episode in every environment, with the seeds and options that were set for this reset."""
        done = np.zeros(self.num_envs, np.bool_)
        while not done.all():  # once for each different set of options, which mostly is one
            options = self._options[int(np.argmin(done))]
            chosen = np.array([one == options for one in self._options]) & ~done
            self._envs.reset_async_each(self._seeds, options or None, chosen)
            obs, infos = self._envs.reset_wait_each()
            for i in map(int, np.flatnonzero(chosen)):
                self.reset_infos[i] = infos[i]
            done |= chosen
        self._reset_seeds()
        self._reset_options()
        return obs  # type: ignore[no-any-return]

    def close(self) -> None:
        self._envs.close()

    def get_images(self) -> Sequence[NDArray[Any] | None]:
        return self.env_method("render")

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        return self._apply(_attribute, indices, attr_name)

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        self.env_method("set_wrapper_attr", attr_name, value, indices=indices)

    def env_method(
        self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **kwargs: Any
    ) -> list[Any]:
        return self._apply(_method, indices, method_name, *method_args, **kwargs)

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper], indices: VecEnvIndices = None) -> list[bool]:
        return self._apply(env_util.is_wrapped, indices, wrapper_class)

    def _apply(self, function: Callable[..., Any], indices: VecEnvIndices, *args: Any, **kwargs: Any) -> list[Any]:
        """What a function says of the chosen environments, in the order of `indices`."""
        order = list(self._get_indices(indices))
        found = self._envs.apply(function, [i in order for i in range(self.num_envs)], *args, **kwargs)
        return [found[i] for i in order]


def _attribute(env: gym.Env[Any, Any], name: str) -> Any:
    return env.get_wrapper_attr(name)


def _method(env: gym.Env[Any, Any], name: str, *args: Any, **kwargs: Any) -> Any:
    return env.get_wrapper_attr(name)(*args, **kwargs)
