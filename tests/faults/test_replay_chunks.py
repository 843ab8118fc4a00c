"""Rows of a replay in checkpoints: in chunks, shared by checkpoints, damaged, missing, killed as they are written."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor

from flotilla.compute import checkpoint, chunks, rows
from flotilla.compute.checkpoint import Checkpoints, Snapshot
from flotilla.compute.ranks import Ranks
from flotilla.core.types import Rollout, Row, Spec
from flotilla.sampling.replay import Replay

N, PER_ENV, LENGTH = 2, 25, 8  # environments, rows of each in the ring, rows of a chunk
SPEC = Spec(gym.spaces.Box(0, 255, (4, 6, 6), np.uint8), gym.spaces.Discrete(3))
LATENT = {"latent": ((2,), torch.float32)}


def make(extras: bool = False) -> Replay:
    return Replay(
        SPEC,
        N,
        N * PER_ENV,
        device=torch.device("cpu"),
        seed=0,
        frame_stack=4,
        extras=LATENT if extras else None,
        ahead=False,
    )


def said(row: int) -> tuple[Tensor, Tensor]:
    """Observations and ends of a row: an episode ends now and then, and its frames are its rows' numbers."""
    obs = torch.stack([torch.full((N, 6, 6), max(row - back, row // 11 * 11) % 251) for back in (3, 2, 1, 0)], 1)
    obs[:, :3] += torch.tensor(row % 11 == 0).to(torch.int64)  # stacks that begin with other frames
    return obs.to(torch.uint8), torch.full((N,), row % 11 == 10)


def grow(replay: Replay, count: int) -> None:
    """More rows, as a sampler would say them again after a resume."""
    first = max(0, replay.rows_added - 1)
    obs, is_last = (torch.stack(x) for x in zip(*(said(first + t) for t in range(count + 1)), strict=True))
    number = torch.arange(first, first + count + 1.0)[:, None].expand(-1, N)
    begins = torch.stack([said(first + t - 1)[1] if first + t else ~is_last[0] for t in range(count + 1)])
    row = Row(obs, number, begins, is_last, is_last)
    replay.add(Rollout(row, number[:-1].long() % 3, {}, torch.zeros(N, 0), torch.zeros(N, 0)))


class Life:
    """A process that trains, so far as its replay goes: from the newest whole checkpoint on."""

    def __init__(self, root: Path, *, extras: bool = False, keep_last: int = 9) -> None:
        self.root, self.files = root, Checkpoints(root, keep_last=keep_last)
        self.replay = make(extras)
        self.rows = rows.Rows(Ranks(), "replay", self.replay, self.files)
        path, self.words = checkpoint.find(root)
        if path is not None:
            found = checkpoint.load(path)
            assert not self.rows.misfit(found.chunks)
            self.replay.load_state_dict(found.trainer)
            self.rows.restore(found.chunks)

    def go_on(self, times: int, count: int = 3, score: float | None = None) -> None:
        for _ in range(times):
            grow(self.replay, count)
            self.rows.settle()
        self.save(score)

    def save(self, score: float | None = None) -> str:
        """The problem, if there is one."""
        parts, count = self.rows.save(), self.replay.rows_added
        self.files.save(Snapshot(count, {}, self.replay.state_dict(), {}), parts=parts, score=score)
        return self.files.wait()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "CHUNK_BYTES", LENGTH * N * make().row_bytes)


def check(one: Replay) -> None:
    """It is as one that ran through: its rows, what is drawn of them, and what is drawn after more rows came."""
    other = make()
    grow(other, one.rows_added - 1)
    assert (one.rows_added, one.oldest, len(one)) == (other.rows_added, other.oldest, len(other))
    for replay in (one, other):
        replay._draws._random.manual_seed(1)
    for _ in range(4):
        here, there = vars(one.sample(40)), vars(other.sample(40))
        assert all(torch.equal(here[key], there[key]) for key in here)
        grow(one, 5), grow(other, 5)


def files_of(root: Path) -> set[str]:
    return {file.name for file in (root / chunks.FOLDER).iterdir()}


def named(root: Path) -> list[chunks.Chunk]:
    return [chunk for path in checkpoint.valid(root) for chunk in checkpoint.load(path).chunks]


@pytest.mark.parametrize("times", [1, 2, 9, 40])
def test_a_ring_that_wraps_over_chunks_goes_on_as_it_was(tmp_path: Path, times: int) -> None:
    """Saved often, or so seldom that rows are gone before a checkpoint names them."""
    for _ in range(14):
        life = Life(tmp_path)
        assert life.words == []
        life.go_on(times)
        check(Life(tmp_path).replay)


def test_settled_rows_are_written_once_and_removed_when_no_checkpoint_names_them(tmp_path: Path) -> None:
    life = Life(tmp_path, keep_last=2)
    written: dict[str, int] = {}
    for turn in range(24):
        life.go_on(2, score=1.0 if turn == 3 else None)
        assert files_of(tmp_path) == {chunk.name for chunk in named(tmp_path)}
        for chunk in named(tmp_path):
            file = tmp_path / chunks.FOLDER / chunk.name
            assert written.setdefault(chunk.name, file.stat().st_mtime_ns) == file.stat().st_mtime_ns
    settled = [name for name in written if int(name[20:32]) - int(name[7:19]) == LENGTH]
    assert len(settled) == len({name[:19] for name in settled}) > 10, "each of them once"
    assert len(checkpoint.valid(tmp_path)) == 3, "the last two and the best, with all its rows"


def test_files_do_not_pile_up_between_two_checkpoints(tmp_path: Path) -> None:
    life = Life(tmp_path)
    for _ in range(200):
        grow(life.replay, 3)
        life.rows.settle()
    assert life.save() == ""
    assert files_of(tmp_path) == {chunk.name for chunk in named(tmp_path)}
    life.files.close()
    life = Life(tmp_path)
    most = 0
    for _ in range(100):
        grow(life.replay, 3)
        life.rows.settle()
        most = max(most, len(files_of(tmp_path)))
    assert most < 2 * (PER_ENV // LENGTH + 4)


@pytest.mark.parametrize("damage", ["missing", "cut", "a bit flipped"])
@pytest.mark.parametrize("which", ["settled", "rest"])
def test_a_damaged_chunk_is_told_and_the_checkpoint_before_is_used(tmp_path: Path, damage: str, which: str) -> None:
    life = Life(tmp_path)
    life.go_on(3), life.go_on(3)
    one, last = (checkpoint.load(path) for path in checkpoint.valid(tmp_path))
    before = {chunk.name for chunk in one.chunks}
    chunk = next(c for c in last.chunks if c.name not in before and c.settled == (which == "settled"))
    file = tmp_path / chunks.FOLDER / chunk.name
    data = file.read_bytes()
    file.unlink()
    if damage != "missing":
        file.write_bytes(data[:-1] if damage == "cut" else data[:-1] + bytes([data[-1] ^ 1]))
    again = Life(tmp_path)
    assert len(again.words) == 1
    assert chunk.name in again.words[0]
    assert again.replay.rows_added == one.step
    checkpoint.load_model(tmp_path / f"step_{last.step:012d}")  # who plays it needs no rows
    again.go_on(3)
    assert Life(tmp_path).words == [], "it took its place"
    check(Life(tmp_path).replay)


def test_what_could_not_be_written_is_written_at_the_next_checkpoint(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    life = Life(root)
    life.go_on(2)
    (root / chunks.FOLDER).rename(tmp_path / "aside")
    (root / chunks.FOLDER).touch()
    for _ in range(4):
        grow(life.replay, 3)
        life.rows.settle()
    assert "could not be written" in life.save()
    (root / chunks.FOLDER).unlink()
    (tmp_path / "aside").rename(root / chunks.FOLDER)
    assert life.save() == ""
    check(Life(root).replay)


def test_extras_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """They are written later than their rows, again and again."""
    life = Life(tmp_path, extras=True)
    for turn in range(12):
        grow(life.replay, 3)
        index = torch.arange(life.replay.oldest * N, life.replay.rows_added * N)
        value = (index + 1000.0 * turn)[:, None].expand(-1, 2)
        life.replay.update(index, {"latent": value})
        life.rows.settle()
        assert life.save() == ""
        again = Life(tmp_path, extras=True)
        found = again.replay.extras(again.replay.oldest, again.replay.rows_added)["extra.latent"]
        assert torch.equal(found, value.view(-1, N, 2).transpose(0, 1))
    older = checkpoint.load(checkpoint.valid(tmp_path)[-2])
    stored = [chunks.read(tmp_path, c) for c in older.chunks]
    assert {x["extra.latent"].max().item() // 1000 for x in stored if "extra.latent" in x} == {10}


def test_other_ranks_take_their_columns(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.go_on(9)
    found = checkpoint.load(checkpoint.newest(tmp_path))
    for column in range(N):
        one = Replay(SPEC, 1, PER_ENV, device=torch.device("cpu"), seed=0, frame_stack=4, ahead=False)
        state = {k: x[column : column + 1] if k.endswith("_N") else x for k, x in found.trainer.items()}
        one.load_state_dict(state)
        for chunk in found.chunks:
            one.load_rows(chunk.first, chunks.read(tmp_path, chunk), column)
        wanted, got = (x.rows(x.oldest, x.rows_added) for x in (life.replay, one))
        for key in wanted.keys() - {"older", "valid"}:
            assert torch.equal(wanted[key][column : column + 1], got[key])
    two = Replay(SPEC, 4, 4 * PER_ENV, device=torch.device("cpu"), seed=0, frame_stack=4)
    told = rows.Rows(Ranks(), "replay", two, life.files).misfit(found.chunks)
    assert told == "the replay begins empty: the rows that were saved are of 2 environments, and there are 4"


CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import test_replay_chunks as chunked

chunked.rows.CHUNK_BYTES = chunked.LENGTH * chunked.N * chunked.make().row_bytes
life = chunked.Life(Path(sys.argv[1]), keep_last=1)
assert life.words == [], life.words
while True:
    life.go_on(2)
    print(life.replay.rows_added, flush=True)
"""


def test_a_kill_at_any_moment_leaves_a_whole_one(tmp_path: Path) -> None:
    draw, last = random.Random(0), 0
    for _ in range(8):
        command = [sys.executable, "-c", CHILD, str(tmp_path), str(Path(__file__).parent)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            for _ in range(draw.randint(1, 12)):
                line = process.stdout.readline()
                assert line, process.stderr.read()
                last = int(line)
            time.sleep(draw.uniform(0, 0.01))
            os.kill(process.pid, signal.SIGKILL)
            last = max([last, *(int(line) for line in process.stdout.read().split())])
            assert not process.stderr.read()
        life = Life(tmp_path)
        assert life.words == []
        assert life.replay.rows_added >= last
        at = life.replay.rows_added
        check(life.replay)
        life = Life(tmp_path)
        assert life.replay.rows_added == at
        life.go_on(1)
        assert files_of(tmp_path) == {chunk.name for chunk in named(tmp_path)}, "nothing is left for good"
        life.files.close()
        last = life.replay.rows_added
