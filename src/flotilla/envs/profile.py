"""One environment alone: what its steps, its resets and its memory cost, measured in a process of its own."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from flotilla.envs.make import EnvOptions, frames_per_step, make_env

PROFILE_S = 1.0
ACTIONS = 64  # sampled before the clock starts
PROFILE_ENVS = 4  # more environments beside the first, to see what one takes


@dataclass(frozen=True)
class Profile:
    """What one environment costs, with random actions."""

    step_mean_us: float
    step_std_us: float
    step_max_us: float
    reset_mean_us: float
    reset_share: float  # of the time, 0 to 1
    cpu_share: float  # of the time, that it computes or waits for a core: the rest it waits for something else
    env_bytes: int  # memory of one more environment in the same process
    process_bytes: int  # and of a process with its first one
    frames_per_step: int


def profile(env_id: str, options: EnvOptions, seconds: float = PROFILE_S) -> Profile:
    """Measure one environment for about `seconds`; the process that does it starts and ends here."""
    make_env(env_id, options).close()  # what a user got wrong is said before a process starts
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_profile, env_id, options, seconds).result()


def _profile(env_id: str, options: EnvOptions, seconds: float) -> Profile:
    process, clock = psutil.Process(), time.perf_counter
    with contextlib.ExitStack() as stack:
        env = stack.enter_context(contextlib.closing(make_env(env_id, options)))
        env.action_space.seed(0)
        actions = itertools.cycle([env.action_space.sample() for _ in range(ACTIONS)])
        env.reset(seed=0)
        env.step(next(actions))
        step_s: list[float] = []
        reset_s: list[float] = []
        ended, busy_s, start = True, _busy_s(process), clock()
        while (now := clock()) - start < seconds or not step_s:
            if ended:
                env.reset()
                ended = False
                reset_s.append(clock() - now)
            else:
                _, _, terminated, truncated, _ = env.step(next(actions))
                step_s.append(clock() - now)
                ended = bool(terminated or truncated)
        cpu_share = (_busy_s(process) - busy_s) / (clock() - start)
        process_bytes = _memory_bytes(process)
        count, start = 0, clock()
        while count < PROFILE_ENVS and (count == 0 or clock() - start < seconds):
            other = stack.enter_context(contextlib.closing(make_env(env_id, options)))
            other.reset(seed=count)
            other.step(next(actions))
            count += 1
        env_bytes = max(0, _memory_bytes(process) - process_bytes) // count
    return Profile(
        step_mean_us=1e6 * statistics.fmean(step_s),
        step_std_us=1e6 * statistics.pstdev(step_s),
        step_max_us=1e6 * max(step_s),
        reset_mean_us=1e6 * statistics.fmean(reset_s),
        reset_share=sum(reset_s) / (sum(reset_s) + sum(step_s)),
        cpu_share=cpu_share,
        env_bytes=env_bytes,
        process_bytes=process_bytes,
        frames_per_step=frames_per_step(env_id, options),
    )


def _family(process: psutil.Process) -> list[psutil.Process]:
    """The process and those that a simulator started, such as a game with a window of its own."""
    return [process, *process.children(recursive=True)]


def _busy_s(process: psutil.Process) -> float:
    """CPU seconds, and those in the queue for a core, which a busy machine must not make look like sleep."""
    queued_ns = 0
    with contextlib.suppress(OSError):  # Linux counts them
        queued_ns = int(Path("/proc/self/schedstat").read_text().split()[1])
    return sum(sum(member.cpu_times()[:2]) for member in _family(process)) + queued_ns / 1e9


def _memory_bytes(process: psutil.Process) -> int:
    """Memory that is nobody else's: libraries that processes share count for none of them."""
    return sum(int(member.memory_full_info().uss) for member in _family(process))
