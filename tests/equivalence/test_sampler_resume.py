"""A sampler that goes on from a saved state gives the rows of one that was never interrupted."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor

from flotilla.core.config import RunConfig
from flotilla.core.types import Episode, Row, State, tree_map
from flotilla.envs.make import EnvOptions, make_env
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


@contextlib.contextmanager
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


ENDING = set(CASES) - {"dm_control", "crafter"}  # whose episodes are short enough


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
    begun = 0
    with sampler_of(config, options) as through:
        for part in (1, rounds // 2, rounds):
            played(through, part)
            state = {key: x.clone() for key, x in through.state_dict().items()}
            assert {key[-2:] for key in state} == {"_N"}
            steps, expected = through.env_steps, played(through, 5)
            with sampler_of(config, options) as later:
                later.load_state_dict(state)
                assert later.begun_anew == 0
                found = played(later, 5)
                assert later.env_steps == through.env_steps - steps
            assert_equal(expected[0], found[0])
            begun += sum(int(is_first[1:].sum()) for is_first in expected[0][2::8])
            strip = [
                [(x.env_index, x.episodic_return, x.length_steps) for x in both] for both in (expected[1], found[1])
            ]
            assert strip[0] == strip[1]
    if case in ENDING:
        assert begun, "episodes begin in what is compared"


class Clock(gym.Env[Any, Any]):
    """Shows the time, which no seed brings back, unless it is stopped."""

    observation_space = gym.spaces.Box(0, np.inf, (1,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, stopped: bool, length: int = 5) -> None:
        self.stopped, self.length, self.t = stopped, length, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def observe(self) -> Any:
        return np.array([0.0 if self.stopped else time.perf_counter()])

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        over = self.t == self.length
        return self.observe(), 0.0, over, False, {"episode": {"r": 0.0, "l": self.t}} if over else {}


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


@pytest.mark.parametrize(("backend", "env_id"), [("envpool", "HalfCheetah-v5"), ("ale", "ALE/Pong-v5")])
def test_simulators_without_seeds_for_episodes_begin_anew(backend: Any, env_id: str) -> None:
    """Each time elsewhere: a run that is interrupted often would else learn from the same few first seconds."""
    config = RunConfig(env_id=env_id, num_envs=2, backend=backend)
    state: dict[str, Tensor] = {}
    first_rows: list[Any] = []
    for start in range(3):
        with sampler_of(config) as sampler:
            sampler.load_state_dict(state)
            assert sampler.begun_anew == (2 if start else 0)
            roll = sampler.rollout(Player(sampler.spec.action_space), 30)
            assert roll.rows.is_first[0].all()
            # Pong looks the same for a while, whatever the number of no-ops.
            first_rows += [roll.rows.obs[:, n].clone() for n in range(2)]  # type: ignore[index]
            state = sampler.state_dict()
    assert all(not torch.equal(x, y) for x, y in itertools.combinations(first_rows, 2))


def test_nothing_to_go_on_from_changes_nothing() -> None:
    config = RunConfig(num_envs=2, backend="sync")
    with sampler_of(config) as one, sampler_of(config) as other:
        assert one.state_dict() == {}
        other.load_state_dict({})
        assert_equal(played(one, 2)[0], played(other, 2)[0])


def test_what_was_loaded_is_saved_again_before_the_first_rollout() -> None:
    config = RunConfig(num_envs=2, backend="sync")
    with sampler_of(config) as one, sampler_of(config) as other, sampler_of(config) as third:
        played(one, 5)
        other.load_state_dict(one.state_dict())
        third.load_state_dict(other.state_dict())
        assert_equal(played(one, 3)[0], played(third, 3)[0])


class Lives(gym.Env[Any, Any]):
    """Loses lives, after which the game goes on; sometimes it is over while it does, and begins without a seed."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gym.spaces.Discrete(2)
    goes_on = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        over: dict[str, Any] = {}
        if self.goes_on and seed is None:
            if self.np_random.random() < 0.5:
                over, self.t = {"episode": {"r": 0.0, "l": self.t}}, 0
        else:
            super().reset(seed=seed)
            self.t = 0
        self.goes_on = False
        return self.observe(), over

    def observe(self) -> Any:
        return np.array([self.np_random.random(), self.t])

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        drawn = self.np_random.random()
        over, self.goes_on = drawn < 0.1, 0.1 <= drawn < 0.4
        info = {"episode": {"r": 0.0, "l": self.t}} if over else {}
        return self.observe(), float(action) + drawn, over or self.goes_on, False, info


