"""The protocol of a backend: many environments, stepped together, that write rows of arrivals into arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from flotilla.core.types import Spec

Array = NDArray[np.generic]


class RowArrays(NamedTuple):
    """Where a backend writes one row: views (N, ...) of the sampler's buffers; the fields of core.types.Row."""

    obs: Array | dict[str, Array]
    reward: NDArray[np.float32]
    is_first: NDArray[np.bool_]
    is_last: NDArray[np.bool_]
    is_terminal: NDArray[np.bool_]


class Finished(NamedTuple):
    """A whole episode that ended in this step, in raw rewards."""

    env_index: int  # within the backend
    episodic_return: float
    length_steps: int


class Backend(Protocol):
    """N environments with the row contract: the last observation of an episode is a row of its own.

    After a row with `is_last` the next action is ignored and the next row is the first of a new episode.
    """

    name: str
    spec: Spec
    num_envs: int

    def reset(self, out: RowArrays) -> None:
        """Start an episode in every environment; the row has `is_first` everywhere."""

    def step(self, action: Array, out: RowArrays) -> Sequence[Finished]:
        """Apply actions (N, ...) and write the next row; says which whole episodes ended."""
        ...

    def close(self) -> None:
        """Free everything; idempotent."""


class RawEpisodes:
    """Return and length of whole episodes for backends whose simulator steps all environments in one call."""

    def __init__(self, num_envs: int) -> None:
        self._return = np.zeros(num_envs, np.float64)
        self._length = np.zeros(num_envs, np.int64)

    def step(self, raw_reward: Array, is_first: NDArray[np.bool_], ended: NDArray[np.bool_]) -> Sequence[Finished]:
        """Count one step; `ended` marks the end of a whole episode, which a lost life is not."""
        self._return += raw_reward  # type: ignore[arg-type]
        self._length += ~is_first
        if not ended.any():
            return ()
        index = np.flatnonzero(ended)
        finished = [Finished(int(i), float(self._return[i]), int(self._length[i])) for i in index]
        self._return[index] = 0.0
        self._length[index] = 0
        return finished
