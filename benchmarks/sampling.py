"""What the sampling engine costs beside the bare thing: sleepers, a straggler, EnvPool and ALE themselves, memory.

    python benchmarks/sampling.py [--work engine sleep straggler envpool ale memory] [--rounds 5]

Both sides of a ratio take turns in one run; the median of the rounds, lowest and highest beside it.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.update(OMP_NUM_THREADS="1")

import gymnasium as gym
import numpy as np
import psutil

from flotilla.core.config import RunConfig
from flotilla.envs.make import EnvOptions
from flotilla.sampling.base import RowArrays, step
from flotilla.sampling.choose import make_backend
from flotilla.sampling.workers import WorkersBackend

Rate = Callable[[], float]


class Sleeper(gym.Env[Any, Any]):
    """A simulator that waits for something else, `step_s` a step."""

    observation_space = gym.spaces.Box(-1, 1, (17,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, step_s: float) -> None:
        self.step_s, self.obs = step_s, np.zeros(17, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self.obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.step_s:
            time.sleep(self.step_s)
        return self.obs, 0.0, False, False, {}


def rows(backend: Any, count: int) -> RowArrays:
    space = backend.spec.obs_space
    flags = (np.zeros(count, bool) for _ in range(3))
    return RowArrays(np.zeros((count, *space.shape), space.dtype), np.zeros(count, np.float32), *flags)


def per_second(once: Callable[[], object], steps: int, seconds: float) -> float:
    """Environment steps per second of a function that makes `steps` of them."""
    once()
    start, calls = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        once()
        calls += 1
    return steps * calls / (time.perf_counter() - start)


def sleep(seconds: float) -> tuple[str, dict[str, Rate]]:
    """16 environments of 10 ms on 16 workers, and one."""
    one = Sleeper(0.01)
    many = WorkersBackend([functools.partial(Sleeper, 0.01)] * 16, range(16), num_workers=16)
    row, action = rows(many, 16), np.zeros(16, np.int64)
    many.reset(row)
    return "16 sleepers of 10 ms / one", {
        "ours": lambda: per_second(lambda: step(many, action, row), 16, seconds),
        "bare": lambda: per_second(lambda: one.step(0), 1, seconds),
    }


def straggler(seconds: float) -> tuple[str, dict[str, Rate]]:
    """Environments of 2 ms, a worker each, the first 8 that are ready: 15 and one that takes 100 ms, or 15 alone."""

    def rate(*more_s: float) -> Rate:
        makers = [functools.partial(Sleeper, step_s) for step_s in (*more_s, *[0.002] * 15)]
        count = len(makers)
        backend = WorkersBackend(makers, range(count), num_workers=count)
        backend.reset(rows(backend, count))
        backend.send_some(np.zeros(count, np.int64), range(count))
        row, action = rows(backend, 8), np.zeros(8, np.int64)

        def once() -> None:
            ready, _ = backend.recv_some(8, row)
            backend.send_some(action, ready)

        return lambda: per_second(once, 8, seconds)

    return "15 and one that is 50x slower, first 8 / without it", {"ours": rate(0.1), "bare": rate()}


def native(env_id: str, name: Any, seconds: float) -> tuple[str, dict[str, Rate]]:
    """A C++ vectoriser behind our protocol, and the same object called directly."""
    config = RunConfig(env_id=env_id, backend=name)
    ours, other = (make_backend(config, EnvOptions(), num_envs=32) for _ in range(2))
    bare = other._envs[0]  # type: ignore[attr-defined]
    row = rows(ours, 32)
    ours.reset(row)
    bare.reset()
    actions = np.stack([ours.spec.action_space.sample() for _ in range(32)])
    theirs = actions.astype(np.float64 if actions.dtype.kind == "f" else np.int32)
    return f"{env_id} x 32 in {name}, behind the protocol / bare", {
        "ours": lambda: per_second(lambda: step(ours, actions, row), 32, seconds),
        "bare": lambda: per_second(lambda: bare.step(theirs), 32, seconds),
    }


def engine(seconds: float) -> tuple[str, dict[str, Rate]]:
    """What a step costs without an environment: 32 that do nothing on 2 workers, and in a loop."""
    many = WorkersBackend([functools.partial(Sleeper, 0.0)] * 32, range(32), num_workers=2)
    loop, row, action = [Sleeper(0.0) for _ in range(32)], rows(many, 32), np.zeros(32, np.int64)
    many.reset(row)
    return "32 environments that do nothing on 2 workers / a bare loop", {
        "ours": lambda: per_second(lambda: step(many, action, row), 32, seconds),
        "bare": lambda: per_second(lambda: [env.step(0) for env in loop], 32, seconds),
    }


WORK: dict[str, Callable[[float], tuple[str, dict[str, Rate]]]] = {
    "engine": engine,
    "sleep": sleep,
    "straggler": straggler,
    "envpool": functools.partial(native, "HalfCheetah-v5", "envpool"),
    "ale": functools.partial(native, "PongNoFrameskip-v4", "ale"),
}


def memory() -> str:
    """What 96 more image environments take: in the shared block, and in all of the process itself."""

    class Images(Sleeper):
        observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)

        def __init__(self) -> None:
            self.step_s, self.obs = 0.0, np.zeros((4, 84, 84), np.uint8)

    def used(count: int) -> tuple[int, int]:
        backend = WorkersBackend([Images] * count, range(count), num_workers=1)
        row = rows(backend, count)
        row.obs.fill(1)  # type: ignore[union-attr]  # the pages are there
        before = psutil.Process().memory_full_info().uss
        backend.reset(row)
        taken = psutil.Process().memory_full_info().uss - before
        block = sum(array.nbytes for array in backend.pool.obs.values())
        backend.close()
        return taken, block

    (few, small), (many, large) = used(32), used(128)
    image = 4 * 84 * 84
    return (
        f"an environment with observations of {image:,} bytes takes {(large - small) / 96:,.0f} of shared memory, "
        f"{(many - few) / 96:,.0f} of the parent's memory, beside the row that it asks for"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", nargs="+", choices=[*WORK, "memory"], default=[*WORK, "memory"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    args = parser.parse_args()
    for name in args.work:
        if name == "memory":
            print(memory())
            continue
        title, sides = WORK[name](args.seconds)
        rounds = [{side: rate() for side, rate in sides.items()} for _ in range(args.rounds)]
        ratios = [one["ours"] / one["bare"] for one in rounds]
        ours, bare = (statistics.median(one[side] for one in rounds) for side in ("ours", "bare"))
        spread = f"{min(ratios):.2f} .. {max(ratios):.2f}"
        print(f"{title}: {ours:,.0f} / {bare:,.0f} steps/s = {statistics.median(ratios):.2f} ({spread})", flush=True)


if __name__ == "__main__":
    main()
