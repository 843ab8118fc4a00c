"""SAC, TD3 and DQN end to end, environment steps per second with learning, beside Stable-Baselines3 in one run.

    python benchmarks/offpolicy.py                        every work, 3 rounds
    python benchmarks/offpolicy.py --work sac --rounds 5

One environment.  SAC and TD3: HalfCheetah-v5, batches of 256, two layers of 256, one update a step.  DQN: Pong, batches
of 32, the Nature network, an update every 4 steps, a replay of 100,000 transitions that is full.  The packages take
turns, each run in a fresh process; the rate is that of steps 1,200 to 1,800, learning and logging included.
Needs `pip install 'flotilla[all,bench]'`.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

FIRST, LAST, STARTS, ROWS = 1_200, 1_800, 1_000, 100_000
WORKS = {
    "sac": ("HalfCheetah-v5", {"q_lr": 3e-4, "policy_frequency": 1}),
    "td3": ("HalfCheetah-v5", {}),
    "dqn": ("PongNoFrameskip-v4", {"learning_rate": 1e-4, "batch_size": 32, "train_frequency": 4, "end_e": 0.01}),
}


def configured(work: str) -> tuple[Any, Any]:
    """Both configurations of a work."""
    from flotilla.core import names
    from flotilla.core.config import RunConfig

    env_id, values = WORKS[work]
    config = names.load("algorithm", names.ALGORITHMS, work).Config(buffer_size=ROWS, learning_starts=STARTS, **values)
    if work == "dqn":
        config = replace(config, target_network_frequency=1_000, exploration_fraction=0.1)
    return RunConfig(env_id=env_id, num_envs=1, total_timesteps=ROWS), config


def flotilla(work: str, threads: int, compile: Literal["none", "default"] = "none") -> float:
    """Environment steps per second."""
    os.environ |= {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000"}  # as the command line does
    from flotilla.commands import train
    from flotilla.run import Run
    from flotilla.sampling.replay import Replay
    from flotilla.sampling.sampler import Sampler
    from replay import ATARI, rollouts

    marks: dict[str, float] = {}
    inner, made = Sampler.rollout, Run.replay

    def rollout(self: Sampler, act: Any, num_steps: int) -> object:
        if self.env_steps >= FIRST:
            marks.setdefault("first", time.perf_counter())
            marks.setdefault("from", self.env_steps)
        if self.env_steps >= LAST:
            marks["rate"] = (self.env_steps - marks["from"]) / (time.perf_counter() - marks["first"])
            raise KeyboardInterrupt  # the rate is known; nothing to evaluate
        return inner(self, act, num_steps)

    def replay(self: Run, capacity: int, **options: Any) -> Replay:
        """Full already, as the peer's is, so that draws miss the cache."""
        full = made(self, capacity, **options)
        if work == "dqn":
            for roll in rollouts(ATARI, 4, 1, ROWS):
                full.add(roll)
        return full

    Sampler.rollout, Run.replay = rollout, replay  # type: ignore[assignment, method-assign]
    run_config, config = configured(work)
    run_dir = os.path.join(tempfile.mkdtemp(), "run")
    run_config = replace(run_config, threads=threads or -1, compile=compile, dashboard="plain", run_dir=run_dir)
    train(work, run_config, config, [], [])
    return marks["rate"]


def sb3(work: str, threads: int) -> float:
    """Environment steps per second of Stable-Baselines3."""
    import torch
    from stable_baselines3.common.vec_env import VecEnv

    from peer import make_envs, make_model

    if threads:
        torch.set_num_threads(threads)
    run_config, config = configured(work)
    model: Any = make_model(work, run_config, config, make_envs(run_config.env_id, 1, seed=1))
    if work == "dqn":
        model.replay_buffer.observations[:] = 1
        model.replay_buffer.next_observations[:] = 1
        model.replay_buffer.full = True
    marks: list[float] = []
    inner = VecEnv.step

    def step(self: VecEnv, actions: object) -> object:
        marks.append(time.perf_counter())
        return inner(self, actions)  # type: ignore[arg-type]

    VecEnv.step = step  # type: ignore[assignment, method-assign]
    model.learn(LAST + 1)
    return (LAST - FIRST) / (marks[LAST] - marks[FIRST])


PEERS: dict[str, Callable[[str, int], float]] = {
    "flotilla": flotilla,
    "flotilla --compile": functools.partial(flotilla, compile="default"),
    "sb3": sb3,
}


def measure(peer: str, work: str, threads: int) -> float:
    """One run in a fresh process."""
    command = [sys.executable, __file__, "--one", peer, "--work", work, "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        return float(json.loads(done.stdout.splitlines()[-1])["steps_per_s"])
    except (IndexError, ValueError, KeyError):
        raise RuntimeError(f"{peer} on {work} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=[*WORKS, "all"], default="all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0: auto, and sb3 as it likes")
    parser.add_argument("--one", choices=list(PEERS), help="measure one package in this process")
    args = parser.parse_args()
    if args.one:
        rate = PEERS[args.one](args.work, args.threads)
        print(json.dumps({"peer": args.one, "work": args.work, "steps_per_s": round(rate, 1)}))
        return
    print("| work | package | steps/s, median (min .. max) | ratio to sb3, median of rounds (min .. max) |")
    print("|---|---|---|---|")
    for work in WORKS if args.work == "all" else [args.work]:
        rounds = [{peer: measure(peer, work, args.threads) for peer in PEERS} for _ in range(args.rounds)]
        for peer in PEERS:
            rates = summary([one[peer] for one in rounds], ",.0f")
            ratios = summary([one[peer] / one["sb3"] for one in rounds], ".2f")
            print(f"| {work} | {peer} | {rates} | {ratios} |", flush=True)


def summary(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} .. {max(values):{form}})"


if __name__ == "__main__":
    main()
