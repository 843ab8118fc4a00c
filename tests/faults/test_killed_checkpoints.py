"""Processes that are killed while they write checkpoints, and real disks that are full or cannot be written."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flotilla.compute import checkpoint


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


NURSERY = """
import os, signal, sys
from pathlib import Path
import torch
from flotilla.compute.checkpoint import Checkpoints, Snapshot

FILES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}

def die_at(operation):
    def hook(event, args):
        nonlocal operation
        if event in FILES and "step_" in str(args[0]):
            operation -= 1
            if operation < 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

def save(kept, n, slope):
    step = n // 2  # every step twice: a new one, and one in place of another
    model = {"weight": torch.full((20_000,), float(step)), "half": torch.ones(999)}
    kept.save(Snapshot(step, model, {}, {"n": n}), score=slope * n)
    assert kept.wait() == ""
    print(n, flush=True)

for line in sys.stdin:
    root, first, count, operation, slope = line.split()
    pid = os.fork()
    if pid == 0:
        kept = Checkpoints(Path(root), keep_last=1)
        print(os.getpid(), flush=True)
        if int(operation) >= 0:
            die_at(int(operation))
        for n in range(int(first), int(first) + int(count)):
            save(kept, n, float(slope))
        os._exit(0)
    print("died" if os.WIFSIGNALED(os.waitpid(pid, 0)[1]) else "done", flush=True)
"""


@pytest.fixture(scope="module")
def nursery() -> Iterator[subprocess.Popen[str]]:
    """A process whose children write checkpoints: `root first count operation slope` a line.

    Each tells its pid, and each n that is on disk, and kills itself before a file operation, if one is given (not -1).
    The score of n is n times the slope.
    """
    with subprocess.Popen(
        [sys.executable, "-c", NURSERY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def begin(nursery: subprocess.Popen[str], *words: object) -> int:
    assert nursery.stdin is not None
    assert nursery.stdout is not None
    print(*words, file=nursery.stdin, flush=True)
    return int(nursery.stdout.readline())


def rest(nursery: subprocess.Popen[str]) -> tuple[list[int], str]:
    """What a child still said, and how it ended."""
    assert nursery.stdout is not None
    said: list[int] = []
    while (line := nursery.stdout.readline().strip()) not in ("died", "done"):
        said.append(int(line))
    return said, line


def check_n(root: Path, at_least: int, at_most: int) -> int:
    path, words = checkpoint.find(root)
    assert path is not None
    assert words == [], "nothing looks damaged"
    found = checkpoint.load(path)
    n = found.counters["n"]
    assert at_least <= n <= at_most, "what was said to be written is there"
    assert found.model["weight"].unique().tolist() == [n // 2]
    return int(n)


def test_a_kill_at_any_moment_leaves_a_whole_one(tmp_path: Path, nursery: subprocess.Popen[str]) -> None:
    draw, last = random.Random(0), -1
    for _ in range(60):
        pid = begin(nursery, tmp_path, last + 1, 10**6, -1, -1)
        assert nursery.stdout is not None
        for _ in range(draw.randint(1, 3)):
            last = int(nursery.stdout.readline())
        time.sleep(draw.uniform(0, 0.02))
        os.kill(pid, signal.SIGKILL)
        said, end = rest(nursery)
        assert end == "died"
        last = max([last, *said])
        last = check_n(tmp_path, last, last + 1)


@pytest.mark.parametrize(
    ("n", "slope", "left"),
    [(1, -1, ["0", "2"]), (2, -1, ["0", "2"]), (2, 0, ["2"])],
    ids=["in place of another", "a new one beside the best", "a new one, and the old one goes"],
)
def test_a_kill_before_any_operation_leaves_a_whole_one_and_nothing_for_good(
    tmp_path: Path, nursery: subprocess.Popen[str], n: int, slope: int, left: list[str]
) -> None:
    """Every opening, renaming and removing of a file that a save consists of, one after another."""
    found: list[int] = []
    for operation in range(200):
        root = tmp_path / str(operation)
        begin(nursery, root, n - 1, 1, -1, slope)
        assert rest(nursery) == ([n - 1], "done")
        begin(nursery, root, n, 1, operation, slope)
        said, end = rest(nursery)
        found.append(check_n(root, n if said else n - 1, n))
        begin(nursery, root, 4, 1, -1, slope)
        assert rest(nursery) == ([4], "done")
        check_n(root, 4, 4)
        assert names(root) == [f"step_00000000000{step}" for step in left], "the last one, the best one, no leavings"
        if end == "done":
            break
    assert end == "done"
    assert operation > 15
    assert found == sorted(found), "once it is there it stays"


def test_an_interpreter_that_ends_waits_for_it(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
import torch
from flotilla.compute.checkpoint import Checkpoints, Snapshot
Checkpoints(Path(sys.argv[1])).save(Snapshot(1, {"weight": torch.ones(3_000_000)}, {}, {}))
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)
    assert checkpoint.load_model(tmp_path / "step_000000000001")["weight"].sum() == 3_000_000
    assert names(tmp_path) == ["step_000000000001"]


FULL = """
import os, sys
from pathlib import Path
import torch
from flotilla.compute import checkpoint
from flotilla.compute.checkpoint import Checkpoints, Snapshot

disk = Path(sys.argv[1])
kept = Checkpoints(disk / "checkpoints", keep_last=9)

def save(step, size):
    kept.save(Snapshot(step, {"weight": torch.ones(size)}, {"moments": torch.ones(2 * size)}, {}))
    return kept.wait()

def whole():
    assert not list((disk / "checkpoints").glob(".*"))
    return [int(path.name[5:]) for path in checkpoint.valid(disk / "checkpoints")]

assert save(1, 10) == ""
for step, size in enumerate(range(20_000, 120_000, 4_000), start=2):  # full in each of its files, sooner or later
    problem = save(step, size)
    assert "No space left on device" in problem, problem
    assert whole() == [1]
assert save(100, 10) == ""
assert os.system(f"mount -o remount,ro {disk}") == 0
problem = save(101, 10)
assert "Read-only file system" in problem, problem
assert whole() == [1, 100]
assert os.system(f"mount -o remount,rw {disk}") == 0
assert save(102, 10) == ""
assert whole() == [1, 100, 102]
print("survived")
"""


def test_a_full_disk_and_one_that_cannot_be_written(tmp_path: Path) -> None:
    """Real ones, in a mount namespace of their own."""
    mount = ["unshare", "--map-root-user", "--mount", "sh", "-c", 'mount -t tmpfs -o size=128k none "$0" && exec "$@"']
    if subprocess.run([*mount, str(tmp_path), "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a small disk (unshare --map-root-user --mount)")
    program = [sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run([*mount, str(tmp_path), *program], check=False, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "survived", done.stderr
