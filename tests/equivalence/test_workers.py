"""Worker processes step environments bit for bit as a loop in this process does, however they are split."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from flotilla.envs.make import EnvOptions, make_env
from flotilla.envs.wrappers import RecordEpisode
from flotilla.sampling.base import Array, Backend, Event, RowArrays, step
from flotilla.sampling.sync import SyncBackend
from flotilla.sampling.workers import WorkersBackend

# Workers get the environments below by value: they need not import pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

# fork is the quickest start; Python 3.12 warns of it where there are threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
STEPS = 60
Maker = Callable[[], gym.Env[Any, Any]]


class Wanderer(gym.Env[Any, Any]):
    """All that it says is drawn at random, beside its action; whatever is lost or doubled moves its whole stream."""

    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, keys: Sequence[str] = (), mean_length: float = 7.0) -> None:
        one = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.observation_space = gym.spaces.Dict(dict.fromkeys(keys, one)) if keys else one
        self.keys, self.mean_length = keys, mean_length

    def _obs(self, action: Any) -> Any:
        drawn = self.np_random.normal(size=3).astype(np.float32) + np.float32(np.sum(action))
        return {key: drawn * n for n, key in enumerate(self.keys, 1)} if self.keys else drawn

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._obs(0), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        ends, at_a_limit = self.np_random.random(2) < (1 / self.mean_length, 0.5)
        reward = float(self.np_random.normal())
        return self._obs(action), reward, bool(ends and not at_a_limit), bool(ends and at_a_limit), {}


class Boxed(Wanderer):
    """Rewards of shape (1,)."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, *rest = super().step(action)
        return obs, np.array([reward]), *rest


def wanderer(**settings: Any) -> Maker:
    return lambda: gym.wrappers.RecordEpisodeStatistics(Wanderer(**settings))


class Record(NamedTuple):
    """T + 1 rows of N environments, and what ended."""

    rows: RowArrays
    events: list[tuple[int, Event]]  # row, event; in order of row and environment


def buffers(backend: Backend, num_rows: int) -> RowArrays:
    """Filled with what no environment says, so that a row that is not written is seen."""
    space, leading = backend.spec.obs_space, (num_rows, backend.num_envs)
    spaces = space.spaces if isinstance(space, gym.spaces.Dict) else {"": space}
    obs: dict[str, Array] = {key: np.full((*leading, *one.shape), 77, one.dtype) for key, one in spaces.items()}
    flags = [np.ones(leading, bool) for _ in range(3)]
    plain = obs if isinstance(space, gym.spaces.Dict) else obs[""]
    return RowArrays(plain, np.full(leading, np.nan, np.float32), *flags)


def actions_of(backend: Backend, steps: int = STEPS) -> Array:
    """(T, N, ...)."""
    space = backend.spec.action_space
    rng = np.random.default_rng(5)
    if isinstance(space, gym.spaces.Discrete):
        return rng.integers(space.n, size=(steps, backend.num_envs))
    return rng.uniform(-1, 1, (steps, backend.num_envs, *space.shape)).astype(space.dtype)


def play(backend: Backend, steps: int = STEPS) -> Record:
    """Groups in turns: all are sent before the first is received."""
    rows, actions, events = buffers(backend, steps + 1), actions_of(backend, steps), []
    try:
        backend.reset(rows.at(0))
        for t in range(steps):
            for group, envs in enumerate(backend.groups):
                backend.send(actions[t, envs], group)
            for group, envs in enumerate(backend.groups):
                events += [(t + 1, event) for event in backend.recv(rows.at((t + 1, envs)), group)]
    finally:
        backend.close()
    return Record(rows, events)


def play_first_ready(backend: WorkersBackend, batch: int, steps: int = STEPS) -> Record:
    """Whichever `batch` environments are ready are received and sent again, each to its own time."""
    rows, actions, events = buffers(backend, steps + 1), actions_of(backend, steps), []
    time = np.zeros(backend.num_envs, int)
    part = buffers(backend, 1).at(0).at(slice(0, batch))
    try:
        backend.reset(rows.at(0))
        backend.send_some(actions[0], list(range(backend.num_envs)))
        while (left := int((time < steps).sum())) > 0:
            count = min(batch, left)
            env_index, ended = backend.recv_some(count, part.at(slice(0, count)))
            time[env_index] += 1
            for mine, theirs in zip(leaves(rows), leaves(part), strict=True):
                mine[time[env_index], env_index] = theirs[:count]
            events += [(int(time[event.env_index]), event) for event in ended]
            again = [i for i in env_index if time[i] < steps]
            if again:
                backend.send_some(actions[time[again], again], again)
    finally:
        backend.close()
    return Record(rows, sorted(events, key=lambda one: (one[0], one[1].env_index)))


