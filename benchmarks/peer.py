"""Stable-Baselines3's SAC, TD3 and DQN with the hyper-parameters of a Flotilla configuration, to stand beside it.

    python benchmarks/peer.py sac-hopper --seed 1 --run-dir runs/learning/sb3-sac-hopper-seed1

trains a setting of benchmarks/settings, evaluates it on 20 episodes, and leaves episodes.jsonl and status.json as a run
of Flotilla does.  Needs `pip install 'flotilla[all,bench]'`.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import ale_py
import gymnasium as gym
import numpy as np
import stable_baselines3 as sb3
import torch
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack

from flotilla.core import names, presets
from flotilla.core.config import RunConfig

SETTINGS = Path(__file__).parent / "settings"
EPISODES = 20


def load(setting: str) -> tuple[str, RunConfig, Any]:
    """The algorithm and both configurations of a setting."""
    file = SETTINGS / f"{setting}.yaml"
    algorithm = presets.algorithm_of(file)
    module = names.load("algorithm", names.ALGORITHMS, algorithm)
    return algorithm, *presets.apply([str(file)], algorithm, RunConfig(), module.Config())


def make_envs(env_id: str, num_envs: int, seed: int) -> VecEnv:
    gym.register_envs(ale_py)
    if "NoFrameskip" in env_id:
        return VecFrameStack(make_atari_env(env_id, num_envs, seed=seed), 4)
    return make_vec_env(env_id, num_envs, seed=seed)


def make_model(algorithm: str, run_config: RunConfig, config: Any, envs: VecEnv) -> BaseAlgorithm:
    """The peer's model; networks, batches and rates as in the configuration."""
    common: dict[str, Any] = {
        "buffer_size": min(config.buffer_size, run_config.total_timesteps),
        "learning_starts": config.learning_starts,
        "batch_size": config.batch_size,
        "gamma": config.gamma,
        "train_freq": max(1, config.train_frequency // run_config.num_envs),
        "gradient_steps": config.gradient_steps,
        "seed": run_config.seed,
        "device": "cpu",
    }
    layers = {"policy_kwargs": {"net_arch": list(config.hidden_sizes)}}
    if algorithm == "sac":
        return sb3.SAC("MlpPolicy", envs, learning_rate=config.policy_lr, tau=config.tau, **layers, **common)
    if algorithm == "td3":
        assert envs.action_space.shape is not None
        size = envs.action_space.shape[0]
        noise = NormalActionNoise(np.zeros(size), np.full(size, config.exploration_noise))
        return sb3.TD3(
            "MlpPolicy",
            envs,
            learning_rate=config.learning_rate,
            tau=config.tau,
            policy_delay=config.policy_frequency,
            action_noise=noise,
            target_policy_noise=config.policy_noise,
            target_noise_clip=config.noise_clip,
            **layers,
            **common,
        )
    assert algorithm == "dqn"
    is_image = len(envs.observation_space.shape or ()) == 3
    return sb3.DQN(
        "CnnPolicy" if is_image else "MlpPolicy",
        envs,
        learning_rate=config.learning_rate,
        target_update_interval=config.target_network_frequency,
        exploration_fraction=config.exploration_fraction,
        exploration_initial_eps=config.start_e,
        exploration_final_eps=config.end_e,
        **({} if is_image else layers),
        **common,
    )


class Record(BaseCallback):
    """Writes a line for each training episode."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file, self._start = file.open("w"), time.perf_counter()

    def _on_step(self) -> bool:
        for env, info in enumerate(self.locals["infos"]):
            if "episode" in info:
                line = {"env_steps": self.num_timesteps, "elapsed_s": time.perf_counter() - self._start, "env": env}
                line |= {"return": float(info["episode"]["r"]), "length": int(info["episode"]["l"])}
                self._file.write(json.dumps(line) + "\n")
                self._file.flush()
        return True


def train(setting: str, seed: int, run_dir: Path) -> None:
    algorithm, run_config, config = load(setting)
    run_dir.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    start = time.perf_counter()
    model = make_model(algorithm, run_config, config, make_envs(run_config.env_id, run_config.num_envs, seed))
    model.set_random_seed(seed)
    model.learn(run_config.total_timesteps, callback=Record(run_dir / "episodes.jsonl"))
    elapsed_s = time.perf_counter() - start
    mean, std = evaluate_policy(model, make_envs(run_config.env_id, 1, seed + 1000), n_eval_episodes=EPISODES)
    status = {
        "state": "done",
        "env_steps": model.num_timesteps,
        "elapsed_s": elapsed_s,
        "eval": {"episodic_return_mean": float(mean), "episodic_return_std": float(std)},
    }
    (run_dir / "status.json").write_text(json.dumps(status))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--run-dir", type=Path, required=True)
    args = parser.parse_args()
    train(args.setting, args.seed, args.run_dir)


if __name__ == "__main__":
    main()
