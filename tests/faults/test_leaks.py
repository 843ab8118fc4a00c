"""Whatever ends how: no process, descriptor, mapping, thread or file in /dev/shm is left, and all of it soon."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import psutil
import pytest

from flotilla.sampling.pool import EnvironmentFailed, Pool

# Workers get the environments below by value: they need not import pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

# fork is the quickest start; Python 3.12 warns of it where there are threads.
pytestmark = [pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"), pytest.mark.usefixtures("no_hang")]


class Hanging(gym.Env[Any, Any]):
    """Sleeps or spins for ever in one of its methods, or keeps Python's lock meanwhile."""

    observation_space = gym.spaces.Box(0, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, where: str = "", how: str = "sleep", noted: Path | None = None) -> None:
        self.where, self.how, self.noted = where, how, noted

    def _maybe_hang(self, where: str) -> None:
        while where == self.where:
            if self.how == "sleep":
                time.sleep(600)
            if self.how == "lock":
                ctypes.PyDLL(None).sleep(600)

    def reset(self, **_: Any) -> Any:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self._maybe_hang("step")
        return np.zeros(2, np.float32), 0.0, False, False, {}

    def close(self) -> None:
        self._maybe_hang("close")
        if self.noted is not None:
            self.noted.touch()


def held() -> tuple[int, int, int, int]:
    """Descriptors, maps of blocks, children, threads."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("memfd:flotilla")
    children = len(multiprocessing.active_children())
    return len(os.listdir("/proc/self/fd")), maps, children, threading.active_count()


@pytest.fixture
def nothing_in_shm() -> Iterator[None]:
    """Nothing new stays in /dev/shm after the test."""
    before = set(os.listdir("/dev/shm"))
    yield
    assert not left_in_shm(before)


def left_in_shm(before: set[str], timeout_s: float = 15.0) -> set[str]:
    """What is new in /dev/shm and stays; tests that run beside this one have semaphores there for a while."""
    end = time.monotonic() + timeout_s
    while (left := set(os.listdir("/dev/shm")) - before) and time.monotonic() < end:
        time.sleep(0.1)
    return left


def gone(pids: list[int], timeout_s: float = 10.0) -> bool:
    """Whether none of these processes lives; a zombie that nobody waits for does not."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        alive = []
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                alive += [pid] if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE else []
        if not alive:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(("where", "how"), [("step", "sleep"), ("step", "busy"), ("close", "busy"), ("", "")])
def test_close_is_bounded_and_idempotent(tmp_path: Path, where: str, how: str) -> None:
    """Who ends by itself closes its environments; who does not is killed."""
    noted = tmp_path / "closed"
    pool = Pool([lambda: Hanging(where, how), lambda: Hanging(noted=noted)], num_workers=2, start_method="fork")
    pool.reset([0, 0])
    pool.send()
    time.sleep(0.1)
    pids, start = pool.pids, time.monotonic()
    pool.close(0.5)
    elapsed = time.monotonic() - start
    assert elapsed < 3
    assert (elapsed > 0.4) == (where != ""), "nobody who can end is waited for"
    pool.close()
    assert pool.closed
    assert pool.pids == []
    assert gone(pids, 0.0 + 0.5)
    assert noted.exists()
    with pytest.raises(OSError, match="closed"):
        pool.send()


def test_closing_while_a_large_reply_is_on_its_way_is_quick() -> None:
    class Large(Hanging):
        def step(self, action: Any) -> Any:
            return *super().step(action)[:4], {"large": bytes(2**20)}

    pool = Pool([Large] * 2, num_workers=2, start_method="fork", infos=True)
    pool.reset([0, 0])
    pool.send()
    time.sleep(0.1)
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < 2


@pytest.mark.usefixtures("nothing_in_shm")
def test_a_hundred_pools_leave_nothing() -> None:
    def cycle(method: str) -> None:
        pool = Pool([Hanging] * 2, num_workers=1, start_method=method, max_restarts=1, env_timeout_s=60)
        pool.reset([0, 0])
        pool.send()
        pool.recv()
        pool.close()

    cycle("fork")
    cycle("forkserver")  # its server and a tracker of resources stay: they belong to multiprocessing
    time.sleep(0.1)
    before = held()
    for n in range(100):
        cycle("forkserver" if n % 20 == 0 else "fork")
    time.sleep(0.1)  # for threads that watch to notice
    assert held() == before


@pytest.mark.usefixtures("nothing_in_shm")
def test_replacing_a_worker_leaves_nothing() -> None:
    pool = Pool([Hanging] * 2, num_workers=2, start_method="fork", max_restarts=100)
    pool.reset([0, 0])
    before = held()
    for _ in range(10):
        os.kill(pool.pids[0], signal.SIGKILL)
        pool.send()
        pool.recv()
    assert held() == before
    pool.close()


