"""Ranks that die, hang, or are told to stop: the others end in words, nothing is left behind, and the run goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from flotilla.compute import checkpoint

pytestmark = [
    pytest.mark.skipif(
        not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="needs torch with gloo"
    ),
    pytest.mark.usefixtures("no_hang"),
]
ENDLESS = "--preset none --device cpu --threads 1 --backend sync --dashboard plain --num-envs 4 --num-steps 32"


@contextmanager
def training(run_dir: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """Two ranks that train for ever, with a checkpoint after each iteration."""
    command = [sys.executable, "-m", "flotilla", "train", "ppo", *ENDLESS.split(), "--run-dir", str(run_dir)]
    command += ["--nproc", "2", "--checkpoint-every", "1", "--eval-episodes", "1", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_a_checkpoint(run_dir: Path, after: str = "") -> str:
    end = time.monotonic() + 60
    while True:
        names = [path.name for path in run_dir.glob("checkpoints/step_*")]
        if names and max(names) > after:
            return max(names)
        assert time.monotonic() < end
        time.sleep(0.05)


def ranks_of(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    """In the order of their ranks."""
    children = psutil.Process(launcher.pid).children()
    return sorted(children, key=lambda process: int(process.environ()["RANK"]))


def status(run_dir: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run_dir / "status.json").read_text())
    return content


@pytest.mark.parametrize(("number", "ranks"), [(signal.SIGTERM, 2), (signal.SIGUSR1, 1), (signal.SIGINT, 4)])
def test_a_signal_ends_all_ranks_together_and_the_run_goes_on(
    tmp_path: Path, number: signal.Signals, ranks: int
) -> None:
    """Also with another number of ranks."""
    run_dir = tmp_path / "run"
    with training(run_dir, "--total-timesteps", "10_000_000") as process:
        wait_for_a_checkpoint(run_dir)
        began = time.monotonic()
        process.send_signal(number)
        out, _ = process.communicate(timeout=60)
    assert time.monotonic() - began < 20
    assert process.returncode == (130 if number == signal.SIGINT else 75), out
    assert "Traceback" not in out
    assert status(run_dir)["state"] == ("interrupted" if number == signal.SIGINT else "preempted")
    steps = status(run_dir)["env_steps"]
    assert checkpoint.load(checkpoint.newest(run_dir / "checkpoints")).counters["env_steps"] == steps
    flags = ["--nproc", str(ranks), "--total-timesteps", str(steps + 400), "--allow-change"]
    with training(run_dir, *flags) as process:
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    assert f"continues at {steps:,} env steps" in out
    assert status(run_dir)["state"] == "done"


@pytest.mark.parametrize("restarts", [0, 1])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies(tmp_path: Path, rank: int, restarts: int) -> None:
    run_dir = tmp_path / "run"
    with training(run_dir, "--total-timesteps", "10_000_000", "--max-restarts", str(restarts)) as process:
        at = wait_for_a_checkpoint(run_dir)
        ranks_of(process)[rank].kill()
        if restarts:
            wait_for_a_checkpoint(run_dir, wait_for_a_checkpoint(run_dir, at))
            time.sleep(2.0)
            process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    if not restarts:
        assert process.returncode == 1, out
        said = re.findall(r"rank (\d) of 2 lost another rank \(.+\); start the same command again", out)
        assert set(said) == {str(1 - rank)}
        assert "Traceback" not in out
    else:
        assert process.returncode == 75, out
        assert f"rank {rank} ended by signal 9 (Killed); start 2 of 2" in out
        assert "continues at " in out


def test_a_rank_that_hangs_is_given_up(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with training(run_dir, "--total-timesteps", "10_000_000", "--rank-timeout-s", "3") as process:
        wait_for_a_checkpoint(run_dir)
        hanging = ranks_of(process)[1]
        hanging.suspend()
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "rank 0 of 2 lost another rank" in out
    assert not hanging.is_running()


def test_no_rank_outlives_its_launcher(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with training(run_dir, "--total-timesteps", "10_000_000") as process:
        wait_for_a_checkpoint(run_dir)
        ranks = ranks_of(process)
        process.kill()
        gone, alive = psutil.wait_procs(ranks, timeout=10)
    assert (len(gone), alive) == (2, [])


def test_a_wrong_flag_is_told_once(tmp_path: Path) -> None:
    with training(tmp_path / "run", "--num-minibatches", "7") as process:
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 64
    assert out.count("num_minibatches=7 does not divide 64 samples") == 1
    assert not (tmp_path / "run").exists()


def test_two_torchrun_agents_are_two_machines(tmp_path: Path) -> None:
    """On loopback; the rank and not the local rank decides who writes, and the same command goes on."""
    run_dir = tmp_path / "run"
    env = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    for attempt, steps in enumerate(("600", "900")):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{29_400 + os.getpid() % 500 + attempt}"]
        command += ["--local-addr=127.0.0.1", "-m", "flotilla", "train", "ppo", *ENDLESS.split()]
        command += ["--run-dir", str(run_dir), "--total-timesteps", steps, "--eval-episodes", "1", "--allow-change"]
        agents = [
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for _ in range(2)
        ]
        said = [agent.communicate(timeout=110)[0] for agent in agents]
        assert [agent.returncode for agent in agents] == [0, 0], said
    assert sum("continues at 640 env steps" in out or "continues at " in out for out in said) == 1
    assert status(run_dir)["state"] == "done"
    assert len(list((run_dir / "tensorboard").iterdir())) == 2, "one file a start"
