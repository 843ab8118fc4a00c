"""Memory that processes share: one anonymous block, known by its file descriptor, and the arrays that lie in it.

Nothing has a name, in /dev/shm or elsewhere: whatever ends how, the kernel frees the block with the last process.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from flotilla.core.errors import UsageError
from flotilla.core.limits import free_memory_bytes

Array = NDArray[Any]
Path = tuple[Any, ...]  # keys that lead to a leaf of a nested Dict or Tuple space
Layout = dict[Any, tuple[tuple[int, ...], np.dtype[Any]]]  # name -> shape, dtype
ALIGN = 64  # bytes of a cache line: two processes never write into the same one through different arrays


def open_block() -> int:
    """The descriptor of a new, empty block."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("flotilla")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def reserve(fd: int, layout: Layout) -> dict[Any, Array]:
    """Give the block the size of the layout; its arrays.  UsageError where memory or disk cannot hold it."""
    nbytes = _offsets(layout)[1]
    try:
        free = free_memory_bytes()
        if nbytes > free:  # Linux would promise it, and kill somebody later
            raise OSError(errno.ENOMEM, f"{free / 2**20:,.0f} MiB of memory are free")
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, nbytes)  # now, in words: not a bus error at the first write to a missing page
        else:
            os.ftruncate(fd, nbytes)
        return arrays(fd, layout)
    except OSError as error:
        raise UsageError(
            f"{nbytes / 2**20:,.0f} MiB of shared memory for the rows of all environments: {error.strerror}; "
            "use fewer environments, or give the machine or container more memory (docker run --memory)"
        ) from None


def arrays(fd: int, layout: Layout) -> dict[Any, Array]:
    """The arrays of a layout in a reserved block; they keep it mapped, the descriptor may be closed."""
    offsets, nbytes = _offsets(layout)
    block = mmap.mmap(fd, nbytes)
    return {
        name: np.ndarray(shape, dtype, buffer=block, offset=offset)
        for (name, (shape, dtype)), offset in zip(layout.items(), offsets, strict=True)
    }


def _offsets(layout: Layout) -> tuple[list[int], int]:
    offsets, end = [], 0
    for shape, dtype in layout.values():
        offsets.append(end)
        end += -(-int(np.prod(shape)) * dtype.itemsize // ALIGN) * ALIGN
    return offsets, max(end, ALIGN)


def leaves(space: gym.Space[Any], path: Path = ()) -> dict[Path, tuple[tuple[int, ...], np.dtype[Any]]] | None:
    """Shape and dtype of every leaf of a space, by its path; None where some value is no array of fixed size."""
    if isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        found: dict[Path, tuple[tuple[int, ...], np.dtype[Any]]] = {}
        for key, child in space.items() if isinstance(space, gym.spaces.Dict) else enumerate(space):
            part = leaves(child, (*path, key))
            if part is None:
                return None
            found |= part
        return found
    kinds = (gym.spaces.Box, gym.spaces.Discrete, gym.spaces.MultiDiscrete, gym.spaces.MultiBinary)
    if type(space) in kinds and space.shape is not None and space.dtype is not None:
        return {path: (tuple(space.shape), np.dtype(space.dtype))}
    return None


def leaf(value: Any, path: Path) -> Any:
    """What lies at a path of a nested value."""
    for key in path:
        value = value[key]
    return value


def nested(space: gym.Space[Any], parts: Mapping[Path, Any], path: Path = ()) -> Any:
    """Leaves in the form of their space: dicts and tuples as it has them."""
    if isinstance(space, gym.spaces.Dict):
        return {key: nested(child, parts, (*path, key)) for key, child in space.items()}
    if isinstance(space, gym.spaces.Tuple):
        return tuple(nested(child, parts, (*path, index)) for index, child in enumerate(space))
    return parts[path]


def same_spaces(spaces: Sequence[tuple[Any, ...]]) -> tuple[gym.Space[Any], gym.Space[Any]]:
    """The observation and action space (the first two of each tuple) that all share; UsageError where they differ."""
    for i, each in enumerate(spaces):
        for what, here, there in zip(("observation", "action"), each[:2], spaces[0][:2], strict=True):
            if here != there:
                raise UsageError(f"environments must have the same {what} space: {i} has {here}, 0 has {there}")
    return spaces[0][:2]