def leaves(rows: RowArrays) -> list[Array]:
    return [*(rows.obs.values() if isinstance(rows.obs, dict) else [rows.obs]), *rows[1:]]


def assert_equal(got: Record, want: Record) -> None:
    for mine, theirs in zip(leaves(got.rows), leaves(want.rows), strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)
    assert got.events == want.events
    assert len(want.events) > 1, "the case has ends of episodes"


@functools.cache
def in_process(num_envs: int) -> Record:
    return play(SyncBackend([wanderer()] * num_envs, range(num_envs)))


@pytest.mark.parametrize(("num_envs", "num_workers"), [(1, 1), (4, 1), (4, 2), (4, 4), (5, 2), (5, 3), (7, 4)])
def test_every_split_gives_the_rows_of_a_loop(num_envs: int, num_workers: int) -> None:
    backend = WorkersBackend([wanderer()] * num_envs, range(num_envs), num_workers=num_workers, start_method="fork")
    assert len(backend.pool.pids) == num_workers
    assert_equal(play(backend), in_process(num_envs))


@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork"])
@pytest.mark.parametrize("num_groups", [1, 2])
def test_every_start_method_and_groups_in_turns(start_method: str, num_groups: int) -> None:
    settings = {"num_workers": 2, "start_method": start_method, "num_groups": num_groups}
    assert_equal(play(WorkersBackend([wanderer()] * 6, range(6), **settings)), in_process(6))


@pytest.mark.parametrize(("num_workers", "batch"), [(1, 3), (2, 1), (2, 3), (3, 5), (6, 4)])
def test_the_order_of_arrival_changes_no_trajectory(num_workers: int, batch: int) -> None:
    backend = WorkersBackend([wanderer()] * 6, range(6), num_workers=num_workers)
    assert_equal(play_first_ready(backend, batch), in_process(6))


def test_a_second_reset_begins_with_the_first_seeds_again() -> None:
    makers = [wanderer()] * 3
    twice = [play_twice(backend(makers, range(3))) for backend in (WorkersBackend, SyncBackend)]
    assert_equal(twice[0], twice[1])
    assert_equal(twice[0], in_process(3))


def play_twice(backend: Any) -> Record:
    """The second half of what it says, from a reset on."""
    rows, actions = buffers(backend, 1).at(0), actions_of(backend)
    backend.reset(rows)
    for action in actions:
        step(backend, action, rows)
    return play(backend)


def test_rewards_in_an_array() -> None:
    makers: list[Maker] = [lambda: RecordEpisode(Boxed())] * 3
    sync = play(SyncBackend(makers, range(3)))
    assert_equal(play(WorkersBackend(makers, range(3), num_workers=2)), sync)
    assert_equal(sync, in_process(3))


def test_dict_observations() -> None:
    makers = [wanderer(keys=("near", "far"))] * 3
    assert_equal(play(WorkersBackend(makers, range(3), num_workers=2)), play(SyncBackend(makers, range(3))))


@pytest.mark.parametrize("env_id", ["CartPole-v1", "HalfCheetah-v5"])
def test_real_environments(env_id: str) -> None:
    pytest.importorskip("mujoco")
    makers = [functools.partial(make_env, env_id, EnvOptions())] * 3
    steps = 1010 if env_id == "HalfCheetah-v5" else 200  # beyond the time limit
    workers = play(WorkersBackend(makers, range(3), num_workers=2), steps)
    assert_equal(workers, play(SyncBackend(makers, range(3)), steps))


@settings(max_examples=15, phases=[Phase.generate])  # each example starts processes: none is made smaller
@given(
    per_group=st.integers(1, 5),
    num_groups=st.integers(1, 3),
    num_workers=st.integers(1, 4),
    mean_length=st.floats(1.0, 12.0),
)
def test_any_split(per_group: int, num_groups: int, num_workers: int, mean_length: float) -> None:
    """Workers need not have equally many environments, of a group or in all."""
    num_envs = per_group * num_groups
    makers = [wanderer(mean_length=mean_length)] * num_envs
    settings = {"num_workers": num_workers, "num_groups": num_groups, "start_method": "fork"}
    workers = play(WorkersBackend(makers, range(num_envs), **settings), 30)
    assert_equal(workers, play(SyncBackend(makers, range(num_envs)), 30))
