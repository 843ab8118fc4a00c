"""What a user or an environment gets wrong: the exit code, one clear line, and what is left on disk."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flotilla import cli
from flotilla.compute import checkpoint
from flotilla.core.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, EXIT_USAGE

BASE = "--preset none --backend sync --dashboard none --device cpu --threads 1 --eval-episodes 1 --num-envs 2"

# An environment that fails, or has spaces that nothing here takes, as a user's own module.
MODULE = """
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
from gymnasium import spaces

class Fragile(gym.Env):
    made = 0
    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, render_mode=None, fail_at=0, in_reset=False):
        self.index, self.fail_at, self.in_reset, self.t = Fragile.made, fail_at, in_reset, 0
        Fragile.made += 1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self.in_reset and self.t:
            self.fail()
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        if self.t == self.fail_at and not self.in_reset:
            self.fail()
        return np.zeros(2, np.float32), 0.0, self.t % 5 == 0, False, {}

    def fail(self):
        if self.index == 1:
            raise ZeroDivisionError("the simulator fell over")

class Hanging(Fragile):
    def fail(self):
        before = Path(__file__).with_name("hung")
        if self.index == 1 and not before.exists():
            before.touch()
            time.sleep(60)

class Blowup(Fragile):
    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, 1e30 if self.t > 40 else 0.0, *rest

class Buttons(Fragile):
    action_space = spaces.MultiBinary(3)

class Words(Fragile):
    observation_space = spaces.Text(5)

for name, kind, more in (
    ("Step", Fragile, {"fail_at": 20}), ("Reset", Fragile, {"in_reset": True}), ("Whole", Fragile, {}),
    ("Hang", Hanging, {"fail_at": 20}), ("Blowup", Blowup, {}),
    ("Buttons", Buttons, {}), ("Words", Words, {}),
):
    gym.register(f"{name}-v0", entry_point=kind, kwargs=more)
