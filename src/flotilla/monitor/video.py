"""An episode as an MP4 that every browser plays, encoded frame by frame so that memory stays bounded."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Self

import av
import numpy as np
from numpy.typing import NDArray

ENLARGE_TO = 480  # pixels of the longer side that small frames are enlarged up to


class VideoWriter:
    """Streams frames into H.264; the file has its name only when it is whole.

        with VideoWriter(path, fps=30) as video:
            video.add(frame)

    A run that fails inside the block, or that adds no frame, leaves no file.
    """

    def __init__(self, path: Path, fps: float) -> None:
        self.path = path
        self._partial = path.with_name(f".{path.name}.partial")
        self._fps = Fraction(fps).limit_denominator(1001)
        self._shape: tuple[int, ...] = ()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._container = av.open(str(self._partial), "w", format="mp4", options={"movflags": "faststart"})

    def add(self, frame: NDArray[np.uint8]) -> None:
        """Append one frame, uint8 of shape (height, width, 3); all frames have the shape of the first."""
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
            raise ValueError(f"a frame is uint8 (height, width, 3), not {frame.dtype} {frame.shape}")
        if not self._shape:
            self._open_stream(frame.shape)
        if frame.shape != self._shape:
            raise ValueError(f"frame {frame.shape} differs from the first one, {self._shape}")
        frame = frame.repeat(self._factor, axis=0).repeat(self._factor, axis=1)
        pad = (frame.shape[0] % 2, frame.shape[1] % 2)  # the colour planes have half the size
        frame = np.pad(frame, ((0, pad[0]), (0, pad[1]), (0, 0)), mode="edge")
        self._container.mux(self._stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))

    def close(self) -> None:
        """Finish the file and give it its name; idempotent."""
        if not self._shape:
            self.discard()
            return
        try:
            self._container.mux(self._stream.encode())
            self._container.close()
            self._partial.replace(self.path)
        except BaseException:
            self.discard()
            raise
        self._shape = ()

    def discard(self) -> None:
        """Leave nothing behind."""
        self._shape = ()
        self._container.close()
        self._partial.unlink(missing_ok=True)

    def _open_stream(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        height, width = shape[:2]
        self._factor = max(1, ENLARGE_TO // max(height, width))
        self._stream = self._container.add_stream("libx264", rate=self._fps)
        self._stream.height = height * self._factor + height * self._factor % 2
        self._stream.width = width * self._factor + width * self._factor % 2
        self._stream.pix_fmt = "yuv420p"
        self._stream.options = {"preset": "fast", "crf": "18"}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()
