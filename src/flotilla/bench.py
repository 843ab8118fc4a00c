"""`flotilla bench sampling`: Flotilla's backends beside Gymnasium's on this machine; and numbers in place of `auto`."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import statistics
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from flotilla.core.config import RunConfig
from flotilla.core.errors import UsageError, nearest
from flotilla.core.ranges import check_ranges
from flotilla.doctor import machine
from flotilla.envs.make import EnvOptions, make_env
from flotilla.envs.profile import Profile, profile
from flotilla.evaluation import options_of
from flotilla.sampling import autotune
from flotilla.sampling.autotune import ENVS_PER_CORE, WINDOWS, Rate, Say, Trial

GYMNASIUM = ("gymnasium-sync", "gymnasium-async")
TUNE_S = 1.0  # for each way that `auto` tries
MIB = 2**20
Table = tuple[list[str], list[list[str]]]  # columns, rows


@dataclass(frozen=True)
class Tuned:
    """What `auto` stands for."""

    config: RunConfig  # with plain numbers
    trials: list[Trial]  # empty where the choice is an earlier one
    words: str  # the choice, and where it comes from


def checked(config: RunConfig, automatic: Iterable[str]) -> RunConfig:
    """The configuration with 0 for the fields that are to be measured; UsageError for other numbers that cannot be."""
    check_ranges(config)
    numbers: dict[str, Any] = dict.fromkeys(automatic, 0)
    return replace(config, **numbers)


def tune(config: RunConfig, say: Say, skip: Say) -> Tuned:
    """Numbers in place of the 0 of `num_envs` and `num_workers`: as an equal question was answered, or measured now.

    `say` is told what is measured next, `skip` what cannot be.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("auto is not for several ranks, which could choose differently: give numbers")
    if before := autotune.recall(config, machine()):
        choice, day = before
        return Tuned(_with(config, choice), [], f"autotune: {choice} (measured {day}; {autotune.cache_file()})")
    backends: Sequence[str] = (config.backend,)
    if config.backend == "auto":  # a number of workers asks for the backend that has them
        backends = ("workers",) if config.num_workers else autotune.BACKENDS
    options = options_of(config, training=True)
    say(f"measuring {config.env_id} alone")
    one = profile(config.env_id, options)
    ways = autotune.proposals(config, machine(), one, backends)
    trials = list(autotune.trials(ways, options, TUNE_S, say, skip if len(backends) > 1 else None))
    choice = autotune.fastest(trials)
    return Tuned(_with(config, choice), trials, f"autotune: {choice} ({_keep(config, choice, one)})")


