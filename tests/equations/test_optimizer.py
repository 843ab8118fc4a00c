"""The flat optimizer against torch's Adam and clip_grad_norm_; a broken gradient changes nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from flotilla.compute.optimizer import Optimizer, parameter_counts
from flotilla.compute.ranks import Ranks


def network() -> nn.Module:
    """Two kinds of layers, one of them channels_last, and a parameter that never gets a gradient."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Tanh(), nn.Linear(4 * 4, 2))
    net[0].weight.data = net[0].weight.data.contiguous(memory_format=torch.channels_last)
    net.unused = nn.Parameter(torch.ones(3))
    return net


def optimizer(net: nn.Module, learning_rate: float = 0.01, clip: float = 0.5) -> Optimizer:
    return Optimizer(net.parameters(), learning_rate, clip=clip, eps=1e-5, ranks=Ranks())


def loss_of(net: nn.Module, seed: int, factor: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(seed)
    total = factor * (net(torch.randn(5, 3, 4, 4)) - torch.randn(5, 2)).square().sum()
    return total, {"total": total.detach()}


def values(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("clip", [0.0, 0.5, 1e6])
def test_twenty_steps_are_those_of_torch(clip: float) -> None:
    ours, theirs = network(), network()
    opt, adam = optimizer(ours, clip=clip), torch.optim.Adam(theirs.parameters(), lr=0.01, eps=1e-5)
    for seed in range(20):
        rate = 0.01 * (1 - seed / 20)
        opt.set_lr(rate)
        adam.param_groups[0]["lr"] = rate
        metrics = opt.step(loss_of, ours, seed)
        adam.zero_grad()
        total, terms = loss_of(theirs, seed)
        total.backward()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), clip or torch.inf)
        adam.step()
        torch.testing.assert_close(metrics["grad_norm"], norm)
        torch.testing.assert_close(metrics["total"], terms["total"])
    for ours_p, theirs_p in zip(values(ours), values(theirs), strict=True):
        torch.testing.assert_close(ours_p, theirs_p, atol=1e-6, rtol=1e-6)
    assert metrics["skipped_steps"] == 0
    assert ours[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_making_it_moves_nothing() -> None:
    net = network()
    before = values(net)
    optimizer(net)
    assert all(torch.equal(x, y) for x, y in zip(values(net), before, strict=True))
    copied = copy.deepcopy(net.state_dict())
    net.load_state_dict(copied)
    optimizer(net).step(loss_of, net, 0)
    assert not torch.equal(net[3].bias, copied["3.bias"]), "the module's own parameters are what it steps"


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(broken: float) -> None:
    ours, reference = network(), network()
    opt, other = optimizer(ours), optimizer(reference)
    for net, one in ((ours, opt), (reference, other)):
        one.step(loss_of, net, 0)
    before, state = values(ours), {key: x.clone() for key, x in opt.state_dict().items()}
    assert opt.step(loss_of, ours, 1, broken)["skipped_steps"] == 1
    assert all(torch.equal(x, y) for x, y in zip(values(ours), before, strict=True))
    assert all(torch.equal(x, state[key]) for key, x in opt.state_dict().items())
    assert opt.step(loss_of, ours, 1, broken)["skipped_steps"] == 2
    for net, one in ((ours, opt), (reference, other)):
        metrics = one.step(loss_of, net, 2)
    assert metrics["skipped_steps"] == 0
    assert all(torch.equal(x, y) for x, y in zip(values(ours), values(reference), strict=True)), "as if it never was"


def test_state_round_trip() -> None:
    """A loaded optimizer goes on as the saved one, and shares no memory with it."""
    net = network()
    opt = optimizer(net)
    for seed in range(3):
        opt.step(loss_of, net, seed)
    other = network()
    other.load_state_dict(net.state_dict())
    loaded = optimizer(other)
    loaded.load_state_dict(opt.state_dict())
    for step in (opt.step(loss_of, net, 7), loaded.step(loss_of, other, 7)):
        assert step["skipped_steps"] == 0
    assert all(torch.equal(x, y) for x, y in zip(values(net), values(other), strict=True))
    fresh = network()
    fresh.load_state_dict(net.state_dict())
    optimizer(fresh).step(loss_of, fresh, 8)
    opt.step(loss_of, net, 8)
    assert not torch.equal(fresh[3].weight, net[3].weight), "without the moments it would be another step"


def test_frozen_parameters_stay() -> None:
    net = network()
    net[0].weight.requires_grad_(requires_grad=False)
    before = net[0].weight.clone()
    opt = optimizer(net)
    opt.step(loss_of, net, 0)
    assert torch.equal(net[0].weight, before)


def test_parameter_counts() -> None:
    assert parameter_counts(network()) == {"0": 3 * 4 * 9 + 4, "3": 16 * 2 + 2, "unused": 3}
