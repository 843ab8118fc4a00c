"""Rollouts from worker processes: whatever is ready first, rows in time order, restarts marked, several ids mixed."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from flotilla.core.config import RunConfig
from flotilla.core.errors import UsageError
from flotilla.core.types import Episode, Row, State, tree_map
from flotilla.envs.make import EnvOptions, make_env
from flotilla.functional import gae
from flotilla.sampling.base import Restarted
from flotilla.sampling.choose import choose_batch, env_ids, make_backend
from flotilla.sampling.sampler import Sampler
from flotilla.sampling.sync import SyncBackend
from flotilla.sampling.workers import WorkersBackend

CPU = torch.device("cpu")


def act(row: Row, state: State) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """An action from the observation alone, and a memory that sums what it saw."""
    seen = row.obs["count"].sum(1) if isinstance(row.obs, dict) else row.obs.flatten(1).sum(1)
    total = seen[:, None] + (0 if state is None else state)
    return (seen * 1000).long().abs() % 2, total, {"seen": seen, "before": total[:, 0] - seen}


Play = tuple[list[dict[str, Any]], list[tuple[Any, ...]], int]


def play(sampler: Sampler, rollouts: int = 4, steps: int = 25) -> Play:
    """Everything that a few rollouts say, the episodes by environment, and the steps that count."""
    found = []
    for _ in range(rollouts):
        roll = sampler.rollout(act, steps)
        parts = roll.rows._asdict() | roll.extras | {"action": roll.action}
        parts |= {"first_state": roll.first_state, "last_state": roll.last_state}
        found.append(tree_map(torch.clone, parts))
    episodes = sorted((e.env_index, e.episodic_return, e.length_steps) for e in sampler.drain_episodes())
    sampler.close()
    return found, episodes, sampler.env_steps


@pytest.mark.parametrize("env_id", ["CartPole-v1", "probe/Counter-v0"])
@pytest.mark.parametrize(("num_workers", "settings"), [(2, {"first_ready": 3}), (5, {"first_ready": 2}), (3, {})])
def test_the_order_of_arrival_changes_nothing(env_id: str, num_workers: int, settings: dict[str, int]) -> None:
    makers, seeds = [functools.partial(make_env, env_id, EnvOptions())] * 5, range(5)
    expected = play(Sampler(SyncBackend(makers, seeds), CPU))
    found = play(Sampler(WorkersBackend(makers, seeds, num_workers=num_workers), CPU, **settings))
    assert expected[1], "episodes end"
    assert found[1:] == expected[1:]
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0)


class Fragile(gym.Env[Any, Any]):
    """Counts its steps, pays 1 for each, and raises once at the third step of its first episode."""

    observation_space, action_space = spaces.Box(0, 100, (1,), np.float32), spaces.Discrete(2)
    failed: list[int] = []  # noqa: RUF012  (of the process)

    def __init__(self, index: int) -> None:
        self.index, self.t = index, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.t = 0
        return np.array([0], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        if self.index == 1 and self.t == 3 and not Fragile.failed:
            Fragile.failed.append(self.index)
            raise ZeroDivisionError("the simulator fell over")
        return np.array([self.t], np.float32), 1.0, False, False, {}


@pytest.mark.parametrize("first_ready", [0, 2])
def test_nothing_trains_on_the_step_that_failed(first_ready: int) -> None:
    """Row 2 becomes the last of a truncated episode; row 3 is the first of the next."""
    makers = [functools.partial(Fragile, index) for index in range(3)]
    backend = WorkersBackend(makers, range(3), num_workers=1, max_restarts=1)
    sampler = Sampler(backend, CPU, 10, first_ready=first_ready)
    roll = sampler.rollout(act, 5)
    rows = roll.rows
    assert rows.obs[:, 1, 0].tolist() == [0, 1, 2, 0, 1, 2]
    assert rows.is_last[:, 1].tolist() == [False, False, True, False, False, False]
    assert rows.is_first[:, 1].tolist() == [True, False, False, True, False, False]
    assert rows.reward[:, 1].tolist() == [0, 1, 1, 0, 1, 1]
    assert not rows.is_terminal.any()
    assert rows.obs[:, [0, 2], 0].T.tolist() == [[0, 1, 2, 3, 4, 5]] * 2, "the others go on"
    assert sampler.env_steps == 14, "the step that failed is none"
    (restart,) = sampler.drain_restarts()
    assert (restart.env_index, sampler.drain_restarts()) == (11, [])
    assert "ZeroDivisionError: the simulator fell over" in restart.cause
    assert f"process {backend.pool.pids[0]}" in restart.cause
    value = torch.full((6, 3), 10.0)
    adv = gae(rows, value, 0.9, 1.0)[:, 1]
    # The value of row 2 is bootstrapped, the step from it has no advantage, and no trace crosses it.
    at_1 = 1 + 0.9 * 10 - 10
    assert adv[:3].tolist() == pytest.approx([at_1 + 0.9 * at_1, at_1, 0], abs=1e-5)
    sampler.close()


def test_a_restart_at_the_seam_of_two_rollouts() -> None:
    makers = [functools.partial(Fragile, index) for index in range(2)]
    sampler = Sampler(WorkersBackend(makers, range(2), num_workers=1, max_restarts=1), CPU)
    assert sampler.rollout(act, 2).rows.is_last.sum() == 0, "nobody knows yet"
    rows = sampler.rollout(act, 2).rows
    assert rows.is_last[:, 1].tolist() == [True, False, False]
    assert rows.is_first[:, 1].tolist() == [False, True, False]
    assert [type(one) for one in sampler.drain_restarts()] == [Restarted]
    sampler.close()


class Unready(Fragile):
    """Raises in its very first reset."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if seed == self.index == 1:
            raise ZeroDivisionError("the simulator was not ready")
        return super().reset(seed=seed, options=options)