class Sampling:
    """One measurement of `flotilla bench sampling`: `alone`, then `trials` to their end, then what they say.

    `backends` are names, or nothing for all that can step the environment.  Where `config` has 0 environments or
    workers several numbers are tried.  UsageError: a backend that is unknown or, where it is named, cannot.
    """

    def __init__(self, config: RunConfig, backends: Sequence[str], seconds: float) -> None:
        known = [*autotune.BACKENDS, *GYMNASIUM]
        for name in backends:
            if name not in known:
                raise UsageError(f"unknown backend '{name}': {nearest(name, known)}")
        if not 0 < seconds < math.inf:
            raise UsageError(f"--seconds {seconds:g} measures nothing (give 1 or more)")
        self._named = bool(backends)
        self._ours = [name for name in backends or known if name not in GYMNASIUM]
        self._gymnasium = [name for name in backends or known if name in GYMNASIUM]
        if not self._ours and not config.num_envs:
            raise UsageError("num_envs=auto needs one of Flotilla's backends beside Gymnasium's: give a number")
        self._config, self._seconds = config, seconds
        self._options = options_of(config, training=True)
        self._trials: list[Trial] = []

    def alone(self, say: Say) -> list[tuple[str, str]]:
        """One environment, measured in a process of its own, in words."""
        say(f"measuring {self._config.env_id} alone")
        self._one = one = profile(self._config.env_id, self._options)
        low, high = (count * machine().cores for count in ENVS_PER_CORE)
        return [
            ("step", f"{one.step_mean_us:,.1f} us (deviation {one.step_std_us:,.1f}, longest {one.step_max_us:,.0f})"),
            ("reset", f"{one.reset_mean_us:,.1f} us, {one.reset_share:.1%} of the time with random actions"),
            ("busy", f"{min(1.0, one.cpu_share):.0%} of the time, else it waits"),
            ("memory", f"{one.env_bytes / MIB:,.1f} MiB each, {one.process_bytes / MIB:,.0f} MiB a process with one"),
            ("frames per step", f"{one.frames_per_step}"),
            ("rule of thumb", f"{ENVS_PER_CORE[0]} to {ENVS_PER_CORE[1]} environments per core: {low} to {high} here"),
        ]

    def trials(self, say: Say, skip: Say) -> Iterator[Trial]:
        """What was measured: Flotilla's backends, then Gymnasium's with as many environments as their fastest.

        With a number of environments all of them take turns, so that what else the machine does falls on each.
        """
        ways = autotune.proposals(self._config, machine(), self._one, self._ours) if self._ours else []
        rivals = [way[0] for way in ways]
        if not self._config.num_envs:
            rivals = []
            for trial in autotune.trials(ways, self._options, self._seconds, say, None if self._named else skip):
                self._trials.append(trial)
                yield trial
        num_envs = self._config.num_envs or autotune.fastest(self._trials).num_envs
        for name in self._gymnasium:
            workers = num_envs if name == "gymnasium-async" else 0
            rivals.append(replace(self._config, backend=name, num_envs=num_envs, num_workers=workers))  # type: ignore[arg-type]
        for trial in self._in_turns(rivals, say, skip):
            self._trials.append(trial)
            yield trial

    def _in_turns(self, rivals: Sequence[RunConfig], say: Say, skip: Say) -> list[Trial]:
        """Those of them that can, each by the median of some windows of its own."""
        able: list[tuple[RunConfig, Rate]] = []
        with contextlib.ExitStack() as stack:
            for config in rivals:
                say(f"starting {config.backend} with {config.num_envs} environments")
                door = _gymnasium if config.backend in GYMNASIUM else autotune.opened
                try:
                    able.append((config, stack.enter_context(door(config, self._options))))
                except UsageError as error:
                    if self._named:
                        raise
                    skip(f"skipped {config.backend}: {error}")
            windows: list[list[float]] = []
            for turn in range(WINDOWS):
                say(f"measuring, turn {turn + 1} of {WINDOWS}")
                windows.append([rate(self._seconds / WINDOWS) for _, rate in able])
        rates = map(statistics.median, zip(*windows, strict=True))
        return [Trial.of(config, self._options, rate) for (config, _), rate in zip(able, rates, strict=True)]

    def table(self) -> Table:
        return table(self._trials)

    def choice(self) -> str:
        """The fastest of Flotilla's backends; kept for `auto` where all of them were tried as it would try them."""
        ours = [trial for trial in self._trials if trial.backend not in GYMNASIUM]
        if not ours:
            return ""
        choice = autotune.fastest(ours)
        kept = "" if self._named or self._config.num_workers else f" ({_keep(self._config, choice, self._one)})"
        return f"choice: {choice}{kept}"


def table(trials: Sequence[Trial]) -> Table:
    """Columns and rows for people, with the ratio to Gymnasium's processes where those were measured."""
    columns = ["backend", "environments", "workers", "steps/s", "frames/s"]
    rows = [
        [t.backend, str(t.num_envs), str(t.num_workers or ""), f"{t.env_steps_per_s:,.0f}", f"{t.frames_per_s:,.0f}"]
        for t in trials
    ]
    reference = [trial.env_steps_per_s for trial in trials if trial.backend == GYMNASIUM[-1]]
    if reference:
        columns.append("vs Async")
        for row, trial in zip(rows, trials, strict=True):
            row.append(f"{trial.env_steps_per_s / reference[0]:.2f}x")
    return columns, rows


def _keep(config: RunConfig, choice: Trial, one: Profile) -> str:
    """Store a choice for the next run that asks the same; words about where, or why not."""
    try:
        autotune.remember(config, machine(), choice, one)
    except OSError as error:
        return f"not kept: {error}"
    return f"kept in {autotune.cache_file()}"


def _with(config: RunConfig, choice: Trial) -> RunConfig:
    return replace(config, backend=choice.backend, num_envs=choice.num_envs, num_workers=choice.num_workers)  # type: ignore[arg-type]


@contextlib.contextmanager
def _gymnasium(config: RunConfig, options: EnvOptions) -> Iterator[Rate]:
    """One of Gymnasium's vector classes as it comes, over the same environments, by Gymnasium's own measure."""
    name = str(config.backend)
    try:
        from gymnasium.utils.performance import benchmark_vector_step
    except ImportError as error:
        raise UsageError(f"backend '{name}' needs gymnasium 1.4 or newer: pip install -U gymnasium") from error
    makers = [functools.partial(make_env, config.env_id, options)] * config.num_envs
    with warnings.catch_warnings():
        # Python 3.12 warns of fork beside threads; it is what everyone's AsyncVectorEnv does.
        warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
        envs = SyncVectorEnv(makers) if name == "gymnasium-sync" else AsyncVectorEnv(makers)
    with contextlib.closing(envs):
        batches = autotune.action_batches(envs.single_action_space, config.num_envs, config.seed)
        # What samples actions is timed there; here it is a look-up, on both sides.
        setattr(envs.action_space, "sample", itertools.cycle(batches).__next__)  # noqa: B010 (mypy: a method)
        yield lambda seconds: benchmark_vector_step(envs, seconds, config.seed)  # type: ignore[arg-type]
