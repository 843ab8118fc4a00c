"""Wall seconds until the last 20 training episodes of CartPole-v1 return 475 on average, beside Stable-Baselines3.

    python benchmarks/time_to_threshold.py --seeds 1 2 3

Both use the tuned values of RL Baselines3 Zoo (benchmarks/settings/cartpole.yaml), one torch thread, and take
turns in fresh processes; the clock starts before the environments are made.  Needs `pip install 'flotilla[all,bench]'`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SETTING = Path(__file__).parent / "settings" / "cartpole.yaml"
THRESHOLD, EPISODES = 475.0, 20


def flotilla(seed: int) -> tuple[float, int]:
    """Seconds and environment steps at which the threshold was reached."""
    from flotilla.algorithms import ppo
    from flotilla.commands import train
    from flotilla.core.config import RunConfig
    from flotilla.core.presets import apply
    from flotilla.core.types import Episode
    from flotilla.monitor.monitor import Monitor

    returns: list[float] = []
    reached: list[tuple[float, int]] = []
    inner = Monitor.episodes
    start = time.perf_counter()

    def episodes(self: Monitor, ended: list[Episode]) -> None:
        for episode in ended:
            returns.append(episode.episodic_return)
            if len(returns) >= EPISODES and statistics.fmean(returns[-EPISODES:]) >= THRESHOLD:
                reached.append((time.perf_counter() - start, episode.env_steps))
                raise KeyboardInterrupt
        inner(self, ended)

    Monitor.episodes = episodes  # type: ignore[assignment, method-assign]
    run_config = RunConfig(seed=seed, run_dir=f"{tempfile.mkdtemp()}/run", threads=1, dashboard="plain")
    run_config, config = apply([str(SETTING)], "ppo", run_config, ppo.Config())
    train("ppo", run_config, config, [], [])
    return reached[0]


def sb3(seed: int) -> tuple[float, int]:
    """The same for Stable-Baselines3's PPO."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(1)

    class Until(BaseCallback):
        def __init__(self) -> None:
            super().__init__()
            self.returns: list[float] = []

        def _on_step(self) -> bool:
            self.returns += [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
            last = self.returns[-EPISODES:]
            return not (len(last) == EPISODES and statistics.fmean(last) >= THRESHOLD)

    start = time.perf_counter()
    model = PPO(
        "MlpPolicy",
        make_vec_env("CartPole-v1", 8, seed=seed),
        n_steps=32,
        batch_size=256,
        n_epochs=20,
        gamma=0.98,
        gae_lambda=0.8,
        ent_coef=0.0,
        learning_rate=lambda left: 1e-3 * left,
        clip_range=lambda left: 0.2 * left,
        seed=seed,
        device="cpu",
    )
    model.learn(100_000, callback=Until())
    return time.perf_counter() - start, model.num_timesteps


PEERS = {"flotilla": flotilla, "sb3": sb3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--one", choices=list(PEERS), help="measure one package in this process")
    args = parser.parse_args()
    if args.one:
        seconds, steps = PEERS[args.one](args.seeds[0])
        print(json.dumps({"seconds": round(seconds, 2), "env_steps": steps}))
        return
    print("| package | seconds of each seed | median | env steps of each seed |")
    print("|---|---|---|---|")
    rows: dict[str, list[dict[str, float]]] = {peer: [] for peer in PEERS}
    for seed in args.seeds:
        for peer, done in rows.items():
            command = [sys.executable, __file__, "--one", peer, "--seeds", str(seed)]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            done.append(json.loads(output.splitlines()[-1]))
    for peer, done in rows.items():
        seconds = [run["seconds"] for run in done]
        steps = ", ".join(f"{run['env_steps']:,}" for run in done)
        print(f"| {peer} | {', '.join(map(str, seconds))} | {statistics.median(seconds)} | {steps} |")


if __name__ == "__main__":
    main()
