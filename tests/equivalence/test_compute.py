"""Many ranks, parts of a batch, half precision, compilation: the same steps as plain ones, within what numbers bear."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor

from flotilla.algorithms import ppo
from flotilla.compute.compile import choose_threads, compiled
from flotilla.compute.optimizer import Optimizer, gradients
from flotilla.compute.precision import LossScale, Precision, autocast, place
from flotilla.compute.ranks import Ranks
from flotilla.core.types import Spec, tree_map
from flotilla.functional import balanced, standardize

CPU = torch.device("cpu")
OBS: dict[str, gym.Space[Any]] = {
    "vectors": gym.spaces.Box(-1, 1, (5,)),
    "images": gym.spaces.Box(0, 255, (4, 84, 84), np.uint8),
}


def agent_of(config: ppo.Config, obs: str = "vectors", dtype: torch.dtype = torch.float32) -> ppo.Agent:
    torch.manual_seed(0)
    agent = ppo.Agent(Spec(OBS[obs], gym.spaces.Box(-1, 1, (2,))), config).to(dtype)
    return place(agent, CPU, channels_last=True)


def batch_of(agent: ppo.Agent, size: int, obs: str = "vectors", dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Samples of which some do not count, with ratios on both sides of the clip."""
    draw = torch.Generator().manual_seed(1)
    leading = (size, 3) if agent.memory.cell is not None else (size,)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*leading, *shape, generator=draw, dtype=dtype)

    image = torch.randint(0, 255, (*leading, 4, 84, 84), generator=draw, dtype=torch.uint8)
    batch: dict[str, Any] = {
        "obs": image if obs == "images" else normal(5),
        "is_first": torch.rand(leading, generator=draw) < 0.2,
        "action": normal(2),
        "log_prob": normal() - 3,
        "value": normal(),
        "adv": 5 + normal(),
        "return": normal(),
        "weight": (torch.rand(leading, generator=draw) < 0.8).to(dtype),
    }
    if agent.memory.cell is not None:
        batch["state"] = torch.randn(size, agent.memory.state_dim, generator=draw, dtype=dtype)
    return batch


def minibatch(batch: dict[str, Any], mean: Callable[[Tensor], Tensor] = lambda x: x) -> dict[str, Any]:
    """All of it, with weights and advantages as PPO makes them."""
    one = tree_map(lambda x: x[None], batch)
    one["weight"] = balanced(one["weight"], mean)
    one["adv"] = standardize(one["adv"], one["weight"], mean)
    return dict(tree_map(lambda x: x[0], one))


def train(
    steps: int = 20,
    *,
    size: int = 32,
    obs: str = "vectors",
    dtype: torch.dtype = torch.float32,
    ranks: Ranks | None = None,
    memory: Any = "none",
    precision: Precision = "fp32",
    **settings: Any,
) -> tuple[list[float], ppo.Agent]:
    """Losses of so many steps on one batch, of which each rank has a part."""
    ranks = ranks or Ranks()
    torch.set_default_dtype(dtype)
    config = ppo.Config(memory=memory, memory_size=8, cnn="a3c")
    agent = agent_of(config, obs, dtype)
    share = size // ranks.world_size
    mine = tree_map(lambda x: x[ranks.rank * share :][:share], batch_of(agent, size, obs, dtype))
    opt = Optimizer(agent.parameters(), 1e-3, clip=0.5, eps=1e-5, ranks=ranks, precision=precision, **settings)
    totals, skipped = [], 0.0
    for _ in range(steps):
        with autocast(CPU, precision):
            terms = opt.step(total_loss, agent, minibatch(mine, ranks.mean_), config)
        if skipped == terms["skipped_steps"].item():  # else fp16 looked for its loss scale
            totals.append(ranks.mean_(terms["total"].clone()).item())
        skipped = terms["skipped_steps"].item()
    torch.set_default_dtype(torch.float32)
    return totals, agent


