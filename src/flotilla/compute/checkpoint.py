"""Checkpoints: a directory of safetensors and JSON with a manifest of hashes, written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from flotilla.core.errors import UsageError

MODEL, TRAINER, COUNTERS, MANIFEST = (
    "model.safetensors",
    "trainer.safetensors",
    "counters.json",
    "manifest.json",
)


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds."""

    step: int
    model: Mapping[str, Tensor]
    trainer: Mapping[str, Tensor]
    counters: Mapping[str, Any]  # of what JSON has


class Checkpoints:
    """The checkpoints of a run."""

    def __init__(self, root: Path, *, keep_last: int = 2) -> None:
        self._root, self._keep_last, self._problem = root, keep_last, ""

    def save(self, snapshot: Snapshot, *, score: float | None = None) -> None:
        try:
            save(self._root, snapshot.step, snapshot.model, snapshot.trainer, snapshot.counters, self._keep_last)
        except OSError as error:
            self._problem = f"checkpoint of step {snapshot.step} cannot be written: {error.strerror}"

    def wait(self) -> str:
        problem, self._problem = self._problem, ""
        return problem


def find(root: Path) -> tuple[Path | None, list[str]]:
    found = valid(root)
    newest = found[-1] if found else None
    damaged = [p for p in sorted(root.glob("step_*")) if not _is_whole(p) and (newest is None or p > newest)]
    return newest, [f"checkpoint {path} is damaged" for path in damaged]


def load(path: Path) -> Snapshot:
    model = load_model(path)
    counters = json.loads((path / COUNTERS).read_text())
    return Snapshot(int(path.name[5:]), model, _read(path / TRAINER), counters)


def save(
    root: Path,
    step: int,
    model: Mapping[str, Tensor],
    trainer: Mapping[str, Tensor],
    counters: Mapping[str, Any],
    keep_last: int = 2,
) -> Path:
    """Write `root`/step_<step> through a temporary directory and a rename; older ones beyond `keep_last` go."""
    target = root / f"step_{step:012d}"
    temporary = root / f".{target.name}.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        for name, tensors in ((MODEL, model), (TRAINER, trainer)):
            save_file({key: x.detach().cpu().contiguous() for key, x in tensors.items()}, temporary / name)
        (temporary / COUNTERS).write_text(json.dumps(counters, indent=1))
        (temporary / MANIFEST).write_text(json.dumps(_hashes(temporary), indent=1))
        for file in temporary.iterdir():
            _sync(file)
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
        _sync(root)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for old in valid(root)[:-keep_last]:
        shutil.rmtree(old)
    return target


def valid(root: Path) -> list[Path]:
    """The checkpoints in `root` whose files are what their manifest says, oldest first."""
    return [path for path in sorted(root.glob("step_*")) if _is_whole(path)]


def load_model(path: Path) -> dict[str, Tensor]:
    """The weights and statistics of a checkpoint; UsageError where it is none or damaged."""
    if not _is_whole(path):
        raise UsageError(f"'{path}' is no whole checkpoint (a file is missing or differs from its manifest)")
    return _read(path / MODEL)


def newest(root: Path) -> Path:
    """The newest valid checkpoint below a run's directory."""
    found = valid(root)
    if not found:
        raise UsageError(f"no valid checkpoint in {root} (train with --run-dir {root.parent} first)")
    return found[-1]


def _is_whole(path: Path) -> bool:
    try:
        return bool(json.loads((path / MANIFEST).read_text()) == _hashes(path))
    except (OSError, ValueError):
        return False


def _read(file: Path) -> dict[str, Tensor]:
    """The tensors of a file; copies, as safetensors maps it, and it may be replaced or cut."""
    return {key: x.clone() for key, x in load_file(file).items()}


def _hashes(path: Path) -> dict[str, str]:
    """The sha256 of each file that a checkpoint must have."""
    hashes = {}
    for name in (MODEL, TRAINER, COUNTERS):
        with (path / name).open("rb") as file:
            hashes[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
