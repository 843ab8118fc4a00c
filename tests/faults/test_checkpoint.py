"""Checkpoints that were cut short, damaged or could not be written: the newest whole one is what counts."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flotilla.algorithms import ppo
from flotilla.compute import checkpoint
from flotilla.compute.checkpoint import Checkpoints, Snapshot
from flotilla.compute.optimizer import Optimizer
from flotilla.compute.ranks import Ranks
from flotilla.core.errors import UsageError
from flotilla.core.types import Spec


def snapshot(step: int, value: float | None = None, size: int = 4) -> Snapshot:
    model = {"weight": torch.full((size,), float(step) if value is None else value)}
    return Snapshot(step, model, {"opt.step": torch.ones(())}, {"env_steps": step})


def write(root: Path, taken: Snapshot, keep_last: int = 9, score: float | None = None) -> Path:
    kept = Checkpoints(root, keep_last=keep_last)
    kept.save(taken, score=score)
    assert kept.wait() == ""
    return root / f"step_{taken.step:012d}"


def save(root: Path, step: int, keep_last: int = 9) -> Path:
    return write(root, snapshot(step), keep_last)


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
    path = write(tmp_path, Snapshot(7, agent.state_dict(), opt.state_dict(), {"env_steps": 7}))
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
    """The second file has numbers that safetensors does not know; also where the step exists already."""
    save(tmp_path, 1), save(tmp_path, 2)
    before = names(tmp_path)
    kept = Checkpoints(tmp_path)
    kept.save(Snapshot(step, {"weight": torch.zeros(4)}, {"moments": torch.ones(2, dtype=torch.complex128)}, {}))
    assert "could not be written (" in kept.wait()
    assert names(tmp_path) == before
    assert steps(tmp_path) == [1, 2]


def test_counters_that_json_does_not_have_are_a_mistake_of_who_gives_them(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="JSON"):
        Checkpoints(tmp_path).save(Snapshot(1, {}, {}, {"env_steps": object()}))


def test_what_a_killed_save_left_is_no_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1)
    left = tmp_path / ".step_000000000002.12345.tmp"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    assert steps(tmp_path) == [1]
    save(tmp_path, 2)
    assert names(tmp_path) == ["step_000000000001", "step_000000000002"]


def test_only_the_last_are_kept(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, step, keep_last=2)
    assert steps(tmp_path) == [4, 5]
    assert len(names(tmp_path)) == 2


def test_damaged_ones_do_not_push_out_whole_ones(tmp_path: Path) -> None:
    save(tmp_path, 1), flip_a_bit(save(tmp_path, 2)), flip_a_bit(save(tmp_path, 3))
    save(tmp_path, 4, keep_last=2)
    assert steps(tmp_path) == [1, 4]
    save(tmp_path, 5, keep_last=2)
    assert names(tmp_path) == ["step_000000000004", "step_000000000005"]


def test_what_another_version_wrote_stays(tmp_path: Path) -> None:
    (save(tmp_path, 1) / "manifest.json").write_text('{"schema": 99}')
    save(tmp_path, 2), save(tmp_path, 3, keep_last=1)
    assert names(tmp_path) == ["step_000000000001", "step_000000000003"]


def test_a_step_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 1)
    write(tmp_path, snapshot(1, 9.0))
    assert steps(tmp_path) == [9]


def test_what_took_the_place_of_another_is_the_newer_one(tmp_path: Path) -> None:
    """Both are there where a process was killed before it removed the one put aside."""
    save(tmp_path, 1).rename(tmp_path / "aside")
    write(tmp_path, snapshot(1, 9.0))
    (tmp_path / "aside").rename(tmp_path / "step_000000000001.old")
    assert steps(tmp_path) == [1, 9]
    assert checkpoint.newest(tmp_path).name == "step_000000000001"
    save(tmp_path, 2)
    assert names(tmp_path) == ["step_000000000001", "step_000000000002"]
    assert steps(tmp_path) == [9, 2]


def test_what_was_put_aside_and_not_replaced_is_put_back(tmp_path: Path) -> None:
    save(tmp_path, 1).rename(tmp_path / "step_000000000001.old")
    assert steps(tmp_path) == [1]
    save(tmp_path, 2)
    assert names(tmp_path) == ["step_000000000001", "step_000000000002"]
    assert steps(tmp_path) == [1, 2]


def test_there_is_none(tmp_path: Path) -> None:
    assert checkpoint.valid(tmp_path / "missing") == []
    with pytest.raises(UsageError, match=r"no valid checkpoint in .*--run-dir"):
        checkpoint.newest(tmp_path / "checkpoints")


def test_the_best_one_stays(tmp_path: Path) -> None:
    for step, score in enumerate([1.0, 7.0, None, 3.0, float("nan"), float("inf")]):
        write(tmp_path, snapshot(step), keep_last=1, score=score)
    assert steps(tmp_path) == [1, 5]
    best = checkpoint.best(tmp_path)
    assert best is not None
    assert best.name == "step_000000000001"
    assert checkpoint.newest(tmp_path).name == "step_000000000005"
    flip_a_bit(best)
    assert checkpoint.best(tmp_path) is None


def test_the_best_one_saved_again_is_still_the_best(tmp_path: Path) -> None:
    """A run saves once more where it ends, and where it is started again after its end."""
    write(tmp_path, snapshot(1), score=2.0), write(tmp_path, snapshot(2), score=7.0)
    write(tmp_path, snapshot(2)), save(tmp_path, 3), save(tmp_path, 4, keep_last=1)
    assert steps(tmp_path) == [2, 4]
    best = checkpoint.best(tmp_path)
    assert best is not None
    assert best.name == "step_000000000002"


def test_of_equals_the_later_one_is_the_best(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, snapshot(step), score=5.0 if step < 3 else 4.0)
    best = checkpoint.best(tmp_path)
    assert best is not None
    assert best.name == "step_000000000002"


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    cut(tmp_path / "step_000000000003")
    (tmp_path / "step_000000000002" / "counters.json").unlink()
    path, words = checkpoint.find(tmp_path)
    assert path == tmp_path / "step_000000000001"
    assert len(words) == 2
    assert re.search(r"step_0+3 is damaged and not used: trainer.safetensors has \d+ bytes, and \d+ were", words[0])
    assert "step_000000000002 is damaged and not used: counters.json: No such file or directory" in words[1]
    flip_a_bit(path)
    (tmp_path / "step_000000000002" / "manifest.json").write_text('{"schema": 99}')
    path, words = checkpoint.find(tmp_path)
    assert path is None
    assert words[1].endswith("manifest.json has schema 99, and this version reads 1 and 2")
    assert words[2].endswith("model.safetensors is not what was written (its sha256 is another)")


@pytest.mark.parametrize("name", ["model.safetensors", "trainer.safetensors", "counters.json", "manifest.json"])
def test_a_file_torn_anywhere_never_loses_the_one_before(tmp_path: Path, name: str) -> None:
    """Cut after no byte, one, in and after the length of the header, in it, at its end, in the first and last value."""
    save(tmp_path, 1)
    last = save(tmp_path, 2)
    whole = (last / name).read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little") if name.endswith("safetensors") else len(whole) // 2
    for size in {0, 1, 7, 8, 9, header // 2, header - 1, header, header + 1, len(whole) - 1}:
        if size >= len(whole):
            continue
        (last / name).write_bytes(whole[:size])
        path, words = checkpoint.find(tmp_path)
        assert path == tmp_path / "step_000000000001", f"{name} of {size} bytes"
        assert len(words) == 1
        assert checkpoint.load(path).model["weight"].tolist() == [1.0] * 4
    for at in {0, 7, 8, header - 1, header, len(whole) - 1} & set(range(len(whole))):
        (last / name).write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        assert checkpoint.find(tmp_path)[0] == tmp_path / "step_000000000001", f"{name} with another byte {at}"
    (last / name).write_bytes(whole)
    assert checkpoint.find(tmp_path) == (last, [])


def test_no_bit_of_a_manifest_is_trusted_that_changed(tmp_path: Path) -> None:
    """Each of them: the one before is taken, or the manifest still says what it said."""
    write(tmp_path, snapshot(1))
    last = write(tmp_path, snapshot(2), score=7.0)
    whole = (last / "manifest.json").read_bytes()
    for bit in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        (last / "manifest.json").write_bytes(changed)
        path, _ = checkpoint.find(tmp_path)
        assert path == tmp_path / "step_000000000001", f"bit {bit}: {bytes(changed)!r}"
        assert checkpoint.best(tmp_path) is None


class TestInTheBackground:
    """`Checkpoints`, which writes in a thread."""

    def test_it_holds_what_was_there_when_it_was_taken(self, tmp_path: Path) -> None:
        kept = Checkpoints(tmp_path, keep_last=2)
        flat = torch.arange(1_000_000.0)
        parts = {"a": flat[:10], "b": flat[10:].view(2, -1)}
        for step in (1, 2, 3):
            flat.fill_(step)
            kept.save(Snapshot(step, parts, {"flat": flat}, {"step": step}))
            flat.fill_(-1.0)
        assert kept.wait() == ""
        assert [path.name[-1] for path in checkpoint.valid(tmp_path)] == ["2", "3"]
        for path in checkpoint.valid(tmp_path):
            found = checkpoint.load(path)
            assert checkpoint.load_model(path).keys() == parts.keys()
            values = torch.cat([*(x.flatten() for x in found.model.values()), found.trainer["flat"]]).unique()
            assert values.tolist() == [found.step] == [found.counters["step"]]

    @pytest.mark.parametrize("trouble", ["a file in the way", "no space"])
    def test_what_goes_wrong_is_told_once_and_costs_nothing(self, tmp_path: Path, trouble: str) -> None:
        root = tmp_path / "checkpoints"
        kept = Checkpoints(root, keep_last=2)
        kept.save(snapshot(1))
        assert kept.wait() == ""
        if trouble == "no space":
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
            try:
                kept.save(snapshot(2, size=10_000))
                problem = kept.wait()
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
                signal.signal(signal.SIGXFSZ, before)
        else:
            os.rename(root, tmp_path / "elsewhere")
            root.touch()
            kept.save(snapshot(2))
            problem = kept.wait()
            root.unlink()
            os.rename(tmp_path / "elsewhere", root)
        assert problem.startswith("the checkpoint of step 2 could not be written (")
        assert kept.wait() == ""
        assert steps(root) == [1]
        assert names(root) == ["step_000000000001"]
        kept.save(snapshot(3))
        assert kept.wait() == ""
        assert steps(root) == [1, 3]


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=9).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)),
        max_size=5,
    )
)
def test_every_kind_of_tensor_comes_back(tmp_path_factory: pytest.TempPathFactory, kinds: dict[str, Any]) -> None:
    tensors = {name: torch.randint(0, 2, shape).to(dtype) for name, (dtype, shape) in kinds.items()}
    path = write(tmp_path_factory.mktemp("round"), Snapshot(1, tensors, tensors, {}))
    found = checkpoint.load(path)
    for part in (found.model, found.trainer):
        assert part.keys() == tensors.keys()
        assert all(x.dtype == tensors[name].dtype and torch.equal(x, tensors[name]) for name, x in part.items())
