"""Eager or `torch.compile`, one thread or many: as asked for, or whichever is measured to be faster."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch

Compile = Literal["none", "default", "max", "auto"]
F = TypeVar("F", bound=Callable[..., Any])

WARM_UP, ROUNDS = 2, 7  # of a measurement, each with one call of every candidate


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
            self._chosen = self._candidates[fastest([functools.partial(fn, *args) for fn in self._candidates])]
        return self._chosen(*args)


def choose_threads(fn: Callable[[], Any], most: int) -> None:
    """Let torch use one thread or `most`, whichever makes `fn` faster."""

    def with_threads(count: int) -> None:
        torch.set_num_threads(count)
        fn()

    counts = [1, most]
    torch.set_num_threads(counts[fastest([functools.partial(with_threads, count) for count in counts])])


def fastest(candidates: Sequence[Callable[[], Any]]) -> int:
    """The number of the fastest, by the median of calls in turns; the first of equals.

    They may draw random numbers, and the generator of the CPU is as it was afterwards.
    """
    before = torch.get_rng_state()
    rounds = [[_seconds(fn) for fn in candidates] for _ in range(WARM_UP + ROUNDS)]
    torch.set_rng_state(before)
    medians = [statistics.median(column) for column in zip(*rounds[WARM_UP:], strict=True)]
    return medians.index(min(medians))


def _seconds(fn: Callable[[], Any]) -> float:
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start
