"""The memory against torch's own cells, run episode by episode; the initialisation of layers."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from flotilla.nets.layers import Memory, MemoryKind, Mlp, orthogonal

KINDS: list[MemoryKind] = ["lstm", "gru"]


def sequences(seed: int) -> tuple[Tensor, Tensor]:
    """Features (B, T, D) and is_first (B, T): one sequence goes on, one begins, others begin in between."""
    torch.manual_seed(seed)
    is_first = torch.zeros(4, 9, dtype=torch.bool)
    is_first[1, 0] = is_first[2, 3] = is_first[2, 4] = is_first[3, 8] = True
    return torch.randn(4, 9, 5), is_first


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_the_cell_on_each_episode_from_zero(kind: MemoryKind) -> None:
    x, is_first = sequences(0)
    memory = Memory(kind, 5, 3)
    start = torch.randn(4, memory.state_dim)
    out, last = memory(x, start, is_first)
    assert (memory.output_dim, memory.state_dim) == (3, 6 if kind == "lstm" else 3)
    cell = memory.cell
    for b in range(4):
        hidden, inner = start[b : b + 1, :3], start[b : b + 1, 3:]
        for t in range(9):
            if is_first[b, t]:
                hidden, inner = torch.zeros_like(hidden), torch.zeros_like(inner)
            if isinstance(cell, nn.LSTMCell):
                hidden, inner = cell(x[b : b + 1, t], (hidden, inner))
            else:
                assert cell is not None
                hidden = cell(x[b : b + 1, t], hidden)
            torch.testing.assert_close(out[b, t], hidden[0])
        torch.testing.assert_close(last[b], torch.cat([hidden, inner], -1)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_memory_step_by_step_is_the_whole_sequence(kind: MemoryKind) -> None:
    x, is_first = sequences(1)
    memory = Memory(kind, 5, 3)
    start = torch.randn(4, memory.state_dim)
    whole, last = memory(x, start, is_first)
    state, outputs = start, []
    for t in range(9):
        out, state = memory(x[:, t : t + 1], state, is_first[:, t : t + 1])
        outputs.append(out)
    torch.testing.assert_close(torch.cat(outputs, 1), whole)
    torch.testing.assert_close(state, last)


@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_crosses_the_start_of_an_episode(kind: MemoryKind) -> None:
    x, is_first = sequences(2)
    memory = Memory(kind, 5, 3)
    x.requires_grad_()
    out, _ = memory(x, torch.zeros(4, memory.state_dim), is_first)
    out[:, -1].sum().backward()
    assert x.grad is not None
    reached = x.grad.abs().sum(-1) > 0
    assert reached[0].all()
    assert reached[2].tolist() == [False] * 4 + [True] * 5
    assert reached[3].tolist() == [False] * 8 + [True]


def test_no_memory_passes_through() -> None:
    x, is_first = sequences(3)
    memory, state = Memory("none", 5, 3), torch.zeros(4, 0)
    out, last = memory(x, state, is_first)
    assert out is x
    assert last is state
    assert (memory.output_dim, memory.state_dim) == (5, 0)
    assert not list(memory.parameters())


def test_initialisation() -> None:
    layer = orthogonal(nn.Linear(6, 4), 0.5)
    torch.testing.assert_close(layer.weight @ layer.weight.T, 0.25 * torch.eye(4))
    assert layer.bias.tolist() == [0, 0, 0, 0]
    for layer in Mlp(3, (8, 2)).layers:
        assert isinstance(layer, nn.Linear)
        small = layer.weight if len(layer.weight) < layer.in_features else layer.weight.T
        torch.testing.assert_close(small @ small.T, math.sqrt(2) ** 2 * torch.eye(len(small)))
    for kind in KINDS:
        for name, parameter in Memory(kind, 5, 3).named_parameters():
            if "bias" in name:
                assert (parameter == 0).all()
            else:
                columns = parameter.shape[1]
                torch.testing.assert_close(parameter.T @ parameter, torch.eye(columns), msg=f"{kind} {name}")


def test_mlp_is_its_layers() -> None:
    net, x = Mlp(3, (8, 2)), torch.randn(5, 4, 3)
    first, second = net.layers
    expected = torch.tanh(second(torch.tanh(first(x))))
    torch.testing.assert_close(net(x), expected)
    assert net.output_dim == 2
    empty = Mlp(3, ())
    assert empty(x) is x
    assert empty.output_dim == 3


def test_mlp_uses_the_weights_that_it_has_now() -> None:
    """Copied, loaded, converted, stepped: it holds its parameters twice, and both must be the same."""
    net, x = Mlp(3, (4,)), torch.ones(1, 3)
    other = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert other(x).tolist() == [[0, 0, 0, 0]]
    assert (net(x) != 0).all()
    other.load_state_dict(net.state_dict())
    assert torch.equal(other(x), net(x))
    assert other.double()(x.double()).dtype == torch.float64
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    before = net(x)
    before.sum().backward()
    optimizer.step()
    assert (net(x) != before).all()
