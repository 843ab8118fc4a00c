"""A pool of workers: any space, every row in its place, orders, scripts without a main guard, threads, memory."""

from __future__ import annotations

import copy
import multiprocessing
import os
import resource
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
import pytest
from gymnasium import spaces
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from flotilla.core import limits
from flotilla.core.errors import UsageError
from flotilla.sampling import pool as pools
from flotilla.sampling.pool import EnvironmentFailed, Pool
from flotilla.sampling.shm import leaf, leaves, nested

# Workers get the environments below by value: they need not import pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

# fork is the quickest start; Python 3.12 warns of it where there are threads.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:.*Casting input x:UserWarning"),
    pytest.mark.usefixtures("no_hang"),
]
Maker = Callable[[], gym.Env[Any, Any]]


@pytest.fixture
def pool() -> Iterator[Callable[..., Pool]]:
    """`pool(makers, **settings)`, closed after the test."""
    made: list[Pool] = []

    def make(makers: list[Maker], **settings: Any) -> Pool:
        made.append(Pool(makers, **{"num_workers": 2, "start_method": "fork"} | settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


# Spaces ---------------------------------------------------------------------------------------------------------

SHAPES = st.lists(st.integers(1, 3), max_size=2).map(tuple)
FLOATS = st.sampled_from([np.float16, np.float32, np.float64])
INTEGERS = st.sampled_from([np.uint8, np.int8, np.int16, np.int32, np.int64])
PLAIN = st.one_of(
    st.builds(lambda shape, kind: spaces.Box(-7, 7, shape, kind), SHAPES, FLOATS),
    st.builds(lambda shape, kind: spaces.Box(0, 100, shape, kind), SHAPES, INTEGERS),
    st.builds(spaces.Discrete, st.integers(1, 9), start=st.integers(-3, 3)),
    st.builds(spaces.MultiDiscrete, st.lists(st.integers(1, 5), min_size=1, max_size=4)),
    st.builds(spaces.MultiBinary, st.integers(1, 4)),
)
ANY_SPACE = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3).map(spaces.Dict),
        st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple),
    ),
    max_leaves=5,
)


class Echo(gym.Env[Any, Any]):
    """Says something random, and the action that it got."""

    def __init__(self, said: gym.Space[Any], action: gym.Space[Any]) -> None:
        said, action = copy.deepcopy((said, action))  # a space draws from a stream of its own
        self.observation_space = spaces.Tuple((said, action))
        self.action_space = action

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        return (self.observation_space[0].sample(), action), 0.0, False, False, {}


@settings(max_examples=30, phases=[Phase.generate])  # each example starts processes: none is made smaller
@given(said=ANY_SPACE, action=ANY_SPACE)
def test_every_space_as_observation_and_action(said: gym.Space[Any], action: gym.Space[Any]) -> None:
    """What an environment says arrives bit for bit, and its own action arrives at it in the type of its space."""
    alone = [Echo(said, action) for _ in range(3)]
    # Where infos travel, actions keep the exact types that the space has.
    pool = Pool([lambda: Echo(said, action)] * 3, num_workers=2, start_method="fork", infos=True)
    try:
        pool.reset([5, 6, 7])
        wanted = [env.reset(seed=5 + i)[0] for i, env in enumerate(alone)]
        for _ in range(3):
            for path, (shape, kind) in leaves(alone[0].observation_space).items():
                assert pool.obs[path].dtype == kind
                assert pool.obs[path].shape == (3, *shape)
                for mine, theirs in zip(pool.obs[path], wanted, strict=True):
                    np.testing.assert_array_equal(mine, leaf(theirs, path))
            actions = [action.sample() for _ in range(3)]
            for path, array in pool.action.items():
                array[:] = [leaf(one, path) for one in actions]
            pool.send()
            pool.recv()
            wanted = [env.step(one)[0] for env, one in zip(alone, actions, strict=True)]
    finally:
        pool.close()


@given(space=ANY_SPACE)
def test_a_value_of_any_space_comes_back_from_its_leaves(space: gym.Space[Any]) -> None:
    value = space.sample()
    parts = {path: leaf(value, path) for path in leaves(space)}
    assert space.contains(nested(space, parts))


@pytest.mark.parametrize("what", ["observation", "action"])
def test_environments_with_other_spaces_are_refused(what: str) -> None:
    def make(size: int) -> gym.Env[Any, Any]:
        env = Counter(0, 9)
        setattr(env, f"{what}_space", spaces.Discrete(size))
        return env

    with pytest.raises(UsageError, match=rf"same {what} space: 1 has Discrete\(3\), 0 has Discrete\(2\)"):
        Pool([lambda: make(2), lambda: make(3)], num_workers=2, start_method="fork")


