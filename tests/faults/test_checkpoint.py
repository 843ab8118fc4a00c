"""Checkpoints that were cut short, damaged or could not be written: the newest whole one is what counts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

from flotilla.algorithms import ppo
from flotilla.compute import checkpoint
from flotilla.compute.optimizer import Optimizer
from flotilla.compute.ranks import Ranks
from flotilla.core.errors import UsageError
from flotilla.core.types import Spec


def save(root: Path, step: int, keep_last: int = 9) -> Path:
    model = {"weight": torch.full((4,), float(step))}
    return checkpoint.save(root, step, model, {"opt.step": torch.ones(())}, {"env_steps": step}, keep_last)


def steps(root: Path) -> list[float]:
    return [checkpoint.load_model(path)["weight"][0].item() for path in checkpoint.valid(root)]


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def flip_a_bit(path: Path) -> None:
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)


def cut(path: Path) -> None:
    data = (path / "trainer.safetensors").read_bytes()
    (path / "trainer.safetensors").write_bytes(data[: len(data) // 2])


def replace_by_a_file(path: Path) -> None:
    path.rename(path.with_name("old"))
    path.touch()


def manifest(text: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        (path / "manifest.json").write_text(text)

    return write


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a bit flipped": flip_a_bit,
    "a file cut": cut,
    "weights missing": lambda path: (path / "model.safetensors").unlink(),
    "manifest missing": lambda path: (path / "manifest.json").unlink(),
    "manifest empty": manifest(""),
    "manifest cut": manifest('{"model.safetensors": "12'),
    "manifest of nothing": manifest("{}"),
    "manifest of another kind": manifest("[]"),
    "manifest of another kind yet": manifest("null"),
    "manifest of bytes": lambda path: (path / "manifest.json").write_bytes(b"\xff\xfe\x00"),
    "a file in its place": replace_by_a_file,
}


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    """Also weights that share one flat tensor and lie channels_last."""
    space = gym.spaces.Box(0, 255, (3, 36, 36), np.uint8)
    agent = ppo.Agent(Spec(space, gym.spaces.Discrete(2)), ppo.Config(memory="lstm"))
    opt = Optimizer(agent.parameters(), 0.1, clip=0.0, eps=1e-5, ranks=Ranks())
    opt.step(lambda: (sum((p.square().sum() for p in agent.parameters()), torch.zeros(())), {}))
    path = checkpoint.save(tmp_path, 7, agent.state_dict(), opt.state_dict(), {"env_steps": 7})
    loaded = checkpoint.load_model(path)
    assert loaded.keys() == agent.state_dict().keys()
    assert all(torch.equal(x, loaded[key]) for key, x in agent.state_dict().items())
    assert path == checkpoint.newest(tmp_path) == tmp_path / "step_000000000007"
    assert json.loads((path / "counters.json").read_text()) == {"env_steps": 7}
    assert names(path) == ["counters.json", "manifest.json", "model.safetensors", "trainer.safetensors"]


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_the_one_before_a_damaged_one_is_taken(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    save(tmp_path, 1), save(tmp_path, 2)
    assert checkpoint.newest(tmp_path).name == "step_000000000002"
    damage(tmp_path / "step_000000000002")
    assert checkpoint.newest(tmp_path).name == "step_000000000001"
    with pytest.raises(UsageError, match="no whole checkpoint"):
        checkpoint.load_model(tmp_path / "step_000000000002")
    save(tmp_path, 3)
    assert steps(tmp_path) == [1, 3]


def test_steps_have_the_order_of_numbers(tmp_path: Path) -> None:
    for step in (900, 1_000, 20_000_000_000, 5):
        save(tmp_path, step)
    assert steps(tmp_path) == [5, 900, 1_000, 20_000_000_000]


@pytest.mark.parametrize("step", [2, 3])
def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path, step: int) -> None:
    """The counters cannot be written, after the weights were; also where the step exists already."""
    save(tmp_path, 1), save(tmp_path, 2)
    before = names(tmp_path)
    with pytest.raises(TypeError, match="JSON"):
        checkpoint.save(tmp_path, step, {"weight": torch.zeros(4)}, {}, {"env_steps": object()})
    assert names(tmp_path) == before
    assert steps(tmp_path) == [1, 2]


def test_what_a_killed_save_left_is_no_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1)
    left = tmp_path / ".step_000000000002.12345.tmp"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    assert steps(tmp_path) == [1]
    save(tmp_path, 2)
    assert steps(tmp_path) == [1, 2]


def test_only_the_last_are_kept(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, step, keep_last=2)
    assert steps(tmp_path) == [4, 5]
    assert len(names(tmp_path)) == 2


def test_damaged_ones_do_not_push_out_whole_ones(tmp_path: Path) -> None:
    save(tmp_path, 1), flip_a_bit(save(tmp_path, 2)), flip_a_bit(save(tmp_path, 3))
    save(tmp_path, 4, keep_last=2)
    assert steps(tmp_path) == [1, 4]


def test_a_step_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 1)
    checkpoint.save(tmp_path, 1, {"weight": torch.full((4,), 9.0)}, {}, {})
    assert steps(tmp_path) == [9]


def test_there_is_none(tmp_path: Path) -> None:
    assert checkpoint.valid(tmp_path / "missing") == []
    with pytest.raises(UsageError, match=r"no valid checkpoint in .*--run-dir"):
        checkpoint.newest(tmp_path / "checkpoints")