def test_a_restart_in_the_first_reset_is_told() -> None:
    makers = [functools.partial(Unready, index) for index in range(2)]
    sampler = Sampler(WorkersBackend(makers, range(2), num_workers=1, max_restarts=1), CPU, 10)
    assert sampler.rollout(act, 2).rows.is_first[:, 1].tolist() == [True, False, False]
    (restart,) = sampler.drain_restarts()
    sampler.close()
    assert restart.env_index == 11
    assert "the simulator was not ready" in restart.cause


@pytest.mark.parametrize("weights", [(), (1.0, 2.0, 5.0), (0.1, 0.1, 0.8)])
def test_shares_of_several_ids(weights: tuple[float, ...]) -> None:
    config = RunConfig(env_id="A,B,C", env_weights=weights)
    found = env_ids(config, range(80))
    shares = weights or (1.0, 1.0, 1.0)
    for n in (8, 24, 80):
        counts = Counter(found[:n])
        for name, share in zip("ABC", shares, strict=True):
            assert abs(counts[name] - n * share / sum(shares)) <= 1
    assert env_ids(config, range(13, 29)) == found[13:29], "whichever rank asks"


def test_several_ids_are_told_apart() -> None:
    config = RunConfig(env_id="CartPole-v0,CartPole-v1", backend="workers", num_workers=2)
    backend = make_backend(config, EnvOptions(), num_envs=4)
    sampler = Sampler(backend, CPU, env_ids=env_ids(config, range(4)))
    sampler.rollout(act, 200)
    episodes: list[Episode] = sampler.drain_episodes()
    sampler.close()
    assert {e.env_index: e.env_id for e in episodes} == dict(enumerate(["CartPole-v0", "CartPole-v1"] * 2))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"env_weights": (1.0,), "env_id": "A,B"}, "does not fit 2 environment ids"),
        ({"env_weights": (1.0, 0.0), "env_id": "A,B"}, "a number above 0 for each"),
        ({"env_batch": 2, "backend": "sync"}, "needs worker processes, not 'sync'"),
        ({"env_batch": 5, "backend": "workers"}, "not between 1 and the 4 environments"),
        ({"env_batch": 2, "backend": "workers", "env_groups": 2}, "exclude each other"),
    ],
)
def test_refused(settings: dict[str, Any], said: str) -> None:
    config = RunConfig(**settings)

    def ask() -> None:
        choose_batch(config, EnvOptions(), 4)
        env_ids(config, range(4))

    with pytest.raises(UsageError, match=said):
        ask()


@pytest.mark.parametrize("backend", ["sync", "workers"])
def test_ids_of_different_spaces_are_refused(backend: Any) -> None:
    config = RunConfig(env_id="CartPole-v1,Pendulum-v1", backend=backend)
    with pytest.raises(UsageError, match="same observation space: 1 has Box"):
        make_backend(config, EnvOptions(), num_envs=4)
