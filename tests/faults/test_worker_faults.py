"""What fails in a worker begins again, is counted and named; nothing else notices."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest

from flotilla.core.seeding import stream_seed
from flotilla.sampling import pool as pools
from flotilla.sampling.base import Restarted, RowArrays
from flotilla.sampling.pool import EnvironmentFailed, Pool
from flotilla.sampling.workers import WorkersBackend

# Workers get the environments below by value: they need not import pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

# fork is the quickest start; Python 3.12 warns of it where there are threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
TIMEOUT_S = 0.4
STEPS = 12


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    """A test that waits for ever fails."""
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it hangs"))
    signal.alarm(30)
    yield
    signal.alarm(0)


@pytest.fixture
def pool() -> Iterator[Callable[..., Pool]]:
    """`pool(makers, **settings)`, closed after the test."""
    made: list[Pool] = []

    def make(makers: Any, **settings: Any) -> Pool:
        made.append(Pool(makers, **{"num_workers": 2, "start_method": "fork", "max_restarts": 5} | settings))
        return made[-1]

    yield make
    for one in made:
        start = time.monotonic()
        one.close(0.5)
        assert time.monotonic() - start < 3
        one.close()


def raises() -> None:
    raise RuntimeError("out of fuel")


def spins() -> None:
    while True:
        pass


FAULTS: dict[str, Callable[[], Any]] = {
    "raise": raises,
    "sys.exit": lambda: sys.exit(3),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "os._exit": lambda: os._exit(7),
    "segfault": lambda: ctypes.string_at(0),
    "sleep": lambda: time.sleep(600),
    "busy": spins,
}
IN_PROCESS = {"raise", "sys.exit"}  # the worker lives on, and with it its other environments
WORDS = {
    "raise": "RuntimeError: out of fuel",
    "sys.exit": "SystemExit: 3",
    "SIGKILL": "its process ended by signal 9 (Killed)",
    "os._exit": "its process ended with exit code 7",
    "segfault": "its process ended by signal 11 (Segmentation fault)",
    "sleep": f"at work for more than {TIMEOUT_S} s (env_timeout_s)",
    "busy": f"at work for more than {TIMEOUT_S} s (env_timeout_s)",
}


class Fragile(gym.Env[Any, Any]):
    """Draws all that it says; fails where it is told, as long as there are marks left in a folder."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, index: int = 0, where: str = "", fault: str = "", marks: Path = Path()) -> None:
        self.index, self.where, self.fault, self.marks = index, where, fault, marks
        self.time = self.episode = 0
        self._maybe_fail("made")

    def _maybe_fail(self, where: str) -> None:
        if where == self.where:
            left = sorted(self.marks.iterdir())
            if left:
                left[0].unlink()
                FAULTS[self.fault]()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._maybe_fail(f"reset {self.episode}")
        super().reset(seed=seed)
        self.time, self.episode = 0, self.episode + 1
        return np.array([self.index, self.episode, 0, self.np_random.normal()]), {}

    def step(self, action: Any) -> Any:
        self.time += 1
        self._maybe_fail(f"step {self.episode}.{self.time}")
        obs = np.array([self.index, self.episode, self.time, self.np_random.normal()])
        return obs, float(self.np_random.normal()), False, self.time == 4, {}


def fragile(tmp_path: Path, where: str, fault: str, *, num_envs: int = 4, which: int = 1, times: int = 1) -> list[Any]:
    """Makers of environments; one of them fails so many times."""
    for n in range(times):
        (tmp_path / f"{n:04}").touch()
    return [
        functools.partial(Fragile, i, where if i == which else "", fault, tmp_path if i == which else Path())
        for i in range(num_envs)
    ]


def row_arrays(num_envs: int) -> RowArrays:
    flags = [np.zeros(num_envs, bool) for _ in range(3)]
    return RowArrays(np.zeros((num_envs, 4)), np.zeros(num_envs, np.float32), *flags)


