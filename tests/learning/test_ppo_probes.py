"""PPO finds the known answer of each probe in seconds; with one thing deliberately wrong it does not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flotilla.algorithms import ppo
from flotilla.core.config import RunConfig
from flotilla.core.types import Act, Rollout, Row
from flotilla.envs import probe
from flotilla.evaluation import evaluate
from flotilla.sampling.sampler import Sampler

Train = Callable[..., ppo.Agent]

COMMON: dict[str, Any] = {
    "num_envs": 8,
    "num_steps": 32,
    "hidden_sizes": (32,),
    "total_timesteps": 4096,
    "learning_rate": 1e-2,
    "gamma": 0.9,
    "ent_coef": 0.0,
    "clip_vloss": False,  # its bound of 0.2 an update is the slowest way to a value of 10
}


def seen(*observations: list[float]) -> Row:
    """Observations as first rows of episodes."""
    flags = [torch.zeros(len(observations), dtype=torch.bool) for _ in range(3)]
    flags[0][:] = True
    return Row(torch.tensor(observations), torch.zeros(len(observations)), *flags)


@torch.no_grad()
def values(agent: ppo.Agent, *observations: list[float]) -> list[float]:
    found: Tensor = agent.value(agent.norm(seen(*observations).obs))
    return found.tolist()


@torch.no_grad()
def best_actions(agent: ppo.Agent, *observations: list[float]) -> Any:
    acting = copy.deepcopy(agent).eval()
    return acting.act(seen(*observations), None)[0].tolist()


def score(agent: ppo.Agent, env_id: str, episodes: int = 50) -> float:
    """Mean return of the policy's mode."""
    config = RunConfig(env_id=env_id, backend="sync")
    scored = evaluate(config, agent, torch.device("cpu"), episodes=episodes, policy="mode")
    return sum(x.episodic_return for x in scored) / episodes


def tamper(monkeypatch: pytest.MonkeyPatch, change: Callable[[Rollout], Rollout]) -> None:
    """What the algorithm is handed is no longer what happened."""
    rollout = Sampler.rollout

    def changed(self: Sampler, act: Act, num_steps: int) -> Rollout:
        return change(rollout(self, act, num_steps))

    monkeypatch.setattr(Sampler, "rollout", changed)


def actions_of_the_next_row(roll: Rollout) -> Rollout:
    return replace(
        roll,
        action=roll.action.roll(1, 0),
        extras=roll.extras | {"log_prob": roll.extras["log_prob"].roll(1, 0)},
    )


