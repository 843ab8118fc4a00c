"""PPO's loss on samples whose terms were worked out by hand; what becomes of a rollout before the loss."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from torch import Tensor

from flotilla.algorithms import ppo
from flotilla.core.config import RunConfig
from flotilla.core.errors import UsageError
from flotilla.core.types import Rollout, Spec, tree_map
from flotilla.envs.make import EnvOptions
from flotilla.functional import balanced
from flotilla.sampling.choose import make_backend
from flotilla.sampling.sampler import Sampler

CLIP = 0.2
CONFIG = ppo.Config(hidden_sizes=(), norm_adv=False, vf_coef=0.5, ent_coef=0.01)


def alone(x: Tensor) -> Tensor:
    """The mean over one rank."""
    return x


def table(new_prob: list[float], new_value: list[float]) -> ppo.Agent:
    """An agent that sees a one-hot of which sample it is: sample i's action 0 has new_prob[i], its value is given."""
    size = len(new_prob)
    agent = ppo.Agent(Spec(gym.spaces.Box(0, 1, (size,)), gym.spaces.Discrete(2)), CONFIG)
    prob = torch.tensor(new_prob)
    with torch.no_grad():
        agent.actor.weight.copy_(torch.stack([prob.log(), (1 - prob).log()]))
        agent.critic.weight.copy_(torch.tensor([new_value]))
    return agent


def batch(**columns: list[float]) -> dict[str, Any]:
    size = len(columns["adv"])
    made: dict[str, Any] = {name: torch.tensor(column) for name, column in columns.items()}
    made["log_prob"] = made.pop("old_prob").log()
    made["weight"] = balanced(made["weight"][None], alone)[0]
    return made | {"obs": torch.eye(size), "is_first": torch.zeros(size, dtype=torch.bool)}


def case() -> tuple[ppo.Agent, dict[str, Any]]:
    """Three samples and one that does not count: ratios 1.5, 0.6, 1.5 and (masked) 4."""
    agent = table(new_prob=[0.6, 0.7, 0.9, 0.8], new_value=[1.0, 1.0, 3.0, 50.0])
    return agent, batch(
        action=[0, 1, 0, 0],
        old_prob=[0.4, 0.5, 0.6, 0.2],
        adv=[2.0, -1.0, -1.0, 100.0],
        value=[0.5, 0.9, 0.0, 0.0],
        **{"return": [2.0, 2.0, 0.1, -70.0]},
        weight=[1.0, 1.0, 1.0, 0.0],
    )


def entropy(p: float) -> float:
    return -p * math.log(p) - (1 - p) * math.log(1 - p)


def test_loss_by_hand() -> None:
    total, terms = ppo.loss(*case(), CONFIG, CLIP)
    # 2 x 1.2 (clipped above), -1 x 0.8 (clipped below), -1 x 1.5 (a worse policy is not clipped)
    policy_loss = -(2.4 - 0.8 - 1.5) / 3
    # (0.5 + 0.2 - 2)^2 clipped, (1 - 2)^2 within the range, (3 - 0.1)^2 the larger of both
    value_loss = 0.5 * (1.69 + 1.0 + 8.41) / 3
    mean_entropy = (entropy(0.6) + entropy(0.3) + entropy(0.9)) / 3
    assert terms["policy_loss"].item() == pytest.approx(policy_loss, abs=1e-5)
    assert terms["value_loss"].item() == pytest.approx(value_loss, abs=1e-5)
    assert terms["entropy"].item() == pytest.approx(mean_entropy, abs=1e-5)
    assert total.item() == pytest.approx(policy_loss - 0.01 * mean_entropy + 0.5 * value_loss, abs=1e-5)
    assert not any(x.requires_grad for x in terms.values())


def test_loss_without_value_clipping() -> None:
    _, terms = ppo.loss(*case(), ppo.Config(norm_adv=False, clip_vloss=False), CLIP)
    assert terms["value_loss"].item() == pytest.approx(0.5 * (1.0 + 1.0 + 8.41) / 3, abs=1e-5)


