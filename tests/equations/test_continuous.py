"""DDPG, TD3 and SAC: scales of actions, critics computed as one, densities, losses against slow computations."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flotilla.algorithms import ddpg, sac, td3
from flotilla.core.errors import UsageError
from flotilla.core.types import Row, Spec
from flotilla.nets.continuous import ActionScale, Critics, with_noise

OBS = gym.spaces.Box(-1, 1, (3,), np.float32)
BOX = gym.spaces.Box(np.float32([-2, 0, 5]), np.float32([2, 10, 5]))
SPEC = Spec(OBS, BOX)
IMAGE = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
SIZES = (7, 5)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class TestScale:
    def test_reaches_the_bounds_and_comes_back(self) -> None:
        scale = ActionScale(BOX)
        unit = torch.tensor([[-1.0, -1.0, 0.3], [1.0, 1.0, 0.0], [0.5, 0.0, 0.0]])
        action = scale.to_env(unit)
        assert action.tolist() == [[-2, 0, 5], [2, 10, 5], [1, 5, 5]]
        assert scale.to_unit(action).tolist() == [[-1, -1, 0], [1, 1, 0], [0.5, 0, 0]]

    def test_random_actions_fill_the_box(self) -> None:
        action = ActionScale(BOX).uniform(4000)
        assert action.amin(0).tolist() == pytest.approx([-2, 0, 5], abs=0.02)
        assert action.amax(0).tolist() == pytest.approx([2, 10, 5], abs=0.02)
        assert action.mean(0).tolist() == pytest.approx([0, 5, 5], abs=0.15)

    @pytest.mark.parametrize(
        ("space", "words"),
        [
            (gym.spaces.Box(-np.inf, np.inf, (2,)), "has no bounds to scale to"),
            (gym.spaces.Box(np.float32([-1, -np.inf]), np.float32([1, 1])), "has no bounds to scale to"),
            (gym.spaces.Box(-1, 1, (2, 2)), "is not supported"),
            (gym.spaces.Discrete(3), "is not supported"),
        ],
    )
    @pytest.mark.parametrize("module", [ddpg, td3, sac])
    def test_other_spaces_are_refused(self, module: Any, space: gym.Space[Any], words: str) -> None:
        if module is sac and isinstance(space, gym.spaces.Discrete):
            return
        with pytest.raises(UsageError, match=words):
            module.Agent(Spec(OBS, space), module.Config())


def test_noise_is_cut_and_so_are_actions() -> None:
    action = torch.full((5000, 1), 0.9)
    noisy = with_noise(action, 0.5, 0.3)
    assert noisy.max() == 1
    assert noisy.min().item() == pytest.approx(0.6)
    wide = with_noise(torch.zeros(5000, 1), 0.2)
    assert wide.std().item() == pytest.approx(0.2, abs=0.01)
    assert torch.equal(with_noise(action, 0.0), action)


@pytest.mark.parametrize(("num_actions", "num_outputs"), [(3, 0), (0, 4)])
def test_critics_as_one_are_what_each_would_be(num_actions: int, num_outputs: int) -> None:
    critics = Critics(SPEC, 2, SIZES, "nature", num_actions=num_actions, num_outputs=num_outputs)
    obs, action = torch.randn(6, 3), torch.rand(6, 3) if num_actions else None
    found = critics(obs, action)
    for k in range(2):
        x = obs if action is None else torch.cat([obs, action], -1)
        for layer, (weight, bias) in enumerate(zip(critics.weights, critics.biases, strict=True)):
            x = nn.functional.linear(x, weight[k].T, bias[k, 0])
            x = x.relu() if layer < 2 else x
        torch.testing.assert_close(found[k], x if num_outputs else x[:, 0])
    assert not torch.allclose(found[0], found[1])
    bound = critics.weights[1].abs().max().item()
    assert 0.9 / math.sqrt(SIZES[0]) < bound <= 1 / math.sqrt(SIZES[0]), "the scale of torch's own layers"


def test_the_density_of_a_squashed_normal() -> None:
    """Against torch.distributions, where its tanh can still be undone, and its limit where it cannot."""
    mean, raw = torch.randn(50, 3, dtype=torch.float64), torch.randn(50, 3, dtype=torch.float64)
    policy = sac.Squashed(mean, raw)
    action, log_prob = policy.sample_with_log_prob()
    normal = torch.distributions.Normal(mean, policy.log_std.exp())
    slow = torch.distributions.TransformedDistribution(normal, torch.distributions.TanhTransform())
    torch.testing.assert_close(log_prob, slow.log_prob(action).sum(-1))
    assert (policy.mode() == mean.tanh()).all()
    assert (policy.log_std > sac.LOG_STD_MIN).all()
    assert (policy.log_std < sac.LOG_STD_MAX).all()
    far = sac.Squashed(torch.full((4, 1), 30.0), torch.full((4, 1), -20.0))
    action, log_prob = far.sample_with_log_prob()
    assert (action == 1).all()
    assert torch.isfinite(log_prob).all(), "where 1 - tanh^2 rounds to 0"


class Constant(nn.Module):
    """An actor that always gives the same."""

    def __init__(self, unit: list[float]) -> None:
        super().__init__()
        self.unit = nn.Parameter(torch.tensor(unit))

    def forward(self, obs: Tensor) -> Tensor:
        return self.unit.expand(len(obs), -1)


class Linear(nn.Module):
    """Critics that are known: K values scale * (sum of obs) + slope * (first action)."""

    def __init__(self, scales: list[float], slope: float = 1.0) -> None:
        super().__init__()
        self.scale, self.slope = nn.Parameter(torch.tensor(scales)), slope

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:
        return self.scale[:, None] * obs.sum(-1) + self.slope * action[:, 0]


def batch() -> dict[str, Any]:
    return {
        "obs": torch.tensor([[1.0, 0, 0], [2.0, 0, 0]]),
        "action": torch.tensor([[1.0, 5, 5], [-2.0, 0, 5]]),  # 0.5 and -1 in the first dimension
        "reward": torch.tensor([1.0, -1.0]),
        "next_obs": torch.tensor([[3.0, 0, 0], [4.0, 0, 0]]),
        "discount": torch.tensor([0.9, 0.0]),
    }


class TestDdpg:
    def agent(self) -> ddpg.Agent:
        agent = ddpg.Agent(SPEC, ddpg.Config(hidden_sizes=SIZES))
        agent.critic, agent.target_critic = Linear([1.0]), Linear([2.0])  # type: ignore[assignment]
        agent.actor, agent.target_actor = Constant([0.2, 0, 0]), Constant([0.4, 0, 0])  # type: ignore[assignment]
        return agent

    def test_the_losses_by_hand(self) -> None:
        agent = self.agent()
        loss, terms = ddpg.critic_loss(agent, batch())
        # Targets: 1 + 0.9 * (2 * 3 + 0.4) = 6.76, and -1; values: 1 + 0.5 and 2 - 1.
        assert loss.item() == pytest.approx((5.26**2 + 2**2) / 2)
        assert terms["q_value"].item() == pytest.approx(1.25)
        assert ddpg.actor_loss(agent, batch())[0].item() == pytest.approx(-(1.2 + 2.2) / 2)

    def test_who_learns(self) -> None:
        agent = self.agent()
        ddpg.critic_loss(agent, batch())[0].backward()
        assert agent.critic.scale.grad is not None
        assert all(x.grad is None for x in [agent.actor.unit, agent.target_actor.unit, agent.target_critic.scale])


class TestTd3:
    def agent(self) -> td3.Agent:
        agent = td3.Agent(SPEC, td3.Config(hidden_sizes=SIZES))
        agent.critics, agent.target_critics = Linear([1.0, 0.0]), Linear([2.0, 3.0])  # type: ignore[assignment]
        agent.actor, agent.target_actor = Constant([0.2, 0, 0]), Constant([0.4, 0, 0])  # type: ignore[assignment]
        return agent

    def test_the_losses_by_hand(self) -> None:
        agent = self.agent()
        loss, _ = td3.critic_loss(agent, batch(), td3.Config(policy_noise=0.0))
        # The smaller target: 6.76 and -1, for the values 1.5, 1 and 0.5, -1.
        assert loss.item() == pytest.approx((5.26**2 + 2**2) / 2 + (6.26**2 + 0**2) / 2)
        assert td3.actor_loss(agent, batch())[0].item() == pytest.approx(-(1.2 + 2.2) / 2), "of the first critic"

    def test_the_noise_of_the_target(self) -> None:
        """Its action moves by the cut noise: here to 0.4 +- 0.1, as a deviation of 99 is always cut."""
        agent = self.agent()
        config = td3.Config(policy_noise=99.0, noise_clip=0.1)
        errors = set()
        for _ in range(20):
            one = {name: x[:1] for name, x in batch().items()}
            errors.add(round(td3.critic_loss(agent, one, config)[0].item(), 3))
        targets = [1 + 0.9 * (6 + 0.4 + move) for move in (-0.1, 0.1)]
        assert errors == {round((t - 1.5) ** 2 + (t - 0.5) ** 2, 3) for t in targets}


class TestSac:
    def agent(self, **values: Any) -> sac.Agent:
        agent = sac.Agent(SPEC, sac.Config(hidden_sizes=SIZES, **values))
        agent.critics, agent.targets = Linear([1.0, 0.0]), Linear([2.0, 3.0])  # type: ignore[assignment]
        return agent

    def test_the_losses_by_hand(self) -> None:
        agent, config = self.agent(autotune=False, alpha=0.5), batch()
        random = torch.random.get_rng_state()
        loss, _ = sac.critic_loss(agent, config)
        torch.random.set_rng_state(random)
        with torch.no_grad():
            action, log_prob = agent.policy(config["next_obs"]).sample_with_log_prob()  # type: ignore[union-attr]
        values = []
        for b in range(2):
            soft = 2 * config["next_obs"][b].sum() + action[b, 0] - 0.5 * log_prob[b]
            target = config["reward"][b] + config["discount"][b] * soft
            unit = [0.5, -1.0][b]
            values += [(target - (config["obs"][b].sum() + unit)) ** 2 + (target - unit) ** 2]
        assert loss.item() == pytest.approx(sum(values).item() / 2, rel=1e-5)

        random = torch.random.get_rng_state()
        loss, terms = sac.actor_loss(agent, config)
        torch.random.set_rng_state(random)
        action, log_prob = agent.policy(config["obs"]).sample_with_log_prob()  # type: ignore[union-attr]
        expected = (0.5 * log_prob - action[:, 0]).mean()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5), "the smaller critic is the one of scale 0"
        assert torch.equal(terms["log_prob"], log_prob.detach())

    def test_the_temperature(self) -> None:
        """It falls where the entropy, 4 here, is above its target of -3, by alpha times the difference."""
        agent = self.agent()
        assert agent.target_entropy == -3
        loss, terms = sac.alpha_loss(agent, {"log_prob": torch.tensor([-3.0, -5.0])})
        loss.backward()
        assert terms["alpha"].item() == 1
        assert agent.log_alpha.grad is not None
        assert agent.log_alpha.grad.item() == pytest.approx(4 + 3)

    def test_discrete_actions_are_expectations(self) -> None:
        spec = Spec(OBS, gym.spaces.Discrete(3))
        agent = sac.Agent(spec, sac.Config(hidden_sizes=SIZES, target_entropy_scale=0.89))
        assert agent.target_entropy == pytest.approx(0.89 * math.log(3))
        agent.log_alpha.data.fill_(math.log(0.3))
        one = batch() | {"action": torch.tensor([2, 0])}
        loss, _ = sac.critic_loss(agent, one)
        policy, q = agent.policy(one["next_obs"]), agent.targets(one["next_obs"])
        log_p = policy.log_p  # type: ignore[union-attr]
        total = 0.0
        for b in range(2):
            soft = sum(
                log_p[b, a].exp() * (min(q[0, b, a], q[1, b, a]) - 0.3 * log_p[b, a])  # type: ignore[type-var]
                for a in range(3)
            )
            target = one["reward"][b] + one["discount"][b] * soft
            chosen = agent.critics(one["obs"])[:, b, one["action"][b]]
            total += ((chosen - target) ** 2).sum().item() / 2
        assert loss.item() == pytest.approx(total, rel=1e-5)
        value, log_prob = sac.soft_value(agent, agent.critics, one["obs"])
        p = agent.policy(one["obs"]).log_p  # type: ignore[union-attr]
        torch.testing.assert_close(log_prob, (p.exp() * p).sum(-1))
        assert sac.actor_loss(agent, one)[0].item() == pytest.approx(-value.mean().item())


@pytest.mark.parametrize("module", [ddpg, td3, sac])
@pytest.mark.parametrize("space", [OBS, IMAGE, gym.spaces.Dict({"image": IMAGE, "speed": OBS})], ids=str)
def test_observations_of_every_kind(module: Any, space: gym.Space[Any]) -> None:
    agent = module.Agent(Spec(space, BOX), module.Config(hidden_sizes=SIZES))
    sample = [space.sample() for _ in range(4)]
    obs: Any
    if isinstance(space, gym.spaces.Dict):
        obs = {key: torch.tensor(np.stack([one[key] for one in sample])) for key in space}
    else:
        obs = torch.tensor(np.stack(sample))
    row = Row(obs, torch.zeros(4), *[torch.zeros(4, dtype=torch.bool)] * 3)
    low, high = torch.tensor(BOX.low), torch.tensor(BOX.high)
    for act in (agent.act, agent.act_at_random):
        action, _, _ = act(row, None)
        assert action.shape == (4, 3)
        assert ((action >= low) & (action <= high)).all()
    assert not torch.equal(agent.act(row, None)[0], agent.act(row, None)[0])
    agent.eval()
    assert torch.equal(agent.act(row, None)[0], agent.act(row, None)[0])
