"""DDPG, TD3 and SAC find the known answer of each probe in seconds; with one thing deliberately wrong they do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from flotilla.algorithms import ddpg, sac, td3
from flotilla.core.types import Row
from flotilla.sampling.replay import Replay, Transitions

TrainAgent = Callable[..., Any]
ALGORITHMS = pytest.mark.parametrize("module", [ddpg, td3, sac], ids=lambda module: module.__name__.rpartition(".")[2])
COMMON: dict[str, Any] = {
    "num_envs": 4,
    "total_timesteps": 1600,
    "learning_starts": 200,
    "train_frequency": 2,
    "buffer_size": 2000,
    "batch_size": 64,
    "gamma": 0.9,
    "tau": 0.05,
    "policy_frequency": 1,
    "hidden_sizes": (32, 32),
}


def settings(module: Any, **values: Any) -> dict[str, Any]:
    own: dict[str, Any] = {"policy_lr": 3e-3, "q_lr": 1e-2, "autotune": False, "alpha": 0.01}
    return COMMON | (own if module is sac else {"learning_rate": 5e-3, "exploration_noise": 0.3}) | values


def seen(*observations: float) -> Row:
    flags = [torch.zeros(len(observations), dtype=torch.bool)] * 3
    return Row(torch.tensor(observations)[:, None], torch.zeros(len(observations)), *flags)


@torch.no_grad()
def actions(agent: Any, *observations: float) -> Any:
    """What it does in evaluation."""
    agent.eval()
    return agent.act(seen(*observations), None)[0].flatten().tolist()


@torch.no_grad()
def value(agent: Any, observation: float, action: float) -> float:
    critics = agent.critic if isinstance(agent, ddpg.Agent) else agent.critics
    return float(critics(torch.tensor([[observation]]), torch.tensor([[action]])).mean())


def tamper(monkeypatch: pytest.MonkeyPatch, change: Callable[[Transitions], Transitions]) -> None:
    """What the algorithm draws is no longer what happened."""
    sample = Replay.sample

    def changed(self: Replay, batch_size: int, *, beta: float = 0.0) -> Transitions:
        return change(sample(self, batch_size, beta=beta))

    monkeypatch.setattr(Replay, "sample", changed)


@ALGORITHMS
def test_the_right_action(module: Any, train_agent: TrainAgent) -> None:
    agent = train_agent(module, "probe/Continuous-v0", **settings(module))
    assert actions(agent, -0.8, 0.0, 0.8) == pytest.approx([-0.4, 0, 0.4], abs=0.1)
    assert value(agent, 0.8, 0.4) == pytest.approx(0, abs=0.1)
    assert value(agent, 0.8, -0.6) == pytest.approx(-1, abs=0.25)


@ALGORITHMS
def test_a_time_limit_is_no_end(module: Any, train_agent: TrainAgent) -> None:
    agent = train_agent(module, "probe/Steady-v0", **settings(module))
    assert actions(agent, 0.0) == pytest.approx([0], abs=0.25)
    assert value(agent, 0.0, 0.0) == pytest.approx(10, abs=1.5)


def test_discrete_actions_of_sac(train_agent: TrainAgent) -> None:
    values = settings(sac, policy_lr=1e-2)
    agent = train_agent(sac, "probe/Action-v0", **values)
    agent.eval()
    assert agent.act(seen(-1.0, 1.0), None)[0].tolist() == [0, 1]
    q_KBA = agent.critics(seen(-1.0, 1.0).obs)
    assert q_KBA.mean(0).flatten().tolist() == pytest.approx([1, -1, -1, 1], abs=0.2)


def test_the_temperature_meets_its_target(train_agent: TrainAgent) -> None:
    """As much entropy as there can be: actions stay random, the temperature is high; none: they do not."""
    found = {}
    for scale in (0.98, 0.05):
        values = settings(sac, autotune=True, target_entropy_scale=scale, total_timesteps=2400)
        agent = train_agent(sac, "probe/Action-v0", **values)
        log_p = agent.policy(seen(-1.0, 1.0).obs).log_p
        found[scale] = (-(log_p.exp() * log_p).sum(-1).mean().item(), agent.log_alpha.exp().item())
    assert found[0.98][0] > 0.6
    assert found[0.05][0] < 0.25
    assert found[0.05][1] < found[0.98][1]


@ALGORITHMS
def test_a_time_limit_as_an_end_is_worth_less(
    module: Any, train_agent: TrainAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = torch.Generator().manual_seed(0)

    def ends(batch: Transitions) -> Transitions:
        """One of ten steps, as where the limit counted as an end."""
        ended = torch.rand(len(batch.discount), generator=random) < 0.1
        return replace(batch, discount=batch.discount.masked_fill(ended, 0.0))

    tamper(monkeypatch, ends)
    agent = train_agent(module, "probe/Steady-v0", **settings(module))
    assert value(agent, 0.0, 0.0) < 7.5


@ALGORITHMS
def test_an_end_that_is_none_is_worth_more(
    module: Any, train_agent: TrainAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    tamper(
        monkeypatch,
        lambda batch: replace(batch, reward=batch.reward + 1, discount=torch.full_like(batch.discount, 0.9)),
    )
    agent = train_agent(module, "probe/Continuous-v0", **settings(module))
    assert value(agent, 0.0, 0.0) > 5, "where it should be 1"


@ALGORITHMS
def test_targets_that_never_move(module: Any, train_agent: TrainAgent) -> None:
    agent = train_agent(module, "probe/Steady-v0", **settings(module, tau=0.0))
    assert value(agent, 0.0, 0.0) < 3


@ALGORITHMS
def test_actions_of_other_transitions(module: Any, train_agent: TrainAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    tamper(monkeypatch, lambda batch: replace(batch, action=batch.action.roll(1, 0)))
    agent = train_agent(module, "probe/Continuous-v0", **settings(module))
    right = value(agent, 0.8, 0.4) - value(agent, 0.8, -0.6)
    assert right < 0.6, "where it should be 1"