def test_advantages_are_standardised_over_the_samples_that_count() -> None:
    """Mean 0 and deviation sqrt(2): 2 and -1 and -1 over it; where they lie and how they are scaled is nothing."""
    agent, samples = case()
    scaled = samples | {"adv": 3 * samples["adv"] + 5}
    config = ppo.Config(norm_adv=True, num_minibatches=1)
    for one in (samples, scaled):
        (minibatch,) = ppo.shuffled(one, config, alone)
        _, terms = ppo.loss(agent, minibatch, config, CLIP)
        assert terms["policy_loss"].item() == pytest.approx(-(2.4 - 0.8 - 1.5) / 3 / math.sqrt(2), abs=1e-5)
    _, terms = ppo.loss(agent, scaled, config, CLIP)
    # 11 x 1.2 (clipped), 2 x 0.6 and 2 x 1.2 (clipped)
    assert terms["policy_loss"].item() == pytest.approx(-(13.2 + 1.2 + 2.4) / 3, abs=1e-5)


def test_gradient_reaches_what_is_not_clipped_or_masked() -> None:
    agent, samples = case()
    ppo.loss(agent, samples, ppo.Config(norm_adv=False, ent_coef=0.0, vf_coef=0.5), CLIP)[0].backward()
    actor, critic = agent.actor.weight.grad, agent.critic.weight.grad
    assert actor is not None
    assert critic is not None
    assert actor[:, [0, 1, 3]].tolist() == [[0, 0, 0], [0, 0, 0]], "two are clipped, one does not count"
    # d(1.5 adv)/d(logit 0) = 1.5 adv (1 - p) with adv = -1, p = 0.9, share 1/3
    assert actor[0, 2].item() == pytest.approx(1.5 * 0.1 / 3, abs=1e-5)
    # vf_coef (value - return) share; nothing where the clipped value has the larger error
    assert critic[0].tolist() == pytest.approx([0.0, 0.5 * -1.0 / 3, 0.5 * 2.9 / 3, 0.0], abs=1e-5)


def test_an_entropy_bonus_leaves_the_masked_sample_alone() -> None:
    agent, samples = case()
    ppo.loss(agent, samples, ppo.Config(ent_coef=1.0), CLIP)[0].backward()
    assert agent.actor.weight.grad is not None
    assert (agent.actor.weight.grad.abs().sum(0) > 0).tolist() == [True, True, True, False]


def test_diagnostics_by_hand() -> None:
    agent, samples = case()
    _, terms = ppo.loss(agent, samples, CONFIG, CLIP)
    found = ppo.diagnostics(terms, samples["weight"], 0.45)
    logs = [math.log(1.5), math.log(0.6), math.log(1.5)]
    assert found["losses/old_approx_kl"].item() == pytest.approx(-sum(logs) / 3, abs=1e-5)
    assert found["losses/approx_kl"].item() == pytest.approx((0.5 - 0.4 + 0.5 - sum(logs)) / 3, abs=1e-5)
    assert found["losses/clipfrac"].item() == pytest.approx(2 / 3)
    assert "losses/log_ratio" not in found


def rollouts(agent_config: ppo.Config, env_id: str, num_steps: int = 12) -> tuple[ppo.Agent, Rollout]:
    """A new agent and its second rollout, which begins in the middle of episodes."""
    torch.manual_seed(0)
    sampler = Sampler(make_backend(RunConfig(env_id=env_id), EnvOptions(), num_envs=4), torch.device("cpu"))
    agent = ppo.Agent(sampler.spec, agent_config)
    sampler.rollout(agent.act, num_steps)
    roll = sampler.rollout(agent.act, num_steps)
    sampler.close()
    return agent, roll


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("probe/TwoStep-v0", {}),
    ("probe/Memory-v0", {"memory": "lstm"}),
    ("probe/Memory-v0", {"memory": "gru", "norm_obs": True}),
    ("probe/Continuous-v0", {"norm_obs": True}),
    ("probe/Continuous-v0", {"memory": "lstm"}),
    ("probe/MultiDiscrete-v0", {}),
    ("probe/MultiDiscrete-v0", {"memory": "gru"}),
    ("probe/Counter-v0", {"cnn": "impala", "norm_obs": True}),
    ("probe/Counter-v0", {"cnn": "impala", "memory": "lstm"}),
]


