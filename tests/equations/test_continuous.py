"""DDPG, TD3 and SAC: scales, critics, noise and densities against slow ones; losses against cases by hand."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor, distributions, nn

from flotilla.algorithms import ddpg, sac, td3
from flotilla.compute.optimizer import Optimizer
from flotilla.core.errors import UsageError
from flotilla.core.types import Spec
from flotilla.functional import polyak
from flotilla.nets.continuous import ActionScale, Critics, with_noise

# The scale of actions -------------------------------------------------------------------------------------------------


def box(low: Sequence[float], high: Sequence[float]) -> gym.spaces.Box:
    return gym.spaces.Box(np.array(low, np.float32), np.array(high, np.float32))


BOXES = [
    box([-1], [1]),
    box([-2, 0, 5], [2, 1, 1e6]),
    box([-0.1, 3, -7], [0.3, 3, -7]),  # two dimensions in which nothing can be chosen
    box([-3e38], [3e38]),
]


@pytest.mark.parametrize("space", BOXES, ids=str)
def test_the_bounds_of_a_box_are_minus_one_and_one(space: gym.spaces.Box) -> None:
    scale = ActionScale(space)
    low, high = torch.tensor(space.low), torch.tensor(space.high)
    ones = torch.ones(scale.dim)
    torch.testing.assert_close(scale.to_env(-ones), low)
    torch.testing.assert_close(scale.to_env(ones), high)
    for unit in torch.linspace(-1, 1, 9):
        action = scale.to_env(unit * ones)
        expected = torch.where(low < high, unit, 0.0)
        torch.testing.assert_close(scale.to_unit(action), expected, atol=2e-3, rtol=0)  # of 1e6, in single precision


@pytest.mark.parametrize("space", BOXES, ids=str)
def test_random_actions_reach_everything_within_the_bounds(space: gym.spaces.Box) -> None:
    torch.manual_seed(0)
    scale = ActionScale(space)
    action = scale.uniform(4000)
    assert action.shape == (4000, scale.dim)
    assert (action >= torch.tensor(space.low)).all()
    assert (action <= torch.tensor(space.high)).all()
    unit = scale.to_unit(action)[:, torch.tensor(space.low < space.high)]
    for share in (-0.9, 0.0, 0.5):
        expected = torch.full((unit.shape[1],), (share + 1) / 2)
        torch.testing.assert_close((unit < share).float().mean(0), expected, atol=0.03, rtol=0)


@pytest.mark.parametrize(
    ("space", "said"),
    [
        (gym.spaces.Discrete(3), "action space Discrete.3. is not supported .*ppo takes others"),
        (gym.spaces.Box(-1, 1, (2, 2)), "is not supported"),
        (gym.spaces.Box(-np.inf, np.inf, (2,)), "has no bounds to scale to .*RescaleAction"),
        (box([-1, -np.inf], [1, 0]), "has no bounds"),
        (box([-1, 0], [1, np.inf]), "has no bounds"),
    ],
    ids=str,
)
def test_what_has_no_bounds_is_refused(space: gym.Space[Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ActionScale(space)


# Critics --------------------------------------------------------------------------------------------------------------

VECTOR = gym.spaces.Box(-1, 1, (5,))
OBS: dict[str, gym.Space[Any]] = {
    "vector": VECTOR,
    "image": gym.spaces.Box(0, 255, (16, 16, 3), np.uint8),
    "dict": gym.spaces.Dict({"a": VECTOR, "b": gym.spaces.Box(0, 255, (16, 16, 3), np.uint8)}),
}


def observations(space: gym.Space[Any], count: int) -> Any:
    if isinstance(space, gym.spaces.Dict):
        return {key: observations(part, count) for key, part in space.spaces.items()}
    space.seed(0)
    return torch.from_numpy(np.stack([space.sample() for _ in range(count)]))


@pytest.mark.parametrize("obs", OBS)
@pytest.mark.parametrize("sizes", [(), (7,), (7, 6)])
@pytest.mark.parametrize(("num_actions", "num_outputs"), [(2, 0), (0, 4)])
def test_critics_are_networks_of_their_own(
    obs: str, sizes: tuple[int, ...], num_actions: int, num_outputs: int
) -> None:
    """K networks, one after the other and one sample after the other."""
    torch.manual_seed(0)
    spec = Spec(OBS[obs], gym.spaces.Discrete(4))
    critics = Critics(spec, 3, sizes, "impala", num_actions=num_actions, num_outputs=num_outputs)
    seen = observations(OBS[obs], 6)
    action = torch.rand(6, num_actions) if num_actions else None
    found = critics(seen, action)
    assert found.shape == ((3, 6, num_outputs) if num_outputs else (3, 6))
    features = critics.encoder(seen)
    for k in range(3):
        for i in range(6):
            x = features[i] if action is None else torch.cat([features[i], action[i]])
            for layer, (weight, bias) in enumerate(zip(critics.weights, critics.biases, strict=True)):
                x = weight[k].T @ x + bias[k, 0]
                x = x if layer == len(sizes) else x.clamp(min=0)
            torch.testing.assert_close(found[k, i], x if num_outputs else x[0], atol=1e-5, rtol=1e-5)


def test_critics_begin_as_linear_layers_do_and_apart_from_each_other() -> None:
    torch.manual_seed(0)
    critics = Critics(Spec(VECTOR, box([-1], [1])), 2, (200,), "nature", num_actions=1)
    for parameter, inputs in ((critics.weights[0], 6), (critics.biases[0], 6), (critics.weights[1], 200)):
        bound = 1 / math.sqrt(inputs)
        assert 0.9 * bound < parameter.abs().max() <= bound
        assert parameter.mean().abs() < 0.2 * bound
        assert (parameter[0] != parameter[1]).all()


# Noise and densities --------------------------------------------------------------------------------------------------


def test_noise_is_normal_and_cut_twice() -> None:
    torch.manual_seed(0)
    noise = with_noise(torch.zeros(100_000), 0.1)
    assert noise.std().item() == pytest.approx(0.1, rel=0.02)
    assert noise.abs().max() > 0.35, "nothing is cut where no bound is named"
    cut = with_noise(torch.zeros(1000), 1e6, 0.5)
    assert set(cut.tolist()) == {-0.5, 0.5}
    assert with_noise(torch.full((1000,), 0.9), 0.2, 0.5).max() == 1.0
    assert with_noise(torch.full((1000,), -0.9), 0.2, 0.5).min() == -1.0
    assert torch.equal(with_noise(cut, 0.0), cut)


def test_noise_is_independent_in_every_sample_and_dimension() -> None:
    torch.manual_seed(0)
    assert len(set(with_noise(torch.zeros(20, 3), 0.2, 0.5).flatten().tolist())) > 50


@pytest.mark.parametrize("mean", [0.0, -0.7, 3.0, 15.0, -40.0, 300.0])
def test_the_density_of_a_squashed_normal(mean: float) -> None:
    """Also where tanh rounds to 1 and a density made from the action would be infinite."""
    means = torch.full((50, 3), mean, dtype=torch.float64)
    policy = sac.Squashed(means, torch.linspace(-3, 3, 150, dtype=torch.float64).view(50, 3))
    torch.manual_seed(0)
    action, log_prob = policy.sample_with_log_prob()
    torch.manual_seed(0)
    assert torch.equal(policy.sample(), action)
    torch.manual_seed(0)
    x = means + policy.log_std.exp() * torch.randn_like(means)
    # The cache: so that it need not invert what was rounded.
    tanh = distributions.IndependentTransform(distributions.TanhTransform(), 1, cache_size=1)
    normal = distributions.Independent(distributions.Normal(means, policy.log_std.exp()), 1)
    theirs = distributions.TransformedDistribution(normal, [tanh])
    torch.testing.assert_close(action, tanh(x))
    torch.testing.assert_close(log_prob, theirs.log_prob(tanh(x)), atol=1e-7, rtol=1e-9)
    slope = torch.tensor([[-2 * (abs(a) + math.log1p(math.exp(-2 * abs(a))) - math.log(2)) for a in row] for row in x])
    expected = normal.log_prob(x) - slope.double().sum(-1)  # 1 - tanh^2 = 1 / cosh^2
    torch.testing.assert_close(log_prob, expected, atol=1e-4, rtol=1e-5)
    assert torch.equal(policy.mode(), means.tanh())


def test_a_deviation_stays_within_what_is_reasonable() -> None:
    policy = sac.Squashed(torch.zeros(3), torch.tensor([-1e9, 0.0, 1e9]))
    assert policy.log_std.tolist() == [-5.0, -1.5, 2.0]


# Losses by hand: three samples that are one-hot, so that a linear network is a table ----------------------------------

SPEC = Spec(gym.spaces.Box(0, 1, (3,)), box([-2], [4]))  # the middle is 1, the half is 3
REWARD, DISCOUNT = [1.0, -2.0, 0.5], [0.9, 0.0, 0.81]
ACTION, UNIT = [[1.0], [4.0], [-0.5]], [0.0, 1.0, -0.5]
NEXT = [1, 0, 2]  # what each sample leads to
Q = [[0.3, -0.4, 1.1, 0.5], [0.2, 0.6, -0.9, -0.8]]  # of two critics: three samples, and the slope by the action
TARGET_Q = [[1.0, 0.7, -0.2, 0.9], [0.4, 1.3, 0.8, -0.3]]
MEAN, TARGET_MEAN, RAW = [0.2, -0.6, 1.5], [0.1, 0.4, -1.0], [0.0, 0.5, -0.5]


def batch(action: Any) -> dict[str, Any]:
    return {
        "obs": torch.eye(3),
        "next_obs": torch.eye(3)[NEXT],
        "action": torch.tensor(action),
        "reward": torch.tensor(REWARD),
        "discount": torch.tensor(DISCOUNT),
    }


def fill(module: nn.Module, **tables: Any) -> None:
    """Weights by the names of parameters; every other one is 0."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            given = tables.get(name.replace(".", "_"))
            parameter.copy_(torch.zeros_like(parameter) if given is None else torch.tensor(given).view_as(parameter))


