"""The rows of a replay in checkpoints: read in chunks as they settle, gathered from all ranks, handed back to any.

Chunks begin and end at the same rows whenever they are written, and hold the environments of all ranks in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

from torch import Tensor

from flotilla.compute.checkpoint import Checkpoints
from flotilla.compute.chunks import Chunk
from flotilla.compute.ranks import Ranks
from flotilla.compute.state import tell

CHUNK_BYTES = 64 * 1024**2  # of all ranks together; as much is copied at a time while training waits

Read = Callable[[int, int], dict[str, Tensor]]


class Part(NamedTuple):
    """A chunk that is written, or will be."""

    last: int
    chunk: Future[Chunk]


class Replayed(Protocol):
    """A ring of rows (of a replay), of which those before `settled` stay as they are, their extras apart."""

    num_envs: int
    row_bytes: int

    @property
    def rows_added(self) -> int: ...

    @property
    def oldest(self) -> int: ...

    @property
    def settled(self) -> int: ...

    def rows(self, first: int, last: int) -> dict[str, Tensor]: ...

    def extras(self, first: int, last: int) -> dict[str, Tensor]: ...

    def load_rows(self, first: int, rows: Mapping[str, Tensor], column: int = 0) -> None: ...


class Rows:
    """What is on disk of one replay's rows.  All ranks call each method together; rank 0 alone writes and reads."""

    def __init__(self, ranks: Ranks, owner: str, replay: Replayed, files: Checkpoints) -> None:
        self._ranks, self._owner, self._replay, self._files = ranks, owner, replay, files
        self.num_envs = replay.num_envs * ranks.world_size
        self._length = max(1, CHUNK_BYTES // (replay.row_bytes * self.num_envs))
        self._next = 0  # rows before this one are on disk or on their way
        self._named = 0  # rows before this one are in what was saved
        self._written: list[Part] = []  # settled ones, on rank 0

    def settle(self) -> None:
        """Hand the writer each chunk whose last row has settled, so that a checkpoint finds it there already."""
        replay = self._replay
        for first, last in self._cuts(self._next, replay.settled // self._length * self._length):
            self._written += self._put(first, last, replay.rows, settled=True)
            self._next = last
        while self._written and self._written[0].last <= replay.oldest:
            gone = self._written.pop(0)
            if gone.last > self._named:  # else it stays as long as a checkpoint that names it
                self._files.discard(gone.chunk)

    def save(self) -> list[Future[Chunk]]:
        """Chunks of all rows that are there now, and of their extras; empty on the ranks that do not write."""
        replay, chunks = self._replay, [part.chunk for part in self._written]
        failed = next((i for i, chunk in enumerate(chunks) if chunk.done() and chunk.exception()), None)
        if failed is not None:  # once more, from there on
            self._written = self._written[:failed]
            self._next = self._written[-1].last if failed else 0
        self._next = tell(self._ranks, self._next)[0]
        self.settle()
        self._named = self._next
        rest = self._put(max(self._next, replay.oldest), replay.rows_added, replay.rows, settled=False)
        if replay.extras(replay.oldest, replay.oldest):
            for first, last in self._cuts(replay.oldest, replay.rows_added):
                rest += self._put(first, last, replay.extras, settled=False)
        return [part.chunk for part in self._written + rest]

    def misfit(self, chunks: Sequence[Chunk]) -> str:
        """Why these chunks are of no use here, in words; else empty."""
        counts = {chunk.num_envs for chunk in self._own(chunks)}
        if counts == {self.num_envs}:
            return ""
        found = f"of {max(counts)} environments, and there are {self.num_envs}" if counts else "not there"
        return f"the {self._owner} begins empty: the rows that were saved are {found}"

    def restore(self, chunks: Sequence[Chunk]) -> None:
        """Load the chunks of a checkpoint that fit, after the replay's other state."""
        for chunk in [] if self.misfit(chunks) else self._own(chunks):
            tensors = self._ranks.share(self._files.read(chunk) if self._ranks.rank == 0 else None)
            self._replay.load_rows(chunk.first, tensors, self._ranks.rank * self._replay.num_envs)
            if chunk.settled:
                self._next = self._named = chunk.last
                done: Future[Chunk] = Future()
                done.set_result(chunk)
                self._written += [Part(chunk.last, done)] if self._ranks.rank == 0 else []

    def _own(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        return [chunk for chunk in chunks if chunk.owner == self._owner]

    def _cuts(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """The parts of these rows, without those that are gone, that are chunks."""
        first = max(first, self._replay.oldest)
        while first < last:
            end = min(last, (first // self._length + 1) * self._length)
            yield first, end
            first = end

    def _put(self, first: int, last: int, read: Read, *, settled: bool) -> list[Part]:
        """The rows of all ranks on their way to a file of rank 0."""
        if first == last:
            return []
        tensors = {key: self._ranks.gather(x) for key, x in read(first, last).items()}
        if self._ranks.rank > 0:
            return []
        chunk = Chunk(owner=self._owner, first=first, last=last, num_envs=self.num_envs, settled=settled)
        return [Part(last, self._files.put(chunk, tensors))]
