"""The actions of open episodes: played again from an episode's seed, they bring a simulator back to where it was."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

MAX_ROWS = 100_000  # of an episode; a longer one begins anew when the run is continued


class History:
    """Actions (T, N, ...) since the last reset of each environment that had a seed.

    Rows are counted from the first one; the next rollout's row 0 is the newest that is known.
    """

    def __init__(self, num_envs: int) -> None:
        self._blocks: deque[Tensor] = deque()
        self._newest = 0
        self._oldest = 0  # the row of the first action that is kept
        self._start = [0] * num_envs
        self._next: dict[int, int] = {}  # starts that may lie beyond the newest row

    def begins(self, env_index: int, t: int) -> None:
        """An episode with a seed of its own begins at row t of the rollout under way."""
        self._start[env_index] = self._next.get(env_index, self._start[env_index])
        self._next[env_index] = self._newest + t

    def extend(self, action: Tensor) -> None:
        """A rollout has ended, with these actions (T, N, ...)."""
        self._blocks.append(action.to("cpu", copy=True))
        self._newest += len(action)
        for i, start in list(self._next.items()):
            if start <= self._newest:  # else the row that ended the episode is still needed
                self._start[i] = self._next.pop(i)
        keep = max(min(self._start), self._newest - MAX_ROWS)
        while self._blocks and self._oldest + len(self._blocks[0]) <= keep:
            self._oldest += len(self._blocks.popleft())

    def state(self) -> dict[str, Tensor]:
        """How many actions of each environment, -1 where not all are there; the actions (N, L, ...); which is over."""
        counts = [self._newest - start if start >= self._oldest else -1 for start in self._start]
        longest = max(0, *counts)
        blocks: list[Tensor] = []
        for block in reversed(self._blocks):
            if sum(map(len, blocks)) >= longest:
                break
            blocks.insert(0, block)
        recent = torch.cat(blocks) if blocks else torch.zeros(0, len(counts))
        actions = recent.new_zeros(len(counts), longest, *recent.shape[2:])
        for i, count in enumerate(counts):
            if count > 0:
                actions[i, :count] = recent[-count:, i]
        over = torch.tensor([i in self._next for i in range(len(counts))])
        return {"count_N": torch.tensor(counts), "action_N": actions, "over_N": over}

    def load(self, counts: Tensor, actions: Tensor, over: Tensor) -> None:
        """Go on from such a state."""
        self._blocks.clear()
        self._next = dict.fromkeys(torch.nonzero(over).flatten().tolist(), actions.shape[1] + 1)
        self._oldest = 0
        self._newest = longest = actions.shape[1]
        self._start = [longest - count if count >= 0 else -1 for count in counts.tolist()]
        if longest:
            block = actions.new_zeros(longest, *actions.shape[:1], *actions.shape[2:])
            for i, count in enumerate(counts.tolist()):
                if count > 0:
                    block[-count:, i] = actions[i, :count]
            self._blocks.append(block)
