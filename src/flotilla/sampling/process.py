"""Worker processes as their parent sees them: how one starts, whether it hangs, and how all of them end.

It is the first of Flotilla that a new process imports, so it imports nothing that starts threads (no numpy).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from multiprocessing import connection, reduction
from multiprocessing.context import BaseContext
from typing import Any, NoReturn

THREADS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
IDLE = 0xFF  # in place of the local number of the environment at work
CLOSE_S = 5.0  # for workers to end by themselves
MOST_FILES = 2**20  # descriptors beyond it are not looked for


class WorkerProcess:
    """One worker: its process, the parent's ends of its pipes, and what was asked of it."""

    def __init__(self, slot: int, index: list[int], groups: list[range]) -> None:
        self.slot, self.index, self.groups = slot, index, groups
        self.process: Any = None
        self.go: Any = None  # commands
        self.done: Any = None  # replies
        self.owed: list[tuple[int, bytes | None]] = []  # commands without a reply yet, with their payload
        self.said: dict[int, Any] = {}  # the last reply to each command
        self.waiting: set[int] = set()  # local numbers of environments stepped one by one
        self.schema: Any = None
        self.hung: int | None = None  # local number of the environment for which the process was killed
        self.torn = False  # an exchange was interrupted: what the pipes hold now means nothing
        _living.add(self)

    def start(self, context: BaseContext, job: bytes, block: int) -> None:
        """Start a process, which begins to make its environments."""
        forks = context.get_start_method() == "fork"
        with _starting, contextlib.nullcontext() if forks else _without_script():
            theirs_go, self.go = context.Pipe(duplex=False)
            self.done, theirs_done = context.Pipe(duplex=False)
            process = context.Process(  # type: ignore[attr-defined]
                target=run,
                args=(job, theirs_go, theirs_done, block if forks else _Descriptor(block)),
                name=f"flotilla-worker-{self.slot}",
                daemon=True,
            )
            process.start()
            self.process = process
            theirs_go.close()
            theirs_done.close()

    def end(self, timeout_s: float) -> None:
        """End the process and give back what it held, whatever state it is in."""
        self.hang_up()
        if self.process is not None:
            process, self.process = self.process, None
            bury([process], timeout_s)

    def hang_up(self) -> None:
        """Close the pipes: a worker that is not at work ends, one that writes a reply too."""
        for end in (self.go, self.done):
            if end is not None:
                end.close()

    def obituary(self) -> str:
        """How the process ended, in words."""
        self.process.join(CLOSE_S)
        code = self.process.exitcode
        if code is None:
            return "its process closed its pipe"
        how = f"by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"with exit code {code}"
        return f"its process ended {how}"


def split(groups: Sequence[slice], num_workers: int) -> list[WorkerProcess]:
    """Each group over all workers, as evenly as it goes; neighbours stay together."""
    index: list[list[int]] = [[] for _ in range(num_workers)]
    parts: list[list[range]] = [[] for _ in range(num_workers)]
    for g, group in enumerate(groups):
        size, more = divmod(group.stop - group.start, num_workers)
        larger = range(more) if g % 2 == 0 else range(num_workers - more, num_workers)
        start = group.start
        for w in range(num_workers):
            stop = start + size + (w in larger)
            parts[w].append(range(len(index[w]), len(index[w]) + stop - start))
            index[w].extend(range(start, stop))
            start = stop
    return [WorkerProcess(slot, index[slot], parts[slot]) for slot in range(num_workers)]


_living: weakref.WeakSet[WorkerProcess] = weakref.WeakSet()
_starting = threading.Lock()  # no process may inherit the ends of pipes that are about to be given to another


def _forget_parent() -> None:
    """In a forked process: the ends of pipes that it has inherited would keep workers from noticing their end."""
    global _starting
    _starting = threading.Lock()
    for worker in _living:
        worker.hang_up()


os.register_at_fork(after_in_child=_forget_parent)


