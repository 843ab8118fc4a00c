"""What each metric means, in which unit, and the sums that wait on the device until a log line."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flotilla.core.errors import UsageError, nearest
from flotilla.core.types import Episode

Kind = Literal["mean", "sum", "max", "last"]


class Metric(NamedTuple):
    """How the values of one log interval become one number, in which unit, and what it means."""

    kind: Kind
    unit: str
    text: str


METRICS: dict[str, Metric] = {
    "charts/episodic_return": Metric(
        "mean", "reward", "Sum of raw rewards of the training episodes that ended in the interval."
    ),
    "charts/episodic_length": Metric(
        "mean",
        "env steps",
        "Length, after action repeat, of the training episodes that ended in the interval.",
    ),
    "charts/episodes": Metric("last", "episodes", "Training episodes that have ended since the run began."),
    "charts/learning_rate": Metric("last", "1", "Step size of the optimizer at the last update."),
    "charts/epsilon": Metric("last", "fraction", "Share of random actions."),
    "losses/policy_loss": Metric(
        "mean",
        "1",
        "Clipped surrogate, mean of max(-A r, -A clip(r, 1 - c, 1 + c)) with r = pi_new / pi_old.",
    ),
    "losses/value_loss": Metric(
        "mean",
        "reward^2",
        "Half the mean squared error of the value, (V - R)^2 / 2; clipped where the config says so.",
    ),
    "losses/td_loss": Metric(
        "mean", "reward^2", "DQN: mean weighted squared or Huber error of Q. C51: mean weighted cross-entropy, in nats."
    ),
    "losses/critic_loss": Metric("mean", "reward^2", "Mean squared error of Q, the sum over both critics where two."),
    "losses/q_value": Metric("mean", "reward", "Mean Q of the actions that were taken."),
    "losses/actor_loss": Metric("mean", "reward", "Minus the mean value that the critics give the policy's actions."),
    "losses/alpha": Metric("mean", "reward/nat", "SAC's temperature: what a nat of entropy is worth."),
    "losses/alpha_loss": Metric("mean", "1", "SAC: alpha times how far the entropy is above its target."),
    "losses/entropy": Metric("mean", "nats", "Entropy of the policy, mean of -sum(pi log pi) over the samples."),
    "losses/approx_kl": Metric("mean", "nats", "KL(pi_old, pi_new), estimated as the mean of (r - 1) - log r."),
    "losses/old_approx_kl": Metric(
        "mean", "nats", "KL(pi_old, pi_new), estimated as the mean of -log r: unbiased, but may be negative."
    ),
    "losses/clipfrac": Metric("mean", "fraction", "Samples whose ratio left the clip range, |r - 1| > c."),
    "losses/explained_variance": Metric(
        "last", "1", "1 - Var(R - V) / Var(R): 1 is a perfect value function, 0 no better than a constant."
    ),
    "losses/grad_norm": Metric(
        "mean", "1", "L2 norm of the gradient of all parameters (of the critics, where apart), before clipping."
    ),
    "losses/skipped_steps": Metric(
        "last", "updates", "Optimizer steps left out since the run began because a gradient was not finite."
    ),
    "losses/epochs": Metric(
        "mean", "passes", "Passes over each rollout; below update_epochs where target_kl stopped it early."
    ),
    "time/env_steps_per_s": Metric(
        "last", "env steps/s", "Environment steps per second over the last 10 s or so, learning included."
    ),
    "time/frames_per_s": Metric(
        "last", "frames/s", "Simulator frames per second: env_steps_per_s times the frames of a step."
    ),
    "time/share_env": Metric("last", "fraction", "Share of the last 10 s or so spent stepping environments."),
    "time/share_inference": Metric("last", "fraction", "The same for choosing actions."),
    "time/share_learning": Metric("last", "fraction", "The same for losses, gradients and optimizer steps."),
    "time/share_waiting": Metric("last", "fraction", "The same for waiting on workers, other ranks or actors."),
    "time/share_other": Metric("last", "fraction", "1 minus the four other shares: evaluation, logs, the rest."),
    "time/elapsed_s": Metric("last", "s", "Wall-clock time since the run was started."),
    "env/episodes": Metric("sum", "episodes", "Training episodes that ended in the interval."),
    "env/restarts": Metric("sum", "restarts", "Environments that crashed and were restarted in the interval."),
    "eval/episodic_return_mean": Metric("last", "reward", "Mean raw return of the episodes of an evaluation."),
    "eval/episodic_return_std": Metric("last", "reward", "Their standard deviation, sqrt(mean((x - mean)^2))."),
    "eval/episodic_length_mean": Metric("last", "env steps", "Mean length of the episodes of an evaluation."),
    "eval/episodes": Metric("last", "episodes", "How many episodes the evaluation had."),
    "system/cpu_percent": Metric(
        "last", "% of a core", "CPU time of the process and its children; 200 is two cores at work."
    ),
    "system/memory_bytes": Metric(
        "last", "bytes", "Resident memory of the process and its children, shared pages counted once."
    ),
    "system/gpu_percent": Metric("last", "%", "Share of time in which the GPU ran a kernel, whoever started it."),
    "system/gpu_memory_bytes": Metric("last", "bytes", "Memory in use on the GPU, whoever uses it."),
}


def metric(key: str) -> Metric:
    """The entry of METRICS for a key, which may go on with "/" and what it is of: charts/episodic_return/<env id>.

    Raises UsageError for a key that METRICS does not declare.
    """
    found = METRICS.get("/".join(key.split("/", 2)[:2]))
    if found is None:
        raise UsageError(f"unknown metric '{key}': {nearest(key, METRICS)}")
    return found


def over_ranks(of_ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One value of each metric for those of several ranks: by its kind; the last is the first rank's."""
    combine: dict[Kind, Callable[[list[float]], float]] = {
        "mean": statistics.fmean,
        "sum": math.fsum,
        "max": max,
        "last": lambda values: values[0],
    }
    return {key: combine[metric(key).kind]([values[key] for values in of_ranks]) for key in of_ranks[0]}