@pytest.mark.parametrize("how", ["raises", "dies", "makes no spaces", "cannot be sent"])
@pytest.mark.usefixtures("nothing_in_shm")
def test_a_constructor_that_fails_leaves_nothing(how: str) -> None:
    def make() -> Any:
        if how == "raises":
            raise RuntimeError("no such level")
        if how == "dies":
            os._exit(1)
        return object() if how == "makes no spaces" else Hanging(noted=threading.Lock())  # type: ignore[arg-type]

    lock = threading.Lock()
    makers: list[Any] = [Hanging, make]
    if how == "cannot be sent":
        makers[1] = lambda: (lock, make())[1]
    before = held()
    error = TypeError if how == "cannot be sent" else EnvironmentFailed
    with pytest.raises(error):
        Pool(makers, num_workers=2, start_method="fork")
    assert held() == before


@pytest.mark.usefixtures("nothing_in_shm")
def test_a_pool_that_is_forgotten_ends() -> None:
    """Also one with a thread that watches it, and one whose worker was lost."""
    before = held()
    pool = Pool([Hanging] * 2, num_workers=2, start_method="fork", env_timeout_s=0.2)
    pool.reset([0, 0])
    pids = pool.pids
    os.kill(pids[0], signal.SIGKILL)
    del pool
    gc.collect()
    assert gone(pids)
    time.sleep(0.2)
    assert held() == before


def test_a_forked_copy_of_a_pool_ends_nothing() -> None:
    """A process that the user forks can neither end the workers nor keep them alive."""
    pool = Pool([Hanging] * 2, num_workers=2, start_method="fork")
    pool.reset([0, 0])
    child = multiprocessing.get_context("fork").Process(target=lambda: (pool.close(), time.sleep(600)))
    child.start()
    time.sleep(0.2)
    assert child.is_alive()
    pool.send()
    pool.recv()
    pids, start = pool.pids, time.monotonic()
    pool.close()
    assert time.monotonic() - start < 2, "workers have noticed the end though the copy still lives"
    assert gone(pids, 0.5)
    child.kill()
    child.join()
    child.close()


# Ends of the whole program --------------------------------------------------------------------------------------

PROGRAM = """
import os, sys, time
sys.path.insert(0, {folder!r})
from test_leaks import Hanging
from flotilla.sampling.pool import Pool

pools = [
    Pool([Hanging, lambda: Hanging({where!r}, {how!r})], num_workers=2, start_method={method!r}) for _ in range({pools})
]
for pool in pools:
    pool.reset([0, 0])
    pool.send()
print(*[pid for pool in pools for pid in pool.pids], flush=True)
{then}
"""


def start(where: str, method: str, then: str, pools: int = 1, how: str = "busy") -> subprocess.Popen[str]:
    """A program that steps pools, in a group of its own."""
    code = PROGRAM.format(
        folder=str(Path(__file__).parent), where=where, method=method, then=then, pools=pools, how=how
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def workers_of(program: subprocess.Popen[str]) -> list[int]:
    """The processes that it has started, once all of them are at work."""
    assert program.stdout is not None
    line = program.stdout.readline()
    assert line, program.communicate()[1]
    return [int(pid) for pid in line.split()]


def descendants(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


WAIT = "for pool in pools: pool.recv()\ntime.sleep(600)"
ENDS: dict[str, Callable[[subprocess.Popen[str]], None]] = {
    "Ctrl-C": lambda program: os.killpg(program.pid, signal.SIGINT),
    "SIGTERM": lambda program: program.terminate(),
    "SIGKILL": lambda program: program.kill(),
}


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
@pytest.mark.parametrize("end", ENDS)
def test_no_process_outlives_the_program(end: str, method: str) -> None:
    """Failure 6 of the list; with a second pool, whose processes fork has given the first one's pipes."""
    before = set(os.listdir("/dev/shm"))
    with start("", method, WAIT, pools=2) as program:
        assert len(workers_of(program)) == 4
        everyone = descendants(program.pid)
        time.sleep(0.1)
        ENDS[end](program)
        assert gone([program.pid, *everyone], 20)
        assert not left_in_shm(before)
        _, errors = program.communicate()
    assert errors.count("Traceback") == (end == "Ctrl-C"), errors


def test_no_process_outlives_the_program_while_an_environment_hangs() -> None:
    """Neither where the program is ended, nor where it ends without closing its pools."""
    ended = [(end, start("step", method, WAIT)) for end in ENDS for method in ("forkserver", "fork")]
    ended += [("SIGKILL", start("step", method, WAIT, how="lock")) for method in ("forkserver", "spawn", "fork")]
    ends = {"": 0, "sys.exit(3)": 3, "os._exit(3)": 3, "1 / 0": 1}
    ending = [(then, start("step", "forkserver", then)) for then in ends]
    everyone = [[*workers_of(program), *descendants(program.pid)] for _, program in ended]
    time.sleep(0.1)
    for end, program in ended:
        ENDS[end](program)
    for (end, program), processes in zip(ended, everyone, strict=True):
        assert gone(processes, 30), end
        program.communicate()
    for then, program in ending:
        assert gone([program.pid, *workers_of(program)], 30), then
        program.communicate()
        assert program.returncode == ends[then]
