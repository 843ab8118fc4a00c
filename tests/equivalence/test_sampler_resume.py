"""A sampler that goes on from a saved state gives the rows of one that was never interrupted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor

from flotilla.core.config import RunConfig
from flotilla.core.types import Episode, Row, State, tree_map
from flotilla.envs.make import EnvOptions
from flotilla.sampling.choose import choose_groups, env_ids, make_backend
from flotilla.sampling.sampler import Sampler
from flotilla.sampling.sync import SyncBackend
from flotilla.sampling.workers import WorkersBackend

STEPS = 7


class Player:
    """Random actions by what it sees and remembers, so that a row that differs changes all that follow."""

    def __init__(self, space: gym.Space[Any]) -> None:
        self.space = space

    def __call__(self, row: Row, state: State) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        state = torch.zeros(len(row.reward), 1, dtype=torch.float64) if state is None else state
        parts = row.obs.values() if isinstance(row.obs, dict) else [row.obs]
        seen = sum(x.double().flatten(1).nan_to_num().sum(1) for x in parts) + row.reward
        state = torch.where(row.is_first[:, None], 0.0, state) * 0.5 + seen[:, None]
        noise = torch.frac(torch.sin(state[:, :1] * 12.9898 + torch.arange(8)) * 43758.5453).abs()
        space = self.space
        if isinstance(space, gym.spaces.Discrete):
            action = (noise[:, 0] * int(space.n)).long()
        elif isinstance(space, gym.spaces.MultiDiscrete):
            action = (noise[:, : len(space.nvec)] * torch.from_numpy(space.nvec)).long()
        else:
            assert isinstance(space, gym.spaces.Box)
            low, high = torch.from_numpy(space.low), torch.from_numpy(space.high)
            action = (low + noise[:, :1].float() * (high - low)).to(low.dtype)
        return action, state, {}


def played(sampler: Sampler, rollouts: int) -> tuple[list[Any], list[Episode]]:
    """All rows, actions and memories, copied, and the episodes that ended."""
    player, kept = Player(sampler.spec.action_space), []
    for _ in range(rollouts):
        roll = sampler.rollout(player, STEPS)
        parts = [*roll.rows, roll.action, roll.first_state, roll.last_state]
        kept += [tree_map(torch.clone, part) for part in parts]
    return kept, sampler.drain_episodes()


def assert_equal(one: list[Any], other: list[Any]) -> None:
    for a, b in zip(one, other, strict=True):
        for x, y in zip(*((p.values() if isinstance(p, dict) else [p]) for p in (a, b)), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


@contextmanager
def sampler_of(config: RunConfig, options: EnvOptions | None = None) -> Iterator[Sampler]:
    options = options or EnvOptions()
    groups = choose_groups(config, options, config.num_envs)
    backend = make_backend(config, options, num_envs=config.num_envs, num_groups=groups)
    ids = env_ids(config, range(config.num_envs))
    sampler = Sampler(backend, torch.device("cpu"), first_ready=config.env_batch, env_ids=ids)
    try:
        yield sampler
    finally:
        sampler.close()


CASES: dict[str, dict[str, Any]] = {
    "short episodes": {"env_id": "CartPole-v1"},
    "time limits": {"env_id": "Pendulum-v1", "num_envs": 2},
    "mujoco": {"env_id": "Hopper-v5"},
    "lost lives": {"env_id": "BreakoutNoFrameskip-v4", "num_envs": 2},
    "dicts": {"env_id": "probe/Counter-v0"},
    "minigrid": {"env_id": "MiniGrid-Empty-Random-5x5-v0"},
    "dm_control": {"env_id": "dmc_cartpole_swingup", "num_envs": 2},
    "crafter": {"env_id": "crafter_reward", "num_envs": 2},
    "mixed": {"env_id": "CartPole-v1,probe/Memory-v0", "num_envs": 4} | {"env_id": "Hopper-v5,Hopper-v4"},
}


@pytest.mark.parametrize("backend", ["sync", "workers", "workers in turns"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.*out of date.*:DeprecationWarning")
def test_rows_are_those_of_one_that_ran_through(case: str, backend: str) -> None:
    if backend == "workers in turns" and case not in ("mujoco", "short episodes"):
        pytest.skip("the same for every environment")
    name, *turns = backend.split(maxsplit=1)
    settings: dict[str, Any] = {"num_envs": 4, "backend": name, "num_workers": 2, "env_groups": 2 if turns else 1}
    config = RunConfig(**(settings | CASES[case]))
    options, rounds = EnvOptions(training=True), 40 if case in ("lost lives", "time limits") else 12
    with sampler_of(config, options) as through:
        for part in (1, rounds // 2, rounds):
            played(through, part)
            state = {key: x.clone() for key, x in through.state_dict().items()}
            assert {key[-2:] for key in state} == {"_N"}
            expected = played(through, 5)
            with sampler_of(config, options) as later:
                later.load_state_dict(state)
                assert later.begun_anew == 0
                found = played(later, 5)
            assert_equal(expected[0], found[0])
            strip = [
                [(x.env_index, x.episodic_return, x.length_steps) for x in both] for both in (expected[1], found[1])
            ]
            assert strip[0] == strip[1]


class Clock(gym.Env[Any, Any]):
    """Shows the time, which no seed brings back; episodes of five steps."""

    observation_space = gym.spaces.Box(0, np.inf, (1,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, stopped: bool) -> None:
        self.stopped, self.t = stopped, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def observe(self) -> Any:
        return np.array([0.0 if self.stopped else time.perf_counter()])

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return self.observe(), 0.0, self.t == 5, False, {"episode": {"r": 0.0, "l": 5}} if self.t == 5 else {}


@pytest.mark.parametrize("kind", [SyncBackend, WorkersBackend])
def test_what_cannot_be_brought_back_begins_anew(kind: Any) -> None:
    """Environment 1 of 2; the other goes on in the middle of its episode."""

    def sampler() -> Sampler:
        return Sampler(kind([lambda: Clock(True), lambda: Clock(False)], [1, 2]), torch.device("cpu"))

    before, after = sampler(), sampler()
    try:
        played(before, 1)
        assert before.state_dict()["count_N"].tolist() == [1, 1]
        after.load_state_dict(before.state_dict())
        assert after.begun_anew == 1
        roll = after.rollout(Player(after.spec.action_space), STEPS)
        assert roll.rows.is_first[:, 1].nonzero().flatten().tolist() == [0, 6]
        assert roll.rows.is_first[:, 0].nonzero().flatten().tolist() == [5]
        assert after.state_dict()["episode_N"].tolist() == [2, 3]
    finally:
        before.close()
        after.close()


@pytest.mark.parametrize(("backend", "env_id"), [("envpool", "HalfCheetah-v5"), ("ale", "PongNoFrameskip-v4")])
def test_simulators_without_seeds_for_episodes_begin_anew(backend: Any, env_id: str) -> None:
    config = RunConfig(env_id=env_id, num_envs=2, backend=backend)
    with sampler_of(config) as before, sampler_of(config) as after:
        played(before, 1)
        after.load_state_dict(before.state_dict())
        assert after.begun_anew == 2
        roll = after.rollout(Player(after.spec.action_space), STEPS)
        assert roll.rows.is_first[0].all()


def test_nothing_to_go_on_from_changes_nothing() -> None:
    config = RunConfig(num_envs=2, backend="sync")
    with sampler_of(config) as one, sampler_of(config) as other:
        assert one.state_dict() == {}
        other.load_state_dict({})
        assert_equal(played(one, 2)[0], played(other, 2)[0])
