"""A run that was killed and started again, as often as it likes, ends as one that ran through: bit for bit."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from flotilla import cli
from flotilla.compute import checkpoint, chunks
from flotilla.core.errors import EXIT_DONE, EXIT_PREEMPTED, EXIT_USAGE

BASE = "--preset none --device cpu --threads 1 --dashboard none --eval-episodes 2 --log-every-s 0"
PPO = "ppo --num-minibatches 2"
# A buffer that is soon full, and so overwrites what it has.
REPLAY = "--buffer-size 150 --learning-starts 60 --batch-size 16 --backend sync"
RUNS = {  # the algorithm with its flags, environment steps, and those between two checkpoints
    "normalisers": (
        f"{PPO} --env-id Pendulum-v1 --norm-obs --norm-reward --num-envs 4 --num-steps 50 --backend sync",
        4000,
        1,
    ),
    "lstm": (
        f"{PPO} --env-id probe/Memory-v0 --memory lstm --memory-size 8 --num-envs 4 --num-steps 32 --backend sync",
        2560,
        1,
    ),
    "workers": (
        f"{PPO} --env-id Hopper-v5 --norm-obs --norm-reward --num-envs 4 --num-steps 32 --backend workers",
        2560,
        1,
    ),
    "lives": (
        f"{PPO} --env-id BreakoutNoFrameskip-v4 --cnn a3c --num-envs 2 --num-steps 64 --update-epochs 1 --backend sync",
        2560,
        1,
    ),
    "sac": (f"sac --env-id Pendulum-v1 --num-envs 2 --train-frequency 3 {REPLAY}", 600, 20),
    "td3": (f"td3 --env-id Hopper-v5 --num-envs 3 {REPLAY}", 600, 20),
    "ddpg": (f"ddpg --env-id Pendulum-v1 --num-envs 1 --train-frequency 4 {REPLAY}", 600, 20),
    "dqn": (f"dqn --env-id CartPole-v1 --n-step 3 --double --target-network-frequency 50 {REPLAY}", 1000, 20),
    "rainbow": (f"c51 --env-id CartPole-v1 --prioritized --noisy --dueling --n-step 2 {REPLAY}", 1000, 20),
    "frames": (f"dqn --env-id PongNoFrameskip-v4 --num-envs 2 --cnn a3c {REPLAY}", 400, 40),
}
KILLS = 5


def command_of(name: str, run_dir: Path, steps: int = 0) -> list[str]:
    """The run of that name, so many steps of it or all."""
    words, all_steps, _ = RUNS[name]
    steps = steps or all_steps
    return ["train", *words.split(), *BASE.split(), "--total-timesteps", str(steps), "--run-dir", str(run_dir)]


def outcome(run_dir: Path) -> dict[str, torch.Tensor]:
    """Everything that the last checkpoint holds."""
    root = run_dir / "checkpoints"
    found = checkpoint.load(checkpoint.newest(root))
    rows = {f"{part.first}.{key}": x for part in found.chunks for key, x in chunks.read(root, part).items()}
    return dict(found.model) | dict(found.trainer) | rows | {"step": torch.tensor(found.step)}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [key for key in one if not torch.equal(one[key].nan_to_num(), other[key].nan_to_num())]
    assert not different, different


def lines(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def kill_after(command: list[str], checkpoints: int, delay_s: float) -> None:
    """Start the run, and kill -9 it so long after so many new checkpoints."""
    root = Path(command[-1]) / "checkpoints"
    before = max(root.glob("step_*"), default=Path("step_"))
    program = [sys.executable, "-m", "flotilla", *command]
    with subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        limit = time.monotonic() + 60
        seen: set[Path] = set()
        while len(seen) < checkpoints and process.poll() is None:
            seen |= {path for path in root.glob("step_*") if path.name > before.name}
            assert time.monotonic() < limit
            time.sleep(0.002)
        time.sleep(delay_s)
        process.kill()
        assert process.stderr is not None
        assert not process.stderr.read().strip()


@pytest.mark.parametrize("name", RUNS)
def test_five_kills_change_nothing(name: str, tmp_path: Path) -> None:
    (_, steps, every), draw = RUNS[name], random.Random(name)
    assert cli.main(command_of(name, tmp_path / "through")) == EXIT_DONE
    command = command_of(name, tmp_path / "killed")
    command[-2:-2] = ["--checkpoint-every", str(every)]
    for _ in range(KILLS):
        kill_after(command, draw.randint(1, 3), draw.uniform(0, 0.05))
    assert cli.main(command) == EXIT_DONE
    assert_equal(outcome(tmp_path / "through"), outcome(tmp_path / "killed"))

    # And nothing is told twice or lost.
    keys = ("env_steps", "env", "return", "length")
    through, killed = (
        [[x[k] for k in keys] for x in lines(tmp_path / d, "episodes.jsonl")] for d in ("through", "killed")
    )
    assert through == killed
    at = [line["env_steps"] for line in lines(tmp_path / "killed", "metrics.jsonl") if "losses/grad_norm" in line]
    assert at == sorted(set(at))
    assert at[-1] >= steps


def test_it_continues_without_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The algorithm, the environment and every number are those of the run in the directory."""
    steps, run_dir = 1200, tmp_path / "run"
    assert cli.main(command_of("normalisers", tmp_path / "through", steps)) == EXIT_DONE
    assert cli.main([*command_of("normalisers", run_dir, steps), "--time-limit", "0.001"]) == EXIT_PREEMPTED
    status = json.loads((run_dir / "status.json").read_text())
    assert (status["state"], status["message"]) == ("preempted", "time limit")
    assert 0 < status["env_steps"] < steps
    assert cli.main(["train", "--run-dir", str(run_dir), "--time-limit", "0", "--dashboard", "plain"]) == EXIT_DONE
    assert f"continues at {status['env_steps']:,} env steps" in capsys.readouterr().out
    assert_equal(outcome(tmp_path / "through"), outcome(run_dir))

    assert cli.main(["train", "--logdir", str(run_dir)]) == EXIT_DONE
    assert f"{run_dir} is done: " in capsys.readouterr().out