def value(table: list[list[float]], critic: int, sample: int, action: float) -> float:
    return table[critic][sample] + table[critic][3] * action


def the_next_noise() -> list[float]:
    """What a loss is going to draw for three samples."""
    torch.manual_seed(0)
    noise: list[float] = torch.randn(3).tolist()
    torch.manual_seed(0)
    return noise


def mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def ddpg_case() -> ddpg.Agent:
    agent = ddpg.Agent(SPEC, ddpg.Config(hidden_sizes=()))
    fill(
        agent,
        critic_weights_0=Q[0],
        target_critic_weights_0=TARGET_Q[0],
        actor_head_weight=MEAN,
        target_actor_head_weight=TARGET_MEAN,
    )
    return agent


def test_ddpg_critic() -> None:
    loss, terms = ddpg.critic_loss(ddpg_case(), batch(ACTION))
    target = [REWARD[i] + DISCOUNT[i] * value(TARGET_Q, 0, NEXT[i], math.tanh(TARGET_MEAN[NEXT[i]])) for i in range(3)]
    found = [value(Q, 0, i, UNIT[i]) for i in range(3)]
    assert loss.item() == pytest.approx(mean([(q - y) ** 2 for q, y in zip(found, target, strict=True)]))
    assert terms["critic_loss"].item() == loss.item()
    assert terms["q_value"].item() == pytest.approx(mean(found))


