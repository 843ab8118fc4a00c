"""Which rows of a replay can be drawn, and which are: with equal probability, or in proportion to a priority."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flotilla.core.errors import UsageError
from flotilla.sampling.priorities import Priorities, SumTree, importance, stratified
from flotilla.sampling.ring import Ring

Ints = NDArray[np.int64]


class Drawn(NamedTuple):
    """The rows that a batch begins with, (B,) each."""

    row: Ints
    env: Ints
    weight: NDArray[np.float64]  # importance weights


class Draws:
    """The rows that are there, `oldest` to before `count`, and those that can be drawn, from `low` on.

    A transition is drawn from any row whose action counts, which one after an episode's end does not, and after which
    n steps, or the end of the episode, have happened.  The oldest k - 1 rows are there for the stacks after them.
    """

    def __init__(self, ring: Ring, *, k: int, n_step: int, priorities: Priorities | None, seed: int) -> None:
        """`ring` has the columns is_last and valid."""
        self.num_rows, self.num_envs, self._k, self._n_step = ring.num_rows, ring.num_envs, k, n_step
        self._is_last, self._valid = (ring.flat[name].numpy() for name in ("is_last", "valid"))
        self._random = torch.Generator().manual_seed(seed)
        self._priorities, self._top = priorities, 1.0
        self._tree = SumTree(len(self._valid)) if priorities else None
        self.count = self.num_valid = 0

    @property
    def oldest(self) -> int:
        return max(0, self.count - self.num_rows)

    @property
    def low(self) -> int:
        return max(0, self.count - self.num_rows + self._k - 1)

    def slot(self, row: Ints, env: Ints) -> Ints:
        """Where rows of environments are in flat columns."""
        return row % self.num_rows * self.num_envs + env

    def advance(self, count: int) -> None:
        """There are `count` rows now, which are yet to be written: what they displace is not drawn any more."""
        first, last = self.low, self.count
        self.count = count
        gone = self._slots(first, min(self.low, last))
        self.num_valid -= int(np.count_nonzero(self._valid[gone]))
        self._valid[gone] = False
        if self._tree is not None and gone.size:
            self._tree.set(gone.ravel(), 0.0)

    def judge(self, first: int) -> None:
        """Rows from `first` on have been written: which of them, and of the n before, can be drawn."""
        first = max(self.low, first - self._n_step)
        slots = self._slots(first, self.count)
        is_last, was = self._is_last[slots], self._valid[slots]
        ends_later = np.zeros_like(is_last)
        ends_later[:-1] = np.logical_or.accumulate(is_last[::-1])[::-1][1:]
        complete = np.arange(first, self.count)[:, None] + self._n_step < self.count
        valid = ~is_last & (complete | ends_later)
        self._valid[slots] = valid
        self.num_valid += int(np.count_nonzero(valid)) - int(np.count_nonzero(was))
        changed = valid != was
        if self._tree is not None and changed.any():
            self._tree.set(slots[changed], np.where(valid[changed], self._top, 0.0))

    def transitions(self, batch_size: int, beta: float) -> Drawn:
        """Of all rows that can be drawn; UsageError where there is none."""
        if not self.num_valid:
            raise UsageError("the replay has no whole transition yet (begin to learn later, or make the buffer larger)")
        if self._tree is not None:
            uniform = torch.rand(batch_size, dtype=torch.float64, generator=self._random).numpy()
            slot = self._tree.find(stratified(uniform))
            weight = importance(self._tree.leaves[slot] / self._tree.total, self.num_valid, beta)
            place, env = np.divmod(slot, self.num_envs)
            return Drawn(self.low + (place - self.low) % self.num_rows, env, weight)
        span = self.count - 1 - self.low
        row, env = self._uniform(span, batch_size)
        while len(bad := np.flatnonzero(~self._valid[self.slot(row, env)])):
            row[bad], env[bad] = self._uniform(span, len(bad))
        return Drawn(row, env, np.ones(batch_size))

    def sequences(self, batch_size: int, length: int) -> Drawn:
        """Starts of `length` rows that have actions; UsageError where fewer are stored."""
        rows = self.count - 1 - self.low
        if rows < length:
            raise UsageError(
                f"sequences of {length} rows, where the replay has {max(rows, 0)} of each environment "
                "(begin to learn later, or make the buffer larger)"
            )
        return Drawn(*self._uniform(rows - length + 1, batch_size), np.ones(batch_size))

    def rows_of(self, index: Tensor) -> tuple[Ints, Ints]:
        """The rows that a batch's index names, and their slots, flat."""
        row, env = np.divmod(index.flatten().cpu().numpy(), self.num_envs)
        return row, self.slot(row, env)

    def prioritize(self, index: Tensor, td_error: Tensor) -> None:
        """Errors (B,) of transitions; of those that cannot be drawn any more nothing is changed."""
        assert self._tree is not None, "draws are uniform"
        assert self._priorities is not None
        row, slot = self.rows_of(index)
        there = (row >= self.low) & self._valid[slot]
        priority = self._priorities.of(td_error.detach().cpu().double().numpy()[there])
        self._tree.set(slot[there], priority)
        self._top = max(self._top, float(priority.max(initial=0)))

    def state(self) -> dict[str, Tensor]:
        """Of the generator and the priorities; what can be drawn is a column."""
        state = {"random_R": self._random.get_state()[None]}
        if self._tree is not None:
            leaves = torch.from_numpy(self._tree.leaves).view(self.num_rows, self.num_envs)
            state["priority_N"] = leaves[: min(self.count, self.num_rows)].transpose(0, 1)
            state["top_R"] = torch.tensor([self._top], dtype=torch.float64)
        return state

    def load(self, state: dict[str, Tensor], count: int) -> None:
        """Go on from such a state with `count` rows."""
        self.count = count
        self._random.set_state(state["random_R"][0].clone())  # torch 2.13 crashes on a view into a larger tensor
        if self._tree is not None and "priority_N" in state:
            leaves = state["priority_N"].transpose(0, 1).reshape(-1).numpy()
            self._tree.set(np.arange(len(leaves)), leaves)
            self._top = state["top_R"].item()

    def recount(self) -> None:
        """After rows were loaded, which may have been saved when the oldest of them could still be drawn."""
        self._valid[self._slots(self.oldest, min(self.low, self.count))] = False
        self.num_valid = int(np.count_nonzero(self._valid))

    def _uniform(self, span: int, count: int) -> tuple[Ints, Ints]:
        """Rows and environments, each of the `span` first rows with equal probability."""
        drawn = torch.randint(span * self.num_envs, (count,), generator=self._random).numpy()
        row, env = np.divmod(drawn, self.num_envs)
        return row + self.low, env

    def _slots(self, first: int, last: int) -> Ints:
        return self.slot(np.arange(first, last)[:, None], np.arange(self.num_envs))
