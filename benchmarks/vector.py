"""Flotilla's vector environment beside Gymnasium's `AsyncVectorEnv`: environment steps per second, in turns, one run.

    python benchmarks/vector.py [--work cartpole halfcheetah noop pong] [--rounds 3] [--seconds 2]

Measured by `gymnasium.utils.performance.benchmark_vector_step`, which samples actions, too; the median of all rounds.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
from collections.abc import Callable
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", PYGAME_HIDE_SUPPORT_PROMPT="1")

import gymnasium as gym
import numpy as np
from gymnasium.utils.performance import benchmark_vector_step
from gymnasium.vector import AsyncVectorEnv, VectorEnv

from flotilla.envs.make import make_env
from flotilla.vector import WorkerVectorEnv


class NoOp(gym.Env[Any, Any]):
    """Does nothing; 17 floats, as HalfCheetah."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (17,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self) -> None:
        self.obs = np.zeros(17, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self.obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.obs, 0.0, False, False, {}


WORK: dict[str, Callable[[], gym.Env[Any, Any]]] = {
    "cartpole": functools.partial(gym.make, "CartPole-v1"),
    "halfcheetah": functools.partial(gym.make, "HalfCheetah-v5"),
    "noop": NoOp,
    "pong": functools.partial(make_env, "PongNoFrameskip-v4"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", nargs="+", choices=WORK, default=list(WORK))
    parser.add_argument("--num-envs", type=int, default=32)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    config = parser.parse_args()
    print(f"{'':12} {'Flotilla':>10} {'Async':>10}  ratio  us per vector step")
    for name in config.work:
        makers = [WORK[name]] * config.num_envs
        sides: dict[str, Callable[[], VectorEnv[Any, Any, Any]]] = {
            "Flotilla": functools.partial(WorkerVectorEnv, makers, num_workers=config.num_workers),
            "Async": functools.partial(AsyncVectorEnv, makers),
        }
        rates: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(config.rounds):
            for side, make in sides.items():
                envs = make()
                rates[side].append(benchmark_vector_step(envs, config.seconds, seed=1))  # type: ignore[arg-type]
                envs.close()
        ours, theirs = statistics.median(rates["Flotilla"]), statistics.median(rates["Async"])
        us = 1e6 * config.num_envs / ours
        print(f"{name:12} {ours:10,.0f} {theirs:10,.0f}  {ours / theirs:4.1f}x {us:8,.0f}", flush=True)


if __name__ == "__main__":
    main()
