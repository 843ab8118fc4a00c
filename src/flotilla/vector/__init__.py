"""The worker engine as a Gymnasium vector environment, for people without Flotilla's trainer."""

from __future__ import annotations

import copy as copies
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode

from flotilla.core.errors import UsageError
from flotilla.sampling.pool import Maker
from flotilla.vector.batch import ObservationMode
from flotilla.vector.env import WorkerVectorEnv

__all__ = ["WorkerVectorEnv", "make"]


def make(
    env_id_or_fns: str | EnvSpec | Maker | Sequence[Maker],
    num_envs: int = 1,
    *,
    num_workers: int | Literal["auto"] = "auto",
    wrappers: Sequence[Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]]] = (),
    autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
    start_method: str = "forkserver",
    observation_mode: ObservationMode = "same",
    copy: bool = True,
    max_env_restarts: int = 0,
    restart_window_s: float = 300.0,
    env_timeout_s: float = 0.0,
    **env_kwargs: Any,
) -> WorkerVectorEnv:
    """A vector environment of `num_envs` environments.

    env_id_or_fns: what `gymnasium.make` takes, made with `env_kwargs` and wrapped as `gymnasium.make_vec` does; or
        a function without arguments that makes one; or one function for each environment.
    All else: see WorkerVectorEnv; `start_method` is its `context`.
    """
    makers: Sequence[Maker]
    named = isinstance(env_id_or_fns, str | EnvSpec)
    if isinstance(env_id_or_fns, str | EnvSpec):
        makers = [functools.partial(_make_one, _registered(env_id_or_fns), env_kwargs, wrappers)] * num_envs
    elif env_kwargs or wrappers:
        raise UsageError(f"{[*env_kwargs, *wrappers][0]!r} is for an environment id; let the functions do it")
    elif callable(env_id_or_fns):
        makers = [env_id_or_fns] * num_envs
    else:
        makers = list(env_id_or_fns)
        if num_envs not in (1, len(makers)):
            raise UsageError(f"num_envs={num_envs} with {len(makers)} functions: leave it out")
    if not makers:
        raise UsageError(f"num_envs={num_envs}: must be at least 1")
    envs = WorkerVectorEnv(
        makers,
        copy=copy,
        context=start_method,
        observation_mode=observation_mode,
        autoreset_mode=autoreset_mode,
        num_workers=num_workers,
        max_env_restarts=max_env_restarts,
        restart_window_s=restart_window_s,
        env_timeout_s=env_timeout_s,
    )
    if named:
        envs.describe(num_envs)
    return envs


def _registered(env_id: str | EnvSpec) -> str | EnvSpec:
    """The specification, where this process has it: a worker need not have run what registered it."""
    if isinstance(env_id, EnvSpec):
        return env_id
    module, _, name = env_id.rpartition(":")
    if module:
        importlib.import_module(module)
    return copies.deepcopy(gym.registry.get(name, env_id))


def _make_one(
    env: str | EnvSpec, kwargs: Mapping[str, Any], wrappers: Sequence[Callable[[Any], gym.Env[Any, Any]]]
) -> gym.Env[Any, Any]:
    made = gym.make(env, **kwargs)
    for wrapper in wrappers:
        made = wrapper(made)
    return made
