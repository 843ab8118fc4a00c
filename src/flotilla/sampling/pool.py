"""The parent's side of worker processes: starts them, sends commands, waits, restarts what fails, ends them.

W processes hold E environments each.  All that is exchanged at each step lies in one block of shared memory; two
pipes per worker carry a byte there and two bytes back, and tell at once when the other side is gone.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import multiprocessing
import os
import pickle
import select
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.context import BaseContext
from typing import Any

import gymnasium as gym
import numpy as np

from flotilla.core.errors import UsageError
from flotilla.sampling import shm
from flotilla.sampling.messages import (
    INFO_COLUMNS,
    MAX_ENVS,
    MESSAGE,
    ORDER,
    PENDING,
    TABLE,
    WHOLE,
    Fault,
    Info,
    Job,
    Made,
    Message,
    dumps,
)
from flotilla.sampling.process import CLOSE_S, IDLE, WorkerProcess, end, split, watch

Maker = Callable[[], gym.Env[Any, Any]]
SPIN_US = 50  # how long a side looks at memory before it sleeps in the kernel, where cores are to spare
REPLACE_S = 1.0  # for a process that is replaced to end by itself
START_S = 60.0  # for a process to start and import, where environments have a time limit


class EnvironmentFailed(RuntimeError):
    """An environment raised, or its process died or hung, and no restart is left."""

    def __init__(self, fault: Fault, note: str = "") -> None:
        super().__init__(f"environment {fault.env_index} (process {fault.pid}) failed{note}:\n{fault.text}")
        self.fault = fault


class Pool:
    """N environments in W processes.

    makers: a function without arguments for each environment; lambdas and closures work.
    num_groups: environments are stepped in groups of N / num_groups neighbours, spread over all workers.
    infos: whether the environments' infos travel; else only `info["episode"]` does, as numbers.
    max_restarts, window_s: how many faults within a window are repaired; 0: the first one raises.
    env_timeout_s: the process of an environment at work for longer is killed; 0: never.
    reseed: each whole episode (with `info["episode"]` at its end) begins with a seed of its own, so that it can be
    had again by its number; else an environment goes on with its own generator, as in Gymnasium.
    agree: the spaces of one environment from what all say; the default refuses differences.
    """

    def __init__(
        self,
        makers: Sequence[Maker],
        *,
        num_workers: int = 0,
        num_groups: int = 1,
        autoreset: str = "next_step",
        infos: bool = False,
        start_method: str | BaseContext = "forkserver",
        max_restarts: int = 0,
        window_s: float = 300.0,
        env_timeout_s: float = 0.0,
        reseed: bool = False,
        agree: Callable[[Sequence[Made]], tuple[gym.Space[Any], gym.Space[Any]]] | None = None,
    ) -> None:
        self.num_envs, self._makers = len(makers), list(makers)
        self.num_workers = min(num_workers or usable_cores(), self.num_envs // num_groups)
        self.num_workers = max(self.num_workers, -(-self.num_envs // MAX_ENVS))
        self.autoreset, self._infos, self._reseed = autoreset, infos, reseed
        self._max_restarts, self._window_s, self._env_timeout_s = max_restarts, window_s, env_timeout_s
        self._context = multiprocessing.get_context(start_method) if isinstance(start_method, str) else start_method
        self.faults: list[Fault] = []  # for whoever reports them
        self._incidents: collections.deque[float] = collections.deque()
        self._seeds: list[int | None] = [None] * self.num_envs
        self._ready: collections.deque[int] = collections.deque()
        assert self.num_envs % num_groups == 0
        size = self.num_envs // num_groups
        self.groups = [slice(start, start + size) for start in range(0, self.num_envs, size)]
        self._workers = split(self.groups, self.num_workers)
        self._of = {i: (worker, k) for worker in self._workers for k, i in enumerate(worker.index)}
        self._members = [[w for w in self._workers if w.groups[g]] for g in range(num_groups)]
        self._last = ORDER  # the command whose replies came last
        self._fd = shm.open_block()
        self._stop = threading.Event()
        self._owner = os.getpid()
        self._closer = weakref.finalize(self, end, self._workers, self._fd, self._stop, self._owner)
        try:
            for worker in self._workers:
                self._start(worker, revived=False)
            made = {i: one for worker in self._workers for i, one in self._receive_made(worker)}
            self.made: list[Made] = [made[i] for i in range(self.num_envs)]
            self.obs_space, self.action_space = (agree or shm.same_spaces)(self.made)
            self._allocate()
            for worker in self._workers:
                self._send_layout(worker)
        except BaseException:
            self.close()
            raise
        if env_timeout_s > 0:
            watched = (self._workers, self._state, self._stop, env_timeout_s)
            threading.Thread(target=watch, args=watched, daemon=True).start()

    # Starting -------------------------------------------------------------------------------------------------

    def _start(self, worker: WorkerProcess, *, revived: bool) -> None:
        job = Job(
            makers=dumps([self._makers[i] for i in worker.index]),
            index=tuple(worker.index),
            groups=tuple(worker.groups),
            slot=worker.slot,
            autoreset=self.autoreset,
            infos=self._infos,
            max_restarts=self._max_restarts,
            revived=revived,
            seeds=tuple(self._seeds[i] for i in worker.index),
            reseed=self._reseed,
        )
        worker.start(self._context, pickle.dumps(job), self._fd)

    def _receive_made(self, worker: WorkerProcess) -> Sequence[tuple[int, Made]]:
        """What its environments say of themselves, by index; EnvironmentFailed where they cannot."""
        try:
            if self._env_timeout_s > 0 and not worker.done.poll(START_S + self._env_timeout_s * len(worker.index)):
                worker.process.kill()
                raise EnvironmentFailed(
                    Fault(worker.index[0], worker.process.pid, "it did not start in time"), " to start"
                )
            answer = pickle.loads(worker.done.recv_bytes())
        except (EOFError, OSError):
            fault = Fault(worker.index[0], worker.process.pid, worker.obituary())
            raise EnvironmentFailed(fault, " to start") from None
        if isinstance(answer, Message):
            if isinstance(answer.faults[0].error, UsageError):
                raise answer.faults[0].error  # a sentence for the user, as from this process
            raise EnvironmentFailed(answer.faults[0], " to start") from answer.faults[0].error
        return list(zip(worker.index, answer, strict=True))

    def _allocate(self) -> None:
        """Reserve the memory and find the arrays in it."""
        n = self.num_envs
        obs, action = shm.leaves(self.obs_space), shm.leaves(self.action_space)
        self._layout: shm.Layout = {("obs", path): ((n, *shape), dtype) for path, (shape, dtype) in (obs or {}).items()}
        self._layout |= {("action", path): ((n, *shape), dtype) for path, (shape, dtype) in (action or {}).items()}
        flags = ("terminated", "truncated", "finished", "restarted", "pending")
        for name, kind in [("reward", "f8"), ("episodes", "i8"), *((flag, "?") for flag in flags)]:
            self._layout["pool", name] = ((n,), np.dtype(kind))
        self._layout["pool", "episode"] = ((n, 2), np.dtype("f8"))
        self._layout["pool", "infos"] = ((n, INFO_COLUMNS if self._infos else 0), np.dtype("f8"))
        # Of each worker: steps begun << 8 | environment at work, or IDLE; commands sent; microseconds to spin.
        self._layout["pool", "workers"] = ((len(self._workers), 8), np.dtype("i8"))
        arrays = shm.reserve(self._fd, self._layout)
        self.obs = {path: array for (kind, path), array in arrays.items() if kind == "obs"}
        self.action = {path: array for (kind, path), array in arrays.items() if kind == "action"}
        self._arrays = {name: array for (kind, name), array in arrays.items() if kind == "pool"}
        self.reward, self.terminated = self._arrays["reward"], self._arrays["terminated"]
        self.truncated, self.restarted = self._arrays["truncated"], self._arrays["restarted"]
        self.finished, self.episode = self._arrays["finished"], self._arrays["episode"]
        self.episodes = self._arrays["episodes"]  # that began with the next seed of the environment's own stream
        self._state = self._arrays["workers"]
        self._spins = usable_cores() > self.num_workers
        self._state[:, 0] = IDLE
        self._state[:, 2] = SPIN_US if self._spins else 0

    def _send_layout(self, worker: WorkerProcess) -> None:
        """Tell a worker where everything lies."""
        with contextlib.suppress(BrokenPipeError):  # a dead worker is noticed when its reply is read
            worker.go.send_bytes(dumps((self._layout, self.action_space)))

    # Stepping groups ------------------------------------------------------------------------------------------

    def send(self, group: int = 0) -> None:
        """Step the environments of a group with the actions that lie in `action`."""
        for worker in self._members[group]:
            self._tell(worker, group)

    def recv(self, group: int = 0, timeout_s: float | None = None) -> None:
        """Wait until the group's rows lie in the arrays; TimeoutError after `timeout_s` (the rows still come)."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for worker in self._members[group]:
            while (group, None) in worker.owed:  # also of an earlier step that nobody received
                self._answer(worker, deadline)
        self._last = group

    # Stepping whatever is ready -------------------------------------------------------------------------------

    def send_some(self, env_index: Sequence[int]) -> None:
        """Step these environments with the actions that lie in `action`; their rows are ready one by one."""
        pending = self._arrays["pending"]
        told: dict[int, WorkerProcess] = {}
        for i in env_index:
            worker, k = self._of[i]
            worker.waiting.add(k)
            pending[i] = True
            told[worker.slot] = worker
        for worker in told.values():
            self._write(worker, PENDING)

    def recv_some(self, count: int, timeout_s: float | None = None) -> list[int]:
        """The indices of the first `count` environments that are ready, in the order of their arrival."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while len(self._ready) < count:
            busy = {worker.done.fileno(): worker for worker in self._workers if worker.waiting}
            assert busy, "more environments are waited for than were sent"
            torn = [worker for worker in busy.values() if worker.torn]
            for worker in torn or [busy[fd] for fd in _readable(busy, deadline)]:
                self._answer(worker)
        return [self._ready.popleft() for _ in range(count)]

    # Orders ---------------------------------------------------------------------------------------------------

    def reset(self, seeds: Sequence[int | None], options: Any = None, chosen: Sequence[bool] | None = None) -> None:
        """Begin episodes: `order_reset` and its end."""
        self.order_reset(seeds, options, chosen)
        self.finish_order()

    def order_reset(
        self, seeds: Sequence[int | None], options: Any = None, chosen: Sequence[bool] | None = None
    ) -> None:
        """Have episodes begin in the chosen environments (all); a seed of None goes on with the environment's own."""
        wanted = [True] * self.num_envs if chosen is None else list(chosen)
        self.order("reset", options, each=list(zip(seeds, wanted, strict=True)))
        self._ready.clear()
        for i, seed in enumerate(seeds):
            if wanted[i] and seed is not None:
                self._seeds[i] = seed

    def order(self, name: str, *arguments: Any, each: Sequence[Any] | None = None) -> None:
        """Send an order to all workers; `each` is split: a value for each environment, as the last argument."""
        self.settle()
        for worker in self._workers:
            part = () if each is None else ([each[i] for i in worker.index],)
            worker.said.pop(ORDER, None)
            self._tell(worker, ORDER, dumps((name, *arguments, *part)))

    def finish_order(self, timeout_s: float | None = None) -> list[Any]:
        """The answers to an order, one for each environment; EnvironmentFailed where one has none."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        found: list[Any] = [None] * self.num_envs
        for worker in self._workers:
            while worker.owed:
                self._answer(worker, deadline)
            for i, one in zip(worker.index, worker.said.get(ORDER) or (), strict=False):
                found[i] = one
        self._last = ORDER
        return found

    def settle(self) -> None:
        """Wait for replies that nobody waited for (after a timeout), so that replies belong to their commands."""
        for worker in self._workers:
            while worker.owed or worker.waiting:
                self._answer(worker)

    # Infos ----------------------------------------------------------------------------------------------------

    def infos(self) -> list[Info]:
        """The infos of the last replies, one for each environment."""
        found: list[Info] = [{} for _ in range(self.num_envs)]
        for worker, part, answer in self._answers():
            for n, k in enumerate(part):
                i = worker.index[k]
                if isinstance(answer, tuple):
                    keys, types = answer
                    values = self._arrays["infos"][i, : len(keys)].tolist()
                    found[i] = {key: kind(x) for key, kind, x in zip(keys, types, values, strict=True)}
                elif answer:
                    found[i] = answer[n]
        return found

    def info_columns(self) -> dict[str, tuple[type, Any]] | None:
        """Type and values (N,) of every key, where the last infos are all numbers of the same keys, or all empty."""
        answers = [answer for _, _, answer in self._answers()]
        if not any(answers):
            return {}
        if not isinstance(answers[0], tuple) or any(answer != answers[0] for answer in answers):
            return None
        keys, types = answers[0]
        table = self._arrays["infos"]
        return {key: (kind, table[:, n].astype(kind)) for n, (key, kind) in enumerate(zip(keys, types, strict=True))}

    def _answers(self) -> list[tuple[WorkerProcess, range, Any]]:
        """The last replies: whose, of which environments, and what: infos, or keys and types of those in the table."""
        if self._last == ORDER:
            return [(worker, range(len(worker.index)), worker.said.get(ORDER)) for worker in self._workers]
        group = self._last
        return [(worker, worker.groups[group], worker.said.get(group)) for worker in self._members[group]]

    # The wire -------------------------------------------------------------------------------------------------

    def _tell(self, worker: WorkerProcess, command: int, payload: bytes | None = None) -> None:
        worker.owed.append((command, payload))
        self._write(worker, command, payload)

    def _write(self, worker: WorkerProcess, command: int, payload: bytes | None = None) -> None:
        try:
            if self._spins:
                self._state[worker.slot, 1] += 1
            os.write(worker.go.fileno(), bytes((command,)))
            if payload is not None:
                worker.go.send_bytes(payload)
        except BrokenPipeError:  # as above
            pass
        except BaseException:
            worker.torn = True
            raise

    def _answer(self, worker: WorkerProcess, deadline: float | None = None) -> None:
        """Take the worker's next reply, to whichever command; where it has died, a new one comes to owe the same."""
        if worker.torn:
            self._replace(worker)
        if deadline is not None:
            _readable({worker.done.fileno(): worker}, deadline)
        message: Message | None = None
        worker.torn = True  # should Ctrl-C strike here, half a reply may be lost
        reply = os.read(worker.done.fileno(), 2)
        if reply and reply[0] == MESSAGE:
            try:
                message = pickle.loads(worker.done.recv_bytes())
            except (EOFError, OSError):  # it died in the middle
                reply = b""
        if not reply:
            self._note(self._death(worker))
            self._replace(worker)
            return
        kind, number = reply
        if number == WHOLE:
            command, _ = worker.owed.pop(0)
            worker.said[command] = worker.schema if kind == TABLE else message and message.result
        else:
            worker.waiting.discard(number)
            self._ready.append(worker.index[number])
        worker.torn = False
        if message is not None:
            self._take(worker, message)

    def _take(self, worker: WorkerProcess, message: Message) -> None:
        worker.schema = message.schema or worker.schema
        self._note(*message.faults)
        if message.refused is not None:
            raise EnvironmentFailed(message.refused) from message.refused.error

    # Faults ---------------------------------------------------------------------------------------------------

    def _note(self, *faults: Fault) -> None:
        """Keep and count faults; EnvironmentFailed when there are too many."""
        self.faults += faults
        now = time.monotonic()
        for fault in faults:
            self._incidents.append(now)
            while self._incidents[0] < now - self._window_s:
                self._incidents.popleft()
            if len(self._incidents) > self._max_restarts:
                many = f" (fault {len(self._incidents)} within {self._window_s:g} s; {self._max_restarts} are allowed)"
                raise EnvironmentFailed(fault, many if self._max_restarts else "") from fault.error

    def _death(self, worker: WorkerProcess) -> Fault:
        """What happened to a process that has gone, and to which of its environments."""
        at, pid = int(self._state[worker.slot, 0]) & 0xFF, worker.process.pid
        if worker.hung is not None:
            text = f"it was at work for more than {self._env_timeout_s:g} s (env_timeout_s), and its process was killed"
            return Fault(worker.index[worker.hung], pid, text)
        if at == IDLE:
            return Fault(worker.index[0], pid, f"{worker.obituary()} while none of its environments was at work")
        return Fault(worker.index[at], pid, worker.obituary())

    def _replace(self, worker: WorkerProcess) -> None:
        """A new process; what the old one owed is told again, and every environment begins anew."""
        if self.closed:
            raise RuntimeError("the pool is closed")
        for attempt in itertools.count():
            worker.end(REPLACE_S)
            self._state[worker.slot, :2] = IDLE, 0
            self._start(worker, revived=True)
            try:
                self._receive_made(worker)
                break
            except EnvironmentFailed as error:
                self._note(error.fault)
                if attempt == self._max_restarts:
                    raise
        self._send_layout(worker)
        for command, payload in worker.owed:
            self._write(worker, command, payload)
        if worker.waiting:
            self._arrays["pending"][[worker.index[k] for k in worker.waiting]] = True
            self._write(worker, PENDING)
        worker.torn = False

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """End all processes; idempotent, and done after `timeout_s` and a little."""
        if self._closer.detach():
            end(self._workers, self._fd, self._stop, self._owner, timeout_s)

    @property
    def closed(self) -> bool:
        return not self._closer.alive

    @property
    def pids(self) -> list[int]:
        """Of the workers."""
        return [worker.process.pid for worker in self._workers if worker.process is not None]


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _readable(workers: dict[int, WorkerProcess], deadline: float | None) -> list[int]:
    """Descriptors with something to read (also an end of file), after waiting for one; TimeoutError at the deadline."""
    poll = select.poll()
    for fd in workers:
        poll.register(fd, select.POLLIN)
    events = poll.poll(None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000)
    if not events:
        raise TimeoutError("the environments did not answer in time")
    return [fd for fd, _ in events]
