"""Compilation behind one function: eager, `torch.compile`, or whichever is measured to be faster."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch

Compile = Literal["none", "default", "max", "auto"]
F = TypeVar("F", bound=Callable[..., Any])

ROUNDS = 7  # of a measurement, each with one call of either


def compiled(fn: F, how: Compile, device: torch.device) -> F:
    """`fn`, compiled or as it is; a call of `torch.autograd.grad` inside becomes part of the same graph.

    max: on a GPU kernels are tuned and launched as one CUDA graph; on a CPU, where there are none, as default.
    auto: on a GPU as default; on a CPU the first call measures, and eager stays where it is faster.
    """
    if how == "none":
        return fn
    if hasattr(torch._dynamo.config, "trace_autograd_ops"):  # newer than torch 2.6, where the graph ends at the call
        torch._dynamo.config.trace_autograd_ops = True
    if how == "max" and device.type == "cuda":
        return torch.compile(fn, mode="max-autotune")  # type: ignore[return-value]
    quick = torch.compile(fn)
    if how == "auto" and device.type == "cpu":
        return _Faster(fn, quick)  # type: ignore[return-value]
    return quick  # type: ignore[return-value]


class _Faster:
    """One of two functions that do the same: the one that its first call finds to be faster."""

    def __init__(self, eager: Callable[..., Any], other: Callable[..., Any]) -> None:
        self._candidates = (eager, other)
        self._chosen: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        if self._chosen is None:
            before = torch.get_rng_state()  # what is measured may draw, and shall not be noticed
            rounds = [[seconds(functools.partial(fn, *args)) for fn in self._candidates] for _ in range(ROUNDS + 2)]
            eager, other = (statistics.median(column) for column in zip(*rounds[2:], strict=True))
            self._chosen = self._candidates[other < eager]
            torch.set_rng_state(before)
        return self._chosen(*args)


def seconds(fn: Callable[[], Any]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start
