"""Two processes that train together: the same weights on both, one of them writes, one of them is enough to stop."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

# What each process runs: train, then say on stdout what it ended with.
PROGRAM = """
import hashlib, json, sys, torch
from flotilla.core.config import RunConfig
from flotilla.core.names import ALGORITHMS, load
from flotilla.run import Run

name, of_run, of_algorithm = json.loads(sys.argv[1])
algorithm = load("algorithm", ALGORITHMS, name)
config = algorithm.Config(**of_algorithm)
run = Run(name, RunConfig(**of_run), config, {})
indices = set()
drain = run.sampler.drain_episodes
def drained():
    episodes = drain()
    indices.update(x.env_index for x in episodes)
    return episodes
run.sampler.drain_episodes = drained
agent = algorithm.train(config, run)
text = b"".join(x.numpy().tobytes() for x in agent.state_dict().values())
print("ENDED", json.dumps({
    "weights": hashlib.sha256(text).hexdigest(),
    "indices": sorted(indices),
    "env_steps": run._env_steps,
    "here": run.sampler.env_steps,
    "finite": all(bool(torch.isfinite(x).all()) for x in agent.state_dict().values()),
}))
run.close("failed")
"""


OFF_POLICY: dict[str, Any] = {
    "env_id": "Pendulum-v1",
    "learning_starts": 100,
    "train_frequency": 8,
    "batch_size": 16,
    "buffer_size": 500,
    "total_timesteps": 450,
}


def together(
    run_dir: Path, ranks: int = 2, algorithm: str = "ppo", **values: Any
) -> list[tuple[int, str, dict[str, Any]]]:
    """Exit code, stderr and what it said, of each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    of_run = {
        "env_id": values.pop("env_id", "CartPole-v1"),
        "num_envs": values.pop("num_envs", 4),
        "total_timesteps": values.pop("total_timesteps", 600),
        "run_dir": str(run_dir),
        "backend": "sync",
        "device": "cpu",
        "threads": 1,
        "dashboard": "none",
        "eval_episodes": 1,
        "eval_every": 300,
    }
    arguments = json.dumps([algorithm, of_run, ({"num_steps": 32} if algorithm == "ppo" else {}) | values])
    world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | world | {"RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONWARNINGS": "default"},
        )
        for rank in range(ranks)
    ]
    results = []
    try:
        for process in started:
            out, err = process.communicate(timeout=120)
            said = [line.removeprefix("ENDED ") for line in out.splitlines() if line.startswith("ENDED ")]
            results.append((process.returncode, err, json.loads(said[0]) if said else {}))
    finally:
        for process in started:
            process.kill()
    return results


pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="needs torch with gloo"
)


@pytest.mark.parametrize(
    "values",
    [
        {"target_kl": 0.002, "update_epochs": 8},
        {"env_id": "Pendulum-v1", "norm_obs": True, "norm_reward": True},
    ],
)
def test_two_ranks_end_with_the_same_weights_and_one_writes(tmp_path: Path, values: dict[str, Any]) -> None:
    run_dir = tmp_path / "run"
    (first_code, first_err, first), (second_code, second_err, second) = together(run_dir, **values)
    assert first_code == second_code == 0, first_err + second_err
    assert first["weights"] == second["weights"]
    assert first["finite"]
    assert first["env_steps"] == second["env_steps"] == first["here"] + second["here"] >= 600
    if "env_id" not in values:
        assert set(first["indices"]) == {0, 1}
        assert set(second["indices"]) == {2, 3}, "indices and so seeds are global"
    status = json.loads((run_dir / "status.json").read_text())
    assert (status["state"], status["env_steps"]) == ("done", first["env_steps"])
    assert len(list((run_dir / "checkpoints").iterdir())) == 2, "after the evaluation that was the best, and the last"
    assert len(list((run_dir / "tensorboard").iterdir())) == 1, "rank 0 alone writes"
    assert [x.name for x in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("algorithm", "values"),
    [
        ("sac", {}),
        ("sac", {"env_id": "CartPole-v1", "gradient_steps": -1, "tau": 1.0, "target_frequency": 7}),
        ("td3", {"num_envs": 2}),
        ("ddpg", {}),
    ],
)
def test_two_ranks_agree_off_policy(tmp_path: Path, algorithm: str, values: dict[str, Any]) -> None:
    """Targets and temperature as well as what an optimizer owns; each has its own environments and its own replay."""
    both = together(tmp_path / "run", algorithm=algorithm, **OFF_POLICY | values)
    (first_code, first_err, first), (second_code, second_err, second) = both
    assert first_code == second_code == 0, first_err + second_err
    assert first["weights"] == second["weights"]
    assert first["finite"]
    assert first["env_steps"] == second["env_steps"] == first["here"] + second["here"] >= 450
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any("losses/critic_loss" in line for line in lines), "they have learned"


@pytest.mark.parametrize("name", ["batch_size", "buffer_size"])
def test_what_is_drawn_from_a_replay_has_to_divide_as_well(tmp_path: Path, name: str) -> None:
    results = together(tmp_path / "run", algorithm="sac", **OFF_POLICY | {name: 33})
    said = f"{name}=33 does not divide over 2 ranks; nearest: 32 or 34"
    assert all(code == 1 and said in err for code, err, _ in results)
    assert not list(tmp_path.iterdir())


def test_what_does_not_divide_over_ranks_is_refused(tmp_path: Path) -> None:
    results = together(tmp_path / "run", num_envs=3)
    assert all(
        code == 1 and "num_envs=3 does not divide over 2 ranks; nearest: 2 or 4" in err for code, err, _ in results
    )
    assert not list(tmp_path.iterdir())
