"""Chunks: files of a replay's rows beside the checkpoints, which name those that they need.

A file's name holds its hash, so that none is ever written in place of another that a checkpoint needs.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

FOLDER = "replay"  # in the directory of the checkpoints


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Rows `first` to before `last` of all environments, or their extras; and the file, once they are in one."""

    owner: str  # the object whose rows they are
    first: int
    last: int
    num_envs: int
    settled: bool  # they do not change any more, so that later checkpoints name the same file
    name: str = ""
    bytes: int = 0
    sha256: str = ""


def write(root: Path, chunk: Chunk, tensors: Mapping[str, Tensor]) -> Chunk:
    """Write it whole or not at all."""
    folder = root / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{chunk.owner}.{os.getpid()}.tmp"
    try:
        save_file(dict(tensors), temporary)
        size, digest = temporary.stat().st_size, sha256(temporary)
        name = f"{chunk.owner}_{chunk.first:012d}_{chunk.last:012d}_{digest[:16]}.safetensors"
        sync(temporary)
        temporary.rename(folder / name)
        sync(folder)
    finally:
        temporary.unlink(missing_ok=True)
    return replace(chunk, name=name, bytes=size, sha256=digest)


def read(root: Path, chunk: Chunk) -> dict[str, Tensor]:
    """Its tensors; copies, as safetensors maps the file."""
    return {key: x.clone() for key, x in load_file(root / FOLDER / chunk.name).items()}


def remove_all_but(root: Path, named: Iterable[str]) -> None:
    """Remove the chunks that no checkpoint names, and what a killed process left."""
    needed = set(named)
    for file in (root / FOLDER).glob("*"):
        if file.name not in needed and file.name.endswith((".safetensors", ".tmp")):
            file.unlink(missing_ok=True)


def remove(root: Path, chunk: Chunk) -> None:
    (root / FOLDER / chunk.name).unlink(missing_ok=True)


def damage_of(file: Path, size: int, digest: str = "") -> str:
    """What is wrong with a file of a known size and hash, in words; without a hash its size alone counts."""
    found = file.stat().st_size
    if found != size:
        return f"{file.name} has {found:,} bytes, and {size:,} were written"
    return f"{file.name} is not what was written (its sha256 is another)" if digest and sha256(file) != digest else ""


def sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
