"""What costs training a checkpoint of 10 million parameters with Adam: a pause, and slower updates meanwhile.

    python benchmarks/checkpoint.py [--rounds 7]

The work beside it is a matrix product and some Python, as an update is.  Medians, lowest and highest.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from flotilla.compute.checkpoint import Checkpoints, Snapshot

PARAMETERS = 10_000_000
WORK_S = 1.0


def updates_per_s(until_s: float) -> tuple[float, float]:
    """Updates per second for so long, and the longest pause between two of them, in seconds."""
    x, count, longest = torch.randn(256, 256), 0, 0.0
    start = last = time.perf_counter()
    while last - start < until_s:
        for _ in range(20):
            x = torch.tanh(x @ x / 16)
        now = time.perf_counter()
        longest, last, count = max(longest, now - last), now, count + 1
    return count / (last - start), longest


def words(values: list[float], scale: float = 1e3, unit: str = "ms") -> str:
    low, middle, high = (scale * f(values) for f in (min, statistics.median, max))
    return f"{middle:.0f} {unit} ({low:.0f} to {high:.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    weights, moments = torch.randn(PARAMETERS), torch.randn(2, PARAMETERS)
    pauses, written, slower, stalls = [], [], [], []
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder))
        for step in range(args.rounds):
            alone, _ = updates_per_s(WORK_S)
            start = time.perf_counter()
            checkpoints.save(Snapshot(step, {"weights": weights}, {"moments": moments}, {}))
            pauses.append(time.perf_counter() - start)
            beside, stall = updates_per_s(WORK_S)
            assert checkpoints.wait() == ""
            written.append(time.perf_counter() - start)
            slower.append(1 - beside / alone)
            stalls.append(stall)
    print(f"training stands still for {words(pauses)}; longest pause between two updates after it {words(stalls)}")
    print(f"updates in the second after it are slower by {words(slower, 100, '%')}; on disk after {words(written)}")


if __name__ == "__main__":
    main()