@pytest.mark.parametrize("kind", [SyncBackend, WorkersBackend])
def test_games_that_end_while_a_lost_life_restarts(kind: Any) -> None:
    with contextlib.ExitStack() as stack:

        def sampler() -> Sampler:
            made = Sampler(kind([Lives] * 3, [1, 2, 3]), torch.device("cpu"))
            stack.callback(made.close)
            return made

        through = sampler()
        for _ in range(6):
            rolls, games = played(through, 3)
            ends = sum(int(x[1:].sum()) for x in rolls[3::8])
            assert 0 < len(games) < ends, "lives are lost besides"
            later = sampler()
            later.load_state_dict(through.state_dict())
            assert later.begun_anew == 0
        assert_equal(played(through, 6)[0], played(later, 6)[0])


class Brittle(Lives):
    """Raises at the third step of its very first episode."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.first = seed == 1
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.first and self.t == 2:
            raise ZeroDivisionError("the simulator fell over")
        return super().step(action)


def test_an_episode_after_a_restart_goes_on() -> None:
    def sampler() -> Sampler:
        return Sampler(WorkersBackend([Brittle] * 2, [1, 2], num_workers=1, max_restarts=2), torch.device("cpu"))

    before, after = sampler(), sampler()
    try:
        before.rollout(Player(before.spec.action_space), 4)
        assert [restart.env_index for restart in before.drain_restarts()] == [0]
        after.load_state_dict(before.state_dict())
        assert (after.begun_anew, after.drain_restarts()) == (0, [])
        assert_equal(played(before, 5)[0], played(after, 5)[0])
    finally:
        before.close()
        after.close()


@pytest.mark.parametrize("kind", [SyncBackend, WorkersBackend])
def test_too_little_time_to_play_all_again(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where every row looks like the one that was to be reached."""
    monkeypatch.setattr("flotilla.sampling.sampler.REPLAY_LIMIT_S", 0.0)
    makers = [functools.partial(make_env, "probe/TimeLimit-v0")] * 2
    before, after = (Sampler(kind(makers, [1, 2]), torch.device("cpu")) for _ in range(2))
    try:
        before.rollout(Player(before.spec.action_space), 4)
        after.load_state_dict(before.state_dict())
        assert after.begun_anew == 2
        roll = after.rollout(Player(after.spec.action_space), 12)
        assert roll.rows.is_last[:, 0].nonzero().flatten().tolist() == [10]
    finally:
        before.close()
        after.close()


def test_no_number_equals_itself() -> None:
    class Nowhere(Lives):
        def observe(self) -> Any:
            return np.array([np.nan, self.t])

    before, after = (Sampler(SyncBackend([Nowhere] * 2, [1, 2]), torch.device("cpu")) for _ in range(2))
    played(before, 3)
    after.load_state_dict(before.state_dict())
    assert after.begun_anew == 0


@pytest.mark.parametrize("limit", ["MAX_ROWS", "MAX_BYTES"])
def test_episodes_that_are_too_long_begin_anew(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no longer cost memory: only what the others need is kept."""
    monkeypatch.setattr(f"flotilla.sampling.history.{limit}", 50 * (1 if limit == "MAX_ROWS" else 16))
    makers = [lambda: Clock(True, 10**9), lambda: Clock(True, 5)]
    before, after = (Sampler(SyncBackend(makers, [1, 2]), torch.device("cpu")) for _ in range(2))
    played(before, 20)
    state = before.state_dict()
    assert (state["count_N"][0], state["count_N"][1] <= 5) == (-1, True)
    assert state["action_N"].shape[1] <= 5
    after.load_state_dict(state)
    assert after.begun_anew == 1
    mine, theirs = (played(one, 3)[0] for one in (before, after))
    assert_equal([x[:, 1:] for x in mine[::8]], [x[:, 1:] for x in theirs[::8]])


def test_actions_keep_their_shape_where_none_is_needed() -> None:
    """Ranks put theirs together."""
    with sampler_of(RunConfig(env_id="Pendulum-v1", num_envs=2, backend="sync")) as sampler:
        sampler.rollout(Player(sampler.spec.action_space), 201)
        action = sampler.state_dict()["action_N"]
        assert (action.shape, action.dtype) == ((2, 0, 1), torch.float32)
