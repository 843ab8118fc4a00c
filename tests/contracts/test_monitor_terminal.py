"""The live dashboard in a real pseudo-terminal: what it draws, that it fits, and that it gives the terminal back."""

from __future__ import annotations

import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from fcntl import ioctl
from pathlib import Path

import pytest
from rich.console import Console

from flotilla.monitor.dashboard import Screen, View
from flotilla.monitor.meters import EnvState

PROGRAM = """
import sys, time, warnings
from pathlib import Path
import torch
from flotilla.core.types import Episode
from flotilla.monitor.monitor import Monitor

monitor = Monitor(Path(sys.argv[1]), title="ppo on CartPole-v1", total_steps=1000, num_envs=20, frames_per_step=4,
                  dashboard="auto", log_every_s=0.1, device="cpu")
state = "failed"
try:
    for i in range(1, 1000 if sys.argv[2] == "forever" else 11):
        monitor.episodes([Episode(i % 20, float(i), 5, i)])
        monitor.add({"losses/value_loss": torch.tensor(0.25)})
        monitor.tick(i)
        if i == 5:
            warnings.warn("a warning meanwhile")
            if sys.argv[2] == "raise":
                raise RuntimeError("boom")
        time.sleep(0.03)
    state = "done"
except KeyboardInterrupt:
    state = "interrupted"
finally:
    if sys.argv[2] != "raise":
        monitor.close(state)
"""
SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


def run_in_terminal(run_dir: Path, how: str) -> tuple[str, int]:
    """What a terminal of 80 x 24 received, and the exit code."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color"}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        environment.pop(name, None)
    command = [sys.executable, "-c", PROGRAM, str(run_dir), how]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    received = b""
    try:
        while True:
            received += os.read(ours, 65536)
            if how == "forever" and received.count(b"Environments") >= 3:
                process.send_signal(signal.SIGINT)
                how = "interrupted"
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(ours)
    return received.decode(), process.wait(timeout=30)


def test_a_run_on_a_terminal_is_live_and_restores_it(tmp_path: Path) -> None:
    text, code = run_in_terminal(tmp_path, "done")
    assert code == 0
    assert text.rindex(SHOW_CURSOR) > text.rindex(HIDE_CURSOR)
    for word in ("ppo on CartPole-v1", "env steps/s", "value_loss", "a warning meanwhile", "done"):
        assert word in text
    assert text.index("a warning meanwhile") < text.rindex("Environments")


def test_ctrl_c_restores_the_terminal(tmp_path: Path) -> None:
    text, code = run_in_terminal(tmp_path, "forever")
    assert code == 0
    assert text.rindex(SHOW_CURSOR) > text.rindex(HIDE_CURSOR)
    assert '"state": "interrupted"' in (tmp_path / "status.json").read_text()


def test_an_exception_that_nobody_handles_restores_the_terminal(tmp_path: Path) -> None:
    text, code = run_in_terminal(tmp_path, "raise")
    assert code == 1
    assert "RuntimeError: boom" in text
    assert text.rindex(SHOW_CURSOR) > text.rindex(HIDE_CURSOR)


def test_a_closed_pipe_does_not_end_training(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), "done"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert b"Error" not in errors
    assert '"state": "done"' in (tmp_path / "status.json").read_text()


def full_view(num_envs: int = 64) -> View:
    envs = [EnvState(12_345, -1234.5, 123_456.0, restarts=i % 3) for i in range(num_envs)]
    keys = ("policy_loss", "value_loss", "entropy", "approx_kl", "old_approx_kl", "clipfrac", "explained_variance")
    return View(
        "ppo on a rather long environment name-v1 · seed 1 · 64 environments · sync · cuda:0 · and more words",
        1_000_000_000,
        envs,
        env_steps=123_456_789,
        elapsed_s=200_000.0,
        env_steps_per_s=123_456.7,
        frames_per_step=4,
        shares={"env": 0.25, "inference": 0.2, "learning": 0.5, "waiting": 0.01, "other": 0.04},
        episodes=1_234_567,
        mean_return=-1234.5,
        best_return=float("inf"),
        eval_return=1e9,
        losses={f"losses/{key}": -1.23456e-7 for key in keys},
        resources={"system/cpu_percent": 1600.0, "system/memory_bytes": 1e12, "system/gpu_percent": 100.0},
    )


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60), (40, 10), (20, 5)])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_screen_fits(size: tuple[int, int], encoding: str, tmp_path: Path) -> None:
    with (tmp_path / "out").open("w", encoding=encoding) as file:
        console = Console(file=file, width=size[0], height=size[1], force_terminal=True, color_system=None)
        console.print(Screen(full_view()), end="")
    lines = (tmp_path / "out").read_text(encoding=encoding).splitlines()
    assert len(lines) < size[1]
    assert all(len(line) == size[0] for line in lines)


@pytest.mark.parametrize(("size", "num_envs", "more"), [((80, 24), 16, False), ((120, 40), 64, True)])
def test_environments_are_shown_or_counted(size: tuple[int, int], num_envs: int, more: bool) -> None:
    console = Console(width=size[0], height=size[1], force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(Screen(full_view(num_envs)))
    text = capture.get()
    assert len(re.findall(r"\b12k  -1\.2k  123k", text)) == 16
    assert ("(48 more)" in text) == more
