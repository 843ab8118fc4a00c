"""PPO end to end, environment steps per second with learning, Flotilla beside Stable-Baselines3 in one run.

    python benchmarks/ppo.py                       every work, 3 rounds
    python benchmarks/ppo.py --work pong --rounds 5

The packages take turns, each run in a fresh process with the same hyper-parameters, networks and environment
wrappers; the rate is read from the start of the second iteration to the start of the last, so that whole
iterations count, learning and logging included, and start-up does not.  Needs `pip install 'flotilla[all,bench]'`.
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
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Work:
    env_id: str
    num_envs: int
    num_steps: int
    epochs: int
    minibatches: int
    learning_rate: float
    clip: float
    entropy: float
    iterations: int


WORKS = {
    "cartpole": Work("CartPole-v1", 8, 128, 4, 4, 2.5e-4, 0.2, 0.01, 30),
    "cheetah": Work("HalfCheetah-v5", 8, 256, 10, 32, 3e-4, 0.2, 0.0, 7),
    "pong": Work("PongNoFrameskip-v4", 8, 128, 4, 4, 2.5e-4, 0.1, 0.01, 5),
}


def flotilla(work: Work, threads: int, compile: Literal["none", "default"] = "none") -> float:
    """Environment steps per second, the ignored steps between episodes not counted."""
    os.environ |= {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000"}  # as the command line does
    from flotilla.algorithms import ppo
    from flotilla.commands import train
    from flotilla.core.config import RunConfig
    from flotilla.sampling.sampler import Sampler

    marks: list[tuple[float, int]] = []
    inner = Sampler.rollout

    def rollout(self: Sampler, act: object, num_steps: int) -> object:
        marks.append((time.perf_counter(), self.env_steps))
        if len(marks) == work.iterations:
            raise KeyboardInterrupt  # the rate is known; nothing to evaluate
        return inner(self, act, num_steps)  # type: ignore[arg-type]

    Sampler.rollout = rollout  # type: ignore[assignment, method-assign]
    run_config = RunConfig(
        env_id=work.env_id,
        num_envs=work.num_envs,
        total_timesteps=work.num_envs * work.num_steps * (work.iterations + 2),
        run_dir=os.path.join(tempfile.mkdtemp(), "run"),
        threads=threads,
        compile=compile,
        dashboard="plain",
    )
    is_cheetah = work.env_id.startswith("HalfCheetah")
    config = ppo.Config(
        num_steps=work.num_steps,
        update_epochs=work.epochs,
        num_minibatches=work.minibatches,
        learning_rate=work.learning_rate,
        anneal_lr=False,
        clip_coef=work.clip,
        clip_vloss=False,
        ent_coef=work.entropy,
        norm_obs=is_cheetah,
        norm_reward=is_cheetah,
    )
    train("ppo", run_config, config, [], [])
    (start, before), (end, after) = marks[1], marks[-1]
    return (after - before) / (end - start)


def sb3(work: Work, threads: int) -> float:
    """Environment steps per second of Stable-Baselines3's PPO, environments in this process (its fastest here)."""
    import ale_py
    import gymnasium as gym
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import VecEnv, VecFrameStack, VecNormalize

    gym.register_envs(ale_py)
    if threads:
        torch.set_num_threads(threads)
    policy = "MlpPolicy"
    if "NoFrameskip" in work.env_id:
        envs: VecEnv = VecFrameStack(make_atari_env(work.env_id, work.num_envs), 4)
        policy = "CnnPolicy"
    else:
        envs = make_vec_env(work.env_id, work.num_envs)
        if work.env_id.startswith("HalfCheetah"):
            envs = VecNormalize(envs)
    model = PPO(
        policy,
        envs,
        learning_rate=work.learning_rate,
        n_steps=work.num_steps,
        batch_size=work.num_envs * work.num_steps // work.minibatches,
        n_epochs=work.epochs,
        clip_range=work.clip,
        ent_coef=work.entropy,
        device="cpu",
    )
    marks: list[float] = []
    inner = VecEnv.step

    def step(self: VecEnv, actions: object) -> object:
        marks.append(time.perf_counter())
        return inner(self, actions)  # type: ignore[arg-type]

    VecEnv.step = step  # type: ignore[assignment, method-assign]
    model.learn(work.num_envs * work.num_steps * work.iterations)
    first, last = work.num_steps, work.num_steps * (work.iterations - 1)
    return (last - first) * work.num_envs / (marks[last] - marks[first])


PEERS: dict[str, Callable[[Work, int], float]] = {
    "flotilla": flotilla,
    "flotilla --compile": functools.partial(flotilla, compile="default"),
    "sb3": sb3,
}


def measure(peer: str, name: str, threads: int) -> float:
    """One run in a fresh process."""
    command = [sys.executable, __file__, "--one", peer, "--work", name, "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        return float(json.loads(done.stdout.splitlines()[-1])["steps_per_s"])
    except (IndexError, ValueError, KeyError):
        raise RuntimeError(f"{peer} on {name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=[*WORKS, "all"], default="all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0: what each package does unasked")
    parser.add_argument("--one", choices=list(PEERS), help="measure one package in this process")
    args = parser.parse_args()
    if args.one:
        rate = PEERS[args.one](WORKS[args.work], args.threads)
        print(json.dumps({"peer": args.one, "work": args.work, "steps_per_s": round(rate, 1)}))
        return
    print("| work | package | steps/s, median (min .. max) | ratio to sb3, median of rounds (min .. max) |")
    print("|---|---|---|---|")
    for name in WORKS if args.work == "all" else [args.work]:
        rounds = [{peer: measure(peer, name, args.threads) for peer in PEERS} for _ in range(args.rounds)]
        for peer in PEERS:
            rates = summary([one[peer] for one in rounds], ",.0f")
            print(
                f"| {name} | {peer} | {rates} | {summary([one[peer] / one['sb3'] for one in rounds], '.2f')} |",
                flush=True,
            )


def summary(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} .. {max(values):{form}})"


if __name__ == "__main__":
    main()
