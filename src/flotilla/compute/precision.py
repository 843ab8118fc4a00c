"""Number and memory formats: in which networks compute, and what keeps small gradients alive in fp16."""

from __future__ import annotations

from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)
Precision = Literal["fp32", "bf16", "fp16"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Matrix products and convolutions in half precision, except for fp32; weights and losses stay as they are."""
    return torch.autocast(device.type, DTYPES[precision], enabled=precision != "fp32")


def place(module: M, device: torch.device, *, channels_last: bool) -> M:
    """The module on a device, the weights of its convolutions with channels last in memory, or as they are."""
    module = module.to(device)
    for layer in module.modules() if channels_last else ():
        if isinstance(layer, nn.Conv2d):
            layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)
    return module


class LossScale:
    """By what losses are multiplied in fp16: as much as gradients bear (Micikevicius et al. 2018, section 3.2).

    All of it stays on the device.
    """

    START, GROWTH, BACKOFF, GROWTH_EVERY = 2.0**16, 2.0, 0.5, 2000  # the values of torch.amp.GradScaler

    def __init__(self, device: torch.device) -> None:
        self.value = torch.tensor(self.START, device=device)
        self._good = torch.zeros((), device=device)  # steps since the last change

    def update(self, broken: Tensor) -> None:
        """After a step; `broken` is 1 where its gradient was not finite, else 0."""
        self._good.add_(1.0).mul_(1 - broken)
        grown = (self._good >= self.GROWTH_EVERY).to(self.value.dtype)
        self.value.mul_(1 + grown * (self.GROWTH - 1)).mul_(1 - broken * (1 - self.BACKOFF))
        self._good.mul_(1 - grown)

    def state_dict(self) -> dict[str, Tensor]:
        return {"loss_scale": self.value, "loss_scale_good_steps": self._good}
