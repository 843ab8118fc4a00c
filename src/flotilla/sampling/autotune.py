"""Autotune: measures an environment and the ways to step many of it here, chooses one, remembers it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, get_args

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import batch_space

from flotilla.core import config as core_config
from flotilla.core.config import RunConfig
from flotilla.core.errors import UsageError
from flotilla.core.provenance import PACKAGES
from flotilla.core.types import Spec
from flotilla.envs.make import EnvOptions, frames_per_step
from flotilla.envs.profile import Profile
from flotilla.sampling.base import Backend, RowArrays, step
from flotilla.sampling.choose import make_backend

BACKENDS: tuple[str, ...] = tuple(name for name in get_args(core_config.Backend) if name != "auto")
WINDOWS = 3  # of which the median is the rate
ACTION_BATCHES = 64  # sampled before the clock starts
ENVS_PER_CORE = (2, 4)  # the rule of thumb
MOST_ENVS_PER_CORE = 16  # of what is tried: cheap environments gain from more than the rule
GAIN = 1.1  # what twice as many environments must gain to be worth having
WAITING = 0.5  # share of the time that a step is busy, below which more workers than cores make sense
MOST_STORED = 200  # choices in the file
MEMORY_SHARE = 0.5  # of what is free, for environments; the learner and its buffers need some, too

Say = Callable[[str], None]
Rate = Callable[[float], float]  # environment steps per second in the next so many seconds


@dataclass(frozen=True)
class Machine:
    """What environments may use here."""

    cpu: str  # model
    cores: int  # whole cores, after affinity and control groups
    memory_bytes: int  # installed or granted, which does not change from run to run
    free_bytes: int


@dataclass(frozen=True)
class Trial:
    """One way to step many environments, and what it reached."""

    backend: str
    env_id: str
    num_envs: int
    num_workers: int  # worker processes; 0: none
    env_steps_per_s: float  # of wall time
    frames_per_s: float

    @classmethod
    def of(cls, config: RunConfig, options: EnvOptions, env_steps_per_s: float) -> Trial:
        """The trial of a configuration whose numbers are plain."""
        frames = env_steps_per_s * frames_per_step(config.env_id, options)
        return cls(
            config.backend,
            config.env_id,
            config.num_envs,
            config.num_workers,
            round(env_steps_per_s, 1),
            round(frames, 1),
        )

    def __str__(self) -> str:
        workers = f" on {self.num_workers} workers" if self.num_workers else ""
        return f"{self.backend}, {self.num_envs} environments{workers}: {self.env_steps_per_s:,.0f} steps/s"


# Many of them -------------------------------------------------------------------------------------------------


def measure(config: RunConfig, options: EnvOptions, seconds: float) -> Trial:
    """Environment steps per second of one backend: the median of some windows.  UsageError where it cannot."""
    with opened(config, options) as rate:
        rates = [rate(seconds / WINDOWS) for _ in range(WINDOWS)]
    return Trial.of(config, options, statistics.median(rates))


@contextlib.contextmanager
def opened(config: RunConfig, options: EnvOptions) -> Iterator[Rate]:
    """A backend that is ready to be measured, as `gymnasium.utils.performance.benchmark_vector_step` counts.

    A reset and a step are not timed, nor is the sampling of random actions; the ignored step after an episode's
    last row is no step.  UsageError where the backend cannot.
    """
    with contextlib.closing(make_backend(config, options, num_envs=config.num_envs)) as backend:
        actions = itertools.cycle(action_batches(backend.spec.action_space, config.num_envs, config.seed))
        row = _row(backend.spec, config.num_envs)
        backend.reset(row)
        step(backend, next(actions), row)
        yield functools.partial(_rate, backend, actions, row)


def action_batches(space: gym.Space[Any], num_envs: int, seed: int) -> list[Any]:
    """Random actions (N, ...) of a single environment's space."""
    batched = batch_space(space, num_envs)
    batched.seed(seed)
    return [batched.sample() for _ in range(ACTION_BATCHES)]


def _rate(backend: Backend, actions: Iterator[Any], row: RowArrays, seconds: float) -> float:
    """Steps per second from `row` on, which is kept up to date."""
    clock = time.perf_counter
    steps, ended = 0, int(np.count_nonzero(row.is_last))
    start = clock()
    while (elapsed := clock() - start) <= seconds:
        step(backend, next(actions), row)
        steps += backend.num_envs - ended
        ended = int(np.count_nonzero(row.is_last))
    return steps / elapsed


def _row(spec: Spec, num_envs: int) -> RowArrays:
    def zeros(space: gym.Space[Any]) -> Any:
        if isinstance(space, gym.spaces.Dict):
            return {key: zeros(part) for key, part in space.spaces.items()}
        return np.zeros((num_envs, *(space.shape or ())), space.dtype)

    flags = (np.zeros(num_envs, bool) for _ in range(3))
    return RowArrays(zeros(spec.obs_space), np.zeros(num_envs, np.float32), *flags)


# Which ways to try, and which to take ---------------------------------------------------------------------------


