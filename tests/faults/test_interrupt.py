"""Signals to a training in a process of its own: it ends, says how, and leaves its results."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flotilla.compute import checkpoint

ENDLESS = ["--total-timesteps", "100_000_000", "--eval-episodes", "1", "--log-every-s", "0"]


@contextmanager
def training(run_dir: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "flotilla", "train", "ppo", "--preset", "none", "--run-dir", str(run_dir)]
    command += ["--dashboard", "plain", "--device", "cpu", "--threads", "1", *ENDLESS, *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(process: subprocess.Popen[str], file: Path, limit_s: float = 60) -> None:
    """Until the training has written something into the file."""
    end = time.monotonic() + limit_s
    while not (file.exists() and file.stat().st_size):
        assert process.poll() is None, f"it ended too early: {process.stdout and process.stdout.read()}"
        assert time.monotonic() < end, f"{file} did not appear"
        time.sleep(0.05)


def end(process: subprocess.Popen[str], limit_s: float = 60) -> tuple[int, str]:
    out, _ = process.communicate(timeout=limit_s)
    return process.returncode, out


def status(run_dir: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run_dir / "status.json").read_text())
    return content


@pytest.mark.parametrize(
    ("number", "code", "state"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 75, "preempted"),
        (signal.SIGUSR1, 75, "preempted"),
        (signal.SIGUSR2, 75, "preempted"),
    ],
)
def test_one_signal_ends_with_results(tmp_path: Path, number: signal.Signals, code: int, state: str) -> None:
    run_dir = tmp_path / "run"
    with training(run_dir) as process:
        wait_for(process, run_dir / "metrics.jsonl")
        process.send_signal(number)
        ended, out = end(process)
    assert ended == code, out
    assert "Traceback" not in out
    found = status(run_dir)
    assert (found["state"], found["message"]) == (state, number.name)
    assert found["env_steps"] > 0
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    path = checkpoint.newest(run_dir / "checkpoints")
    counters = json.loads((path / "counters.json").read_text())
    assert found["env_steps"] == counters["env_steps"] == last["env_steps"]
    assert list((run_dir / "plots").iterdir())


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    """In the middle of an iteration that would take minutes."""
    run_dir = tmp_path / "run"
    with training(run_dir, "--num-steps", "1_000_000", "--num-envs", "4") as process:
        wait_for(process, run_dir / "status.json")
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        time.sleep(1.0)
        assert process.poll() is None, "the first one waits for the iteration"
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        ended, out = end(process)
    assert ended == 130, out
    assert time.monotonic() - began < 30
    assert "Ctrl-C again ends at once" in out
    assert "Traceback" not in out
    assert status(run_dir)["state"] == "interrupted"
