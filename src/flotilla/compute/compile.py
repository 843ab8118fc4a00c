"""Compilation behind one function: eager or `torch.compile`, as the configuration says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch

Compile = Literal["none", "default"]
F = TypeVar("F", bound=Callable[..., Any])


def compiled(fn: F, how: Compile) -> F:
    """`fn`, compiled or as it is; a call of `torch.autograd.grad` inside becomes part of the same graph."""
    if how == "none":
        return fn
    if hasattr(torch._dynamo.config, "trace_autograd_ops"):  # newer than torch 2.6, where the graph ends at the call
        torch._dynamo.config.trace_autograd_ops = True
    return torch.compile(fn)  # type: ignore[return-value]
