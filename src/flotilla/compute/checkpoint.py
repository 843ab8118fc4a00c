"""Checkpoints: a directory of safetensors and JSON with a manifest of hashes, written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flotilla.compute import chunks
from flotilla.compute.chunks import Chunk, sha256, sync
from flotilla.core.errors import UsageError

MODEL, TRAINER, COUNTERS, MANIFEST = (
    "model.safetensors",
    "trainer.safetensors",
    "counters.json",
    "manifest.json",
)
SCHEMA = 2  # of the directory; a later version of this file reads it, an earlier one refuses it; 1 has no chunks
OLD = ".old"  # behind the name of a checkpoint while another takes its place
# What is asked of the chunks of a replay: nothing, for who wants the weights; to be there; to be what was written.
Ask = Literal["nothing", "sizes", "hashes"]


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds."""

    step: int
    model: Mapping[str, Tensor]
    trainer: Mapping[str, Tensor]
    counters: Mapping[str, Any]  # of what JSON has
    chunks: Sequence[Chunk] = ()  # files beside it, some of which other checkpoints name as well


class Checkpoints:
    """The checkpoints of a run: copied to the host while training waits, written while it goes on.

    The newest `keep_last` stay, and the one with the highest score.
    """

    def __init__(self, root: Path, *, keep_last: int = 2) -> None:
        assert keep_last > 0
        self._root, self._keep_last = root, keep_last
        self._problems: list[str] = []
        # Joined where the interpreter ends, which so waits until the checkpoint is whole.
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._saving: Future[None] | None = None
        self._putting: Future[Chunk] | None = None

    def put(self, chunk: Chunk, tensors: Mapping[str, Tensor]) -> Future[Chunk]:
        """Write a chunk of rows, whose tensors nobody changes any more; waits for the one before.

        It counts from the checkpoint on that names it.
        """
        wait([self._putting] if self._putting else [])
        self._putting = self._writer.submit(chunks.write, self._root, chunk, tensors)
        return self._putting

    def discard(self, chunk: Future[Chunk]) -> None:
        """Remove a chunk that no checkpoint names."""
        self._writer.submit(lambda: chunks.remove(self._root, chunk.result()))

    def read(self, chunk: Chunk) -> dict[str, Tensor]:
        """What a chunk holds."""
        return chunks.read(self._root, chunk)

    def save(self, snapshot: Snapshot, *, parts: Sequence[Future[Chunk]] = (), score: float | None = None) -> None:
        """Take what is there now; waits for the checkpoint before to be written.  parts: chunks that it needs.

        One that takes the place of another of the same step, without a score, keeps the score of that one.
        """
        self._join()
        taken = Snapshot(
            snapshot.step,
            {key: _copied(x) for key, x in snapshot.model.items()},
            {key: _copied(x) for key, x in snapshot.trainer.items()},
            json.loads(json.dumps(snapshot.counters)),
        )
        self._saving = self._writer.submit(self._write, taken, list(parts), score)

    def wait(self) -> str:
        """Until what was taken is on disk; in words what could not be written, each once, else empty."""
        self._join()
        problems, self._problems = self._problems, []
        return "; ".join(problems)

    def close(self) -> None:
        """Write what was taken, and end the thread; idempotent."""
        self._writer.shutdown()

    def _join(self) -> None:
        if self._saving is not None:
            self._saving.result()
            self._saving = None

    def _write(self, taken: Snapshot, parts: list[Future[Chunk]], score: float | None) -> None:
        try:
            taken = replace(taken, chunks=[part.result() for part in parts])
            target = _write(self._root, taken, score)
            _prune(self._root, target, self._keep_last)
        except Exception as error:  # of any kind: what is not told here, nobody would hear of
            reason = (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"
            self._problems.append(
                f"the checkpoint of step {taken.step:,} could not be written ({reason}); earlier ones stay"
            )


def find(root: Path, ask: Ask = "hashes") -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole, and a sentence about each newer one that is not."""
    words: list[str] = []
    for path in reversed(_listed(root)):
        damage = damage_of(path, ask)
        if not damage:
            return path, words
        words.append(f"{path} is damaged and not used: {damage}")
    return None, words


def newest(root: Path) -> Path:
    """The newest checkpoint whose weights can be used; UsageError where there is none."""
    path, _ = find(root, "nothing")
    if path is None:
        raise UsageError(f"no valid checkpoint in {root} (train with --run-dir {root.parent} first)")
    return path


def best(root: Path) -> Path | None:
    """The checkpoint with the highest score; the later one of equals."""
    scored = [(stated["score"], path) for path in _listed(root) if (stated := _stated(path))]
    ranked = sorted([(score, path) for score, path in scored if score is not None], key=lambda pair: pair[0])
    return next((path for _, path in reversed(ranked) if not damage_of(path, "nothing")), None)


def valid(root: Path) -> list[Path]:
    """The checkpoints in `root` whose files are what their manifest says, oldest first."""
    return [path for path in _listed(root) if not damage_of(path)]


def load(path: Path) -> Snapshot:
    """Everything in a checkpoint, on the host, and which chunks it needs; UsageError where it is none or damaged.

    That the chunks are whole is for `find`, which looks at them once.
    """
    model = load_model(path)
    counters = json.loads((path / COUNTERS).read_text())
    return Snapshot(_manifest(path)["step"], model, _read(path / TRAINER), counters, _chunks(path))


def load_model(path: Path) -> dict[str, Tensor]:
    """The weights and statistics of a checkpoint; UsageError where it is none or damaged."""
    if damage := damage_of(path, "nothing"):
        raise UsageError(f"'{path}' is no whole checkpoint: {damage}")
    return _read(path / MODEL)


def damage_of(path: Path, ask: Ask = "hashes") -> str:
    """What is wrong with a checkpoint, in words; empty where it is whole."""
    try:
        for name, stated in _manifest(path)["files"].items():
            if damage := chunks.damage_of(path / name, stated["bytes"], stated["sha256"]):
                return damage
        for chunk in _chunks(path) if ask != "nothing" else []:
            file = path.parent / chunks.FOLDER / chunk.name
            if damage := chunks.damage_of(file, chunk.bytes, chunk.sha256 if ask == "hashes" else ""):
                return damage
    except OSError as error:
        return f"{Path(error.filename or path).name}: {error.strerror}"
    except ValueError as error:
        return f"{MANIFEST} {error}"
    return ""


def _write(root: Path, taken: Snapshot, score: float | None) -> Path:
    """Write `root`/step_<step> through a temporary directory and a rename; its tensors have memory of their own."""
    target = root / f"step_{taken.step:012d}"
    temporary, aside = _hidden(target), target.with_name(target.name + OLD)
    root.mkdir(parents=True, exist_ok=True)
    _tidy(root)
    if score is None or not math.isfinite(score):
        score = _stated(target).get("score")  # a run saves once more at its end, and a step has one agent
    temporary.mkdir()
    try:
        save_file(dict(taken.model), temporary / MODEL)
        save_file(dict(taken.trainer), temporary / TRAINER)
        (temporary / COUNTERS).write_text(json.dumps(taken.counters, indent=1))
        files = {file.name: {"bytes": file.stat().st_size, "sha256": sha256(file)} for file in temporary.iterdir()}
        parts = [asdict(chunk) for chunk in taken.chunks]
        manifest = {"schema": SCHEMA, "step": taken.step, "score": score, "files": files, "chunks": parts}
        (temporary / MANIFEST).write_text(json.dumps(manifest | {"sha256": _digest(manifest)}, indent=1))
        for file in [*temporary.iterdir(), temporary]:
            sync(file)
        if target.exists():
            # Under its other name the old one counts as well, should this process be killed between the two renames.
            target.rename(aside)
        temporary.rename(target)
        sync(root)
        _remove(aside)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _tidy(root: Path) -> None:
    """Finish what a process began that was killed."""
    for left in root.glob(".step_*.tmp"):
        shutil.rmtree(left, ignore_errors=True)
    for aside in root.glob(f"step_*{OLD}"):
        target = aside.with_name(aside.name.removesuffix(OLD))
        if target.exists():
            _remove(aside)
        else:
            aside.rename(target)


def _prune(root: Path, written: Path, keep_last: int) -> None:
    """Remove what is older than the last whole ones, and chunks that none names; what is not ours stays.

    Of a replay sizes are looked at alone: all of it would be read for each checkpoint.
    """
    older, kept = _listed(root), 0
    older = older[: older.index(written) + 1]  # newer ones were damaged when the run went on
    while older and kept < keep_last:
        path = older.pop()
        kept += path == written or not damage_of(path, "sizes")
    top = best(root)
    for path in older:
        if path != top and _stated(path):
            _remove(path)
    chunks.remove_all_but(root, {chunk.name for path in _listed(root) for chunk in _named(path)})


def _remove(path: Path) -> None:
    """At once, by its name: what a killed process has half deleted must not look like a damaged checkpoint."""
    if path.exists():
        path.rename(_hidden(path))
        shutil.rmtree(_hidden(path), ignore_errors=True)


def _hidden(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _listed(root: Path) -> list[Path]:
    """What may be checkpoints, oldest first; one that was put aside is older than what took its place."""
    return sorted(root.glob("step_*"), key=lambda path: (path.name.removesuffix(OLD), path.suffix != OLD))


def _copied(x: Tensor) -> Tensor:
    """On the host and in memory of its own, as weights may be parts of one large tensor."""
    return x.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _stated(path: Path) -> dict[str, Any]:
    """A checkpoint's manifest; empty where it cannot be read."""
    try:
        return _manifest(path)
    except (OSError, ValueError):
        return {}


def _chunks(path: Path) -> list[Chunk]:
    return [Chunk(**stated) for stated in _manifest(path).get("chunks", [])]


def _named(path: Path) -> list[Chunk]:
    """The chunks of a checkpoint, none where it is damaged; OSError where the disk does not say."""
    try:
        return _chunks(path)
    except (ValueError, FileNotFoundError, NotADirectoryError):
        return []


def _manifest(path: Path) -> dict[str, Any]:
    """Schema, step, score and files of a checkpoint; ValueError, in words, where they are not what was written."""
    text = (path / MANIFEST).read_bytes()
    try:
        content = json.loads(text)
        schema = content["schema"]
    except (ValueError, KeyError, TypeError):
        raise ValueError("cannot be read") from None
    if schema not in (1, SCHEMA):
        raise ValueError(f"has schema {schema}, and this version reads 1 and {SCHEMA}")
    if content.pop("sha256", "") != _digest(content):
        raise ValueError("is not what was written (its sha256 is another)")
    assert isinstance(content, dict)
    return content


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _read(file: Path) -> dict[str, Tensor]:
    """The tensors of a file; copies, as safetensors maps it, and it may be replaced or cut."""
    return {key: x.clone() for key, x in load_file(file).items()}