@pytest.mark.parametrize("said", [np.zeros(1, np.float32), np.zeros(2, np.float64), np.zeros((2, 1), np.float32)])
def test_an_observation_that_is_not_in_its_space_is_told_in_words(pool: Callable[..., Pool], said: Any) -> None:
    class Liar(gym.Env[Any, Any]):
        observation_space = spaces.Box(0, 1, (2,), np.int64 if said.dtype == np.float64 else np.float32)
        action_space = spaces.Discrete(2)

        def reset(self, **_: Any) -> Any:
            return said, {}

    with pytest.raises(EnvironmentFailed, match=r"the observation has shape .* but its space says"):
        pool([Liar] * 2).reset([0, 0])


# Rows in their places -------------------------------------------------------------------------------------------


class Counter(gym.Env[Any, Any]):
    """Says its number, episode, time and last action; its reward is 100 x episode + time."""

    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float64)
    action_space = spaces.Discrete(1000)

    def __init__(self, index: int, length: int, sleep_s: float = 0.0, info: Any = None) -> None:
        self.index, self.length, self.sleep_s, self.info = index, length, sleep_s, info
        self.episode, self.time = 0, 0

    def _say(self, action: int) -> Any:
        return np.array([self.index, self.episode, self.time, action], np.float64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.episode, self.time = self.episode + 1, 0
        return self._say(-1), {}

    def step(self, action: Any) -> Any:
        assert self.time < self.length, "stepped after its end"
        self.time += 1
        if self.sleep_s:
            time.sleep(self.sleep_s)
        ended = self.time == self.length
        odd = self.episode % 2 == 1
        info = {} if self.info is None else {"what": self.info}
        return self._say(int(action)), 100.0 * self.episode + self.time, ended and odd, ended and not odd, info


def counter(*args: Any, **settings: Any) -> Maker:
    return lambda: Counter(*args, **settings)


class Expected:
    """What a counter has to say, step by step."""

    def __init__(self, index: int, length: int) -> None:
        self.index, self.length, self.episode, self.time = index, length, 1, 0

    def check(self, pool: Pool, action: int) -> None:
        i = self.index
        if self.time == self.length and pool.autoreset == "next_step":
            self.episode, self.time = self.episode + 1, 0
            want = ([i, self.episode, 0, -1], 0.0, False, False)
        else:
            self.time += 1
            ended, odd = self.time == self.length, self.episode % 2 == 1
            reward = 100.0 * self.episode + self.time
            want = ([i, self.episode, self.time, action], reward, ended and odd, ended and not odd)
            if ended and pool.autoreset == "same_step":
                self.episode, self.time = self.episode + 1, 0
                want = ([i, self.episode, 0, -1], *want[1:])
        got = (pool.obs[()][i].tolist(), pool.reward[i], pool.terminated[i], pool.truncated[i])
        assert got == want


LENGTHS = [3, 1, 4, 2, 7, 5]


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
@pytest.mark.parametrize("num_groups", [1, 2, 3])
def test_rows_belong_to_their_actions(pool: Callable[..., Pool], autoreset: str, num_groups: int) -> None:
    makers = [counter(i, length) for i, length in enumerate(LENGTHS)]
    one = pool(makers, autoreset=autoreset, num_groups=num_groups)
    expected = [Expected(i, length) for i, length in enumerate(LENGTHS)]
    one.reset([0] * 6)
    groups = list(range(num_groups))
    for t in range(40):
        actions = one.action[()][:] = (np.arange(6) * 31 + t * 7) % 1000
        for group in groups:
            one.send(group)
        for group in groups if t % 2 else reversed(groups):  # in whichever order they are received
            one.recv(group)
            for i in range(6)[one.groups[group]]:
                expected[i].check(one, actions[i])


def test_rows_belong_to_their_actions_in_whichever_order_they_are_ready(pool: Callable[..., Pool]) -> None:
    one = pool([counter(i, length) for i, length in enumerate(LENGTHS)])
    expected = [Expected(i, length) for i, length in enumerate(LENGTHS)]
    rng = np.random.default_rng(0)
    one.reset([0] * 6)
    idle = set(range(6))
    for _ in range(150):
        chosen = [int(i) for i in rng.permutation(sorted(idle))[: rng.integers(1, 7)]]
        one.action[()][chosen] = rng.integers(1000, size=len(chosen))
        one.send_some(chosen)
        idle -= set(chosen)
        for i in one.recv_some(int(rng.integers(1, 7 - len(idle)))):
            expected[i].check(one, int(one.action[()][i]))
            idle.add(i)


def test_disabled_autoreset_begins_the_chosen_episodes_only(pool: Callable[..., Pool]) -> None:
    one = pool([counter(i, length) for i, length in enumerate([2, 5, 2, 5])], autoreset="disabled")
    expected = [Expected(i, length) for i, length in enumerate([2, 5, 2, 5])]
    one.reset([0] * 4)
    for _ in range(2):
        one.send()
        one.recv()
        for each in expected:
            each.check(one, 0)
    one.reset([None] * 4, chosen=[True, False, True, False])
    assert one.obs[()].tolist() == [[0, 2, 0, -1], [1, 1, 2, 0], [2, 2, 0, -1], [3, 1, 2, 0]]
    assert one.reward.tolist() == [0, 102, 0, 102]
    assert not one.terminated.any()


def test_steps_after_a_timeout_are_aligned(pool: Callable[..., Pool]) -> None:
    """Failure 4 of the list: a late reply is never taken for that of a later command."""
    one = pool([counter(i, 99, 0.3 if i == 1 else 0.0) for i in range(3)], num_workers=3)
    one.reset([0] * 3)
    one.send()
    with pytest.raises(TimeoutError):
        one.recv(timeout_s=0.05)
    one.send()  # nobody has waited for the first
    one.recv()
    assert one.obs[()][:, 2].tolist() == [2, 2, 2]
    one.send()
    with pytest.raises(TimeoutError):
        one.recv(timeout_s=0.05)
    one.recv()  # but one may go on to wait for it
    assert one.obs[()][:, 2].tolist() == [3, 3, 3]
    one.send_some([0, 1, 2])
    with pytest.raises(TimeoutError):
        one.recv_some(3, timeout_s=0.05)
    one.reset([0] * 3)
    assert one.obs[()][:, 2].tolist() == [0, 0, 0]
    one.send_some([2])
    assert one.recv_some(1) == [2]
    assert one.obs[()][:, 2].tolist() == [0, 0, 1]


def test_a_second_reset_by_hand_is_not_doubled(pool: Callable[..., Pool]) -> None:
    """Failure 5 of the list: a reset by hand takes the place of the one that is due."""
    one = pool([counter(0, 2), counter(1, 2)], infos=True)
    one.reset([0, 0])
    for _ in range(2):
        one.send()
        one.recv()
    one.reset([None, None])
    one.send()
    one.recv()
    assert one.obs[()][:, 1:3].tolist() == [[2, 1], [2, 1]]


# Orders ---------------------------------------------------------------------------------------------------------


def call(pool: Pool, what: Any, *args: Any) -> list[Any]:
    pool.order("call", what, args, {}, each=[True] * pool.num_envs)
    return pool.finish_order()


def test_calls_attributes_and_functions(pool: Callable[..., Pool]) -> None:
    one = pool([counter(i, 9) for i in range(3)])
    one.reset([0] * 3)
    assert call(one, "index") == [0, 1, 2]
    assert [x.tolist() for x in call(one, "_say", 8)] == [[i, 1, 0, 8] for i in range(3)]
    assert call(one, lambda env, more: env.unwrapped.index + more, 10) == [10, 11, 12]
    one.order("set_attr", "length", each=[5, 6, 7])
    one.finish_order()
    assert call(one, "length") == [5, 6, 7]


def test_a_call_that_fails_leaves_everything_as_it_was(pool: Callable[..., Pool]) -> None:
    """It is the caller's error, and not the environment's: nothing is counted or restarted."""
    one = pool([counter(i, 9) for i in range(3)], max_restarts=1)
    one.reset([0] * 3)
    for wrong in ("lenght", lambda env: 1 / 0, lambda env: threading.Lock(), lambda env: sys.exit()):
        with pytest.raises(EnvironmentFailed, match=r"lenght|ZeroDivisionError|cannot pickle|SystemExit"):
            call(one, wrong)
    with pytest.raises(TypeError, match="pickle"):
        one.order("set_attr", "length", each=[1, 2, threading.Lock()])
    one.send()
    one.recv()
    assert one.obs[()][:, 2].tolist() == [1, 1, 1]
    assert not one.faults
    assert not one.episodes.any()


def test_an_info_that_cannot_be_pickled_names_its_environment(pool: Callable[..., Pool]) -> None:
    makers = [counter(0, 9), counter(1, 9), lambda: Counter(2, 9, info=threading.Lock())]
    one = pool(makers, infos=True, num_workers=1)
    one.reset([0] * 3)
    one.send()
    with pytest.raises(EnvironmentFailed, match=r"(?s)environment 2 .*cannot pickle"):
        one.recv()


def test_large_orders_and_large_replies_do_not_wait_for_each_other(pool: Callable[..., Pool]) -> None:
    """A pipe holds 64 KiB: the parent must not write an order while a worker waits for it to read."""
    large = bytes(2**20)
    one = pool([counter(i, 9, info=large) for i in range(4)], infos=True, num_groups=2)
    one.reset([0] * 4)
    for _ in range(3):
        one.send(0)
        one.send(1)
        time.sleep(0.05)  # both workers have begun to write
        assert call(one, lambda env, given: given, large) == [large] * 4
        one.recv(0)
        one.recv(1)
    assert one.infos()[2:] == [{"what": large}] * 2


# Starting -------------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
import gymnasium as gym
import numpy as np
from flotilla.sampling.pool import Pool

with open(sys.argv[2], "a") as file:
    file.write("run ")

class Mine(gym.Env):
    observation_space = gym.spaces.Box(0, 99, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    def __init__(self, says):
        self.says = says
    def reset(self, seed=None, options=None):
        return np.array([self.says], np.float32), {}

pool = Pool([lambda says=says: Mine(says) for says in range(3)], num_workers=2, start_method=sys.argv[1])
pool.reset([0, 0, 0])
print(pool.obs[()][:, 0].tolist(), type(pool.made[0].obs_space).__name__, __file__.endswith("script.py"))
"""


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_a_script_needs_no_main_guard_and_runs_once(tmp_path: Path, start_method: str) -> None:
    """Its class lives in __main__, its makers are lambdas, and it never closes the pool."""
    script, runs = tmp_path / "script.py", tmp_path / "runs"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), start_method, str(runs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("[0.0, 1.0, 2.0] Box True\n", "")
    assert runs.read_text() == "run "


class Threads(gym.Env[Any, Any]):
    """Says which numbers of threads it sees."""

    observation_space = spaces.Box(0, np.inf, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        import ctypes
        import glob

        import cv2
        import torch

        self.variables = {os.environ[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        libraries = Path(np.__file__).parent.parent / "numpy.libs"
        blas = ctypes.CDLL(glob.glob(str(libraries / "*openblas*"))[0])
        self.seen = {"blas": blas.scipy_openblas_get_num_threads64_()}
        self.libraries = (torch, cv2)

    @property
    def threads(self) -> dict[str, int]:
        torch, cv2 = self.libraries
        return self.seen | {"torch": torch.get_num_threads(), "cv2": cv2.getNumThreads()}


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_libraries_have_one_thread_in_a_worker(pool: Callable[..., Pool], start_method: str) -> None:
    pytest.importorskip("cv2")
    first = multiprocessing.get_context(start_method).Process(target=print)  # a server that knows nothing of us
    before = {name: os.environ.pop(name, None) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    try:
        first.start()
        first.join()
        one = pool([Threads], num_workers=1, start_method=start_method)
        assert "OPENBLAS_NUM_THREADS" not in os.environ, "the parent's variables stay as they were"
    finally:
        os.environ.update({name: value for name, value in before.items() if value is not None})
    assert call(one, "variables") == [{"1"}]
    assert call(one, "threads") == [{"blas": 1, "torch": 1, "cv2": 1}]


def test_pools_beside_and_inside_each_other(pool: Callable[..., Pool]) -> None:
    """Two at once, one of them made in a thread that has ended; and an environment with a pool of its own."""
    first = pool([counter(0, 9)] * 2)
    made: list[Pool] = []
    thread = threading.Thread(target=lambda: made.append(pool([counter(1, 9)] * 2, start_method="forkserver")))
    thread.start()
    thread.join()

    class Nest(Counter):
        def __init__(self) -> None:
            super().__init__(2, 9)
            self.pool = Pool([counter(7, 9)] * 2, num_workers=1, start_method="forkserver")
            self.pool.reset([0, 0])

        def step(self, action: Any) -> Any:
            self.pool.send()
            self.pool.recv()
            return self.pool.obs[()][1], 0.0, False, False, {}

        def close(self) -> None:
            self.pool.close()

    nest = pool([Nest], start_method="forkserver")
    for one in (first, *made, nest):
        one.reset([0] * one.num_envs)
        one.send()
    for one in (nest, *made, first):
        one.recv()
    assert [one.obs[()][0, 0] for one in (first, *made, nest)] == [0, 1, 7]
    first.close()
    for one in (nest, *made):
        one.send()
        one.recv()


# Memory ---------------------------------------------------------------------------------------------------------


class Image(gym.Env[Any, Any]):
    observation_space = spaces.Box(0, 255, (64, 64, 3), np.uint8)
    action_space = spaces.Discrete(2)

    def __init__(self, shape: tuple[int, ...] = (64, 64, 3)) -> None:
        self.observation_space = spaces.Box(0, 255, (1,), np.uint8)
        self.observation_space._shape = shape  # bounds of such a size would need memory themselves


def test_too_little_memory_is_one_line_and_leaves_nothing(pool: Callable[..., Pool]) -> None:
    """The kernel refuses a file that is larger than allowed; it would be killed for one larger than memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
    try:
        with pytest.raises(
            UsageError, match=r"^\d+ MiB of shared memory .*File too large; use fewer environments"
        ) as at:
            pool([lambda: Image((512, 512, 3))] * 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(at.value)
    with pytest.raises(UsageError, match=r"environments: [\d,]+ MiB of memory are free; use fewer environments"):
        pool([lambda: Image((2**20, 2**20))] * 2)
    assert not multiprocessing.active_children()


def test_what_a_container_grants_is_all_there_is(
    pool: Callable[..., Pool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CGROUPS", tmp_path)
    (tmp_path / "memory.max").write_text(str(2**22))
    (tmp_path / "memory.current").write_text(str(3 * 2**20))
    pool([lambda: Image((512, 512))] * 2)
    with pytest.raises(UsageError, match=r"2 MiB of shared memory .*: 1 MiB of memory are free"):
        pool([lambda: Image((1024, 1024))] * 2)


# Speed, by counts -----------------------------------------------------------------------------------------------


def test_a_straggler_holds_nobody_up(pool: Callable[..., Pool]) -> None:
    """One of 16 sleeps 50 times longer: batches of 8 come as if it were not there."""
    one = pool([counter(i, 10**6, 0.1 if i == 3 else 0.002) for i in range(16)], num_workers=16)
    one.reset([0] * 16)
    one.send_some(range(16))
    stepped = np.zeros(16, int)
    start = time.monotonic()
    while time.monotonic() - start < 1.0:
        ready = one.recv_some(8)
        stepped[ready] += 1
        one.send_some(ready)
    others = np.delete(stepped, 3)
    assert stepped[3] <= 11
    assert others.min() > 2 * stepped[3], "nobody waits for the slow one"
    assert others.max() < 2 * others.min(), "and the others share alike"


def test_many_more_workers_than_cores_make_progress(pool: Callable[..., Pool]) -> None:
    one = pool([counter(i, 10**6) for i in range(48)], num_workers=48)
    one.reset([0] * 48)
    start = time.monotonic()
    for _ in range(100):
        one.send()
        one.recv()
    assert (one.obs[()][:, 2] == 100).all()
    assert time.monotonic() - start < 10, "two sides that spin for the same core need seconds for each step"


def test_a_step_costs_one_write_and_one_read_a_worker(
    pool: Callable[..., Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number of environments; and it makes no garbage that grows, nor pickles."""
    one = pool([counter(i, 10**6) for i in range(64)])
    one.reset([0] * 64)
    calls: list[str] = []

    class Counted:
        def __getattr__(self, name: str) -> Any:
            if name in ("read", "write"):
                calls.append(name)
            return getattr(os, name)

    class Never:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"pickle.{name} in a step")

    monkeypatch.setattr(pools, "os", Counted())
    monkeypatch.setattr(pools, "pickle", Never())
    monkeypatch.setattr(pools, "dumps", Never())
    for _ in range(50):
        one.send()
        one.recv()
    assert sorted(calls) == ["read"] * 100 + ["write"] * 100
    calls.clear()
    before = call_usage(one)
    for _ in range(50):
        one.send()
        one.recv()
    waits = call_usage(one) - before
    assert (waits <= 50 + 10).all(), f"a worker sleeps once a step, not {waits / 50}"


def call_usage(pool: Pool) -> Any:
    """How often the process of each environment has waited for something."""
    statuses = [Path(f"/proc/{pid}/status").read_text() for pid in pool.pids]
    return np.array([int(one.split("\nvoluntary_ctxt_switches:")[1].split()[0]) for one in statuses])
