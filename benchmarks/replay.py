"""Transitions drawn from Flotilla's replay and from Stable-Baselines3's buffer in turns, and what a row takes in both.

    python benchmarks/replay.py [--rows 200000] [--work atari cheetah] [--num-envs 1] [--work-ms 1.0]

Batches/s one after the other; what a draw takes of a learner that computes for --work-ms between draws; bytes a row.
Medians of the rounds, lowest and highest beside them.  "sb3" keeps every observation twice: its buffer of Atari has a
quarter of the rows, which is far beyond any cache as well, and would not fit otherwise.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

os.environ.update(OMP_NUM_THREADS="1")

import gymnasium as gym
import numpy as np
import torch

from flotilla.core.types import Rollout, Row, Spec
from flotilla.sampling.replay import Replay

Sample = Callable[[], object]
ATARI = Spec(gym.spaces.Box(0, 255, (4, 84, 84), np.uint8), gym.spaces.Discrete(6))
CHEETAH = Spec(gym.spaces.Box(-np.inf, np.inf, (17,), np.float32), gym.spaces.Box(-1, 1, (6,), np.float32))
WORK: dict[str, tuple[Spec, int, int]] = {"atari": (ATARI, 4, 32), "cheetah": (CHEETAH, 1, 256)}
STEPS, EPISODE = 50, 1000  # of a rollout, and of an episode


def rollouts(spec: Spec, k: int, num_envs: int, num_rows: int) -> Iterator[Rollout]:
    """Rows of random numbers; frames out of a pool, each stack the one before moved on, new ones for new episodes."""
    random = torch.Generator().manual_seed(0)
    pool = torch.randint(0, 256, (997, *spec.obs_space.shape[-2:]), dtype=torch.uint8, generator=random)  # type: ignore[index]
    is_discrete = isinstance(spec.action_space, gym.spaces.Discrete)
    for start in range(0, num_rows, STEPS):
        row = torch.arange(start, start + STEPS + 1)[:, None].expand(-1, num_envs)
        if k > 1:
            age = (row[:, :, None] % EPISODE + torch.arange(1 - k, 1)).clamp(min=0)
            obs = pool[(age + 31 * (row // EPISODE)[:, :, None] + 7 * torch.arange(num_envs)[:, None]) % len(pool)]
        else:
            obs = torch.randn(STEPS + 1, num_envs, *spec.obs_space.shape, generator=random)  # type: ignore[misc]
        is_last, is_first = row % EPISODE == EPISODE - 1, row % EPISODE == 0
        rows = Row(obs, torch.randn(row.shape, generator=random), is_first, is_last, torch.zeros_like(is_last))
        shape = (STEPS, num_envs, *spec.action_space.shape)  # type: ignore[misc]
        action = torch.randint(6, shape, generator=random) if is_discrete else torch.rand(shape, generator=random)
        yield Rollout(rows, action, {}, torch.zeros(0), torch.zeros(0))


def fill(work: str, num_rows: int, num_envs: int) -> dict[str, tuple[Sample, float]]:
    """Full buffers with the same rows: how each is drawn from, and the bytes a row that it has allocated."""
    from stable_baselines3.common.buffers import ReplayBuffer

    spec, k, batch_size = WORK[work]
    device = torch.device("cpu")
    ours = {
        name: Replay(spec, num_envs, num_rows, device=device, seed=1, frame_stack=k, ahead=name == "ours ahead")
        for name in ("ours", "ours ahead")[: 2 if work == "atari" else 1]
    }
    theirs = {
        name: ReplayBuffer(
            num_rows // 4 if work == "atari" and not optimized else num_rows,
            spec.obs_space,
            spec.action_space,
            device=device,
            n_envs=num_envs,
            optimize_memory_usage=optimized,
            handle_timeout_termination=not optimized,
        )
        for name, optimized in (("sb3", False), ("sb3 optimized", True))
    }
    for roll in rollouts(spec, k, num_envs, num_rows // num_envs + 1):
        for replay in ours.values():
            replay.add(roll)
        obs, rows = roll.rows.obs.numpy(), roll.rows  # type: ignore[union-attr]
        for buffer in theirs.values():
            for t in range(STEPS):
                done, reward = rows.is_terminal[t + 1].numpy(), rows.reward[t + 1].numpy()
                buffer.add(obs[t], obs[t + 1], roll.action[t].numpy(), reward, done, [{}] * num_envs)
    made: dict[str, tuple[Sample, float]] = {}
    for name, replay in ours.items():
        made[name] = lambda replay=replay: replay.sample(batch_size), replay.bytes / num_rows  # type: ignore[misc]
    for name, buffer in theirs.items():
        size = sum(x.nbytes for x in vars(buffer).values() if isinstance(x, np.ndarray))
        size_of_row = size / buffer.buffer_size / num_envs
        made[name] = lambda buffer=buffer: buffer.sample(batch_size), size_of_row  # type: ignore[misc]
    return made


def rate(sample: Sample, seconds: float) -> float:
    """Batches per second, one after the other."""
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        sample()
        count += 1
    return count / (time.perf_counter() - start)


def wait_us(sample: Sample, work: Callable[[], object], seconds: float) -> float:
    """Microseconds of a draw for who works between two of them."""
    start, waited, count = time.perf_counter(), 0.0, 0
    while time.perf_counter() - start < seconds:
        work()
        before = time.perf_counter()
        sample()
        waited += time.perf_counter() - before
        count += 1
    return waited / count * 1e6


def learner(work_ms: float) -> Callable[[], object]:
    """Matrix products for so many milliseconds."""
    matrix = torch.rand(256, 256)

    def work() -> None:
        end = time.perf_counter() + work_ms / 1000
        while time.perf_counter() < end:
            matrix.mm(matrix)

    return work


def measure(work: str, options: argparse.Namespace) -> None:
    made, compute = fill(work, options.rows, options.num_envs), learner(options.work_ms)
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in made}
    for _ in range(options.rounds):
        for name, (sample, _) in made.items():
            rate(sample, 0.05)
            found[name][0].append(rate(sample, options.seconds))
            found[name][1].append(wait_us(sample, compute, options.seconds))
    print(f"\n{WORK[work][2]} transitions of {work}, {options.rows} rows of {options.num_envs} environments")
    slowest = statistics.median(found["sb3"][0]), statistics.median(found["sb3"][1])
    for name, values in found.items():
        text = ""
        for unit, numbers in zip(("batches/s", "us beside work"), values, strict=True):
            text += f"{statistics.median(numbers):9.0f} {unit} ({min(numbers):.0f} to {max(numbers):.0f}), "
        middle = [statistics.median(numbers) for numbers in values]
        ratio = f"{middle[0] / slowest[0]:.1f}x and {slowest[1] / middle[1]:.1f}x sb3"
        print(f"  {name:14s} {text}{made[name][1]:8.0f} bytes a row, {ratio}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--num-envs", type=int, default=1)
    parser.add_argument("--work", nargs="+", default=list(WORK), choices=WORK)
    parser.add_argument("--work-ms", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5)
    options: Any = parser.parse_args()
    warnings.simplefilter("ignore")  # of buffers that would not fit if all of them were touched
    torch.set_num_threads(1)
    for work in options.work:
        measure(work, options)


if __name__ == "__main__":
    main()