def proposals(config: RunConfig, machine: Machine, one: Profile, backends: Sequence[str]) -> list[list[RunConfig]]:
    """For each backend and number of workers the configurations to try, by growing numbers of environments.

    A number that `config` has is kept; 0 is to be chosen.  UsageError where memory holds no environment.
    """
    found = [
        [replace(config, backend=name, num_envs=envs, num_workers=min(workers, envs)) for envs in counts]  # type: ignore[arg-type]
        for name in backends
        for workers in (_worker_counts(config, machine, one) if name == "workers" else [0])
        if (counts := _env_counts(config, machine, one, workers))
    ]
    if not found:
        raise UsageError(
            f"num_envs=auto: no environment fits into half of the free memory, {machine.free_bytes / 2**30:.1f} GiB "
            f"(one takes {(one.process_bytes + one.env_bytes) / 2**20:,.0f} MiB); give --num-envs a number"
        )
    return found


def _worker_counts(config: RunConfig, machine: Machine, one: Profile) -> list[int]:
    if config.num_workers:
        return [config.num_workers]
    if one.cpu_share > WAITING:
        return [machine.cores]
    return [machine.cores, math.ceil(machine.cores / max(one.cpu_share, 0.01))]


def _env_counts(config: RunConfig, machine: Machine, one: Profile, workers: int) -> list[int]:
    """Powers of two, which minibatches divide: from the rule of thumb's upper end upwards, fewer if memory is short."""
    if config.num_envs:
        return [config.num_envs]
    largest, first = (int(math.log2(per_core * machine.cores)) for per_core in (MOST_ENVS_PER_CORE, ENVS_PER_CORE[1]))
    fitting = []
    for envs in (2**exponent for exponent in range(largest + 1)):
        needed_bytes = _needed_bytes(one, envs, min(workers, envs))
        if needed_bytes <= MEMORY_SHARE * machine.free_bytes and envs >= config.num_workers:
            fitting.append(envs)
    return [envs for envs in fitting if envs >= 2**first] or fitting[-1:]


def _needed_bytes(one: Profile, envs: int, workers: int) -> int:
    return max(1, workers) * one.process_bytes + envs * one.env_bytes


def trials(
    ways: Sequence[Sequence[RunConfig]], options: EnvOptions, seconds: float, say: Say, skip: Say | None
) -> Iterator[Trial]:
    """Each way with more and more environments, as long as more of them gain.

    What cannot be done is skipped, and `skip` is told why; without it that is an error.
    """
    for way in ways:
        best = 0.0
        for config in way:
            say(f"measuring {config.backend} with {config.num_envs} environments")
            try:
                trial = measure(config, options, seconds)
            except UsageError as error:
                if skip is None:
                    raise
                skip(f"skipped {config.backend}: {error}")
                break
            yield trial
            if trial.env_steps_per_s < GAIN * best:
                break
            best = trial.env_steps_per_s


def fastest(found: Sequence[Trial]) -> Trial:
    """The one with the fewest environments of those that nearly reach the highest rate; the fastest of these."""
    enough = max(trial.env_steps_per_s for trial in found) / GAIN
    return min(
        (trial for trial in found if trial.env_steps_per_s >= enough),
        key=lambda trial: (trial.num_envs, -trial.env_steps_per_s),
    )


# What is remembered ---------------------------------------------------------------------------------------------


def cache_file() -> Path:
    """Where choices are kept, for all projects of this user."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "flotilla" / "autotune.json"


def stored(machine: Machine) -> list[dict[str, Any]]:
    """What was measured on this machine with the packages as they are: "asked", "choice", "measured", ... of each."""
    here = _here(machine)
    return [entry for entry in _entries() if entry["here"] == here]


def recall(config: RunConfig, machine: Machine) -> tuple[Trial, str] | None:
    """The choice that an equal question got, and on which day; None where there is none that memory still holds."""
    for entry in stored(machine):
        fits = config.num_envs or entry["needs_bytes"] <= MEMORY_SHARE * machine.free_bytes
        if entry["asked"] == _asked(config) and fits:
            return Trial(**entry["choice"]), entry["measured"]
    return None


def remember(config: RunConfig, machine: Machine, choice: Trial, one: Profile) -> None:
    """Keep a choice in place of an older one for the same question here. OSError where it cannot be written."""
    entry = {
        "here": _here(machine),
        "asked": _asked(config),
        "choice": asdict(choice),
        "needs_bytes": _needed_bytes(one, choice.num_envs, choice.num_workers),
        "measured": time.strftime("%Y-%m-%d"),
    }
    kept = [old for old in _entries() if (old["here"], old["asked"]) != (entry["here"], entry["asked"])]
    file = cache_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(f".{os.getpid()}")
    beside.write_text(json.dumps([*kept[-MOST_STORED + 1 :], entry], indent=1))
    beside.replace(file)


def _entries() -> list[dict[str, Any]]:
    try:
        entries: list[dict[str, Any]] = json.loads(cache_file().read_text())
        complete = all(entry.keys() >= {"here", "asked", "choice", "needs_bytes", "measured"} for entry in entries)
        return entries if complete else []
    except (OSError, ValueError, AttributeError, TypeError):  # none yet, or not ours: the next one replaces it
        return []


def _here(machine: Machine) -> dict[str, Any]:
    """What a rate depends on besides the question: if it changes, measure again."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {"cpu": machine.cpu, "cores": machine.cores, "memory_bytes": machine.memory_bytes, "versions": versions}


def _asked(config: RunConfig) -> dict[str, Any]:
    names = ("env_id", "obs_type", "image_size", "action_repeat", "backend", "num_envs", "num_workers")
    return {name: getattr(config, name) for name in names}
