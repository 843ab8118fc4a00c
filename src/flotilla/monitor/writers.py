"""The files of a run that programs read: JSON lines, TensorBoard events, status.json.

A full disk does not end training: what cannot be written is lost, people are told, the next write is tried.
"""

from __future__ import annotations

import functools
import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

from flotilla.core.types import Episode

METRICS_FILE = "metrics.jsonl"
EPISODES_FILE = "episodes.jsonl"
STATUS_FILE = "status.json"

_STRICT = json.JSONEncoder(allow_nan=False)


class Writers:
    """Everything that is written into the run's directory while it goes on; appends to what is there."""

    def __init__(self, run_dir: Path, resumed: Mapping[str, int] | None = None) -> None:
        """`resumed`: the positions from which an earlier start is continued; what it wrote after them is dropped."""
        run_dir.mkdir(parents=True, exist_ok=True)
        self._run_dir = run_dir
        self._reported = False
        self._metrics = _Appender(run_dir / METRICS_FILE)
        self._episodes = _Appender(run_dir / EPISODES_FILE)
        self._events = _EventFile(run_dir / "tensorboard", resumed["env_steps"] + 1 if resumed else None)
        for name, lines in ((METRICS_FILE, self._metrics), (EPISODES_FILE, self._episodes)):
            self.guarded(functools.partial(lines.cut, resumed[name]) if resumed else lines.end_torn_line)

    def positions(self) -> dict[str, int]:
        """The length in bytes of each file of lines."""
        return {METRICS_FILE: self._metrics.end(), EPISODES_FILE: self._episodes.end()}

    def metrics(self, env_steps: int, elapsed_s: float, values: Mapping[str, float]) -> None:
        """One line in metrics.jsonl, one point per key in TensorBoard."""
        line = to_json({"env_steps": env_steps, "elapsed_s": round(elapsed_s, 3), **values})
        self.guarded(lambda: self._metrics.write(f"{line}\n".encode()))
        # Each training episode is a point of its own there: see `episodes`.
        points = {key: x for key, x in values.items() if key != "charts/episodic_return"}
        self.guarded(lambda: self._events.write([(env_steps, points)]))

    def episodes(self, elapsed_s: float, episodes: Iterable[Episode]) -> None:
        """One line in episodes.jsonl and one point in TensorBoard for each finished training episode."""
        lines, points = [], []
        for episode in episodes:
            record: dict[str, Any] = {
                "env_steps": episode.env_steps,
                "elapsed_s": round(elapsed_s, 3),
                "env": episode.env_index,
                "return": episode.episodic_return,
                "length": episode.length_steps,
            }
            curves = {"charts/episodic_return": episode.episodic_return}
            if episode.env_id:
                record["env_id"] = episode.env_id
                curves[f"charts/episodic_return/{episode.env_id}"] = episode.episodic_return
            lines.append(f"{to_json(record)}\n")
            points.append((episode.env_steps, curves))
        self.guarded(lambda: self._episodes.write("".join(lines).encode()))
        self.guarded(lambda: self._events.write(points))

    def status(self, status: Mapping[str, Any]) -> None:
        """Replace status.json."""
        self.guarded(lambda: replace_file(self._run_dir / STATUS_FILE, f"{to_json(status)}\n"))

    def guarded(self, write: Callable[[], object]) -> None:
        """Call `write`; an OSError is told to people once, instead of being raised."""
        try:
            write()
        except OSError as error:
            if not self._reported:
                self._reported = True
                reason = error.strerror or str(error)
                text = f"results in {self._run_dir} cannot be written ({reason}); training goes on without them"
                sys.stderr.write(f"flotilla: {text}\n")

    def close(self) -> None:
        """Close the files; idempotent."""
        for file in (self._metrics, self._episodes, self._events):
            self.guarded(file.close)


def to_json(record: Mapping[str, Any]) -> str:
    """Strict JSON in one line: NaN and the infinities, which it does not have, become null."""
    try:
        return _STRICT.encode(record)
    except ValueError:
        return _STRICT.encode(_finite(record))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON lines file; none where it is absent, without a last line that was cut off."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # half a line of a process that was killed
    return records


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def replace_file(path: Path, text: str) -> None:
    """Write a whole file, or leave the one before; a reader sees one of the two, also after a power cut."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


class _Appender:
    """A file that grows by whole records: one that was written in part is taken back."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+b", buffering=0)

    def write(self, data: bytes) -> None:
        """Append all of `data`, or raise OSError and append nothing."""
        start = self.end()
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            if len(rest) < len(data):
                self._file.truncate(start)
            raise

    def end(self) -> int:
        return self._file.seek(0, os.SEEK_END)

    def cut(self, end: int) -> None:
        """Drop what lies behind `end`; a file that lost some of what was before it is left as it is."""
        if self.end() > end:
            self._file.truncate(end)
        self.end_torn_line()

    def end_torn_line(self) -> None:
        """Start on a line of its own where an earlier process was killed in the middle of one."""
        end = self.end()
        if end > 0:
            self._file.seek(end - 1)
            if self._file.read(1) != b"\n":
                self.write(b"\n")

    def close(self) -> None:
        self._file.close()


class _EventFile:
    """A TensorBoard event file, written in this thread so that a failed write is noticed here."""

    def __init__(self, directory: Path, resumed_at: int | None = None) -> None:
        """`resumed_at`: the first environment step of which earlier files say nothing that still counts."""
        directory.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a directory in the order of their names; each process has its own.
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = _Appender(directory / name)
        self._begun = False
        self._resumed_at = resumed_at

    def write(self, points: Iterable[tuple[int, Mapping[str, float]]]) -> None:
        """Append, at each environment step, the values of some tags."""
        now = time.time()
        events = [] if self._begun else [Event(wall_time=now, file_version="brain.Event:2")]
        if not self._begun and self._resumed_at is not None:  # TensorBoard then drops later steps of earlier files
            events.append(Event(wall_time=now, step=self._resumed_at, session_log=SessionLog(status=SessionLog.START)))
        for env_steps, values in points:
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=x) for tag, x in values.items()])
            events.append(Event(wall_time=now, step=env_steps, summary=summary))
        batch = _Batch()
        record = RecordWriter(batch)
        for event in events:
            record.write(event.SerializeToString())
        self._file.write(bytes(batch.data))
        self._begun = True

    def close(self) -> None:
        self._file.close()


class _Batch:
    """What RecordWriter takes for a file: records that go to the disk together."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes) -> None:
        self.data += data
