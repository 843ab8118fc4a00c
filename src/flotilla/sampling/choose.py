"""Which backend steps an environment: the one asked for, or the one that measures fastest for its kind."""

from __future__ import annotations

import functools
import importlib.util
import math
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
from flotilla.sampling.workers import WorkersBackend

THREADED = ("ale", "envpool", "workers")  # backends that step while this process acts
CHEAP = ("classic", "box2d", "probe")  # suites whose steps cost tens of microseconds


def choose(config: RunConfig, options: EnvOptions) -> tuple[str, str]:
    """The backend's name, and why."""
    if config.backend != "auto":
        return config.backend, "asked for"
    ids = config.env_id.split(",")
    suite = suite_of(ids[0])
    if len(ids) > 1:
        cheap = all(suite_of(env_id) in CHEAP for env_id in ids) or (os.cpu_count() or 1) == 1
        return ("sync" if cheap else "workers"), "several kinds of environments"
    if suite == "atari":
        return "ale", "Atari, emulated and preprocessed in ALE's C++ threads"
    if (
        suite in ("mujoco", "dmc")
        and importlib.util.find_spec("envpool")
        and task_of(config.env_id, options)
        and (os.cpu_count() or 1) > 1
    ):
        if config.num_envs == 1:
            return "sync", "one environment, in this process: nothing to step beside it"
        return "envpool", "the same MuJoCo model, stepped in C++ threads"
    if suite in CHEAP or (os.cpu_count() or 1) == 1:
        return "sync", "in this process: a step costs less than its way to another"
    return "workers", "a Python simulator, in processes over shared memory"


def choose_groups(config: RunConfig, options: EnvOptions, num_envs: int) -> int:
    """In how many groups `num_envs` environments take turns; UsageError for a number that cannot be."""
    name, _ = choose(config, options)
    if config.env_groups == 0:
        # Measured on 2 cores: acting for vectors costs the same for half as many, so that turns only double it;
        # for images they pay off until the environments keep every core busy by themselves.
        cores = os.cpu_count() or 1
        return 2 if name == "ale" and cores > 1 and num_envs % 2 == 0 and 4 <= num_envs <= 8 * cores else 1
    if config.env_groups > 1 and name not in THREADED:
        raise UsageError(
            f"env_groups={config.env_groups} needs a backend that steps beside the policy ({', '.join(THREADED)}), "
            f"not '{name}'; use --env-groups 1"
        )
    if num_envs % config.env_groups:
        divisors = [n for n in range(1, num_envs + 1) if num_envs % n == 0]
        fits = min(divisors, key=lambda n: abs(n - config.env_groups))
        raise UsageError(f"env_groups={config.env_groups} does not divide {num_envs} environments; nearest: {fits}")
    return config.env_groups


def env_ids(config: RunConfig, indices: range) -> list[str]:
    """The id of each environment, by its index in the run: neighbours differ, and shares hold from the start.

    UsageError for weights that do not fit the ids.
    """
    ids, weights = config.env_id.split(","), config.env_weights
    if weights and (len(weights) != len(ids) or not all(0 < weight < math.inf for weight in weights)):
        raise UsageError(
            f"env_weights={weights} does not fit {len(ids)} environment ids: give a number above 0 for each"
        )
    shares = weights or (1.0,) * len(ids)
    counts, found = [0] * len(ids), []
    for _ in range(indices.stop):
        # Whoever lacks most of its share is next.
        k = min(range(len(ids)), key=lambda k: ((counts[k] + 1) / shares[k], k))
        counts[k] += 1
        found.append(ids[k])
    return found[indices.start :]


def choose_batch(config: RunConfig, options: EnvOptions, num_envs: int) -> int:
    """For how many environments the policy acts at once as they come, 0 for all; UsageError where it cannot."""
    if not config.env_batch:
        return 0
    name, _ = choose(config, options)
    if name != "workers":
        raise UsageError(f"env_batch={config.env_batch} needs worker processes, not '{name}'; use --backend workers")
    if not 0 < config.env_batch <= num_envs:
        raise UsageError(f"env_batch={config.env_batch} is not between 1 and the {num_envs} environments of a rank")
    if config.env_groups > 1:
        raise UsageError(
            f"env_batch={config.env_batch} and env_groups={config.env_groups} exclude each other; drop one"
        )
    return config.env_batch


def make_backend(
    config: RunConfig,
    options: EnvOptions,
    *,
    num_envs: int,
    first_index: int = 0,
    purpose: str = "env",
    num_groups: int = 1,
) -> Backend:
    """`num_envs` environments, seeded by (seed, purpose, global index) from `first_index` on."""
    seeds = [stream_seed(config.seed, purpose, first_index + i) for i in range(num_envs)]
    # Groups step at the same time: more threads than cores would take them from the policy.
    threads = max(1, min(num_envs, os.cpu_count() or 1) // num_groups)
    name, _ = choose(config, options)
    if name == "ale":
        game = atari.parse(config.env_id)
        if game is None:
            raise UsageError(f"backend 'ale' steps Atari only, not '{config.env_id}'; use --backend sync")
        return AleBackend(game, seeds, threads, num_groups, training=options.training)
    if name == "envpool":
        if importlib.util.find_spec("envpool") is None:
            raise UsageError("backend 'envpool' needs EnvPool: pip install 'flotilla[envpool]'")
        return EnvPoolBackend(config.env_id, options, seeds, threads, num_groups)
    ids = env_ids(config, range(first_index, first_index + num_envs))
    makers = [functools.partial(make_env, env_id, options) for env_id in ids]
    if name == "workers":
        return WorkersBackend(
            makers,
            seeds,
            num_workers=config.num_workers,
            num_groups=num_groups,
            start_method=config.start_method,
            max_restarts=config.max_env_restarts,
            env_timeout_s=config.env_timeout_s,
        )
    return SyncBackend(makers, seeds)
