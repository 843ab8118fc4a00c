"""What only a GPU can show: the steps of a CPU, CUDA graphs, half precision, pinned rows, checkpoints that move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flotilla import cli
from flotilla.compute import checkpoint
from flotilla.compute.compile import compiled
from flotilla.compute.optimizer import Optimizer
from flotilla.compute.precision import LossScale, autocast
from flotilla.compute.ranks import Ranks
from flotilla.core.errors import EXIT_DONE, EXIT_PREEMPTED

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FLAGS = "--preset none --backend sync --threads 1 --eval-episodes 1 --num-steps 32 --num-envs 4 --dashboard none"


def steps(device: str, how: Any = "none", precision: Any = "fp32") -> list[float]:
    """Losses of a small network on one batch."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).to(device)
    batch = {"x": torch.randn(64, 8).to(device), "y": torch.randn(64, 1).to(device)}
    opt = Optimizer(net.parameters(), 1e-2, clip=0.5, eps=1e-5, ranks=Ranks(), compile=how, precision=precision)

    def loss(net: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        total = (net(batch["x"]).float() - batch["y"]).square().mean()
        return total, {"total": total.detach()}

    found = []
    for _ in range(20):
        with autocast(torch.device(device), precision):
            found.append(opt.step(loss, net, batch)["total"].item())
    return found


@pytest.mark.parametrize("how", ["none", "default", "max", "auto"])
def test_steps_are_those_of_a_cpu(how: str) -> None:
    assert steps("cuda", how) == pytest.approx(steps("cpu"), abs=1e-4)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision(precision: str) -> None:
    found = steps("cuda", precision=precision)
    assert found[-1] < found[0]
    assert found[0] == pytest.approx(steps("cpu")[0], abs=0.05)


def test_a_loss_scale_stays_on_the_device() -> None:
    scale = LossScale(torch.device("cuda"))
    broken = torch.zeros((), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        scale.update(broken)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert scale.value.device.type == "cuda"


def test_max_launches_one_graph() -> None:
    fn = compiled(lambda x: torch.tanh(x @ x).sum(), "max", torch.device("cuda"))
    x = torch.randn(64, 64, device="cuda")
    for _ in range(4):
        found = fn(x)
    torch.testing.assert_close(found, torch.tanh(x @ x).sum(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("pin", ["--pin-memory", "--no-pin-memory"])
def test_a_run_begins_on_a_gpu_and_goes_on_without(tmp_path: Path, pin: str) -> None:
    flags = [*FLAGS.split(), "--run-dir", str(tmp_path / "run"), "--total-timesteps", "2048", pin]
    assert cli.main(["train", "ppo", *flags, "--device", "cuda", "--time-limit", "0.001"]) == EXIT_PREEMPTED
    assert cli.main(["train", "ppo", *flags, "--device", "cpu", "--time-limit", "0"]) == EXIT_DONE
    found = checkpoint.load(checkpoint.newest(tmp_path / "run" / "checkpoints"))
    assert all(bool(torch.isfinite(x).all()) for x in found.model.values())