def play(backend: WorkersBackend, mode: str, steps: int = STEPS) -> tuple[list[RowArrays], list[list[Any]]]:
    """T + 1 rows of all environments, and the events of each."""
    n = backend.num_envs
    rows, events = [row_arrays(n) for _ in range(steps + 1)], [[] for _ in range(steps + 1)]  # type: ignore[var-annotated]
    backend.reset(rows[0])
    for row, found in zip(rows[1:], events[1:], strict=True):
        if mode == "groups":
            for group, envs in enumerate(backend.groups):
                backend.send(np.zeros(len(range(n)[envs]), int), group)
            for group, envs in enumerate(backend.groups):
                found += backend.recv(row.at(envs), group)
        else:
            backend.send_some(np.zeros(n, int), list(range(n)))
            part = row_arrays(n)
            order, ended = backend.recv_some(n, part)
            found += ended
            for mine, theirs in zip(row, part, strict=True):
                mine[order] = theirs  # type: ignore[index]
    return rows, events


def alone(seed: int, index: int) -> Iterator[tuple[list[float], float]]:
    """Observations and rewards of an environment that nothing happens to, with an episode every five rows."""
    env = Fragile(index)
    while True:
        yield env.reset(seed=seed)[0].tolist(), 0.0
        seed, done = None, False  # type: ignore[assignment]
        while not done:
            obs, reward, _, done, _ = env.step(0)
            yield obs.tolist(), float(np.float32(reward))


def check_restart(rows: list[RowArrays], events: list[list[Any]], seeds: list[int], at: int, broken: set[int]) -> None:
    """Until row `at` nothing happened; there the broken ones begin again, with seeds of their own."""
    streams = [alone(seed, i) for i, seed in enumerate(seeds)]
    for t, row in enumerate(rows):
        if t == at:
            for i in broken:
                streams[i] = alone(stream_seed(seeds[i], "restart", 1), i)
        for i, stream in enumerate(streams):
            obs, reward = next(stream)
            assert (row.obs[i].tolist(), float(row.reward[i])) == (obs, reward), f"row {t} of environment {i}"  # type: ignore[index, call-overload, union-attr]
            assert row.is_first[i] == (obs[2] == 0)
            assert row.is_last[i] == (obs[2] == 4)
        restarted = {event.env_index for event in events[t] if isinstance(event, Restarted)}
        assert restarted == (broken if t == at else set())


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("mode", ["groups", "first ready"])
def test_only_what_failed_begins_again(tmp_path: Path, pool: Any, fault: str, mode: str) -> None:
    """Environment 1 of 4 fails in a step; 0 shares its process."""
    seeds = [11, 12, 13, 14]
    settings = {"num_workers": 2, "start_method": "fork", "max_restarts": 1, "env_timeout_s": TIMEOUT_S}
    backend = WorkersBackend(fragile(tmp_path, "step 2.2", fault), seeds, **settings)
    before = backend.pool.pids
    try:
        rows, events = play(backend, mode)
        after = backend.pool.pids
    finally:
        backend.close()
    broken = {1} if fault in IN_PROCESS else {0, 1}
    check_restart(rows, events, seeds, at=7, broken=broken)
    causes = {event.env_index: event.cause for event in events[7]}
    assert f"process {before[0]}: " in causes[1]
    assert WORDS[fault] in causes[1]
    assert causes.get(0, "") == "", "it did nothing wrong"
    assert (after[0] == before[0]) == (fault in IN_PROCESS)
    assert after[1] == before[1]


