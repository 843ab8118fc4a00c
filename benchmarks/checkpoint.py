"""What costs training a checkpoint of 10 million parameters with Adam: a pause, and slower updates meanwhile.

    python benchmarks/checkpoint.py [--rounds 7]

The work beside it is a matrix product and some Python, as an update is; it goes on until the files are on disk, and as
long without them.  Medians, lowest and highest.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from flotilla.compute.checkpoint import Checkpoints, Snapshot

PARAMETERS = 10_000_000


def work(enough: Callable[[], bool]) -> tuple[float, float, float]:
    """Updates per second until it is enough, the longest pause between two of them and all the time, in seconds."""
    x, count, longest = torch.randn(256, 256), 0, 0.0
    start = last = time.perf_counter()
    while not enough():
        for _ in range(20):
            x = torch.tanh(x @ x / 16)
        now = time.perf_counter()
        longest, last, count = max(longest, now - last), now, count + 1
    return count / (last - start), longest, last - start


def words(values: list[float], scale: float = 1e3, unit: str = "ms") -> str:
    low, middle, high = (scale * f(values) for f in (min, statistics.median, max))
    return f"{middle:.0f} {unit} ({low:.0f} to {high:.0f})"


def measure(checkpoints: Checkpoints, snapshot: Snapshot) -> tuple[float, ...]:
    """Of one checkpoint: the pause, seconds until it is on disk, share of updates lost, longest time between two."""
    start = time.perf_counter()
    checkpoints.save(snapshot)
    pause = time.perf_counter() - start
    waiter = threading.Thread(target=checkpoints.wait)
    waiter.start()
    beside, longest, seconds = work(lambda: not waiter.is_alive())
    until = time.perf_counter() + seconds
    alone, usual, _ = work(lambda: time.perf_counter() > until)
    return pause, pause + seconds, 1 - beside / alone, longest, usual


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    weights, moments = torch.randn(PARAMETERS), torch.randn(2, PARAMETERS)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        checkpoints = Checkpoints(Path(folder))
        rounds = [
            measure(checkpoints, Snapshot(step, {"weights": weights}, {"moments": moments}, {}))
            for step in range(args.rounds)
        ]
        assert (Path(folder) / f"step_{args.rounds - 1:012d}").is_dir()
    pauses, written, slower, longest, usual = (list(values) for values in zip(*rounds, strict=True))
    print(f"training stands still for {words(pauses)}; all is on disk after {words(written)}")
    print(f"updates meanwhile are slower by {words(slower, 100, '%')}")
    print(f"longest time from one update to the next {words(longest)}; without a checkpoint {words(usual)}")


if __name__ == "__main__":
    main()
