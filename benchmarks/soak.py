"""Ten minutes of faults: environments raise, die and hang at random, workers are killed, and every row must be right.

    python benchmarks/soak.py --seconds 600

Each environment counts its steps; a row must be the next of its episode or the first of another.  Exit code 1, and
what was wrong, where one is not.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import os
import signal
import sys
import threading
import time
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
from numpy.typing import NDArray

from flotilla.sampling.pool import Pool

NUM_ENVS, NUM_WORKERS, NUM_GROUPS = 12, 4, 2
TIMEOUT_S = 1.0
REPORT_S = 5.0


class Moody(gym.Env[Any, Any]):
    """Says (number, episode, time, last action), and now and then fails instead, in one of many ways."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float64)
    action_space = gym.spaces.Discrete(1000)

    def __init__(self, index: int, rate: float, calm_until: float) -> None:
        self.index, self.rate = index, rate
        self.chance = np.random.default_rng()  # of its own: no fault comes twice at the same place
        self.episode = self.time = 0
        if time.monotonic() > calm_until:  # a constructor that fails at the very start is no fault but an error
            self._maybe_fail(rate * 20)

    def _maybe_fail(self, rate: float) -> None:
        if self.chance.random() > rate:
            return
        match self.chance.choice(
            ["raise", "exit", "kill", "segfault", "sleep", "spin"], p=[0.4, 0.2, 0.1, 0.1, 0.1, 0.1]
        ):
            case "raise":
                raise RuntimeError("one of those days")
            case "exit":
                os._exit(3)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "segfault":
                ctypes.string_at(0)
            case "sleep":
                time.sleep(3600)
            case "spin":
                while True:
                    pass

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._maybe_fail(self.rate * 3)
        self.episode, self.time = self.episode + 1, 0
        self.length = int(self.np_random.integers(1, 50))
        return np.array([self.index, self.episode, 0, -1], np.float64), {}

    def step(self, action: int) -> Any:
        self._maybe_fail(self.rate)
        self.time += 1
        obs = np.array([self.index, self.episode, self.time, action], np.float64)
        return obs, float(self.time), False, self.time == self.length, {}


class Checker:
    """What the last row of each environment was, so that the next one can be judged."""

    def __init__(self, pool: Pool) -> None:
        self.pool, self.rng = pool, np.random.default_rng(0)
        self.rows = 0
        self.last = np.zeros((pool.num_envs, 4))
        self.ended = np.zeros(pool.num_envs, bool)

    def reset(self) -> None:
        self.pool.reset(range(self.pool.num_envs))
        self.pool.restarted[:] = False
        assert (self.pool.obs[()][:, 2] == 0).all(), "a reset gives first rows"
        self.last[:], self.ended[:] = self.pool.obs[()], False

    def act(self, envs: Any) -> None:
        self.pool.action[()][envs] = self.rng.integers(1000, size=self.pool.num_envs)[envs]

    def check(self, envs: list[int]) -> None:
        pool = self.pool
        for i in envs:
            index, episode, now, action = pool.obs[()][i]
            assert index == i, f"environment {i} has the row of {index}"
            if pool.restarted[i] or self.ended[i]:
                assert (now, action, pool.reward[i]) == (0, -1, 0), f"environment {i}: no first row {pool.obs[()][i]}"
            else:
                want = (self.last[i, 1], self.last[i, 2] + 1, pool.action[()][i], self.last[i, 2] + 1)
                got = (episode, now, action, pool.reward[i])
                assert got == want, f"environment {i}: {got} after {self.last[i]}, not {want}"
            pool.restarted[i] = False
            self.last[i], self.ended[i] = pool.obs[()][i], pool.terminated[i] or pool.truncated[i]
        self.rows += len(envs)

    def play(self, rounds: int) -> None:
        """Groups in turns, then whichever are ready first; all settled at the end."""
        pool, everyone = self.pool, list(range(self.pool.num_envs))
        for _ in range(rounds):
            for group, envs in enumerate(pool.groups):
                self.act(envs)
                pool.send(group)
            for group, envs in enumerate(pool.groups):
                pool.recv(group)
                self.check(everyone[envs])
        self.act(everyone)
        pool.send_some(everyone)
        for _ in range(rounds):
            ready = pool.recv_some(pool.num_envs // 2)
            self.check(ready)
            self.act(ready)
            pool.send_some(ready)
        self.check(pool.recv_some(pool.num_envs))


def kill_now_and_then(pool: Pool, stop: threading.Event, every_s: float) -> None:
    """From outside, at any moment: in a step, between two, while another is replaced."""
    rng: np.random.Generator = np.random.default_rng()
    while not stop.wait(float(rng.exponential(every_s))):
        try:
            os.kill(int(rng.choice(pool.pids)), signal.SIGKILL)
        except (ProcessLookupError, ValueError):  # it is being replaced
            continue


def held() -> NDArray[np.int64]:
    """Descriptors, children of children's, threads."""
    me = psutil.Process()
    return np.array([me.num_fds(), len(me.children(recursive=True)), me.num_threads()])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--rate", type=float, default=2e-4, help="faults of an environment per step")
    parser.add_argument("--kill-every-s", type=float, default=3.0, help="mean time between kills from outside")
    args = parser.parse_args()
    calm_until = time.monotonic() + 10
    makers = [functools.partial(Moody, i, args.rate, calm_until) for i in range(NUM_ENVS)]
    settings = {"num_workers": NUM_WORKERS, "num_groups": NUM_GROUPS, "max_restarts": 10**9, "env_timeout_s": TIMEOUT_S}
    pool = Pool(makers, **settings)
    checker, stop = Checker(pool), threading.Event()
    killer = threading.Thread(target=kill_now_and_then, args=(pool, stop, args.kill_every_s), daemon=True)
    start = reported = time.monotonic()
    at_start, resets = held(), 0
    killer.start()
    try:
        while (now := time.monotonic()) - start < args.seconds:
            checker.reset()
            checker.play(100)
            resets += 1
            if now - reported > REPORT_S:
                reported = now
                held_now = " ".join(map(str, held()))
                print(
                    f"{now - start:5.0f} s  {checker.rows:9,} rows  {len(pool.faults):5} faults  held {held_now}",
                    flush=True,
                )
    finally:
        stop.set()
        killer.join()
        pids = pool.pids
        pool.close()
    left = [pid for pid in pids if psutil.pid_exists(pid)]
    kinds = sorted({fault.text.strip().splitlines()[-1] for fault in pool.faults})
    print(
        f"{checker.rows:,} rows right, {resets} resets, {int(pool.episodes.sum())} restarts, {len(pool.faults)} faults:"
    )
    print(*(f"  {kind}" for kind in kinds), sep="\n")
    print(f"descriptors, processes, threads: {at_start} at the start, {held()} after close; workers left: {left}")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