@pytest.mark.parametrize("fault", ["raise", "os._exit", "busy"])
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_groups_in_turns_and_every_start_method(tmp_path: Path, fault: str, start_method: str) -> None:
    """Environment 1 fails when its second group is under way, too; that one begins again at its own next row."""
    seeds = [11, 12, 13, 14]
    settings = {"num_workers": 1, "num_groups": 2, "start_method": start_method, "max_restarts": 1}
    backend = WorkersBackend(fragile(tmp_path, "step 1.3", fault), seeds, env_timeout_s=TIMEOUT_S, **settings)
    try:
        rows, events = play(backend, "groups")
    finally:
        backend.close()
    check_restart(rows, events, seeds, at=3, broken={1} if fault in IN_PROCESS else {0, 1, 2, 3})


@pytest.mark.parametrize("fault", ["raise", "segfault", "sleep"])
def test_a_fault_in_a_reset(tmp_path: Path, fault: str) -> None:
    """In the reset that follows an episode, and in the very first one."""
    seeds = [11, 12, 13, 14]
    settings = {"num_workers": 2, "start_method": "fork", "max_restarts": 1, "env_timeout_s": TIMEOUT_S}
    backend = WorkersBackend(fragile(tmp_path, "reset 1", fault), seeds, **settings)
    try:
        rows, events = play(backend, "groups")
    finally:
        backend.close()
    check_restart(rows, events, seeds, at=5, broken={1} if fault in IN_PROCESS else {0, 1})

    backend = WorkersBackend(fragile(tmp_path, "reset 0", fault), seeds, **settings)
    try:
        rows, _ = play(backend, "groups", 3)
    finally:
        backend.close()
    want = next(alone(stream_seed(12, "restart", 1) if fault in IN_PROCESS else 12, 1))[0]
    assert rows[0].obs[1].tolist() == want  # type: ignore[index, call-overload, union-attr]
    assert rows[0].obs[3].tolist() == next(alone(14, 3))[0]  # type: ignore[index, call-overload, union-attr]


@pytest.mark.parametrize("fault", ["raise", "os._exit", "SIGKILL", "segfault"])
def test_a_fault_in_the_constructor_at_the_start(tmp_path: Path, fault: str) -> None:
    start = time.monotonic()
    with pytest.raises(EnvironmentFailed, match=r"environment [01] \(process \d+\) failed to start") as failed:
        Pool(fragile(tmp_path, "made", fault), num_workers=2, start_method="fork", max_restarts=3)
    assert time.monotonic() - start < 5
    assert WORDS[fault] in str(failed.value)
    if fault == "raise":
        assert failed.value.fault.env_index == 1
        assert isinstance(failed.value.__cause__, RuntimeError)
        assert "_maybe_fail" in str(failed.value), "the traceback of the environment"


@pytest.mark.parametrize("fault", ["raise", "os._exit", "segfault"])
def test_a_storm_of_restarts_ends(tmp_path: Path, pool: Any, fault: str) -> None:
    """It dies in a step, and ever again when it is made: as many tries as are allowed, then an error."""
    makers = fragile(tmp_path, "step 1.2", fault, times=1)
    folder = tmp_path / "made"
    folder.mkdir()

    def make(first: list[bool] = [True]) -> Any:  # noqa: B006
        marker = tmp_path / "alive"
        if marker.exists():
            (folder / f"{time.monotonic_ns()}").touch()
            FAULTS[fault]()
        marker.touch()
        return Fragile(1, "step 1.2", fault, makers[1].args[3])

    for path in tmp_path.glob("0*"):
        path.rename(tmp_path / f"mark-{path.name}")
    marks = tmp_path / "marks"
    marks.mkdir()
    (marks / "0").touch()
    one = pool([makers[0], lambda: Fragile(1, "step 1.2", fault, marks) if not (tmp_path / "alive").exists() else make()])
    (tmp_path / "alive").touch()
    one.reset([1, 2])
    one.send()
    one.recv()
    one.send()
    with pytest.raises(EnvironmentFailed, match=r"\(fault 6 within 300 s; 5 are allowed\)") as failed:
        one.recv()
    assert failed.value.fault.env_index == 1
    assert WORDS[fault] in failed.value.fault.text
    assert len(list(folder.iterdir())) == 5