def test_ddpg_actor() -> None:
    loss, terms = ddpg.actor_loss(ddpg_case(), batch(ACTION))
    assert loss.item() == pytest.approx(-mean([value(Q, 0, i, math.tanh(MEAN[i])) for i in range(3)]))
    assert terms["actor_loss"].item() == loss.item()


def td3_case() -> td3.Agent:
    agent = td3.Agent(SPEC, td3.Config(hidden_sizes=()))
    fill(
        agent,
        critics_weights_0=Q,
        target_critics_weights_0=TARGET_Q,
        actor_head_weight=MEAN,
        target_actor_head_weight=TARGET_MEAN,
    )
    return agent


@pytest.mark.parametrize(("policy_noise", "noise_clip"), [(0.0, 0.5), (0.2, 0.5), (5.0, 0.5), (5.0, 9.0)])
def test_td3_critics(policy_noise: float, noise_clip: float) -> None:
    config = td3.Config(policy_noise=policy_noise, noise_clip=noise_clip)
    agent, noise = td3_case(), the_next_noise()
    loss, terms = td3.critic_loss(agent, batch(ACTION), config)
    total, found = 0.0, []
    for i in range(3):
        change = max(-noise_clip, min(noise_clip, policy_noise * noise[i]))
        action = max(-1.0, min(1.0, math.tanh(TARGET_MEAN[NEXT[i]]) + change))
        smaller = min(value(TARGET_Q, k, NEXT[i], action) for k in range(2))
        for k in range(2):
            found.append(value(Q, k, i, UNIT[i]))
            total += (found[-1] - (REWARD[i] + DISCOUNT[i] * smaller)) ** 2
    assert loss.item() == pytest.approx(total / 3)
    assert terms["critic_loss"].item() == loss.item()
    assert terms["q_value"].item() == pytest.approx(mean(found))


def test_td3_actor_asks_the_first_critic() -> None:
    loss, _ = td3.actor_loss(td3_case(), batch(ACTION))
    assert loss.item() == pytest.approx(-mean([value(Q, 0, i, math.tanh(MEAN[i])) for i in range(3)]))


ALPHA = 0.3


