"""The device that a configuration names."""

from __future__ import annotations

import os

import torch

from flotilla.core.errors import UsageError


def device_of(name: str) -> torch.device:
    """The device that a configuration names; UsageError where there is none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"  # one GPU a rank
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"unknown device '{name}'; choose from auto, cpu, cuda, cuda:<index>") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device '{name}' needs a CUDA GPU, and torch {torch.__version__} sees none; use --device cpu")
    return device