FOLD_AT = 64  # vectors that may wait before they are folded into one


class _Group:
    """The tensors of calls that had the same keys: a vector a call, folded now and then to bound memory."""

    def __init__(self) -> None:
        self.count = 0
        self.latest = 0  # number of the newest call
        self._waiting: list[Tensor] = []  # each (K,)
        self._folded: Tensor | None = None  # (3, K): sum, maximum, last

    def add(self, values: list[Tensor], call: int) -> None:
        with torch.no_grad():
            # Stacking copies: a compiled or graphed loss may write its next value into the same memory.
            self._waiting.append(torch.stack(values))
            self.count += 1
            self.latest = call
            if len(self._waiting) == FOLD_AT:
                self.fold()

    def fold(self) -> Tensor:
        """Sum, maximum and last of everything so far, (3, K); still on the device."""
        if self._waiting:
            new = torch.stack(self._waiting).float()
            sums, maxima = new.sum(0), new.amax(0)
            if self._folded is not None:
                sums, maxima = sums + self._folded[0], torch.maximum(maxima, self._folded[1])
            self._folded = torch.stack([sums, maxima, new[-1]])
            self._waiting = []
        assert self._folded is not None
        return self._folded


class _Total:
    """Sum, maximum, last and count of one key."""

    def __init__(self) -> None:
        self.count = 0
        self.sum = 0.0
        self.max = -math.inf
        self.last = math.nan
        self.latest = -1

    def add(self, count: int, total: float, maximum: float, last: float, call: int) -> None:
        self.count += count
        self.sum += total
        # A NaN must stay visible: none is greater than one that was seen, and a new one always wins.
        self.max = maximum if maximum > self.max or math.isnan(maximum) else self.max
        if call >= self.latest:
            self.last, self.latest = last, call

    def reduce(self, kind: Kind) -> float:
        return {"mean": self.sum / self.count, "sum": self.sum, "max": self.max, "last": self.last}[kind]


class Aggregator:
    """Gathers metrics between two log lines without waiting for the device.

    Memory does not grow with the number of calls.  All tensors are scalars on one device.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[str, ...], _Group] = {}
        self._totals: dict[str, _Total] = {}
        self._calls = 0

    def add(self, metrics: Mapping[str, Tensor | float]) -> None:
        """One value for each key.

        Raises UsageError for a key that METRICS does not declare.
        """
        self._calls += 1
        tensors: dict[str, Tensor] = {}
        for key, value in metrics.items():
            metric(key)
            if isinstance(value, Tensor):
                tensors[key] = value
            else:
                number = float(value)
                self._total(key).add(1, number, number, number, self._calls)
        if tensors:
            names = tuple(tensors)
            group = self._groups.get(names)
            if group is None:
                group = self._groups[names] = _Group()
            group.add(list(tensors.values()), self._calls)

    def fetch(self) -> dict[str, float]:
        """One number for each key that was added since the last fetch; a single transfer from the device."""
        if self._groups:
            folded = torch.cat([group.fold() for group in self._groups.values()], dim=1)
            columns = iter(zip(*folded.tolist(), strict=True))
            for names, group in self._groups.items():
                for key in names:
                    total, maximum, last = next(columns)
                    self._total(key).add(group.count, total, maximum, last, group.latest)
        reduced = {key: total.reduce(metric(key).kind) for key, total in self._totals.items()}
        self._groups.clear()
        self._totals.clear()
        return reduced

    def _total(self, key: str) -> _Total:
        return self._totals.setdefault(key, _Total())


def summary(episodes: Sequence[Episode]) -> dict[str, float]:
    """Figures of an evaluation: mean and standard deviation (of the population) of the returns, mean length."""
    returns = [episode.episodic_return for episode in episodes]
    return {
        "episodic_return_mean": statistics.fmean(returns),
        "episodic_return_std": statistics.pstdev(returns),
        "episodic_length_mean": statistics.fmean(episode.length_steps for episode in episodes),
        "episodes": len(episodes),
    }
