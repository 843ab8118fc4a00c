"""The actions of open episodes: played again from an episode's seed, they bring a simulator back to where it was."""

from __future__ import annotations

import math
from collections import deque

import torch
from torch import Tensor

from flotilla.sampling.base import Array

MAX_ROWS = 100_000  # of an episode; a longer one begins anew when the run is continued
MAX_BYTES = 2**28  # of the actions that are kept, and so the most that they add to a checkpoint


class History:
    """Actions (T, N, ...) since the last reset of each environment that had a seed.

    Rows are counted from the first one; the next rollout's row 0 is the newest that is known.
    none: no actions (0, N, ...), for their shape and dtype.
    """

    def __init__(self, none: Tensor) -> None:
        self._none = none
        self._most_rows = min(MAX_ROWS, MAX_BYTES // (none.element_size() * math.prod(none.shape[1:])))
        self._blocks: deque[Array] = deque()
        self._newest = 0
        self._oldest = 0  # the row of the first action that is kept
        self._start = [0] * none.shape[1]
        self._next: dict[int, int] = {}  # starts that may lie beyond the newest row

    def begins(self, env_index: int, t: int) -> None:
        """An episode with a seed of its own begins at row t of the rollout under way."""
        self._start[env_index] = self._next.get(env_index, self._start[env_index])
        self._next[env_index] = self._newest + t

    def extend(self, action: Array) -> None:
        """A rollout has ended, with these actions (T, N, ...)."""
        self._blocks.append(action.copy())
        self._newest += len(action)
        come = [i for i, start in self._next.items() if start <= self._newest]
        for i in come:  # else the row that ended the episode is still needed
            self._start[i] = self._next.pop(i)
        if not come and self._newest - self._oldest <= self._most_rows:
            return
        # An episode whose beginning was dropped before is lost, and holds nothing any more.
        needed = min((start for start in self._start if start >= self._oldest), default=self._newest)
        keep = max(needed, self._newest - self._most_rows)
        while self._blocks and self._oldest + len(self._blocks[0]) <= keep:
            self._oldest += len(self._blocks.popleft())

    def state(self) -> dict[str, Tensor]:
        """How many actions of each environment, -1 where not all are there; the actions (N, L, ...); which is over."""
        counts = [self._newest - start if start >= self._oldest else -1 for start in self._start]
        longest = max(0, *counts)
        recent = torch.cat([self._none, *map(torch.from_numpy, self._blocks)])
        actions = recent.new_zeros(len(counts), longest, *recent.shape[2:])
        for i, count in enumerate(counts):
            if count > 0:
                actions[i, :count] = recent[-count:, i]
        over = torch.tensor([i in self._next for i in range(len(counts))])
        return {"count_N": torch.tensor(counts), "action_N": actions, "over_N": over}

    def load(self, counts: Tensor, actions: Tensor, over: Tensor) -> None:
        """Go on from such a state, in which no count is negative."""
        longest = actions.shape[1]
        self._blocks.clear()
        self._oldest, self._newest = 0, longest
        self._next = dict.fromkeys(torch.nonzero(over).flatten().tolist(), longest + 1)
        self._start = [longest - count for count in counts.tolist()]
        if longest:
            block = actions.new_zeros(longest, *actions.shape[:1], *actions.shape[2:])
            for i, count in enumerate(counts.tolist()):
                if count > 0:
                    block[-count:, i] = actions[i, :count]
            self._blocks.append(block.numpy())
