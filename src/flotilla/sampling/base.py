"""The protocol of a backend: many environments, stepped together or in groups that take turns, as rows in arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from flotilla.core.types import Spec

Array = NDArray[np.generic]


class RowArrays(NamedTuple):
    """Where a backend writes rows: views (n, ...) of the sampler's buffers; the fields of core.types.Row."""

    obs: Array | dict[str, Array]
    reward: NDArray[np.float32]
    is_first: NDArray[np.bool_]
    is_last: NDArray[np.bool_]
    is_terminal: NDArray[np.bool_]

    def at(self, index: Any) -> RowArrays:
        """The views at an index of the leading dimensions."""
        obs = {key: x[index] for key, x in self.obs.items()} if isinstance(self.obs, dict) else self.obs[index]
        return RowArrays(obs, *(x[index] for x in self[1:]))


def pairs(one: Any, other: Any) -> list[tuple[Any, Any]]:
    """The parts of two rows side by side; of dict observations each part of theirs."""
    pairs = list(zip(one[1:], other[1:], strict=True))
    if isinstance(one.obs, dict):
        return pairs + list(zip(one.obs.values(), other.obs.values(), strict=True))
    return [*pairs, (one.obs, other.obs)]


def same(one: RowArrays, other: RowArrays) -> NDArray[np.bool_]:
    """Which environments have equal rows in both, (N,); a value that is no number equals itself."""
    equal = np.ones(len(one.reward), bool)
    for a, b in pairs(one, other):
        equal &= ((a == b) | ((a != a) & (b != b))).reshape(len(equal), -1).all(1)
    return equal


class Finished(NamedTuple):
    """A whole episode that ended in this step, in raw rewards."""

    env_index: int  # within the backend
    episodic_return: float
    length_steps: int


class Restarted(NamedTuple):
    """An environment that failed and was made again: its row is the first of a new episode, and the step to it none."""

    env_index: int  # within the backend
    cause: str  # the process and the traceback; empty where another environment of the process failed


Event = Finished | Restarted


class Backend(Protocol):
    """N environments with the row contract: the last observation of an episode is a row of its own.

    After a row with `is_last` the next action is ignored and the next row is the first of a new episode.
    Environments are sent and received by groups; n is the number of one group's environments.
    """

    name: str
    spec: Spec
    num_envs: int
    groups: Sequence[slice]  # contiguous, equal in size, in order

    def reset(self, out: RowArrays, start: int = 0) -> Sequence[Restarted]:
        """Start an episode in every environment; the row (N, ...) has `is_first` everywhere.

        start: how often an interrupted run has done so before, as each time needs seeds of its own.  Says which
        environments failed and were made again.
        """
        ...

    def send(self, action: Array, group: int = 0) -> None:
        """Start a step of one group by its actions (n, ...), which must stay as they are until it is received.

        Returns at once where the simulator has threads or processes of its own.
        """

    def recv(self, out: RowArrays, group: int = 0) -> Sequence[Event]:
        """Wait for the group that was sent and write its rows (n, ...); says which episodes ended or broke off."""
        ...

    def close(self) -> None:
        """Free everything; idempotent."""


@runtime_checkable
class Resumable(Protocol):
    """What a backend can do besides, whose environments begin each whole episode with `core.seeding.episode_seed`."""

    @property
    def episodes(self) -> NDArray[np.int64]:
        """The number of each environment's episode (N,)."""
        ...

    def resume(
        self, episodes: Sequence[int], actions: Sequence[Array], out: RowArrays, limit_s: float
    ) -> Sequence[int]:
        """Instead of `reset`: begin these episodes, play the actions (steps, ...) of each, write the rows reached.

        Simulators that are deterministic are then where they were.  The indices of environments of which actions
        are left after `limit_s` seconds.
        """
        ...

    def begin(self, env_index: Sequence[int], out: RowArrays) -> None:
        """Begin the next episode in some environments, and write their rows into those of all, (N, ...)."""


def step(backend: Backend, action: Array, out: RowArrays) -> Sequence[Event]:
    """One step of every environment: actions and rows (N, ...)."""
    for group, envs in enumerate(backend.groups):
        backend.send(action[envs], group)
    return [one for group, envs in enumerate(backend.groups) for one in backend.recv(out.at(envs), group)]


def split(num_envs: int, num_groups: int) -> Sequence[slice]:
    """The groups of a backend."""
    assert num_envs % num_groups == 0
    size = num_envs // num_groups
    return [slice(start, start + size) for start in range(0, num_envs, size)]


class RawEpisodes:
    """Return and length of one group's episodes, for simulators that step all their environments in one call."""

    def __init__(self, envs: slice) -> None:
        self._first = envs.start
        self._return = np.zeros(envs.stop - envs.start, np.float64)
        self._length = np.zeros(envs.stop - envs.start, np.int64)

    def step(self, raw_reward: Array, is_first: NDArray[np.bool_], ended: NDArray[np.bool_]) -> Sequence[Finished]:
        """Count one step; `ended` marks the end of a whole episode, which a lost life is not."""
        self._return += raw_reward
        self._length += ~is_first
        if not ended.any():
            return ()
        index = np.flatnonzero(ended)
        finished = [Finished(self._first + int(i), float(self._return[i]), int(self._length[i])) for i in index]
        self._return[index] = 0.0
        self._length[index] = 0
        return finished