"""


@pytest.fixture(autouse=True)
def in_a_folder_with_the_module(tmp_path_factory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path_factory.mktemp("modules")
    (folder / "users_own.py").write_text(MODULE)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "users_own", raising=False)
    monkeypatch.chdir(tmp_path)


def train(*flags: str) -> int:
    return cli.main(["train", "ppo", *BASE.split(), "--total-timesteps", "512", "--num-steps", "32", *flags])


def status(run_dir: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path(run_dir, "status.json").read_text())
    return content


@pytest.mark.filterwarnings("ignore:.*Overriding environment:UserWarning")  # the module is imported once a test
@pytest.mark.parametrize("where", ["Step", "Reset"])
def test_an_environment_that_raises_ends_the_run(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--env-id", f"users_own:{where}-v0", "--run-dir", "run") == EXIT_FAILED
    said = capsys.readouterr()
    assert "environment 1 " in said.out + said.err
    assert "ZeroDivisionError" in said.out + said.err
    found = status("run")
    assert found["state"] == "failed"
    assert "environment 1 " in found["message"]
    assert "the simulator fell over" in found["message"]
    assert Path("run/config.yaml").exists()


@pytest.mark.filterwarnings("ignore:.*Overriding environment:UserWarning")
def test_the_same_environment_without_the_fault_is_done() -> None:
    assert train("--env-id", "users_own:Whole-v0", "--run-dir", "some/deep/run") == EXIT_DONE
    assert status("some/deep/run")["state"] == "done"


@pytest.mark.filterwarnings("ignore:.*Overriding environment:UserWarning")
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--num-envs 0", "num_envs=0"),
        ("--num-envs -3", "num_envs=-3"),
        ("--total-timesteps 0", "total_timesteps=0"),
        ("--eval-episodes 0", "eval_episodes=0"),
        ("--eval-every -1", "eval_every=-1"),
        ("--threads -2", "threads=-2"),
        ("--num-minibatches 3", "num_minibatches=3 does not divide 64 samples"),
        ("--num-minibatches 4 --memory lstm", "num_minibatches=4 does not divide 2 environments"),
        ("--gamma 1.5", "gamma=1.5 is out of range"),
        ("--hidden-sizes 64 0", "hidden_sizes=(64, 0)"),
        ("--env-id CartPol-v1", "did you mean CartPole-v"),
        ("--env-id users_own:Missing-v0", "users_own:Missing-v0"),
        ("--env-id nobodys_own:Missing-v0", "cannot import 'nobodys_own'"),
        ("--env-id users_own:Buttons-v0", "the action space MultiBinary(3)"),
        ("--env-id users_own:Words-v0", "the observation space Text"),
        ("--env-id probe/Counter-v0 --cnn nature", "images of 8x8 are too small for --cnn nature"),
        ("--backend ale", "backend 'ale' steps Atari only, not 'CartPole-v1'"),
        ("--device gpu0", "unknown device 'gpu0'; choose from auto, cpu, cuda"),
        ("--action-repeat 2", "action_repeat 2"),
    ],
)
def test_a_refused_configuration_leaves_no_run(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--run-dir", "run", *flags.split()) == EXIT_USAGE
    output = capsys.readouterr()
    assert output.err.startswith("flotilla: ")
    assert output.err.count("\n") == 1
    assert said in output.err
    assert list(Path().iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to train on")
def test_a_gpu_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--run-dir", "run", "--device", "cuda") == EXIT_USAGE
    assert "sees none; use --device cpu" in capsys.readouterr().err
    assert list(Path().iterdir()) == []


def test_a_directory_with_something_in_it_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run").mkdir()
    Path("run/thesis.txt").write_text("mine")
    Path("file").write_text("mine, too")
    for name in ("run", "file"):
        assert train("--run-dir", name) == EXIT_USAGE
        assert f"run_dir '{name}' exists and is no run" in capsys.readouterr().err
    assert [path.name for path in Path("run").iterdir()] == ["thesis.txt"]
    assert Path("file").read_text() == "mine, too"


def test_an_empty_directory_is_as_good_as_none() -> None:
    Path("run").mkdir()
    assert train("--run-dir", "run") == EXIT_DONE
    assert status("run")["state"] == "done"


def test_a_run_has_what_the_documentation_says_and_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert train() == EXIT_DONE
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    (run_dir,) = Path("runs").iterdir()
    assert run_dir.name.startswith("ppo-CartPole-v1-seed1-")
    assert {"config.yaml", "status.json", "metrics.jsonl", "checkpoints", "plots"} <= set(os.listdir(run_dir))
    found = status(str(run_dir))
    assert found["state"] == "done"
    assert 512 <= found["env_steps"] < 512 + 64
    assert found["episodes"] > 0
    assert found["eval"]["episodes"] == 1


def test_a_checkpoint_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    """No file may grow: training goes on, at its end nobody is told that all went well, and what was good stays."""
    short = ["--run-dir", "run", "--checkpoint-every", "128", "--dashboard", "plain"]
    assert train(*short, "--time-limit", "0.001") == EXIT_PREEMPTED
    (before,) = checkpoint.valid(Path("run/checkpoints"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        assert train(*short, "--time-limit", "0") == EXIT_FAILED
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    said = capsys.readouterr().out
    assert said.count("could not be written (") >= 3, "each one is told"
    assert status("run")["state"] == "failed"
    assert checkpoint.valid(Path("run/checkpoints")) == [before]
    assert train(*short, "--time-limit", "0") == EXIT_DONE
    assert checkpoint.newest(Path("run/checkpoints")) > before


def test_a_run_directory_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").touch()
    assert train("--run-dir", "file/run") == EXIT_USAGE
    assert "run_dir 'file/run' cannot be written (Not a directory)" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:.*Overriding environment:UserWarning")
def test_training_that_diverges_says_what_became_infinite(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--env-id", "users_own:Blowup-v0", "--run-dir", "run", "--max-skipped-steps", "2", "--dashboard", "plain"]
    assert train(*flags) == EXIT_FAILED
    said = capsys.readouterr().out
    assert "training diverged: policy_loss and value_loss not finite in" in said
    assert status("run")["state"] == "failed"


RESTARTS = "--backend workers --num-workers 1 --max-env-restarts"


@pytest.mark.parametrize("where", ["Step", "Reset"])
def test_an_environment_that_raises_is_restarted_and_the_run_goes_on(
    where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that is made again is another one for the module, and fails no more."""
    flags = ["--env-id", f"users_own:{where}-v0", "--run-dir", "run", *RESTARTS.split(), "3", "--dashboard", "plain"]
    assert train(*flags) == EXIT_DONE
    said = capsys.readouterr().out
    assert "environment 1 was restarted: process" in said
    assert "ZeroDivisionError: the simulator fell over" in said
    found = status("run")
    assert (found["state"], found["env_restarts"]) == ("done", 1)
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert sum(line.get("env/restarts", 0) for line in lines) == 1


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:.*Overriding environment:UserWarning")
def test_an_environment_that_hangs_is_restarted(start_method: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--env-id", "users_own:Hang-v0", "--run-dir", "run", *RESTARTS.split(), "3", "--dashboard", "plain"]
    assert train(*flags, "--start-method", start_method, "--env-timeout-s", "1") == EXIT_DONE
    assert "at work for more than 1 s (env_timeout_s)" in capsys.readouterr().out
    assert status("run")["env_restarts"] == 2, "both environments of the process"


def test_too_many_restarts_end_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--env-id", "users_own:Step-v0", "--run-dir", "run", *RESTARTS.split(), "0"]
    assert train(*flags) == EXIT_FAILED
    said = capsys.readouterr().out
    assert re.search(r"environment 1 \(process \d+\) failed", said)
    assert "ZeroDivisionError: the simulator fell over" in said
    assert status("run")["state"] == "failed"
