"""DDPG, TD3 and SAC find the known answer of each probe in seconds; with one thing deliberately wrong they do not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from flotilla.algorithms import sac
from flotilla.core.types import Act, Rollout, Row
from flotilla.envs import probe
from flotilla.sampling.replay import Replay, Transitions
from flotilla.sampling.sampler import Sampler

Train = Callable[..., Any]
GAMMA = 0.8
BOX = gym.spaces.Box(-1, 1, (1,))

COMMON: dict[str, Any] = {
    "num_envs": 8,
    "total_timesteps": 1200,
    "learning_starts": 64,
    "train_frequency": 16,
    "gradient_steps": 8,
    "batch_size": 64,
    "buffer_size": 2400,
    "hidden_sizes": (32,),
    "gamma": GAMMA,
    "tau": 0.1,
}
VALUES: dict[str, dict[str, Any]] = {
    "ddpg": {"learning_rate": 5e-3},
    "td3": {"learning_rate": 5e-3},
    "sac": {"policy_lr": 5e-3, "q_lr": 5e-3},
}
COLD = {"autotune": False, "alpha": 1e-4}  # a temperature at which values are those without entropy

# Boxes by each algorithm, and choices by SAC.
everyone = pytest.mark.parametrize("name", ["ddpg", "td3", "sac", "discrete sac"])


def seen(*numbers: float) -> Tensor:
    return torch.tensor(numbers).unsqueeze(-1)


@torch.no_grad()
def q(agent: Any, name: str, *observations: float) -> Any:
    """What the (first) critic says of action 0, in the middle or the first."""
    critic, obs = agent.critic if name == "ddpg" else agent.critics, seen(*observations)
    said: Tensor = critic(obs)[0, :, 0] if name == "discrete sac" else critic(obs, torch.zeros(len(obs), 1))[0]
    return said.tolist()


@torch.no_grad()
def best_actions(agent: Any, *observations: float) -> list[Any]:
    agent.eval()
    flags = torch.zeros(len(observations), dtype=torch.bool)
    action: Tensor = agent.act(Row(seen(*observations), torch.zeros(len(flags)), ~flags, flags, flags), None)[0]
    return action.flatten().tolist()


def error(agent: Any) -> float:
    """Largest distance of the policy's mode from the best action of Continuous."""
    sights = [-0.9, -0.5, 0.0, 0.5, 0.9]
    return float(max(abs(a - x / 2) for a, x in zip(best_actions(agent, *sights), sights, strict=True)))


def on(train: Train, name: str, kind: str, monkeypatch: pytest.MonkeyPatch, **values: Any) -> Any:
    """Trained on a probe whose reward does not depend on the action, which is of the kind that is needed."""
    if name != "discrete sac":
        monkeypatch.setattr(getattr(probe, kind), "action_space", BOX)
    algorithm = name.split()[-1]
    cold = COLD if algorithm == "sac" else {}
    return train(algorithm, f"probe/{kind}-v0", **COMMON | VALUES[algorithm] | cold | values)


def tamper(monkeypatch: pytest.MonkeyPatch, change: Callable[[Rollout], Rollout]) -> None:
    """What the algorithm is handed is no longer what happened."""
    rollout = Sampler.rollout

    def changed(self: Sampler, act: Act, num_steps: int) -> Rollout:
        return change(rollout(self, act, num_steps))

    monkeypatch.setattr(Sampler, "rollout", changed)


# Values: of the end, and of what never ends ---------------------------------------------------------------------------


