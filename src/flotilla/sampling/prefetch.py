"""One batch ahead: while the learner has a batch, the next one is gathered in a thread, into memory that stays."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch
from torch import Tensor

Named = dict[str, Tensor]
Fill = Callable[[Named], None]  # writes a batch into tensors of these names
Batch = TypeVar("Batch")


class Buffer(Generic[Batch]):
    """A batch where it is gathered, and the same on the device where it is used."""

    def __init__(self, made: Named, device: torch.device, view: Callable[[Named], Batch]) -> None:
        """`made`: where the gathering writes, on the host too where the device is a GPU; `view`: what is handed out."""
        on_gpu, self._device = device.type == "cuda", device
        self.gathered = {key: x.pin_memory() if on_gpu and x.device.type == "cpu" else x for key, x in made.items()}
        self._used = {
            key: x if x.device.type == device.type else torch.empty_like(x, device=device, pin_memory=False)
            for key, x in self.gathered.items()
        }
        self.batch = view(self._used)
        self.moved = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def fill(self, fill: Fill) -> None:
        if self.moved is not None:
            self.moved.synchronize()  # until then the page-locked memory is being read
        fill(self.gathered)
        self.move()

    def move(self) -> None:
        """Start its way to the device, on the current stream."""
        for key, x in self._used.items():
            if x is not self.gathered[key]:
                x.copy_(self.gathered[key], non_blocking=True)
        if self.moved is not None:
            self.moved.record(torch.cuda.current_stream(self._device))


class Prefetch(Generic[Batch]):
    """Two buffers that take turns: one is out, the other is filled by a thread.  Without a thread one is enough."""

    def __init__(self, make: Callable[[], Buffer[Batch]], device: torch.device, *, threaded: bool) -> None:
        self._next = make()
        self._out = make() if threaded else self._next
        self._device, self._on_gpu = device, device.type == "cuda"
        self._thread = ThreadPoolExecutor(1, "replay") if threaded else None
        self._stream = torch.cuda.Stream(device) if threaded and self._on_gpu else None  # type: ignore[no-untyped-call]
        self._filling: Future[None] | None = None
        self.ahead = False  # whether the next batch is there or on its way
        self.threaded = threaded

    def start(self, fill: Fill) -> None:
        """Fill the buffer that is not out."""
        self.ahead = True
        if self._thread is None:
            self._next.fill(fill)
            return
        # What the caller has asked of the device so far may still write the ring, or read the buffer.
        before = torch.cuda.current_stream(self._device).record_event() if self._on_gpu else None
        self._filling = self._thread.submit(self._fill, self._next, fill, before)

    def take(self) -> Batch:
        """The batch that was started; what its thread raised is raised.  With a thread `start` does not touch it."""
        filling, self._filling, self.ahead = self._filling, None, False
        if filling is not None:
            filling.result()
        self._out, self._next = self._next, self._out
        self._order(self._out)
        return self._out.batch

    def wait(self) -> None:
        """Until nothing is read from the ring; an error waits for `take`."""
        if self._filling is not None and self._filling.exception() is None:
            self._order(self._next)

    def waiting(self) -> Named:
        """The batch that is ahead."""
        self.wait()
        return self._next.gathered

    def put(self, batch: Named) -> None:
        """A batch that was ahead when the run was saved."""
        for key, x in self._next.gathered.items():
            x.copy_(batch[key])
        self._next.move()
        self.ahead = True

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def _fill(self, buffer: Buffer[Batch], fill: Fill, before: torch.cuda.Event | None) -> None:
        with torch.cuda.stream(self._stream):
            if before is not None:
                before.wait()
            buffer.fill(fill)

    def _order(self, buffer: Buffer[Batch]) -> None:
        """What the caller asks of the device from now on comes after the buffer's filling."""
        if buffer.moved is not None:
            torch.cuda.current_stream(self._device).wait_event(buffer.moved)
