"""Checkpoints: a directory of safetensors and JSON with a manifest of hashes, written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from flotilla.core.errors import UsageError

MODEL, TRAINER, COUNTERS, MANIFEST = (
    "model.safetensors",
    "trainer.safetensors",
    "counters.json",
    "manifest.json",
)
SCHEMA = 1  # of the directory; a later version of this file reads it, an earlier one refuses it


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds."""

    step: int
    model: Mapping[str, Tensor]
    trainer: Mapping[str, Tensor]
    counters: Mapping[str, Any]  # of what JSON has


class Checkpoints:
    """The checkpoints of a run: copied to the host while training waits, written while it goes on.

    The newest `keep_last` stay, and the one with the highest score.
    """

    def __init__(self, root: Path, *, keep_last: int = 2) -> None:
        self._root, self._keep_last, self._problem = root, keep_last, ""
        self._writer: threading.Thread | None = None

    def save(self, snapshot: Snapshot, *, score: float | None = None) -> None:
        """Take what is there now; waits for the checkpoint before to be written."""
        self._join()
        taken = Snapshot(
            snapshot.step,
            {key: _host(x) for key, x in snapshot.model.items()},
            {key: _host(x) for key, x in snapshot.trainer.items()},
            json.loads(json.dumps(snapshot.counters)),
        )
        # No daemon: an interpreter that ends waits until the checkpoint is whole.
        self._writer = threading.Thread(target=self._write, args=(taken, score), name="checkpoint")
        self._writer.start()

    def wait(self) -> str:
        """Until what was taken is on disk; in words why it could not be written, once, else empty."""
        self._join()
        problem, self._problem = self._problem, ""
        return problem

    def _join(self) -> None:
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def _write(self, snapshot: Snapshot, score: float | None) -> None:
        try:
            write(self._root, snapshot, keep_last=self._keep_last, score=score)
        except OSError as error:
            reason = error.strerror or str(error)
            self._problem = (
                f"the checkpoint of step {snapshot.step:,} could not be written ({reason}); earlier ones stay"
            )
        except SafetensorError as error:  # what its own writing fails with
            self._problem = (
                f"the checkpoint of step {snapshot.step:,} could not be written ({error}); earlier ones stay"
            )


def write(root: Path, snapshot: Snapshot, *, keep_last: int = 2, score: float | None = None) -> Path:
    """Write `root`/step_<step> through a temporary directory and a rename, and drop what need not stay."""
    target = root / f"step_{snapshot.step:012d}"
    temporary, aside = root / f".{target.name}.{os.getpid()}.tmp", root / f"{target.name}.old"
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(".step_*.tmp"):  # of a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    temporary.mkdir()
    try:
        for name, tensors in ((MODEL, snapshot.model), (TRAINER, snapshot.trainer)):
            save_file({key: _host(x) for key, x in tensors.items()}, temporary / name)
        (temporary / COUNTERS).write_text(json.dumps(snapshot.counters, indent=1))
        manifest = {"schema": SCHEMA, "step": snapshot.step, "score": score, "sha256": _hashes(temporary)}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1))
        for file in [*temporary.iterdir(), temporary]:
            _sync(file)
        if target.exists():
            # Under its other name the old one counts as well, should this process be killed between the two renames.
            shutil.rmtree(aside, ignore_errors=True)
            target.rename(aside)
        temporary.rename(target)
        _sync(root)
        shutil.rmtree(aside, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _prune(root, keep_last)
    return target


def _host(x: Tensor) -> Tensor:
    """A copy on the host of its own, as weights may be parts of one large tensor."""
    return x.detach().to("cpu", copy=True).contiguous()


def _prune(root: Path, keep_last: int) -> None:
    found = valid(root)
    top = best(root)
    for old in found[:-keep_last]:
        if old != top:
            shutil.rmtree(old)


def best(root: Path) -> Path | None:
    """The checkpoint with the highest score; the later one of equals."""
    scores = [(_manifest(path)["score"], path) for path in valid(root)]
    scored = [(score, path) for score, path in scores if score is not None and math.isfinite(score)]
    return max(scored)[1] if scored else None


def find(root: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole, and a sentence about each newer one that is not."""
    words: list[str] = []
    for path in sorted(root.glob("step_*"), reverse=True):
        damage = damage_of(path)
        if not damage:
            return path, words
        words.append(f"{path} is damaged and not used: {damage}")
    return None, words


def load(path: Path) -> Snapshot:
    """Everything in a checkpoint, on the host; UsageError where it is none or damaged."""
    model = load_model(path)
    counters = json.loads((path / COUNTERS).read_text())
    return Snapshot(_manifest(path)["step"], model, _read(path / TRAINER), counters)


def valid(root: Path) -> list[Path]:
    """The checkpoints in `root` whose files are what their manifest says, oldest first."""
    return [path for path in sorted(root.glob("step_*")) if not damage_of(path)]


def load_model(path: Path) -> dict[str, Tensor]:
    """The weights and statistics of a checkpoint; UsageError where it is none or damaged."""
    if damage := damage_of(path):
        raise UsageError(f"'{path}' is no whole checkpoint: {damage}")
    return _read(path / MODEL)


def newest(root: Path) -> Path:
    """The newest valid checkpoint below a run's directory."""
    found = valid(root)
    if not found:
        raise UsageError(f"no valid checkpoint in {root} (train with --run-dir {root.parent} first)")
    return found[-1]


def damage_of(path: Path) -> str:
    """What is wrong with a checkpoint, in words; empty where it is whole."""
    try:
        manifest = _manifest(path)
        hashes = manifest["sha256"]
        if manifest["schema"] != SCHEMA:
            return f"{MANIFEST} has schema {manifest['schema']}, and this version reads {SCHEMA}"
        for name, found in _hashes(path).items():
            if hashes[name] != found:
                return f"{name} ({(path / name).stat().st_size:,} bytes) is not what {MANIFEST} says"
    except OSError as error:
        return f"{Path(error.filename or path).name}: {error.strerror}"
    except (ValueError, KeyError, TypeError):
        return f"{MANIFEST} cannot be read"
    return ""


def _manifest(path: Path) -> dict[str, Any]:
    content = json.loads((path / MANIFEST).read_text())
    if not isinstance(content, dict):
        raise TypeError(content)
    return content


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
