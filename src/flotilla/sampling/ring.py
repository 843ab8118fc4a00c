"""The memory of a replay: columns (slots, environments, ...) in RAM, on disk or on a GPU, counted first."""

from __future__ import annotations

import errno
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from flotilla.core.errors import UsageError
from flotilla.core.limits import free_memory_bytes
from flotilla.core.types import Spec

Storage = Literal["ram", "disk", "device"]


class Part(NamedTuple):
    """What one row of one environment has in a column."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Parts = Mapping[str, Part]


def payload(spec: Spec, frame_stack: int, extras: Parts) -> dict[str, Part]:
    """The columns whose size follows from the environment: one frame of a stack, the action, the extras."""
    space = spec.obs_space
    if isinstance(space, gym.spaces.Dict):
        parts = {f"obs.{key}": part(one) for key, one in space.spaces.items()}
    else:
        parts = {"obs": part(space)}
    if frame_stack > 1:
        obs = parts.get("obs")
        if obs is None or len(obs.shape) != 3 or obs.shape[0] != frame_stack or obs.dtype != torch.uint8:
            raise UsageError(f"frame_stack={frame_stack} does not fit observations of {space} (use frame_stack=1)")
        parts["obs"] = Part(obs.shape[1:], obs.dtype)
    return parts | {"action": part(spec.action_space)} | {f"extra.{key}": one for key, one in extras.items()}


def control(frame_stack: int) -> dict[str, Part]:
    """The columns that decide which rows are drawn, and what they are worth; always in RAM."""
    parts = {"reward": Part((), torch.float32)}
    parts |= {key: Part((), torch.bool) for key in ("is_first", "is_last", "is_terminal", "valid")}
    if frame_stack > 1:
        parts |= {"age": Part((), torch.uint8), "place": Part((), torch.int32)}
    return parts


def part(space: gym.Space[object]) -> Part:
    """The column for values of a space."""
    assert space.shape is not None
    return Part(tuple(space.shape), torch.from_numpy(np.empty(0, space.dtype)).dtype)


def bytes_per_row(spec: Spec, frame_stack: int = 1, extras: Parts | None = None, *, prioritized: bool = False) -> int:
    """Bytes that one row of one environment takes.

    With a frame stack there are k - 1 frames more for each row whose stack is neither the one before it, moved on, nor
    one frame repeated: the first rows of games in ALE.
    """
    parts = payload(spec, frame_stack, extras or {}) | control(frame_stack)
    return sum(one.bytes for one in parts.values()) + (9 if prioritized else 0)  # 8, and 1/15 for the sums


def check_room(
    row_bytes: int,
    num_rows: int,
    num_envs: int,
    spare: int,
    storage: Storage,
    device: torch.device,
    directory: Path | None,
    max_bytes: int,
) -> None:
    """UsageError where rows (num_rows, num_envs) need more bytes than granted (0: all that are free).

    `spare` rows of each environment hold no transition.
    """
    free, where = _room(storage, device, directory)
    room = min(free, max_bytes) if max_bytes else free
    wanted = row_bytes * num_rows * num_envs
    if wanted > room:
        fits = max(0, room // (row_bytes * num_envs) - spare) * num_envs
        fix = f"use a buffer of {fits} rows at most" if fits else "none fits: use another storage or fewer environments"
        raise UsageError(
            f"a replay of {(num_rows - spare) * num_envs} rows needs {wanted} bytes ({wanted / 1e9:.2f} GB), "
            f"{'the budget is' if room < free else f'{where} has'} {room} ({room / 1e9:.2f} GB): {fix}"
        )


def _room(storage: Storage, device: torch.device, directory: Path | None) -> tuple[int, str]:
    """What is free, and where."""
    if storage == "disk":
        assert directory is not None
        return shutil.disk_usage(directory).free, f"the disk of {directory}"
    if storage == "device" and device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0], str(device)
    return free_memory_bytes(), "memory"


class Ring:
    """Columns (L, N, ...) in which absolute row r has slot r % L; `flat` has them as (L * N, ...).

    Nothing is touched before it is written, so that the system gives memory as the ring fills.
    """

    def __init__(
        self, parts: Parts, num_rows: int, num_envs: int, storage: Storage, device: torch.device, directory: Path | None
    ) -> None:
        self.num_rows, self.num_envs = num_rows, num_envs
        shapes = {name: (num_rows, num_envs, *one.shape) for name, one in parts.items()}
        if storage == "disk":
            assert directory is not None
            made = {name: _on_disk(directory, shape, parts[name].dtype) for name, shape in shapes.items()}
        elif storage == "device" and device.type != "cpu":
            made = {name: torch.empty(shape, dtype=parts[name].dtype, device=device) for name, shape in shapes.items()}
        else:
            made = {name: _in_ram(shape, parts[name].dtype) for name, shape in shapes.items()}
        self.columns: dict[str, Tensor] = made
        self.flat = {name: x.flatten(0, 1) for name, x in made.items()}

    def write(self, name: str, first: int, rows: Tensor) -> None:
        """Rows (n, N, ...), n <= L, from the absolute row `first` on."""
        column, slot = self.columns[name], first % self.num_rows
        before_end = min(len(rows), self.num_rows - slot)
        column[slot : slot + before_end].copy_(rows[:before_end])
        if before_end < len(rows):
            column[: len(rows) - before_end].copy_(rows[before_end:])

    def read(self, name: str, first: int, last: int) -> Tensor:
        """A copy of the absolute rows `first` to `last`, which is not among them, (n, N, ...)."""
        column = self.columns[name]
        slots = torch.arange(first, last, device=column.device) % self.num_rows
        return column.index_select(0, slots)


def _in_ram(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """NumPy asks for huge pages, without which a random frame costs a third more; bool has to begin as False."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size, np.uint8) if dtype == torch.bool else np.empty(size, np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


def _on_disk(directory: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A mapped file without a name: however the process ends, nothing is left behind."""
    size = math.prod(shape) * dtype.itemsize
    with tempfile.TemporaryFile(dir=directory) as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error here, and not a signal later
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise UsageError(f"the disk of {directory} has no {size / 1e9:.2f} GB for a replay (use fewer)") from None
        mapped = np.memmap(file, np.uint8, "r+", shape=(size,))
    return torch.from_numpy(mapped).view(dtype).view(shape)