@everyone
def test_two_step(train: Train, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = on(train, name, "TwoStep", monkeypatch)
    assert q(agent, name, 0.0, 1.0) == pytest.approx([GAMMA, 1.0], abs=0.05)


@everyone
def test_two_step_is_wrong_where_ends_are_not_seen(train: Train, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = Replay.sample

    def endless(self: Replay, batch_size: int) -> Transitions:
        batch = sample(self, batch_size)
        return replace(batch, discount=torch.full_like(batch.discount, GAMMA))

    monkeypatch.setattr(Replay, "sample", endless)
    agent = on(train, name, "TwoStep", monkeypatch)
    assert q(agent, name, 1.0)[0] > 1.5


@everyone
def test_two_step_is_wrong_where_targets_stand_still(train: Train, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = on(train, name, "TwoStep", monkeypatch, tau=0.0)
    first, second = q(agent, name, 0.0, 1.0)
    assert second == pytest.approx(1.0, abs=0.05), "the last step needs no target"
    assert abs(first - GAMMA) > 0.2


@everyone
def test_a_time_limit_is_bootstrapped(train: Train, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = on(train, name, "TimeLimit", monkeypatch)
    assert q(agent, name, 0.0) == pytest.approx([1 / (1 - GAMMA)], abs=0.15)


@everyone
def test_a_time_limit_taken_for_an_end_gives_another_value(
    train: Train, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tamper(monkeypatch, lambda roll: replace(roll, rows=roll.rows._replace(is_terminal=roll.rows.is_last)))
    agent = on(train, name, "TimeLimit", monkeypatch)
    assert q(agent, name, 0.0) == pytest.approx([1 / (1 - 0.9 * GAMMA)], abs=0.4), "each tenth step is an end"


# Actions --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VALUES)
def test_continuous(train: Train, name: str) -> None:
    assert error(train(name, "probe/Continuous-v0", **COMMON | VALUES[name])) < 0.15


@pytest.mark.parametrize("name", VALUES)
def test_continuous_is_not_learned_from_misplaced_actions(
    train: Train, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def preference() -> float:
        """What the critic says of the best action, above another one which is worth 1.45^2 less."""
        noisy = {} if name == "sac" else {"exploration_noise": 1.0}
        agent = train(name, "probe/Continuous-v0", **COMMON | VALUES[name] | noisy)
        critic = agent.critic if name == "ddpg" else agent.critics
        with torch.no_grad():
            good, bad = critic(seen(0.9, 0.9), seen(0.45, -1.0))[0].tolist()
        return float(good - bad)

    assert preference() > 1.4
    tamper(monkeypatch, lambda roll: replace(roll, action=roll.action.roll(1, 0)))
    assert abs(preference()) < 0.7


def test_action_and_a_temperature_that_holds_the_entropy(train: Train) -> None:
    """Rewards of 1 and -1 give probabilities of 1 to exp(-2 / alpha), whose entropy is the target."""
    agent = train("sac", "probe/Action-v0", **COMMON | VALUES["sac"])
    assert best_actions(agent, -1.0, 1.0) == [0, 1]
    with torch.no_grad():
        torch.testing.assert_close(
            agent.critics(seen(-1.0, 1.0))[0], torch.tensor([[1.0, -1], [-1, 1]]), atol=0.1, rtol=0
        )
        policy = agent.policy(seen(-1.0, 1.0))
    right = policy.log_p.exp()[0, 0].item()
    assert policy.entropy().tolist() == pytest.approx([0.89 * math.log(2)] * 2, abs=0.03)
    assert agent.log_alpha.exp().item() == pytest.approx(2 / math.log(right / (1 - right)), rel=0.1)


def test_action_is_not_learned_from_misplaced_actions(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    tamper(monkeypatch, lambda roll: replace(roll, action=roll.action.roll(1, 0)))
    agent = train("sac", "probe/Action-v0", **COMMON | VALUES["sac"])
    with torch.no_grad():
        q_BA = agent.critics(seen(-1.0, 1.0))[0]
    assert (q_BA[:, 0] - q_BA[:, 1]).abs().max() < 0.7, "as good as each other, rather than 2 apart"


def test_continuous_and_a_temperature_that_holds_the_entropy(train: Train) -> None:
    """The best policy is a normal of variance alpha / 2, whose entropy is log(pi e alpha) / 2."""
    values = COMMON | {"total_timesteps": 2400, "policy_lr": 5e-3, "q_lr": 1e-2}
    agent = train("sac", "probe/Continuous-v0", **values, target_entropy=-0.5)
    with torch.no_grad():
        _, log_prob = sac.soft_value(agent, agent.critics, torch.rand(2000, 1) * 2 - 1)
    assert -log_prob.mean().item() == pytest.approx(-0.5, abs=0.1)
    assert agent.log_alpha.exp().item() == pytest.approx(math.exp(-1) / (math.pi * math.e), rel=0.5)


# Images and dicts -----------------------------------------------------------------------------------------------------


class Looks(probe.Continuous):
    """The probe Continuous, whose x is the brightness of an image, a number in a dict, or both."""

    discrete = False  # whether the actions are two choices

    def __init__(self, kind: str, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        image, vector = gym.spaces.Box(0, 255, (12, 12, 3), np.uint8), gym.spaces.Box(-1, 1, (2,))
        parts: dict[str, gym.Space[Any]] = {"image": image, "vector": vector}
        self.kind = kind
        self.observation_space = gym.spaces.Dict(parts) if kind == "dict" else parts[kind]
        if self.discrete:
            self.action_space = gym.spaces.Discrete(2)  # type: ignore[assignment]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        obs, info = super().reset(seed=seed, options=options)
        return self.look(obs), info

    def step(self, action: Any) -> Any:
        obs, *rest = super().step([action - 0.5] if self.discrete else action)
        return self.look(obs), *rest

    def look(self, obs: NDArray[np.float32]) -> Any:
        parts = {
            "image": np.full((12, 12, 3), 127.5 * (1 + self.x), np.uint8),
            "vector": np.repeat(obs, 2),
        }
        return parts if self.kind == "dict" else parts[self.kind]


for _kind in ("image", "vector", "dict"):
    gym.register(f"looks/{_kind}-v0", entry_point=f"{__name__}:Looks", kwargs={"kind": _kind})


@everyone
@pytest.mark.parametrize("kind", ["image", "vector", "dict"])
def test_every_kind_of_observation(train: Train, name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part learns: no module is left out."""
    algorithm = name.split()[-1]
    monkeypatch.setattr(Looks, "discrete", name == "discrete sac")
    rate = ("policy_lr", "q_lr") if algorithm == "sac" else ("learning_rate",)
    short = COMMON | {"total_timesteps": 96, "batch_size": 16, "cnn": "impala"}
    fresh, agent = (
        train(algorithm, f"looks/{kind}-v0", **short | dict.fromkeys(rate, x)).state_dict() for x in (0.0, 1e-2)
    )
    still = {key for key, x in fresh.items() if torch.equal(x, agent[key])}
    assert {key for key in still if not key.startswith("scale.")} == set()
    assert all(torch.isfinite(x).all() for x in agent.values())