def run(job: bytes, go: connection.Connection, done: connection.Connection, block: Any) -> None:
    """The target of the process: one thread in each library, the workers are the parallelism."""
    os.environ.update(dict.fromkeys(THREADS, "1"))
    with _guarded(go.fileno()):
        from flotilla.sampling import worker  # only now: numpy reads the variables when it is loaded

        worker.main(pickle.loads(job), go, done, block if isinstance(block, int) else block.detach())


@contextlib.contextmanager
def _guarded(commands: int) -> Iterator[None]:
    """With a child of this process that kills it a while after its parent has gone.

    No thread of its own could do that while an environment hangs in compiled code that keeps Python's lock.
    """
    alive, held = os.pipe()
    guard = os.fork()
    if guard == 0:
        _guard(os.getppid(), commands, alive)
    os.close(alive)
    try:
        yield
    finally:
        os.kill(guard, signal.SIGKILL)
        os.waitpid(guard, 0)
        os.close(held)


def _guard(worker: int, commands: int, alive: int) -> NoReturn:
    """The life of that child: it ends with the worker, or after it has killed it."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group
        start = 0
        for fd in (*sorted((commands, alive)), MOST_FILES):  # what it holds, nobody would see the end of
            os.closerange(start, fd)
            start = fd + 1
        ends = select.poll()
        ends.register(alive, 0)  # wakes at the end of file only
        ends.register(commands, 0)
        ends.poll()
        ends.unregister(commands)
        if not ends.poll(CLOSE_S * 1000) and os.getppid() == worker:
            os.kill(worker, signal.SIGKILL)
    finally:
        os._exit(0)


def watch(workers: Sequence[WorkerProcess], state: Any, stop: threading.Event, timeout_s: float) -> None:
    """Kill processes whose environment has been at work for longer than the timeout, until told to stop."""
    since: dict[int, tuple[Any, int, float]] = {}
    while not stop.wait(timeout_s / 4):
        now = time.monotonic()
        for worker in workers:
            process, progress = worker.process, int(state[worker.slot, 0])
            known, before, start = since.get(worker.slot, (None, IDLE, now))
            if progress & 0xFF == IDLE or (process, progress) != (known, before):
                since[worker.slot] = (process, progress, now)
            elif now - start > timeout_s:
                worker.hung = progress & 0xFF
                try:
                    if not connection.wait([process.sentinel], 0):  # else its number may be another's by now
                        process.kill()
                except ValueError:  # it was replaced meanwhile
                    worker.hung = None


def end(
    workers: Sequence[WorkerProcess], block: int, stop: threading.Event, owner: int, timeout_s: float = CLOSE_S
) -> None:
    """Have all processes end, kill those that do not within `timeout_s`, and give back what they held."""
    if os.getpid() != owner:  # a forked copy of the pool goes, not the pool
        return
    stop.set()
    processes = [worker.process for worker in workers if worker.process is not None]
    for worker in workers:
        worker.hang_up()
        worker.process = None
    bury(processes, timeout_s)
    with contextlib.suppress(OSError):
        os.close(block)


def bury(processes: Sequence[Any], timeout_s: float) -> None:
    """Wait for processes to end, and kill those that do not."""
    deadline = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join(CLOSE_S)
        with contextlib.suppress(ValueError):  # not even killed: it hangs in the kernel
            process.close()


class _Descriptor:
    """A file descriptor that travels to a process that is being started."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> Any:
        return _same, (reduction.DupFd(self._fd),)


def _same(handle: Any) -> Any:
    return handle


@contextlib.contextmanager
def _without_script() -> Iterator[None]:
    """New processes do not run the user's script again.

    Functions of the script travel by value (cloudpickle), so that it needs no `if __name__ == "__main__"`.
    """
    script = sys.modules["__main__"].__dict__
    kept: dict[str, Any] = {name: script[name] for name in ("__spec__", "__file__") if name in script}
    script["__spec__"] = None
    script.pop("__file__", None)
    try:
        yield
    finally:
        script.update(kept)
