"""Every backend writes rows by the same contract, on real environments with random actions."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from numpy.typing import NDArray

from flotilla.core.config import RunConfig
from flotilla.core.errors import UsageError
from flotilla.envs.make import EnvOptions
from flotilla.sampling.base import Array, Finished, RowArrays, step
from flotilla.sampling.choose import choose, choose_groups, make_backend

PONG, BREAKOUT, INVADERS = "PongNoFrameskip-v4", "BreakoutNoFrameskip-v4", "SpaceInvadersNoFrameskip-v4"
ATARI = [("sync", BREAKOUT), ("ale", BREAKOUT), ("envpool", BREAKOUT)]
TIME_LIMITED = [("sync", "Pendulum-v1", 200), ("envpool", "Pendulum-v1", 200), ("envpool", "HalfCheetah-v5", 1000)]
CASES = [("sync", "CartPole-v1"), ("envpool", "CartPole-v1"), *(case[:2] for case in TIME_LIMITED), *ATARI]
STEPS = {"HalfCheetah-v5": 1050, "CartPole-v1": 2000, "Pendulum-v1": 1050, BREAKOUT: 1000}
NUM_ENVS = 3

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(package) is None for package in ("envpool", "ale_py", "mujoco")),
    reason="needs pip install 'flotilla[envpool,atari,mujoco]'",
)
Policy = Callable[[Array, int], Array]  # observations (N, ...), time -> actions


@dataclass(frozen=True)
class Record:
    """T + 1 rows of N environments, and what ended at which row."""

    space: gym.Space[Any]
    obs: Array
    reward: NDArray[np.float32]
    is_first: NDArray[np.bool_]
    is_last: NDArray[np.bool_]
    is_terminal: NDArray[np.bool_]
    finished: tuple[tuple[int, Finished], ...]


def play(
    name: Any,
    env_id: str,
    steps: int,
    *,
    num_envs: int = NUM_ENVS,
    first_index: int = 0,
    seed: int = 3,
    training: bool = True,
    policy: Policy | None = None,
    num_groups: int = 1,
) -> Record:
    """Random actions, unless there is a policy; those of an environment follow from its global index alone."""
    config = RunConfig(env_id=env_id, backend=name, seed=seed)
    options = EnvOptions(training=training)
    backend = make_backend(config, options, num_envs=num_envs, first_index=first_index, num_groups=num_groups)
    assert (backend.name, backend.num_envs, len(backend.groups)) == (name, num_envs, num_groups)
    space, action_space = backend.spec.obs_space, backend.spec.action_space
    rngs = [np.random.default_rng([seed, first_index + i]) for i in range(num_envs)]
    leading = (steps + 1, num_envs)
    flags = [np.ones(leading, bool) for _ in range(3)]  # what a backend does not write would be seen
    rows = RowArrays(np.full((*leading, *space.shape), 77, space.dtype), np.full(leading, np.nan, np.float32), *flags)
    finished = []
    try:
        backend.reset(rows.at(0))
        for t in range(steps):
            action = policy(rows.obs[t], t) if policy else np.stack([draw(action_space, rng) for rng in rngs])
            ended = step(backend, action, rows.at(t + 1))
            finished += [(t + 1, episode) for episode in ended]
    finally:
        backend.close()
        backend.close()  # idempotent
    return Record(space, *rows, tuple(finished))


def draw(space: gym.Space[Any], rng: np.random.Generator) -> Any:
    if isinstance(space, gym.spaces.Discrete):
        return rng.integers(space.n)
    return rng.uniform(-3, 3, space.shape).astype(np.float32)  # a Gaussian policy overshoots the bounds


@functools.cache
def random_play(name: str, env_id: str, training: bool = True) -> Record:
    return play(name, env_id, STEPS[env_id], training=training)


@pytest.mark.parametrize(("name", "env_id"), CASES)
def test_rows(name: str, env_id: str) -> None:
    rows = random_play(name, env_id)
    assert rows.is_first[0].all()
    np.testing.assert_array_equal(rows.is_first[1:], rows.is_last[:-1])
    assert not rows.is_last[0].any()
    assert (rows.is_last | ~rows.is_terminal).all(), "is_terminal implies is_last"
    assert (rows.reward[rows.is_first] == 0).all()
    assert np.isfinite(rows.reward).all()
    assert rows.is_last.sum() >= NUM_ENVS, "the case has ends of episodes"
    assert rows.obs.dtype in (np.float32, np.uint8)
    assert all(rows.space.contains(obs) for row in rows.obs[::7] for obs in row)


@pytest.mark.parametrize(("name", "env_id"), CASES)
def test_the_same_seed_gives_the_same_rows_and_another_does_not(name: str, env_id: str) -> None:
    once = random_play(name, env_id)
    short = min(200, STEPS[env_id])
    again, other = play(name, env_id, short), play(name, env_id, short, seed=4)
    for part in ("obs", "reward", "is_first", "is_last", "is_terminal"):
        np.testing.assert_array_equal(getattr(again, part), getattr(once, part)[: short + 1])
    assert again.finished == tuple(x for x in once.finished if x[0] <= short)
    assert not np.array_equal(other.obs, again.obs)


@pytest.mark.parametrize(("name", "env_id"), CASES)
def test_a_trajectory_does_not_depend_on_how_many_there_are(name: str, env_id: str) -> None:
    whole, short = random_play(name, env_id), min(200, STEPS[env_id])
    for first, count in ((0, 1), (1, 2)):
        split = play(name, env_id, short, num_envs=count, first_index=first)
        for part in ("obs", "reward", "is_first", "is_last", "is_terminal"):
            expected = getattr(whole, part)[: short + 1, first : first + count]
            np.testing.assert_array_equal(getattr(split, part), expected)
    assert not np.array_equal(whole.obs[:50, 0], whole.obs[:50, 1]), "environments have seeds of their own"


@pytest.mark.parametrize(("name", "env_id"), [case for case in CASES if case[0] != "sync"])
def test_a_trajectory_does_not_depend_on_the_number_of_groups(name: str, env_id: str) -> None:
    whole, short = random_play(name, env_id), min(400, STEPS[env_id])
    split = play(name, env_id, short, num_groups=NUM_ENVS)
    for part in ("obs", "reward", "is_first", "is_last", "is_terminal"):
        np.testing.assert_array_equal(getattr(split, part), getattr(whole, part)[: short + 1])
    assert split.finished == tuple(x for x in whole.finished if x[0] <= short)


@pytest.mark.parametrize(("name", "env_id"), CASES)
def test_raw_episodes_of_an_evaluation_are_the_sums_of_its_rows(name: str, env_id: str) -> None:
    rows = random_play(name, env_id, training=False)
    expected, returns, lengths = [], np.zeros(NUM_ENVS), np.zeros(NUM_ENVS, int)
    for t in range(1, len(rows.reward)):
        returns, lengths = returns + rows.reward[t], lengths + ~rows.is_first[t]
        for i in np.flatnonzero(rows.is_last[t]):
            expected.append((t, i, returns[i], lengths[i]))
            returns[i] = lengths[i] = 0
    assert len(expected) >= NUM_ENVS
    assert [(t, x.env_index, x.length_steps) for t, x in rows.finished] == [(t, i, n) for t, i, _, n in expected]
    np.testing.assert_allclose([x.episodic_return for _, x in rows.finished], [x[2] for x in expected], rtol=1e-5)


@pytest.mark.parametrize(("name", "env_id", "limit"), TIME_LIMITED)
def test_a_time_limit_is_not_terminal(name: str, env_id: str, limit: int) -> None:
    rows = random_play(name, env_id)
    assert not rows.is_terminal.any()
    expected = np.zeros(len(rows.is_last), bool)
    expected[limit :: limit + 1] = True  # the reset is a row of its own
    np.testing.assert_array_equal(rows.is_last, np.repeat(expected[:, None], NUM_ENVS, 1))
    assert {episode.length_steps for _, episode in rows.finished} == {limit}
    assert (rows.reward[~rows.is_first] != 0).all()


@pytest.mark.parametrize("name", ["sync", "envpool"])
def test_a_failure_is_terminal_and_the_limit_of_the_same_environment_is_not(name: str) -> None:
    def balance(obs: Array, t: int) -> Array:
        position, speed, angle, turn = obs.T
        return (angle + 0.3 * turn + 0.02 * position + 0.06 * speed > 0).astype(np.int64)

    fell, stood = random_play(name, "CartPole-v1"), play(name, "CartPole-v1", 1010, policy=balance)
    np.testing.assert_array_equal(fell.is_terminal, fell.is_last)
    assert {episode.length_steps for _, episode in stood.finished} == {500}
    assert np.flatnonzero(stood.is_last.all(1)).tolist() == [500, 1001]
    assert not stood.is_terminal.any()
    assert np.abs(stood.obs[500, :, 2]).max() < 0.21, "the last observation is of the old episode"
    assert np.abs(stood.obs[501]).max() < 0.06, "and the next one is of the new"
    assert (np.abs(fell.obs[fell.is_terminal][:, [0, 2]]) > (2.4, 0.2)).any(1).all()


@pytest.mark.parametrize(("name", "env_id"), ATARI)
def test_a_lost_life_ends_the_row_but_not_the_game(name: str, env_id: str) -> None:
    rows = random_play(name, env_id)
    np.testing.assert_array_equal(rows.is_terminal, rows.is_last)
    assert len(rows.finished) >= NUM_ENVS
    for i in range(NUM_ENVS):
        ends = np.flatnonzero(rows.is_last[:, i])
        games = [t for t, episode in rows.finished if episode.env_index == i]
        # Breakout has five lives: were they given back after each, no game would end.
        assert games == ends[4::5].tolist()
        lengths = [episode.length_steps for _, episode in rows.finished if episode.env_index == i]
        spans = np.diff([0, *games])
        assert (np.abs(lengths - spans) <= 5 * 3).all(), "up to three steps restart after each life"


@pytest.mark.parametrize(("name", "env_id"), ATARI)
def test_rewards_are_clipped_in_training_only(name: str, env_id: str) -> None:
    """Pong counts points either way, Space Invaders in fives and tens."""
    trained = random_play(name, env_id)
    assert set(np.unique(trained.reward)) == {0, 1}
    pong, whole = play(name, PONG, 150), play(name, PONG, 150, training=False)
    assert set(np.unique(pong.reward)) == {-1, 0}, "random play loses points"
    np.testing.assert_array_equal(pong.obs, whole.obs)  # a game without lives is the same in both
    invaders, scored = play(name, INVADERS, 100), play(name, INVADERS, 100, training=False)
    assert set(np.unique(invaders.reward)) == {0, 1}
    assert scored.reward.max() >= 5


@pytest.mark.parametrize(("name", "env_id"), ATARI)
def test_stacks_move_by_one_image_newest_last(name: str, env_id: str) -> None:
    rows = random_play(name, env_id)
    assert rows.space == gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    goes_on = ~rows.is_first[1:]
    np.testing.assert_array_equal(rows.obs[1:, :, :3][goes_on], rows.obs[:-1, :, 1:][goes_on])
    newest = rows.obs[:, :, 3].astype(float)
    assert 20 < newest.mean() < 90, "grey levels of the screen, not of something else"
    assert (newest[1:][goes_on] != newest[:-1][goes_on]).any((1, 2)).mean() > 0.5


@pytest.mark.parametrize("name", ["sync", "envpool"])
def test_an_action_beyond_its_bounds_is_the_bound(name: str) -> None:
    """The reward of HalfCheetah has a cost of the action, which would be nine times as large."""

    def push(strength: float) -> Policy:
        return lambda obs, t: np.full((NUM_ENVS, 6), strength if t % 4 < 2 else -strength, np.float32)

    far, near = (play(name, "HalfCheetah-v5", 20, policy=push(strength)) for strength in (3.0, 1.0))
    np.testing.assert_array_equal(far.obs, near.obs)
    np.testing.assert_array_equal(far.reward, near.reward)


@pytest.mark.parametrize(
    ("name", "env_id", "said"),
    [
        ("ale", "CartPole-v1", "backend 'ale' steps Atari only, not 'CartPole-v1'; use --backend sync"),
        ("envpool", "probe/TwoStep-v0", "backend 'envpool' has no environment 'probe/TwoStep-v0' .*--backend sync"),
        ("envpool", "CartPol-v1", "no environment 'CartPol-v1' .did you mean CartPole-v"),
        ("sync", "CartPol-v1", "unknown environment 'CartPol-v1'"),
    ],
)
def test_a_backend_that_cannot(name: Any, env_id: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make_backend(RunConfig(env_id=env_id, backend=name), EnvOptions(), num_envs=1)


@pytest.mark.parametrize("env_id", ["CartPole-v1", BREAKOUT, "HalfCheetah-v5", "dmc_walker_walk", "probe/Memory-v0"])
def test_auto_takes_a_backend_that_has_the_environment(env_id: str) -> None:
    config = RunConfig(env_id=env_id)
    name, reason = choose(config, EnvOptions())
    assert reason
    backend = make_backend(config, EnvOptions(), num_envs=1)
    assert backend.name == name
    backend.close()


@pytest.mark.parametrize(
    ("values", "num_envs", "said"),
    [
        ({"env_groups": 3}, 8, "env_groups=3 does not divide 8 environments; nearest: 2"),
        ({"env_groups": 7}, 8, "env_groups=7 does not divide 8 environments; nearest: 8"),
        ({"env_groups": 2}, 1, "env_groups=2 does not divide 1 environments; nearest: 1"),
        ({"env_groups": 2, "backend": "sync"}, 8, r"env_groups=2 needs a backend .*, not 'sync'; use --env-groups 1"),
    ],
)
def test_groups_that_cannot_be(values: dict[str, Any], num_envs: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        choose_groups(RunConfig(env_id=PONG, **values), EnvOptions(), num_envs)


@pytest.mark.parametrize(
    ("env_id", "num_envs", "cores", "expected"),
    [(PONG, 8, 2, 2), (PONG, 8, 1, 1), (PONG, 7, 2, 1), (PONG, 2, 2, 1), (PONG, 18, 2, 1), ("HalfCheetah-v5", 8, 2, 1)],
)
def test_the_automatic_number_of_groups(
    env_id: str, num_envs: int, cores: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert choose_groups(RunConfig(env_id=env_id), EnvOptions(), num_envs) == expected
    assert choose_groups(RunConfig(env_id=env_id, env_groups=1), EnvOptions(), num_envs) == 1