def blind(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The probe shows zeros in place of what it would show."""
    kind = getattr(probe, name)
    observe = kind.observe
    monkeypatch.setattr(kind, "observe", lambda self: 0 * observe(self))


# A value of 1, of gamma then 1, of what is seen -----------------------------------------------------------------------


def test_constant(train_ppo: Train) -> None:
    agent = train_ppo("probe/Constant-v0", **COMMON)
    assert values(agent, [0.0]) == pytest.approx([1.0], abs=0.05)


def test_constant_is_not_learned_where_the_value_has_no_loss(train_ppo: Train) -> None:
    agent = train_ppo("probe/Constant-v0", **COMMON, vf_coef=0.0)
    assert abs(values(agent, [0.0])[0] - 1.0) > 0.3


@pytest.mark.parametrize("gamma", [0.9, 0.5])
def test_two_step(train_ppo: Train, gamma: float) -> None:
    """The first value is the discount: another discount gives another value."""
    agent = train_ppo("probe/TwoStep-v0", **COMMON | {"gamma": gamma})
    assert values(agent, [0.0], [1.0]) == pytest.approx([gamma, 1.0], abs=0.06)


def test_two_step_is_wrong_where_ends_are_not_seen(train_ppo: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(roll: Rollout) -> Rollout:
        never = torch.zeros_like(roll.rows.is_terminal)
        return replace(roll, rows=roll.rows._replace(is_terminal=never))

    tamper(monkeypatch, endless)
    agent = train_ppo("probe/TwoStep-v0", **COMMON)
    assert values(agent, [1.0])[0] > 1.5


def test_observed_reward(train_ppo: Train) -> None:
    agent = train_ppo("probe/ObsReward-v0", **COMMON)
    assert values(agent, [-1.0], [1.0]) == pytest.approx([-1.0, 1.0], abs=0.06)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_solves_it_as_well(train_ppo: Train, precision: str) -> None:
    agent = train_ppo("probe/ObsReward-v0", **COMMON, precision=precision)
    assert values(agent, [-1.0], [1.0]) == pytest.approx([-1.0, 1.0], abs=0.1)
    agent = train_ppo("probe/TimeLimit-v0", **COMMON | {"total_timesteps": 8192}, precision=precision)
    assert values(agent, [0.0]) == pytest.approx([10.0], abs=0.5)


def test_observed_reward_is_not_learned_blindly(train_ppo: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    blind(monkeypatch, "ObsReward")
    agent = train_ppo("probe/ObsReward-v0", **COMMON)
    assert values(agent, [0.0]) == pytest.approx([0.0], abs=0.3), "the mean of -1 and 1"
    assert max(map(abs, values(agent, [-1.0], [1.0]))) < 0.9


# Time limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gae_lambda", [0.0, 0.95])
def test_a_time_limit_is_bootstrapped(train_ppo: Train, gae_lambda: float) -> None:
    agent = train_ppo("probe/TimeLimit-v0", **COMMON | {"total_timesteps": 8192}, gae_lambda=gae_lambda)
    assert values(agent, [0.0]) == pytest.approx([10.0], abs=0.3)


def test_a_time_limit_taken_for_an_end_gives_another_value(train_ppo: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    tamper(monkeypatch, lambda roll: replace(roll, rows=roll.rows._replace(is_terminal=roll.rows.is_last)))
    agent = train_ppo("probe/TimeLimit-v0", **COMMON | {"total_timesteps": 8192})
    assert values(agent, [0.0])[0] < 7.0


# Actions --------------------------------------------------------------------------------------------------------------


def test_action(train_ppo: Train) -> None:
    agent = train_ppo("probe/Action-v0", **COMMON)
    assert best_actions(agent, [-1.0], [1.0]) == [0, 1]
    assert score(agent, "probe/Action-v0") == 1.0


def test_action_is_not_learned_from_misplaced_actions(train_ppo: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    tamper(monkeypatch, actions_of_the_next_row)
    agent = train_ppo("probe/Action-v0", **COMMON)
    monkeypatch.undo()
    assert score(agent, "probe/Action-v0") < 0.5


def test_multi_discrete(train_ppo: Train) -> None:
    agent = train_ppo("probe/MultiDiscrete-v0", **COMMON)
    assert score(agent, "probe/MultiDiscrete-v0") > 0.97


def test_multi_discrete_is_not_learned_from_misplaced_actions(
    train_ppo: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    tamper(monkeypatch, actions_of_the_next_row)
    agent = train_ppo("probe/MultiDiscrete-v0", **COMMON)
    monkeypatch.undo()
    assert score(agent, "probe/MultiDiscrete-v0") < 0.8


CONTINUOUS: dict[str, Any] = COMMON | {"total_timesteps": 8192, "update_epochs": 8}


def error(agent: ppo.Agent) -> float:
    """Largest distance of the policy's mean from the best action."""
    sights = [-0.9, -0.5, 0.0, 0.5, 0.9]
    means = best_actions(agent, *([x] for x in sights))
    return max(abs(mean[0] - x / 2) for mean, x in zip(means, sights, strict=True))


@pytest.mark.parametrize("normalised", [False, True])
def test_continuous(train_ppo: Train, normalised: bool) -> None:
    agent = train_ppo("probe/Continuous-v0", **CONTINUOUS, norm_obs=normalised, norm_reward=normalised)
    assert error(agent) < 0.15
    assert agent.log_std.item() < -0.5, "noise costs reward"


def test_continuous_is_not_learned_blindly(train_ppo: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    blind(monkeypatch, "Continuous")
    agent = train_ppo("probe/Continuous-v0", **CONTINUOUS)
    assert error(agent) > 0.2


# Memory ---------------------------------------------------------------------------------------------------------------

MEMORY: dict[str, Any] = COMMON | {
    "num_envs": 16,
    "total_timesteps": 32_768,
    "learning_rate": 5e-3,
    "gamma": 0.99,
    "memory_size": 16,
    "ent_coef": 0.01,
}


@pytest.mark.parametrize("memory", ["lstm", "gru"])
def test_memory(train_ppo: Train, memory: str) -> None:
    agent = train_ppo("probe/Memory-v0", **MEMORY, memory=memory)
    assert score(agent, "probe/Memory-v0") > 0.9


def test_memory_is_not_solved_without_one(train_ppo: Train) -> None:
    agent = train_ppo("probe/Memory-v0", **MEMORY, memory="none")
    assert abs(score(agent, "probe/Memory-v0")) < 0.5


def test_memory_is_not_solved_where_it_is_wiped_at_every_step(
    train_ppo: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flotilla.nets.layers import Memory

    forward = Memory.forward
    monkeypatch.setattr(Memory, "forward", lambda self, x, state, is_first: forward(self, x, state, is_first | True))
    agent = train_ppo("probe/Memory-v0", **MEMORY | {"total_timesteps": 16_384}, memory="gru")
    assert abs(score(agent, "probe/Memory-v0")) < 0.5
