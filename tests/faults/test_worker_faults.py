"""What fails in a worker begins again, is counted and named; nothing else notices."""

from __future__ import annotations

import ctypes
import faulthandler
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

from flotilla.core.seeding import episode_seed
from flotilla.sampling import pool as pools
from flotilla.sampling.base import Restarted, RowArrays
from flotilla.sampling.pool import EnvironmentFailed, Pool
from flotilla.sampling.workers import WorkersBackend

# Workers get the environments below by value: they need not import pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

# fork is the quickest start; Python 3.12 warns of it where there are threads.
pytestmark = [pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"), pytest.mark.usefixtures("no_hang")]
TIMEOUT_S = 0.4
STEPS = 12


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


def steps(pool: Pool, count: int) -> None:
    for _ in range(count):
        pool.send()
        pool.recv()


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
    "segfault": lambda: (faulthandler.disable(), ctypes.string_at(0)),  # pytest's dump of it would be noise
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
    rows, events = [row_arrays(n) for _ in range(steps + 1)], [[] for _ in range(steps + 1)]
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
                mine[order] = theirs
    return rows, events


def alone(seed: int, index: int) -> Iterator[tuple[list[float], float]]:
    """Observations and rewards of an environment that nothing happens to, with an episode every five rows."""
    env = Fragile(index)
    while True:
        yield env.reset(seed=seed)[0].tolist(), 0.0
        seed, done = None, False
        while not done:
            obs, reward, _, done, _ = env.step(0)
            yield obs.tolist(), float(np.float32(reward))


def check_restart(rows: list[RowArrays], events: list[list[Any]], seeds: list[int], broken: dict[int, int]) -> None:
    """Until its row the broken ones (environment -> row) are as if alone; there they begin again by other seeds."""
    for i, seed in enumerate(seeds):
        stream = alone(seed, i)
        for t, row in enumerate(rows):
            begins_again = broken.get(i) == t
            if begins_again:
                stream = alone(episode_seed(seed, 1), i)
            obs, reward = next(stream)
            assert isinstance(row.obs, np.ndarray)
            assert (row.obs[i].tolist(), float(row.reward[i])) == (obs, reward), f"row {t} of environment {i}"
            assert row.is_first[i] == (obs[2] == 0)
            assert row.is_last[i] == (obs[2] == 4)
            restarts = [one for one in events[t] if isinstance(one, Restarted) and one.env_index == i]
            assert len(restarts) == begins_again


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
    broken = {1: 7}
    if fault not in IN_PROCESS:
        broken[0] = 7 if mode == "groups" else 8  # its own row was ready before the process died
    check_restart(rows, events, seeds, broken)
    causes = {event.env_index: event.cause for event in events[7] + events[8]}
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
    check_restart(rows, events, seeds, dict.fromkeys([1] if fault in IN_PROCESS else [0, 1, 2, 3], 3))


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
    check_restart(rows, events, seeds, dict.fromkeys([1] if fault in IN_PROCESS else [0, 1], 5))

    backend = WorkersBackend(fragile(tmp_path, "reset 0", fault), seeds, **settings)
    try:
        rows, _ = play(backend, "groups", 3)
    finally:
        backend.close()
    want = next(alone(episode_seed(12, 1) if fault in IN_PROCESS else 12, 1))[0]
    assert rows[0].obs[1].tolist() == want
    assert rows[0].obs[3].tolist() == next(alone(14, 3))[0]


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


class Doomed(Fragile):
    """Fails in its first step, and whenever it is made again."""

    def __init__(self, fault: str, lives: Path) -> None:
        made_before = any(lives.iterdir())
        (lives / str(time.monotonic_ns())).touch()
        if made_before:
            FAULTS[fault]()
        super().__init__(1)
        self.fault = fault

    def step(self, action: Any) -> Any:
        FAULTS[self.fault]()


@pytest.mark.parametrize("fault", ["raise", "os._exit", "segfault", "busy"])
def test_a_storm_of_restarts_ends(tmp_path: Path, pool: Any, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tries as are allowed, then an error with the last cause."""
    monkeypatch.setattr(pools, "START_S", 0.2)
    one = pool([Fragile, lambda: Doomed(fault, tmp_path)], max_restarts=3, env_timeout_s=TIMEOUT_S)
    one.reset([1, 2])
    one.send()
    with pytest.raises(EnvironmentFailed, match=r"\(fault 4 within 300 s; 3 are allowed\)") as failed:
        one.recv()
    assert failed.value.fault.env_index == 1
    assert (WORDS[fault] if fault != "busy" else "it did not start in time") in str(failed.value)
    assert len(list(tmp_path.iterdir())) == 1 + 3


@pytest.mark.parametrize("fault", ["raise", "os._exit"])
def test_more_faults_than_allowed(tmp_path: Path, pool: Any, fault: str) -> None:
    """Every step fails; what is begun again fails in its first step, too."""
    one = pool(fragile(tmp_path, "step 1.1", fault, times=9), max_restarts=2)
    one.reset([1, 2, 3, 4])
    steps(one, 2)
    assert one.episodes[1] == 2
    pid = one.pids[0]
    one.send()
    with pytest.raises(EnvironmentFailed, match=rf"environment 1 \(process {pid}\) failed \(fault 3 within") as failed:
        one.recv()
    assert WORDS[fault] in str(failed.value)


def test_faults_that_are_long_ago_do_not_count(tmp_path: Path, pool: Any) -> None:
    one = pool(fragile(tmp_path, "step 1.1", "raise", times=6), max_restarts=1, window_s=0.05)
    one.reset([1, 2, 3, 4])
    for _ in range(12):
        steps(one, 1)
        time.sleep(0.06)
    assert one.episodes.tolist() == [0, 6, 0, 0]


def test_the_environment_at_work_is_named(tmp_path: Path, pool: Any) -> None:
    """Of many in one process; and none, where none was at work."""
    one = pool(fragile(tmp_path, "step 1.2", "segfault", num_envs=9, which=7), num_workers=1, max_restarts=2)
    one.reset(range(9))
    steps(one, 2)
    assert [fault.env_index for fault in one.faults] == [7]
    os.kill(one.pids[0], signal.SIGKILL)
    one.send()
    one.recv()
    assert one.faults[1].text.endswith("signal 9 (Killed) while none of its environments was at work")


def test_a_worker_that_dies_while_it_is_replaced(tmp_path: Path, pool: Any) -> None:
    """Its first replacement is killed before its environments are made; the second one lives."""
    lives = tmp_path / "lives"
    lives.mkdir()

    def make() -> Any:
        life = len(list(lives.iterdir()))
        (lives / str(life)).touch()
        if life == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return Fragile(0)

    one = pool([make], num_workers=1)
    one.reset([3])
    os.kill(one.pids[0], signal.SIGKILL)
    one.send()
    one.recv()
    assert len(one.faults) == 2
    assert one.obs[()][0].tolist() == next(alone(episode_seed(3, 1), 0))[0]


def test_a_worker_that_is_killed_while_it_starts(tmp_path: Path) -> None:
    def make() -> Any:
        (tmp_path / str(os.getpid())).touch()
        time.sleep(600)

    def kill() -> None:
        while not (pids := [int(path.name) for path in tmp_path.iterdir()]):
            time.sleep(0.01)
        os.kill(pids[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(EnvironmentFailed, match="failed to start:\nits process ended by signal 9"):
        Pool([make], num_workers=1)
    killer.join()


def test_a_reply_that_is_cut_short_is_a_death(pool: Any) -> None:
    """Killed while it waits for the parent to read the rest of a large message."""

    class Large(Fragile):
        def step(self, action: Any) -> Any:
            return *super().step(action)[:4], {"large": bytes(2**20)}

    one = pool([Large] * 2, num_workers=1, infos=True)
    one.reset([5, 6])
    one.send()
    time.sleep(0.2)
    os.kill(one.pids[0], signal.SIGKILL)
    one.recv()
    assert one.episodes.tolist() == [1, 1]
    one.send()
    one.recv()
    assert [len(info["large"]) for info in one.infos()] == [2**20] * 2
    assert one.obs[()][:, 2].tolist() == [1, 1]


def test_nobody_is_killed_for_the_time_that_the_parent_takes(pool: Any) -> None:
    """A reply that lies unread, or that does not fit into the pipe, is not an environment at work."""

    class Large(Fragile):
        def step(self, action: Any) -> Any:
            return *super().step(action)[:4], {"large": bytes(2**20 if self.index else 1)}

    makers = [lambda index=index: Large(index) for index in range(2)]
    one = pool(makers, infos=True, env_timeout_s=0.2)
    one.reset([5, 6])
    one.send()
    time.sleep(0.8)
    one.recv()
    one.send_some([0, 1])
    time.sleep(0.8)
    one.recv_some(2)
    assert not one.faults


def test_a_call_outlives_its_worker(pool: Any) -> None:
    """Asked again, of environments that are fit for use; their rows come with the next step."""
    one = pool([functools.partial(Fragile, i) for i in range(4)])
    one.reset([1, 2, 3, 4])
    os.kill(one.pids[0], signal.SIGKILL)
    one.order("call", "episode", (), {}, each=[True] * 4)
    assert one.finish_order() == [1, 1, 1, 1]
    one.send()
    one.recv()
    assert one.restarted.tolist() == [True, True, False, False]
    assert one.obs[()][:, 2].tolist() == [0, 0, 1, 1]
    assert one.obs[()][2:].tolist() == [list(obs) for obs in one.obs[()][2:]]


@pytest.mark.parametrize("how", ["kill", "exit", "raise"])
def test_after_an_error_close_is_quick_and_nobody_is_left(tmp_path: Path, how: str) -> None:
    """Failures 1 to 3 of the list: the error names index and process, a second step is an error too or works."""
    where = {"kill": "", "exit": "step 1.3", "raise": "step 1.3"}[how]
    makers = fragile(tmp_path, where, {"exit": "os._exit"}.get(how, "raise"), num_envs=3)
    one = Pool(makers, num_workers=3, start_method="forkserver")
    pids = one.pids
    one.reset([1, 2, 3])
    if how == "kill":
        os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(EnvironmentFailed, match=rf"environment 1 \(process {pids[1]}\) failed:"):
        steps(one, 3)
    one.reset([1, 2, 3])  # who catches the error can go on
    one.send()
    one.recv()
    assert one.obs[()][:, 1:3].tolist() == [[2, 1]] * 3
    start, later = time.monotonic(), one.pids
    one.close()
    assert time.monotonic() - start < 2
    for pid in {*pids, *later}:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_an_interrupt_while_waiting_leaves_a_pool_that_can_be_used_and_closed(pool: Any) -> None:
    """Ctrl-C in the middle of a reply: what was under way begins anew."""

    class Slow(Fragile):
        def step(self, action: Any) -> Any:
            time.sleep(0.3 * self.index)
            return super().step(action)

    one = pool([functools.partial(Slow, i) for i in range(2)], max_restarts=0)
    one.reset([1, 2])
    before = one.pids
    for call in (one.recv, lambda: one.recv_some(2)):
        one.send() if call == one.recv else one.send_some([0, 1])
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            call()
        one.reset([1, 2])
        for t in range(1, 3):
            one.send()
            one.recv()
            assert one.obs[()][:, 2].tolist() == [t, t]
    assert one.pids[0] == before[0], "the one that had answered goes on"
    one.send()
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        one.recv()


def test_an_interrupt_that_takes_a_reply_with_it(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C just after the bytes were read, before anybody knows of them: nobody waits for them again."""

    class Struck:
        armed = True

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def read(self, fd: int, count: int) -> bytes:
            found = os.read(fd, count)
            if self.armed:
                self.armed = False
                raise KeyboardInterrupt
            return found

    one = pool([functools.partial(Fragile, i) for i in range(4)], max_restarts=0)
    one.reset([1, 2, 3, 4])
    for receive in (one.recv, lambda: one.recv_some(4)):
        one.send() if receive == one.recv else one.send_some(range(4))
        with monkeypatch.context() as patch:
            patch.setattr(pools, "os", Struck())
            with pytest.raises(KeyboardInterrupt):
                receive()
        receive()
        assert one.restarted.tolist() in ([True, True, False, False], [False, False, True, True]), "one worker"
        one.restarted[:] = False
        steps(one, 2)
        one.reset([1, 2, 3, 4])
    assert not one.faults, "it was nobody's fault"


def test_kills_at_any_moment(pool: Any) -> None:
    """Rows stay whole and in order: each is the next of its episode, or the first of another."""
    one = pool([functools.partial(Fragile, i) for i in range(6)], num_workers=3, num_groups=2, max_restarts=10**6)
    stop, rng, killed = threading.Event(), np.random.default_rng(0), 0

    def kill() -> None:
        nonlocal killed
        while not stop.wait(float(rng.uniform(0, 0.03))):
            try:
                os.kill(one.pids[rng.integers(3)], signal.SIGKILL)
                killed += 1
            except (IndexError, AttributeError, ProcessLookupError):  # it is being replaced
                pass

    one.reset(range(6))
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        before, end = one.obs[()].copy(), time.monotonic() + 4
        while time.monotonic() < end:
            for group in (0, 1):
                one.send(group)
            for group in (0, 1):
                one.recv(group)
            for i, ((_, _, was, _), (index, _, now, _)) in enumerate(zip(before, one.obs[()], strict=True)):
                assert index == i
                begins = one.restarted[i] or was == 4
                assert now == (0 if begins else was + 1)
            one.restarted[:] = False
            before = one.obs[()].copy()
    finally:
        stop.set()
        killer.join()
    assert killed > 10
    assert len(one.faults) > 5