def test_a_change_of_the_result_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps, run_dir = 400, tmp_path / "run"
    assert cli.main(command_of("normalisers", run_dir, steps)) == EXIT_DONE
    before = outcome(run_dir)
    changes = ["--gamma", "0.9", "--num-envs", "8"]
    assert cli.main(["train", "--run-dir", str(run_dir), *changes]) == EXIT_USAGE
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "--num-envs 8 (was 4) and --gamma 0.9 (was 0.99)" in said
    assert "--allow-change" in said
    assert_equal(before, outcome(run_dir))
    more = ["--total-timesteps", str(2 * steps)]
    assert cli.main(["train", "--run-dir", str(run_dir), *more]) == EXIT_USAGE
    assert cli.main(["train", "--run-dir", str(run_dir), *more, *changes, "--allow-change"]) == EXIT_DONE
    assert outcome(run_dir)["step"] >= 2 * steps
    assert len(outcome(run_dir)["sampler.episode_N"]) == 8
    harmless = ["--eval-episodes", "1", "--num-workers", "1", "--backend", "workers"]
    assert cli.main(["train", "--run-dir", str(run_dir), *harmless]) == EXIT_DONE, "not allowed for ever"
    assert cli.main(["train", "--run-dir", str(run_dir), "--gamma", "0.8"]) == EXIT_USAGE


def test_a_damaged_checkpoint_is_told_and_the_one_before_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    assert cli.main([*command_of("normalisers", run_dir, 800), "--checkpoint-every", "1"]) == EXIT_DONE
    whole = outcome(run_dir)
    *_, before, last = checkpoint.valid(run_dir / "checkpoints")
    with (last / "trainer.safetensors").open("r+b") as file:
        file.truncate(100)
    status = run_dir / "status.json"
    status.write_text(status.read_text().replace('"done"', '"running"'))
    assert cli.main(["train", "--run-dir", str(run_dir), "--dashboard", "plain"]) == EXIT_DONE
    said = capsys.readouterr().out
    assert last.name in said
    assert f"continues at {int(before.name[5:]):,} env steps" in said
    assert_equal(whole, outcome(run_dir))