def sac_case() -> sac.Agent:
    agent = sac.Agent(SPEC, sac.Config(hidden_sizes=()))
    fill(
        agent,
        critics_weights_0=Q,
        targets_weights_0=TARGET_Q,
        actor_weight=[MEAN, RAW],
        log_alpha=math.log(ALPHA),
    )
    return agent


def drawn(sample: int, noise: float) -> tuple[float, float]:
    """The action that a draw gives, and the log of its density by the rule for a change of variables."""
    log_std = -5 + 3.5 * (math.tanh(RAW[sample]) + 1)
    action = math.tanh(MEAN[sample] + math.exp(log_std) * noise)
    normal = math.exp(-0.5 * noise**2) / (math.exp(log_std) * math.sqrt(2 * math.pi))
    return action, math.log(normal / (1 - action**2))


def soft(table: list[list[float]], sample: int, noise: float) -> float:
    action, log_prob = drawn(sample, noise)
    return min(value(table, k, sample, action) for k in range(2)) - ALPHA * log_prob


def test_sac_critics() -> None:
    agent, noise = sac_case(), the_next_noise()
    loss, terms = sac.critic_loss(agent, batch(ACTION))
    target = [REWARD[i] + DISCOUNT[i] * soft(TARGET_Q, NEXT[i], noise[i]) for i in range(3)]
    errors = [value(Q, k, i, UNIT[i]) - target[i] for k in range(2) for i in range(3)]
    assert loss.item() == pytest.approx(sum(x**2 for x in errors) / 3, rel=1e-5)
    assert terms["q_value"].item() == pytest.approx(mean([value(Q, k, i, UNIT[i]) for k in range(2) for i in range(3)]))


def test_sac_actor() -> None:
    agent, noise = sac_case(), the_next_noise()
    loss, terms = sac.actor_loss(agent, batch(ACTION))
    assert loss.item() == pytest.approx(-mean([soft(Q, i, noise[i]) for i in range(3)]), rel=1e-5)
    assert terms["log_prob"].tolist() == pytest.approx([drawn(i, noise[i])[1] for i in range(3)], rel=1e-5)


def test_sac_temperature() -> None:
    agent, log_prob = sac_case(), [0.5, -2.0, 3.0]
    loss, terms = sac.alpha_loss(agent, {"log_prob": torch.tensor(log_prob)})
    assert agent.target_entropy == -1.0, "one dimension"
    expected = -ALPHA * mean([x - 1.0 for x in log_prob])
    assert loss.item() == pytest.approx(expected)
    assert terms["alpha"].item() == pytest.approx(ALPHA)
    (slope,) = torch.autograd.grad(loss, [agent.log_alpha])
    assert slope.item() == pytest.approx(expected), "alpha is an exponential"


# The same with three choices: tables are samples x choices
CHOICES = Spec(gym.spaces.Box(0, 1, (3,)), gym.spaces.Discrete(3))
CHOSEN = [2, 0, 1]
LOGITS = [[0.5, -1.0, 0.2], [1.0, 1.0, -2.0], [0.0, 3.0, 0.5]]
CHOICE_Q = [
    [[0.1, 0.9, -0.4], [1.2, 0.3, 0.0], [-0.7, 0.2, 0.6]],
    [[0.3, -0.1, 0.5], [0.8, 1.1, -0.2], [0.4, 0.4, 1.0]],
]
CHOICE_TARGET_Q = [
    [[0.6, -0.3, 0.2], [0.0, 0.5, 1.4], [1.0, -1.0, 0.3]],
    [[0.2, 0.7, -0.8], [0.9, -0.5, 1.0], [0.1, 0.3, 0.5]],
]


def discrete_case() -> sac.Agent:
    agent = sac.Agent(CHOICES, sac.Config(hidden_sizes=()))
    fill(
        agent,
        critics_weights_0=CHOICE_Q,
        targets_weights_0=CHOICE_TARGET_Q,
        actor_weight=[list(column) for column in zip(*LOGITS, strict=True)],
        log_alpha=math.log(ALPHA),
    )
    return agent


def probabilities(sample: int) -> list[float]:
    powers = [math.exp(x) for x in LOGITS[sample]]
    return [x / sum(powers) for x in powers]


def expected_soft(table: list[list[list[float]]], sample: int) -> float:
    total = 0.0
    for choice, p in enumerate(probabilities(sample)):
        total += p * (min(table[k][sample][choice] for k in range(2)) - ALPHA * math.log(p))
    return total