def total_loss(agent: ppo.Agent, batch: dict[str, Any], config: ppo.Config) -> tuple[Tensor, dict[str, Tensor]]:
    total, terms = ppo.loss(agent, batch, config, 0.2)
    return total, terms | {"total": total.detach()}


def weights(agent: ppo.Agent) -> Tensor:
    return torch.cat([p.detach().flatten() for p in agent.parameters()])


def in_world(size: int, folder: Path, function: str, *arguments: Any) -> list[Any]:
    """What a function of this module says on each rank; through files, as a pipe without a buffer may lose an end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = (
        f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        "import json, os, pathlib, test_compute\n"
        f"said = test_compute.{function}(*json.loads({json.dumps(arguments)!r}))\n"
        f"pathlib.Path({str(folder)!r}, os.environ['RANK']).write_text(json.dumps(said))"
    )
    world = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen([sys.executable, "-c", program], env=os.environ | world | {"RANK": str(rank)})
        for rank in range(size)
    ]
    assert [process.wait() for process in started] == [0] * size
    return [json.loads((folder / str(rank)).read_text()) for rank in range(size)]


def on_a_rank(dtype: str, obs: str) -> list[Any]:
    ranks = Ranks.join("cpu", 60.0)
    totals, agent = train(ranks=ranks, dtype=getattr(torch, dtype), obs=obs)
    mine = weights(agent)
    first = ranks.broadcast_(mine.clone())
    ranks.leave(together=True)
    return [totals, mine.tolist(), float((mine - first).abs().max())]


@pytest.mark.usefixtures("no_hang")
@pytest.mark.parametrize(
    ("size", "dtype", "obs", "tolerance"),
    [
        (2, "float64", "vectors", 1e-10),
        (4, "float64", "vectors", 1e-10),
        (2, "float32", "vectors", 1e-5),
        (2, "float32", "images", 1e-5),
    ],
)
def test_ranks_with_the_same_global_batch_learn_as_one(
    size: int, dtype: str, obs: str, tolerance: float, tmp_path: Path
) -> None:
    totals, agent = train(dtype=getattr(torch, dtype), obs=obs)
    assert max(totals) - min(totals) > 0.01, "it learns"
    for found, mine, difference in in_world(size, tmp_path, "on_a_rank", dtype, obs):
        assert found == pytest.approx(totals, abs=tolerance)
        assert difference == 0.0
        limit = 1e-10 if dtype == "float64" else 1e-4
        torch.testing.assert_close(
            torch.tensor(mine, dtype=torch.float64), weights(agent).double(), atol=limit, rtol=limit
        )


@pytest.mark.parametrize("memory", ["none", "lstm"])
@pytest.mark.parametrize("count", [4, 5])  # also parts of different sizes
def test_parts_of_a_batch_are_the_batch(count: int, memory: str) -> None:
    whole, one = train(memory=memory)
    parts, other = train(memory=memory, grad_accum_steps=count)
    assert parts == pytest.approx(whole, abs=1e-6)
    torch.testing.assert_close(weights(one), weights(other), atol=1e-6, rtol=1e-6)


def test_terms_of_parts_are_joined() -> None:
    agent, config = agent_of(ppo.Config()), ppo.Config()
    batch = minibatch(batch_of(agent, 32))
    opt = Optimizer(agent.parameters(), 0.0, clip=0.0, eps=1e-5, ranks=Ranks(), grad_accum_steps=3)
    found = opt.step(ppo.loss, agent, batch, config, 0.2)
    for name, x in ppo.loss(agent, batch, config, 0.2)[1].items():
        torch.testing.assert_close(found[name], x, atol=1e-6, rtol=1e-6)


def test_a_fused_step_is_the_other_one() -> None:
    fused, one = train(precision="fp32")
    plain, other = train(precision="fp32", fused=False)
    assert plain == pytest.approx(fused, abs=2e-5)
    torch.testing.assert_close(weights(one), weights(other), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("fused", [True, False])
def test_a_broken_step_changes_nothing(fused: bool) -> None:
    agent, config = agent_of(ppo.Config()), ppo.Config()
    batch = minibatch(batch_of(agent, 32))
    opt = Optimizer(agent.parameters(), 1e-3, clip=0.5, eps=1e-5, ranks=Ranks(), fused=fused, max_skipped=2)
    opt.step(total_loss, agent, batch, config)
    before, state = weights(agent), {name: x.clone() for name, x in opt.state_dict().items()}
    broken = batch | {"return": batch["return"].index_fill(0, torch.tensor([3]), torch.nan)}
    broken["weight"] = torch.ones_like(batch["weight"])
    for count in range(1, 4):
        assert not opt.is_stuck()
        assert opt.step(total_loss, agent, broken, config)["skipped_steps"] == count
    assert torch.equal(weights(agent), before)
    assert all(torch.equal(x, state[name]) for name, x in opt.state_dict().items())
    assert opt.is_stuck()
    assert (
        opt.problem(dict(agent.named_parameters())) == "value_loss and total not finite in 3 optimizer steps in a row"
    )
    opt.step(total_loss, agent, batch, config)
    assert not opt.is_stuck()
    assert not torch.equal(weights(agent), before)


def test_a_gradient_alone_can_be_broken() -> None:
    """The root of 0 is finite, its slope is not."""
    layer = torch.nn.Linear(2, 1)
    opt = Optimizer(layer.parameters(), 1e-3, clip=0.0, eps=1e-8, ranks=Ranks(), max_skipped=0)

    def root(net: torch.nn.Linear) -> tuple[Tensor, dict[str, Tensor]]:
        total = (net.bias * 0).sqrt().sum() + net.weight.sum()
        return total, {"total": total.detach()}

    opt.step(root, layer)
    assert (
        opt.problem(dict(layer.named_parameters())) == "the gradient of bias not finite in 1 optimizer steps in a row"
    )


@pytest.mark.parametrize("obs", ["vectors", "images"])
@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.08), ("fp16", 0.02)])
@pytest.mark.parametrize("memory", ["none", "lstm"])
def test_half_precision_stays_close(precision: Precision, tolerance: float, obs: str, memory: str) -> None:
    if obs == "images" and memory == "lstm":
        pytest.skip("the same memory as on vectors")
    full, one = train(obs=obs, memory=memory)
    half, other = train(obs=obs, memory=memory, precision=precision)
    assert half != full
    assert len(half) >= 15
    assert half == pytest.approx(full[: len(half)], abs=tolerance)
    assert weights(one).dtype == weights(other).dtype == torch.float32


def test_what_a_loss_sees_is_single_precision() -> None:
    agent = agent_of(ppo.Config())
    with autocast(CPU, "bf16"):
        assert agent.actor(torch.zeros(1, 64)).dtype == torch.bfloat16
        policy, value, _ = agent(torch.zeros(1, 5), torch.zeros(1, 0), torch.zeros(1, dtype=torch.bool))
    assert policy.mode().dtype == value.dtype == policy.entropy().dtype == torch.float32


def test_weights_that_half_precision_keeps_are_the_new_ones() -> None:
    """Autocast remembers a weight's copy until it is left, which a run's loop never is."""
    layer, x = torch.nn.Linear(4, 1), torch.ones(3, 4)
    opt = Optimizer(layer.parameters(), 0.1, clip=0.0, eps=1e-8, ranks=Ranks(), precision="bf16")
    with autocast(CPU, "bf16"):
        before = layer(x)
        opt.step(lambda net: (net(x).mean(), {}), layer)
        assert not torch.equal(layer(x), before)


def test_an_overflow_lowers_the_loss_scale() -> None:
    layer = torch.nn.Linear(1, 1)
    opt = Optimizer(layer.parameters(), 1e-3, clip=0.0, eps=1e-8, ranks=Ranks(), precision="fp16")
    before = layer.weight.clone()

    def steep(net: torch.nn.Linear, slope: float) -> tuple[Tensor, dict[str, Tensor]]:
        return (net(torch.ones(1, 1)) * slope).sum(), {}

    with autocast(CPU, "fp16"):
        for skipped in (1, 2):
            assert opt.step(steep, layer, 4e4)["skipped_steps"] == skipped, "2**16 x 40,000 is beyond fp16"
        assert torch.equal(layer.weight, before)
        assert opt.state_dict()["loss_scale"] == LossScale.START / 4
        assert opt.step(steep, layer, 0.5)["grad_norm"].item() == pytest.approx(0.5 * 2**0.5, rel=1e-3), "not scaled"
    assert not torch.equal(layer.weight, before)


def test_the_loss_scale_grows_back() -> None:
    scale, fine, broken = LossScale(CPU), torch.tensor(0.0), torch.tensor(1.0)
    scale.update(broken)
    for _ in range(LossScale.GROWTH_EVERY - 1):
        scale.update(fine)
    assert scale.value == LossScale.START / 2
    scale.update(fine)
    assert scale.value == LossScale.START
    for _ in range(LossScale.GROWTH_EVERY - 1):
        scale.update(fine)
    scale.update(broken)
    scale.update(fine)
    assert scale.value == LossScale.START / 2, "a broken step begins the count anew"


def test_auto_takes_the_faster_one_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that makes things slower, or faster, than they are."""
    import time

    calls = []

    def work(x: Tensor) -> Tensor:
        calls.append("eager")
        time.sleep(0.004)
        return x + torch.rand(1)

    for pause, chosen in ((0.008, "eager"), (0.0, "compiled")):

        def compiler(fn: Any, pause: float = pause, **_: Any) -> Any:
            def faster(x: Tensor) -> Tensor:
                calls.append("compiled")
                time.sleep(pause)
                return x + torch.rand(1)

            return faster

        monkeypatch.setattr(torch, "compile", compiler)
        fn = compiled(work, "auto", CPU)
        torch.manual_seed(3)
        first = fn(torch.zeros(1))
        calls.clear()
        second = fn(torch.zeros(1))
        assert calls == [chosen]
        torch.manual_seed(3)
        assert [first.item(), second.item()] == torch.rand(2).tolist()


