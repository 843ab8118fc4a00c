"""DQN and C51 find the known answer of each probe in seconds; with one thing deliberately wrong they do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flotilla.algorithms import c51
from flotilla.core.types import Row
from flotilla.sampling.replay import Replay, Transitions

Train = Callable[..., Any]
ALGORITHMS = pytest.mark.parametrize("name", ["dqn", "c51"])
COMMON: dict[str, Any] = {
    "num_envs": 4,
    "total_timesteps": 3000,
    "learning_starts": 100,
    "train_frequency": 4,
    "buffer_size": 2000,
    "batch_size": 64,
    "learning_rate": 1e-2,
    "adam_eps": 1e-5,
    "target_network_frequency": 40,
    "gamma": 0.9,
    "hidden_sizes": (32,),
}


def settings(name: str, **values: Any) -> dict[str, Any]:
    atoms = {"num_atoms": 25, "v_min": -12.0, "v_max": 12.0} if name == "c51" else {}
    return COMMON | atoms | values


def seen(*observations: list[float]) -> Tensor:
    return torch.tensor(observations)


@torch.no_grad()
def q(agent: Any, *observations: list[float]) -> Any:
    """What the network says that each action is worth."""
    agent.eval()
    out = agent.network(seen(*observations))
    return (out.softmax(-1) @ agent.atom_K if isinstance(agent, c51.Agent) else out).tolist()


def best_actions(agent: Any, *observations: list[float]) -> Any:
    agent.eval()
    flags = [torch.zeros(len(observations), dtype=torch.bool)] * 3
    with torch.no_grad():
        return agent.act(Row(seen(*observations), torch.zeros(len(observations)), *flags), None)[0].tolist()


def tamper(monkeypatch: pytest.MonkeyPatch, change: Callable[[Transitions], Transitions]) -> None:
    """What the algorithm draws is no longer what happened."""
    sample = Replay.sample

    def changed(self: Replay, batch_size: int, *, beta: float = 0.0) -> Transitions:
        return change(sample(self, batch_size, beta=beta))

    monkeypatch.setattr(Replay, "sample", changed)


@ALGORITHMS
def test_the_right_action(name: str, train: Train) -> None:
    agent = train(name, "probe/Action-v0", **settings(name))
    assert best_actions(agent, [-1.0], [1.0]) == [0, 1]
    (low, high), (other_low, other_high) = q(agent, [-1.0], [1.0])
    assert [low, high, other_low, other_high] == pytest.approx([1, -1, -1, 1], abs=0.15)


@ALGORITHMS
@pytest.mark.parametrize(
    "values", [{"double": True, "dueling": True}, {"noisy": True, "dueling": True}, {"prioritized": True, "n_step": 2}]
)
def test_the_additions_find_it_too(name: str, values: dict[str, Any], train: Train) -> None:
    agent = train(name, "probe/Action-v0", **settings(name, **values))
    assert best_actions(agent, [-1.0], [1.0]) == [0, 1]


@ALGORITHMS
@pytest.mark.parametrize("n_step", [1, 3])
def test_the_value_of_a_later_reward(name: str, n_step: int, train: Train) -> None:
    agent = train(name, "probe/TwoStep-v0", **settings(name, n_step=n_step))
    (first, _), (second, _) = q(agent, [0.0], [1.0])
    assert [first, second] == pytest.approx([0.9, 1.0], abs=0.1)


@ALGORITHMS
def test_a_time_limit_is_no_end(name: str, train: Train) -> None:
    """Reward 1 for ever at gamma 0.9 is worth 10."""
    agent = train(name, "probe/TimeLimit-v0", **settings(name, total_timesteps=6000))
    assert q(agent, [0.0])[0] == pytest.approx([10, 10], abs=1.2)


@ALGORITHMS
def test_a_time_limit_as_an_end_is_worth_less(name: str, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    index = torch.Generator().manual_seed(0)

    def ends(batch: Transitions) -> Transitions:
        """One of ten steps, as where the limit counted as an end."""
        ended = torch.rand(len(batch.discount), generator=index) < 0.1
        return replace(batch, discount=batch.discount.masked_fill(ended, 0.0))

    tamper(monkeypatch, ends)
    agent = train(name, "probe/TimeLimit-v0", **settings(name, total_timesteps=6000))
    assert q(agent, [0.0])[0][0] < 7


@ALGORITHMS
def test_an_end_that_is_none_is_worth_more(name: str, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    tamper(monkeypatch, lambda batch: replace(batch, discount=torch.full_like(batch.discount, 0.9)))
    agent = train(name, "probe/Constant-v0", **settings(name, total_timesteps=6000))
    assert q(agent, [0.0])[0][0] > 5, "where it should be 1"


@ALGORITHMS
def test_a_target_that_never_moves(name: str, train: Train) -> None:
    values = settings(name, total_timesteps=6000, target_network_frequency=10**9)
    agent = train(name, "probe/TimeLimit-v0", **values)
    assert q(agent, [0.0])[0][0] < 3


@ALGORITHMS
def test_actions_of_other_transitions(name: str, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    tamper(monkeypatch, lambda batch: replace(batch, action=batch.action.roll(1)))
    agent = train(name, "probe/Action-v0", **settings(name))
    assert max(abs(value) for values in q(agent, [-1.0], [1.0]) for value in values) < 0.6