def test_discrete_sac_critics_by_expectation() -> None:
    loss, terms = sac.critic_loss(discrete_case(), batch(CHOSEN))
    target = [REWARD[i] + DISCOUNT[i] * expected_soft(CHOICE_TARGET_Q, NEXT[i]) for i in range(3)]
    found = [[CHOICE_Q[k][i][CHOSEN[i]] for i in range(3)] for k in range(2)]
    assert loss.item() == pytest.approx(sum((found[k][i] - target[i]) ** 2 for k in range(2) for i in range(3)) / 3)
    assert terms["q_value"].item() == pytest.approx(mean(found[0] + found[1]))


def test_discrete_sac_actor_by_expectation() -> None:
    agent = discrete_case()
    loss, terms = sac.actor_loss(agent, batch(CHOSEN))
    assert loss.item() == pytest.approx(-mean([expected_soft(CHOICE_Q, i) for i in range(3)]))
    expected = [sum(p * math.log(p) for p in probabilities(i)) for i in range(3)]
    assert terms["log_prob"].tolist() == pytest.approx(expected)


def test_the_targets_of_entropy() -> None:
    """So many nats for each dimension; of choices the share of the most that there can be."""
    of_box = sac.Agent(Spec(VECTOR, box([-1] * 4, [1] * 4)), sac.Config(target_entropy=-0.5))
    assert of_box.target_entropy == -2.0
    of_choices = sac.Agent(CHOICES, sac.Config(target_entropy_scale=0.89))
    assert of_choices.target_entropy == pytest.approx(0.89 * math.log(3))


def test_a_fixed_temperature_is_the_one_that_was_given() -> None:
    assert sac.Agent(SPEC, sac.Config(autotune=False, alpha=0.07)).log_alpha.exp().item() == pytest.approx(0.07)
    assert sac.Agent(SPEC, sac.Config(alpha=0.07)).log_alpha.exp().item() == 1.0


# Who moves ------------------------------------------------------------------------------------------------------------


def test_polyak_by_hand() -> None:
    targets, sources = (
        [torch.tensor([1.0, -2.0]), torch.tensor([[4.0]])],
        [torch.tensor([3.0, 0.0]), torch.tensor([[0.0]])],
    )
    polyak(targets, sources, 0.25)
    assert [x.flatten().tolist() for x in targets] == [[1.5, -1.5], [3.0]]
    polyak(targets, sources, 0.0)
    assert [x.flatten().tolist() for x in targets] == [[1.5, -1.5], [3.0]]
    polyak(targets, sources, 1.0)
    assert [x.flatten().tolist() for x in targets] == [[3.0, 0.0], [0.0]]
    assert sources[0].tolist() == [3.0, 0.0]


MOVES: dict[str, tuple[str, dict[str, set[str]]]] = {
    "ddpg": ("Pendulum-v1", {"critic_loss": {"critic"}, "actor_loss": {"actor"}}),
    "td3": ("Pendulum-v1", {"critic_loss": {"critics"}, "actor_loss": {"actor"}}),
    "sac": (
        "Pendulum-v1",
        {"critic_loss": {"critics"}, "actor_loss": {"encoder", "actor"}, "alpha_loss": {"log_alpha"}},
    ),
    "discrete sac": (
        "CartPole-v1",
        {"critic_loss": {"critics"}, "actor_loss": {"encoder", "actor"}, "alpha_loss": {"log_alpha"}},
    ),
}


@pytest.mark.parametrize("name", MOVES)
def test_a_loss_moves_its_own_network_and_no_other(
    name: str, train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of that network; the targets stand still until the algorithm moves them."""
    step = Optimizer.step
    moved: dict[str, set[str]] = defaultdict(set)
    still: dict[str, set[str]] = defaultdict(set)

    def watched(self: Optimizer, loss: Callable[..., Any], agent: nn.Module, *args: Any) -> dict[str, Tensor]:
        before = {key: x.clone() for key, x in agent.state_dict().items()}
        terms = step(self, loss, agent, *args)
        for key, x in agent.state_dict().items():
            (still if torch.equal(x, before[key]) else moved)[loss.__name__].add(key)
        return terms

    monkeypatch.setattr(Optimizer, "step", watched)
    env_id, expected = MOVES[name]
    train(
        name.split()[-1],
        env_id,
        num_envs=1,
        total_timesteps=40,
        learning_starts=20,
        batch_size=8,
        hidden_sizes=(8,),
    )
    assert {loss: {key.split(".")[0] for key in keys} for loss, keys in moved.items()} == expected
    for loss, networks in expected.items():
        left = still[loss] - moved[loss]
        assert not [key for key in left if key.split(".")[0] in networks], "a part that does not learn"
