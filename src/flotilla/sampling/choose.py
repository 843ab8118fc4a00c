"""Which backend steps an environment: the one asked for, or the one that measures fastest for its kind."""

from __future__ import annotations

import functools
import importlib.util
import os

from flotilla.core.config import RunConfig
from flotilla.core.errors import UsageError
from flotilla.core.seeding import stream_seed
from flotilla.envs import atari
from flotilla.envs.make import EnvOptions, make_env, suite_of
from flotilla.sampling.ale import AleBackend
from flotilla.sampling.base import Backend
from flotilla.sampling.envpool import EnvPoolBackend, task_of
from flotilla.sampling.sync import SyncBackend


def choose(config: RunConfig, options: EnvOptions) -> tuple[str, str]:
    """The backend's name, and why."""
    if config.backend != "auto":
        return config.backend, "asked for"
    suite = suite_of(config.env_id)
    if suite == "atari":
        return "ale", "Atari, emulated and preprocessed in ALE's C++ threads"
    if (
        suite in ("mujoco", "dmc")
        and importlib.util.find_spec("envpool")
        and task_of(config.env_id, options)
        and (os.cpu_count() or 1) > 1
    ):
        return "envpool", "the same MuJoCo model, stepped in C++ threads"
    return "sync", "in this process: cheap steps, or a simulator that only Python has"


def make_backend(
    config: RunConfig, options: EnvOptions, *, num_envs: int, first_index: int = 0, purpose: str = "env"
) -> Backend:
    """`num_envs` environments, seeded by (seed, purpose, global index) from `first_index` on."""
    seeds = [stream_seed(config.seed, purpose, first_index + i) for i in range(num_envs)]
    threads = min(num_envs, os.cpu_count() or 1)
    name, _ = choose(config, options)
    if name == "ale":
        game = atari.parse(config.env_id)
        if game is None:
            raise UsageError(f"backend 'ale' steps Atari only, not '{config.env_id}'; use --backend sync")
        return AleBackend(game, seeds, threads, training=options.training)
    if name == "envpool":
        if importlib.util.find_spec("envpool") is None:
            raise UsageError("backend 'envpool' needs EnvPool: pip install 'flotilla[envpool]'")
        return EnvPoolBackend(config.env_id, options, seeds, threads)
    return SyncBackend([functools.partial(make_env, config.env_id, options)] * num_envs, seeds)
