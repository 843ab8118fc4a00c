"""DQN and C51: networks with an output for each action, the projection of distributions, losses by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from flotilla.algorithms import c51, dqn
from flotilla.core.errors import UsageError
from flotilla.core.types import Row, Spec
from flotilla.functional import categorical_projection, epsilon_greedy, polyak, schedule
from flotilla.nets.values import ActionValues, NoisyLinear

SPEC = Spec(gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Discrete(2))
PLAIN: dict[str, Any] = {"dueling": False, "noisy": False, "sigma_0": 0.5}


class Table(nn.Module):
    """Outputs (A, ...) for observations that are row numbers."""

    def __init__(self, rows: list[Any]) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.tensor(rows, dtype=torch.float64))

    def forward(self, obs: Tensor) -> Tensor:
        return self.rows[obs.long()]


def project_slowly(p: list[float], reward: float, discount: float, atoms: list[float]) -> list[float]:
    """Each moved value gives its probability to its neighbours, one after the other."""
    out, width = [0.0] * len(atoms), atoms[1] - atoms[0]
    for probability, atom in zip(p, atoms, strict=True):
        value = min(max(reward + discount * atom, atoms[0]), atoms[-1])
        for k, other in enumerate(atoms):
            out[k] += probability * max(0.0, 1 - abs(value - other) / width)
    return out


@given(
    st.lists(st.floats(0.01, 1), min_size=5, max_size=5),
    st.floats(-4, 4),
    st.sampled_from([0.0, 0.5, 0.99, 0.99**3, 1.0]),
)
def test_a_projection_is_that_of_a_slow_loop(weights: list[float], reward: float, discount: float) -> None:
    p = torch.tensor([weights], dtype=torch.float64) / sum(weights)
    atoms = torch.linspace(-2, 2, 5, dtype=torch.float64)
    of_one = torch.ones(1, dtype=torch.float64)
    found = categorical_projection(p, reward * of_one, discount * of_one, -2.0, 2.0)
    assert found.sum().item() == pytest.approx(1)
    assert found[0].tolist() == pytest.approx(project_slowly(p[0].tolist(), reward, discount, atoms.tolist()))


def test_what_falls_on_an_atom_is_all_its_own() -> None:
    p = torch.tensor([[0.25, 0.5, 0.25], [0.25, 0.5, 0.25], [0.25, 0.5, 0.25], [0.25, 0.5, 0.25]])
    reward, discount = torch.tensor([0.0, 1.0, 5.0, -1.0]), torch.tensor([1.0, 1.0, 1.0, 0.0])
    found = categorical_projection(p, reward, discount, -1.0, 1.0)
    assert found.tolist() == [[0.25, 0.5, 0.25], [0, 0.25, 0.75], [0, 0, 1], [1, 0, 0]]


def test_random_actions_have_their_share_and_all_the_same_chance() -> None:
    torch.manual_seed(0)
    action = epsilon_greedy(torch.full((60_000,), 2), 3, torch.tensor(0.3))
    share = torch.bincount(action, minlength=3) / len(action)
    assert share.tolist() == pytest.approx([0.1, 0.1, 0.8], abs=0.006)
    assert (epsilon_greedy(torch.full((99,), 2), 3, torch.tensor(0.0)) == 2).all()


def test_schedules_and_slow_copies() -> None:
    assert [schedule(1.0, 0.2, share) for share in (0, 0.5, 1, 7)] == pytest.approx([1, 0.6, 0.2, 0.2])
    target, source = [torch.tensor([0.0, 4.0])], [torch.tensor([1.0, 8.0])]
    polyak(target, source, 0.25)
    assert target[0].tolist() == [0.25, 5.0]
    polyak(target, source, 1.0)
    assert target[0].tolist() == [1.0, 8.0]


@pytest.mark.parametrize("num_atoms", [1, 4])
def test_dueling_streams_add_up(num_atoms: int) -> None:
    """Q = V + A - mean of A over the actions (Wang et al. 2016, eq. 9), for each atom."""
    net = ActionValues(SPEC, (5, 4), "nature", num_atoms=num_atoms, dueling=True, noisy=False, sigma_0=0.5)
    obs = torch.randn(7, 3)
    features = net.encoder(obs)
    assert net.value is not None
    value, advantage = net.value(features), net.advantage(features).view(7, 2, num_atoms)
    for b, a, k in itertools.product(range(7), range(2), range(num_atoms)):
        expected = value[b, k] + advantage[b, a, k] - (advantage[b, 0, k] + advantage[b, 1, k]) / 2
        found = net(obs)[b, a] if num_atoms == 1 else net(obs)[b, a, k]
        assert found.item() == pytest.approx(expected.item(), abs=1e-6)


def test_observations_of_every_kind() -> None:
    image = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    spaces = [image, gym.spaces.Dict({"image": image, "speed": gym.spaces.Box(-1, 1, (2,), np.float32)})]
    for space, dueling, noisy in itertools.product(spaces, (False, True), (False, True)):
        net = ActionValues(
            Spec(space, gym.spaces.Discrete(3)), (8, 8), "nature", dueling=dueling, noisy=noisy, sigma_0=0.5
        )
        sample = [space.sample() for _ in range(2)]
        obs: Any = torch.tensor(np.stack(sample)) if space is image else None
        if obs is None:
            obs = {key: torch.tensor(np.stack([one[key] for one in sample])) for key in space}  # type: ignore[attr-defined]
        assert net(obs).shape == (2, 3)
    plain = ActionValues(Spec(image, gym.spaces.Discrete(3)), (), "nature", **PLAIN)
    sizes = [tuple(x.shape) for name, x in plain.named_parameters() if name.startswith("advantage") and x.dim() == 2]
    assert sizes == [(512, 3136), (3, 512)], "as Mnih et al. 2015 have it"


def test_other_actions_are_refused() -> None:
    with pytest.raises(UsageError, match=r"action space Box.*Discrete"):
        ActionValues(Spec(SPEC.obs_space, gym.spaces.Box(-1, 1, (2,))), (4,), "nature", **PLAIN)


class TestNoise:
    def test_is_factorised_and_of_its_scale(self) -> None:
        """Fortunato et al. 2018, eq. 9 to 11: w = mu + sigma * f(e_out) f(e_in)."""
        torch.manual_seed(0)
        layer = NoisyLinear(4, 3, 0.5)
        assert (layer.weight_sigma == 0.5 / 2).all()
        x = torch.randn(2, 4)
        noise = torch.outer(layer.noise_out, layer.noise_in)
        expected = x @ (layer.weight + 0.25 * noise).T + layer.bias + 0.25 * layer.noise_out
        torch.testing.assert_close(layer(x), expected)
        draws = []
        for _ in range(4000):
            layer.resample()
            draws.append(layer.noise_in.clone())
        values = torch.stack(draws)
        # f(e) = sgn(e) sqrt(|e|): mean 0, variance E|e| = sqrt(2 / pi).
        assert values.mean().item() == pytest.approx(0, abs=0.02)
        assert values.square().mean().item() == pytest.approx((2 / np.pi) ** 0.5, abs=0.02)

    def test_stays_until_it_is_drawn_anew_and_is_absent_in_evaluation(self) -> None:
        net = ActionValues(SPEC, (5,), "nature", dueling=True, noisy=True, sigma_0=0.5)
        obs = torch.randn(4, 3)
        before = net(obs)
        assert torch.equal(before, net(obs))
        net.resample()
        assert not torch.equal(before, net(obs))
        net.eval()
        quiet = net(obs)
        net.resample()
        assert torch.equal(quiet, net(obs))

    def test_its_scale_is_learned(self) -> None:
        net = ActionValues(SPEC, (5,), "nature", dueling=False, noisy=True, sigma_0=0.5)
        net(torch.randn(4, 3)).sum().backward()
        for name, parameter in net.named_parameters():
            assert parameter.grad is not None, name
            if name.endswith("sigma"):
                assert parameter.grad.abs().sum() > 0, name


def agent_of(module: Any, online: list[Any], target: list[Any], config: Any) -> Any:
    agent = module.Agent(SPEC, config)
    agent.network, agent.target = Table(online), Table(target)
    return agent


def batch_of(**values: Any) -> dict[str, Any]:
    return {key: torch.tensor(x, dtype=None if key == "action" else torch.float64) for key, x in values.items()}


BATCH = batch_of(obs=[0, 1], action=[1, 0], reward=[1.0, -2.0], next_obs=[1, 0], discount=[0.5, 0.0], weight=[1.0, 0.5])


class TestDqn:
    ONLINE, TARGET = [[1.0, 3.0], [5.0, 4.0]], [[10.0, 20.0], [30.0, 40.0]]

    @pytest.mark.parametrize(
        ("double", "huber", "expected"),
        [
            # Targets: 1 + 0.5 * 40 = 21 (double: the network prefers action 0, so 1 + 0.5 * 30 = 16), and -2.
            (False, False, (18**2 + 0.5 * 7**2) / 2),
            (True, False, (13**2 + 0.5 * 7**2) / 2),
            (False, True, (17.5 + 0.5 * 6.5) / 2),
            (True, True, (12.5 + 0.5 * 6.5) / 2),
        ],
    )
    def test_the_loss_by_hand(self, double: bool, huber: bool, expected: float) -> None:
        config = dqn.Config(double=double, huber=huber)
        agent = agent_of(dqn, self.ONLINE, self.TARGET, config)
        total, terms = dqn.loss(agent, BATCH, config)
        assert total.item() == pytest.approx(expected)
        assert terms["td_error"].tolist() == [13.0 if double else 18.0, -7.0]
        assert terms["q_value"].item() == 4.0
        total.backward()
        assert agent.target.rows.grad is None, "targets are no part of the gradient"
        assert (agent.network.rows.grad != 0).tolist() == [[False, True], [True, False]]

    def test_the_best_action_in_evaluation_and_random_ones_in_training(self) -> None:
        agent = agent_of(dqn, self.ONLINE, self.TARGET, dqn.Config())
        agent.network.num_actions, agent.network.resample = 2, lambda: None
        flags = [torch.zeros(400, dtype=torch.bool)] * 3
        row = Row(torch.zeros(400), torch.zeros(400), *flags)
        assert 120 < agent.act(row, None)[0].sum() < 280
        assert (agent.eval().act(row, None)[0] == 1).all()


# Probabilities of the values -1, 0, 1, for two observations and two actions.
ONLINE = [[[0.2, 0.3, 0.5], [0.1, 0.8, 0.1]], [[0.1, 0.1, 0.8], [0.6, 0.2, 0.2]]]
TARGET = [[[0.2, 0.3, 0.5], [0.1, 0.8, 0.1]], [[0.5, 0.25, 0.25], [0.0625, 0.25, 0.6875]]]


class TestC51:
    @pytest.mark.parametrize("double", [False, True])
    def test_the_loss_by_hand(self, double: bool) -> None:
        config = c51.Config(double=double, num_atoms=3, v_min=-1.0, v_max=1.0)
        logs = [np.log(np.array(x)).tolist() for x in (ONLINE, TARGET)]
        agent = agent_of(c51, *logs, config)
        agent.atom_K = agent.atom_K.double()
        batch = BATCH | batch_of(reward=[0.5, -2.0])
        total, terms = c51.loss(agent, batch, config)
        # Of observation 1 the target prefers action 1, the network action 0.
        p = TARGET[1][0 if double else 1]
        first = project_slowly(p, 0.5, 0.5, [-1.0, 0.0, 1.0])
        costs = [-np.dot(first, np.log(ONLINE[0][1])), -np.log(ONLINE[1][0][0])]
        assert total.item() == pytest.approx((costs[0] + 0.5 * costs[1]) / 2)
        assert terms["td_error"].tolist() == pytest.approx(costs)
        assert terms["q_value"].item() == pytest.approx((0.0 + 0.7) / 2)

    def test_a_range_that_is_none(self) -> None:
        with pytest.raises(UsageError, match=r"v_min=1.0 is not below v_max=1.0"):
            c51.train(replace(c51.Config(), v_min=1.0, v_max=1.0), None)  # type: ignore[arg-type]