@pytest.mark.filterwarnings(
    "ignore:.*is deprecated:DeprecationWarning"
)  # torch's compiler imports what torch deprecates
@pytest.mark.parametrize("how", ["max", "auto"])
def test_compiled_steps_are_eager_ones(how: Any) -> None:
    torch._dynamo.reset()
    eager, one = train(5)
    found, other = train(5, compile=how)
    assert found == pytest.approx(eager, abs=1e-5)
    torch.testing.assert_close(weights(one), weights(other), atol=1e-4, rtol=1e-4)


def test_gradients_of_a_scaled_loss_are_scaled() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    (grad,), _ = gradients(lambda: (x.square().sum(), {}), (), [x], torch.tensor(8.0))
    assert grad.tolist() == [16.0, 32.0]


def test_threads_are_those_that_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where two threads get in each other's way, and where they help."""
    import time

    for slow in (1, 2):

        def work(slow: int = slow) -> Tensor:
            time.sleep(0.006 if torch.get_num_threads() == slow else 0.002)
            return torch.rand(1)

        torch.manual_seed(5)
        choose_threads(work, 2)
        assert torch.get_num_threads() == 3 - slow
        after = torch.rand(1)
        torch.manual_seed(5)
        assert torch.equal(after, torch.rand(1)), "no draw was used up"
    torch.set_num_threads(1)
    expected, one = train(3)
    found, other = train(3, most_threads=2)
    assert found == pytest.approx(expected, abs=1e-5)
    torch.testing.assert_close(weights(one), weights(other), atol=1e-5, rtol=1e-5)