@pytest.mark.parametrize(("env_id", "values"), VARIANTS)
def test_before_the_first_step_the_policy_is_the_one_that_acted(env_id: str, values: dict[str, Any]) -> None:
    """Ratio 1 and the same values in every sample: the order, the memory's state and the normaliser are right."""
    config = ppo.Config(num_minibatches=2, memory_size=8, **values)
    agent, roll = rollouts(config, env_id)
    assert roll.rows.is_last[:-1].any(), "the case has masked samples"
    with torch.no_grad():
        batch, _ = ppo.samples(agent, roll, config)
        for minibatch in ppo.shuffled(batch, config, alone):
            _, terms = ppo.loss(agent, minibatch, config, CLIP)
            assert terms["log_ratio"].abs().max() < 1e-5
            _, value, _ = agent(minibatch["obs"], minibatch.get("state"), minibatch["is_first"])
            torch.testing.assert_close(value, minibatch["value"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("memory", ["none", "lstm"])
def test_every_sample_is_in_one_minibatch(memory: Any) -> None:
    config = ppo.Config(num_minibatches=2, memory=memory, memory_size=8)
    agent, roll = rollouts(config, "probe/Memory-v0")
    with torch.no_grad():
        batch, _ = ppo.samples(agent, roll, config)
    masked = batch["weight"] == 0
    assert masked.sum() == roll.rows.is_last[:-1].sum() > 0
    assert (batch["adv"][masked] == 0).all()
    batch["number"] = torch.arange(batch["adv"].numel()).view_as(batch["adv"])
    first, second = ppo.shuffled(batch, config, alone)
    seen = torch.cat([first["number"].flatten(), second["number"].flatten()])
    assert seen.sort()[0].tolist() == list(range(len(seen)))
    orders = [next(iter(ppo.shuffled(batch, config, alone)))["number"] for _ in range(9)]
    assert not all(torch.equal(order, first["number"]) for order in orders)
    for part in (first, second):
        at = part["number"].flatten()
        for key in ("action", "log_prob", "value", "return", "is_first"):
            assert torch.equal(part[key].flatten(), batch[key].flatten()[at]), f"{key} left its sample"
        assert torch.equal(part["weight"].flatten() > 0, ~masked.flatten()[at])
        adv = batch["adv"].flatten()[at][part["weight"].flatten() > 0]
        expected = (adv - adv.mean()) / adv.std(correction=0)
        torch.testing.assert_close(part["adv"].flatten()[part["weight"].flatten() > 0], expected, atol=1e-4, rtol=1e-4)


def test_dict_observations_stay_with_their_sample() -> None:
    config = ppo.Config(num_minibatches=3, cnn="impala")
    agent, roll = rollouts(config, "probe/Counter-v0")
    with torch.no_grad():
        batch, _ = ppo.samples(agent, roll, config)
    flat: Tensor = tree_map(lambda x: x[:-1].flatten(0, 1), roll.rows.obs)["count"]
    assert torch.equal(batch["obs"]["count"], flat)
    for part in ppo.shuffled(batch, config, alone):
        step = part["obs"]["count"][:, 1]
        assert torch.equal(part["obs"]["image"].float(), step.view(-1, 1, 1, 1).expand(-1, 8, 8, 3))
        assert torch.equal(part["is_first"], step == 0)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_minibatches": 7}, "num_minibatches=7 does not divide 1024 samples.*nearest: 8"),
        ({"num_minibatches": 0}, "num_minibatches=0 does not divide .*nearest: 1"),
        ({"num_minibatches": 3, "memory": "lstm"}, "num_minibatches=3 does not divide 8 environments.*nearest: [24]"),
        ({"gamma": 1.1}, "gamma=1.1 is out of range"),
        ({"learning_rate": math.nan}, "learning_rate=nan is out of range"),
        ({"num_steps": 0}, "num_steps=0 is out of range"),
        ({"update_epochs": 0}, "update_epochs=0 is out of range"),
        ({"hidden_sizes": (64, 0)}, "hidden_sizes"),
    ],
)
def test_check_names_the_value_and_what_fits(train_ppo: Any, tmp_path: Path, values: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        train_ppo("CartPole-v1", num_envs=8, **values)
    assert not list(tmp_path.iterdir()), "no half-made run"
