"""Mixed precision: the number format in which networks compute."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch

Precision = Literal["fp32", "bf16", "fp16"]


@contextlib.contextmanager
def autocast(device: torch.device, precision: Precision) -> Iterator[None]:
    """Matrix products and convolutions in half precision, except for fp32."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    with torch.autocast(device.type, dtype, enabled=precision != "fp32"):
        yield
