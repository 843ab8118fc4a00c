"""The sampler: what lies side by side in a rollout belongs together, and one rollout goes on where the last ended."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor

from flotilla.core.config import RunConfig
from flotilla.core.seeding import episode_seed, stream_seed
from flotilla.core.types import Rollout, Row, State, tree_map
from flotilla.envs.make import EnvOptions
from flotilla.sampling.base import Array, Backend, Finished, Restarted, RowArrays, split
from flotilla.sampling.choose import make_backend
from flotilla.sampling.sampler import Sampler
from flotilla.sampling.sync import SyncBackend

NUM_ENVS, STEPS = 3, 8


class InTurns:
    """Backends of one environment each as the groups of one: a deterministic probe, taken in turns."""

    name = "in turns"

    def __init__(self, backends: Sequence[Backend]) -> None:
        self.spec, self.num_envs, self.groups = backends[0].spec, len(backends), split(len(backends), len(backends))
        self._backends = backends
        self.in_flight: set[int] = set()

    def reset(self, out: RowArrays, start: int = 0) -> Sequence[Restarted]:
        for backend, envs in zip(self._backends, self.groups, strict=True):
            backend.reset(out.at(envs), start)
        return ()

    def send(self, action: Array, group: int = 0) -> None:
        assert group not in self.in_flight
        self.in_flight.add(group)
        self._backends[group].send(action)

    def recv(self, out: RowArrays, group: int = 0) -> Sequence[Finished]:
        self.in_flight.remove(group)
        return [one._replace(env_index=group) for one in self._backends[group].recv(out)]

    def close(self) -> None:
        for backend in self._backends:
            backend.close()


def sampler(
    env_id: str = "probe/Counter-v0", first_index: int = 0, *, num_groups: int = 1, num_envs: int = NUM_ENVS
) -> Sampler:
    config = RunConfig(env_id=env_id)
    size = num_envs // num_groups
    parts = [
        make_backend(config, EnvOptions(), num_envs=size, first_index=first_index + i) for i in range(0, num_envs, size)
    ]
    return Sampler(InTurns(parts) if num_groups > 1 else parts[0], torch.device("cpu"), first_index)


class Player:
    """Random actions; remembers how often it acted, as its state and beside each action."""

    def __init__(self) -> None:
        self.calls: list[Row] = []  # of one group each
        self.random = torch.Generator().manual_seed(0)

    def __call__(self, row: Row, state: State) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        self.calls.append(Row(tree_map(torch.clone, row.obs), *(x.clone() for x in row[1:])))
        calls = torch.zeros(len(row.reward), 1) if state is None else state
        action = torch.randint(0, 5, row.reward.shape, generator=self.random)
        return action, calls + 1, {"calls": calls[:, 0], "twice": 2 * action}

    def counts(self) -> Tensor:
        """The counters that it saw (steps, N, 4)."""
        return torch.cat([row.obs["count"] for row in self.calls]).unflatten(0, (-1, NUM_ENVS))  # type: ignore[index]

    def seen(self, part: int) -> Tensor:
        """The reward or a flag (steps, N)."""
        return torch.cat([row[part] for row in self.calls]).unflatten(0, (-1, NUM_ENVS))


def kept(roll: Rollout) -> Rollout:
    """A copy that the next rollout does not overwrite."""
    rows = Row(tree_map(torch.clone, roll.rows.obs), *(x.clone() for x in roll.rows[1:]))
    return Rollout(
        rows, roll.action.clone(), {key: x.clone() for key, x in roll.extras.items()}, roll.first_state, roll.last_state
    )


def tag_of(env_index: int, episode: int) -> int:
    """What Counter draws from the seed of an episode."""
    seed = episode_seed(stream_seed(RunConfig().seed, "env", env_index), episode)
    return int(np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed))).integers(100_000))


@pytest.fixture(params=[1, NUM_ENVS], ids=["one group", "in turns"])
def rollouts(request: pytest.FixtureRequest) -> tuple[Player, list[Rollout], Sampler]:
    player, made = Player(), sampler(num_groups=request.param)
    return player, [kept(made.rollout(player, STEPS)) for _ in range(6)], made


Made = tuple[Player, list[Rollout], Sampler]


def test_shapes_and_dtypes(rollouts: Made) -> None:
    roll = rollouts[1][0]
    obs: Any = roll.rows.obs
    assert (obs["count"].shape, obs["count"].dtype) == ((STEPS + 1, NUM_ENVS, 4), torch.float32)
    assert (obs["image"].shape, obs["image"].dtype) == ((STEPS + 1, NUM_ENVS, 8, 8, 3), torch.uint8)
    assert (roll.rows.reward.shape, roll.rows.reward.dtype) == ((STEPS + 1, NUM_ENVS), torch.float32)
    assert all((x.shape, x.dtype) == ((STEPS + 1, NUM_ENVS), torch.bool) for x in roll.rows[2:])
    assert (roll.action.shape, roll.action.dtype) == ((STEPS, NUM_ENVS), torch.int64)
    assert {key: (x.shape, x.dtype) for key, x in roll.extras.items()} == {
        "calls": ((STEPS, NUM_ENVS), torch.float32),
        "twice": ((STEPS, NUM_ENVS), torch.int64),
    }
    assert roll.first_state.shape == roll.last_state.shape == (NUM_ENVS, 1)


def test_row_t_of_one_rollout_is_row_0_of_the_next(rollouts: Made) -> None:
    _, rolls, _ = rollouts
    for old, new in pairwise(rolls):
        for key in ("count", "image"):
            assert torch.equal(old.rows.obs[key][-1], new.rows.obs[key][0])
        assert all(torch.equal(x[-1], y[0]) for x, y in zip(old.rows[1:], new.rows[1:], strict=True))
        assert torch.equal(old.last_state, new.first_state)


def test_the_policy_saw_the_rows_that_stand_beside_its_actions(rollouts: Made) -> None:
    player, rolls, _ = rollouts
    for number, roll in enumerate(rolls):
        for t in range(STEPS):
            step = number * STEPS + t
            assert torch.equal(player.counts()[step], roll.rows.obs["count"][t])
            assert all(torch.equal(player.seen(i)[step], roll.rows[i][t]) for i in range(1, 5))
            assert (roll.extras["calls"][t] == number * STEPS + t).all()
        assert torch.equal(roll.extras["twice"], 2 * roll.action)
        assert (roll.first_state == number * STEPS).all()
        assert (roll.last_state == (number + 1) * STEPS).all()


def test_observation_action_and_reward_belong_together(rollouts: Made) -> None:
    """The counter says which step of which episode a row is, and which action led to it."""
    _, rolls, _ = rollouts
    count = torch.cat([roll.rows.obs["count"][:-1] for roll in rolls])
    image = torch.cat([roll.rows.obs["image"][:-1] for roll in rolls])
    reward, is_first, is_last, is_terminal = (torch.cat([roll.rows[i][:-1] for roll in rolls]) for i in range(1, 5))
    action = torch.cat([roll.action for roll in rolls])
    for n in range(NUM_ENVS):
        episode, step, last_action = 0, 0, -1
        for t in range(len(count)):
            tag = tag_of(n, episode)
            assert count[t, n].tolist() == [0, step, last_action, tag], "each episode has the seed of its number"
            assert (image[t, n] == step).all()
            assert reward[t, n] == step
            end = step == 3 + tag % 4
            flags = [is_first[t, n].item(), is_last[t, n].item(), is_terminal[t, n].item()]
            assert flags == [step == 0, end, end and tag % 2 == 0]
            episode, step, last_action = (episode + 1, 0, -1) if end else (episode, step + 1, action[t, n].item())
        assert episode >= 5
    assert len(set(count[0, :, 3].tolist())) == NUM_ENVS, "environments have seeds of their own"


def test_counts(rollouts: Made) -> None:
    """Ignored actions are no steps; every episode is reported once, with its index, return and length."""
    _, rolls, made = rollouts
    ignored = sum(int(roll.rows.is_last[:-1].sum()) for roll in rolls)
    assert made.env_steps == 6 * STEPS * NUM_ENVS - ignored
    episodes = made.drain_episodes()
    assert made.drain_episodes() == []
    assert len(episodes) == sum(int(roll.rows.is_last[1:].sum()) for roll in rolls)
    for n in range(NUM_ENVS):
        mine = [x for x in episodes if x.env_index == n]
        lengths = [3 + tag_of(n, i) % 4 for i in range(len(mine))]
        assert [x.length_steps for x in mine] == lengths
        assert [x.episodic_return for x in mine] == [length * (length + 1) / 2 for length in lengths]
    steps = [x.env_steps for x in episodes]
    assert steps == sorted(set(steps)), "episodes that end together are told apart"
    assert 0 < steps[0] <= steps[-1] <= made.env_steps + NUM_ENVS
    assert made.seconds["env"] > 0
    assert made.seconds["inference"] > 0


def test_environments_have_global_indices() -> None:
    made = sampler(first_index=5)
    made.rollout(Player(), STEPS)
    assert {x.env_index for x in made.drain_episodes()} == {5, 6, 7}


def test_rollouts_of_another_length_go_on() -> None:
    player, made = Player(), sampler()
    for steps in (4, 7, 1, 1, 4):
        roll = made.rollout(player, steps)
        assert len(roll.action) == steps == len(roll.rows.reward) - 1
    whole = sampler().rollout(Player(), 17)
    assert torch.equal(player.counts(), whole.rows.obs["count"][:-1])


def test_nothing_is_in_flight_between_rollouts(rollouts: Made) -> None:
    backend = rollouts[2]._backend
    assert not getattr(backend, "in_flight", ())
    rollouts[2].close()


def test_groups_are_sent_before_another_is_acted_for() -> None:
    made, flying = sampler(num_groups=NUM_ENVS), []

    def act(row: Row, state: State) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        flying.append(len(made._backend.in_flight))  # type: ignore[attr-defined]
        return Player()(row, state)

    made.rollout(act, 3)
    assert flying == [0, 1, *[NUM_ENVS - 1] * 7]


def test_acting_beside_environments_takes_half_of_the_threads() -> None:
    threads = []

    def act(row: Row, state: State) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        threads.append(torch.get_num_threads())
        return Player()(row, state)

    torch.set_num_threads(2)
    for num_groups in (1, NUM_ENVS):
        sampler(num_groups=num_groups).rollout(act, 1)
    assert threads == [2, *[1] * NUM_ENVS]
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(("backend", "env_id"), [("envpool", "CartPole-v1"), ("ale", "PongNoFrameskip-v4")])
def test_rollouts_do_not_depend_on_the_number_of_groups(backend: Any, env_id: str) -> None:
    """With a policy that depends on the observation only."""
    for package in ("envpool", "ale_py"):
        pytest.importorskip(package)

    def act(row: Row, state: State) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        obs: Any = row.obs
        action = (obs[:, 2] > 0).long() if env_id == "CartPole-v1" else obs.flatten(1).sum(1) % 6
        return action, torch.zeros(len(action), 0), {"reward": row.reward}

    config, made = RunConfig(env_id=env_id, backend=backend), []
    for num_groups in (1, 2, 4):
        one = Sampler(make_backend(config, EnvOptions(), num_envs=4, num_groups=num_groups), torch.device("cpu"), 10)
        rolls = [kept(one.rollout(act, 40)) for _ in range(3)]
        made.append((rolls, one.drain_episodes(), one.env_steps))
        one.close()
    (rolls, episodes, steps), *others = made
    assert len(set(rolls[0].action.flatten().tolist())) > 1
    assert (len(episodes) > 4) == (env_id == "CartPole-v1")
    for other_rolls, other_episodes, other_steps in others:
        assert other_episodes == episodes
        assert other_steps == steps
        for roll, other in zip(rolls, other_rolls, strict=True):
            assert torch.equal(roll.action, other.action)
            assert torch.equal(roll.extras["reward"], other.extras["reward"])
            assert all(torch.equal(x, y) for x, y in zip(roll.rows, other.rows, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("env_id", "dtype", "shape"), [("Continuous", torch.float32, (1,)), ("MultiDiscrete", torch.int64, (2,))]
)
def test_actions_of_other_spaces(env_id: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """The reward says that the environment got the action that stands in the rollout."""
    made = sampler(f"probe/{env_id}-v0")
    torch.manual_seed(0)

    def act(row: Row, state: State) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        action = torch.rand(NUM_ENVS, 1) * 2 - 1 if env_id == "Continuous" else torch.randint(0, 2, (NUM_ENVS, 2))
        return action, torch.zeros(NUM_ENVS, 0), {}

    roll = made.rollout(act, 20)
    assert (roll.action.shape, roll.action.dtype) == ((20, NUM_ENVS, *shape), dtype)
    obs, acted = roll.rows.obs[:-1].numpy(), roll.rows.is_first[:-1].numpy()
    action = roll.action.numpy()
    if env_id == "Continuous":
        expected = -((action[..., 0] - obs[..., 0] / 2) ** 2)
    else:
        wanted = np.stack([obs[..., :2].argmax(-1), obs[..., 2:].argmax(-1)], -1)
        expected = (action == wanted).mean(-1)
    np.testing.assert_allclose(roll.rows.reward[1:].numpy()[acted], expected[acted], atol=1e-6)
    assert acted.sum() == 30


def test_an_environment_that_raises_is_named() -> None:
    made = sampler("CartPole-v1")

    def act(row: Row, state: State) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        return torch.tensor([0, 1, 7]), torch.zeros(NUM_ENVS, 0), {}

    with pytest.raises(RuntimeError, match=r"environment 2 .*CartPole.* in step") as caught:
        made.rollout(act, 1)
    assert caught.value.__cause__ is not None
    made.close()
    made.close()


def test_an_environment_that_raises_in_reset_is_named() -> None:
    class Unready(gym.Env[Any, Any]):
        observation_space, action_space = gym.spaces.Box(0, 1, (1,), np.float32), gym.spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            raise ZeroDivisionError

    made = Sampler(SyncBackend([Unready], [1]), torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"environment 0 .*Unready.* in reset"):
        made.rollout(Player(), 1)
