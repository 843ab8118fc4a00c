"""The worker backend: any Gymnasium environments in worker processes over shared memory, as rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from flotilla.core.types import Spec
from flotilla.sampling.base import Array, Event, Finished, Restarted, RowArrays, pairs
from flotilla.sampling.pool import Pool


class WorkersBackend:
    """Environments in the processes of a Pool; what it is given besides seeds is the pool's.

    Beside groups it can step whatever is ready: `send_some` and `recv_some` by environment index.
    """

    name = "workers"

    def __init__(
        self, makers: Sequence[Callable[[], gym.Env[Any, Any]]], seeds: Sequence[int], **settings: Any
    ) -> None:
        self.pool = Pool(makers, reseed=True, **settings)
        self.num_envs = self.pool.num_envs
        self.groups: Sequence[slice] = self.pool.groups
        self.spec = Spec(self.pool.obs_space, self.pool.action_space)
        self._seeds = list(seeds)
        self._action = self.pool.action[()]
        # The paths of a flat Dict have one key.
        self._obs = {path[0] if path else None: array for path, array in self.pool.obs.items()}
        self._ended = np.zeros(self.num_envs, bool)

    def reset(self, out: RowArrays, start: int = 0) -> Sequence[Restarted]:
        self.pool.episodes[:] = 0
        self.pool.reset(self._seeds)
        self._ended[:] = True  # whatever was before, these rows are first
        events = self._write(slice(0, self.num_envs), out)
        if start:
            self.pool.episodes[:] = start - 1
            self.begin(range(self.num_envs), out)
        return [event for event in events if isinstance(event, Restarted)]

    def send(self, action: Array, group: int = 0) -> None:
        self._action[self.groups[group]] = action
        self.pool.send(group)

    def recv(self, out: RowArrays, group: int = 0) -> Sequence[Event]:
        self.pool.recv(group)
        return self._write(self.groups[group], out)

    def send_some(self, action: Array, env_index: Sequence[int]) -> None:
        """Start a step of the environments with these indices, in any order, by their actions (n, ...)."""
        self._action[env_index] = action
        self.pool.send_some(env_index)

    def recv_some(self, count: int, out: RowArrays) -> tuple[list[int], Sequence[Event]]:
        """Wait for the first `count` environments, and write their rows (count, ...) as they came; their indices."""
        env_index = self.pool.recv_some(count)
        return env_index, self._write(env_index, out)

    @property
    def episodes(self) -> NDArray[np.int64]:
        return self.pool.episodes

    def resume(
        self, episodes: Sequence[int], actions: Sequence[Array], out: RowArrays, limit_s: float
    ) -> Sequence[int]:
        self.pool.reset(self._seeds)
        self.pool.episodes[:] = np.asarray(episodes) - 1
        self.begin(range(self.num_envs), out)
        end, t = time.monotonic() + limit_s, 0
        while behind := [i for i, played in enumerate(actions) if len(played) > t]:
            if time.monotonic() > end:
                break
            self._step(behind, np.stack([actions[i][t] for i in behind]), out)
            t += 1
        return behind

    def begin(self, env_index: Sequence[int], out: RowArrays) -> None:
        chosen = [i in set(env_index) for i in range(self.num_envs)]
        self.pool.order("end", each=chosen)
        self.pool.finish_order()
        self._ended[:] |= chosen
        self._step(env_index, self._action[env_index], out)

    def _step(self, env_index: Sequence[int], action: Array, out: RowArrays) -> None:
        """A step of some environments that nobody is told of, into the rows of all."""
        self.send_some(action, env_index)
        came = self.pool.recv_some(len(env_index))
        rows = out.at(came)  # copies
        self._write(came, rows)
        for target, source in pairs(out, rows):
            target[came] = source

    def close(self) -> None:
        self.pool.close()

    def _write(self, envs: slice | list[int], out: RowArrays) -> Sequence[Event]:
        """The rows of some environments, out of shared memory."""
        pool, ended = self.pool, self._ended
        for key, array in self._obs.items():
            (out.obs if key is None else out.obs[key])[...] = array[envs]  # type: ignore[index]
        out.reward[:] = pool.reward[envs]
        out.is_terminal[:] = pool.terminated[envs]
        out.is_first[:] = ended[envs]
        np.logical_or(out.is_terminal, pool.truncated[envs], out=out.is_last)
        ended[envs] = out.is_last
        if not (pool.faults or pool.finished.any() or pool.restarted.any()):
            return ()
        return self._events(range(self.num_envs)[envs] if isinstance(envs, slice) else envs, out)

    def _events(self, env_index: Sequence[int], out: RowArrays) -> Sequence[Event]:
        pool, events = self.pool, []  # type: tuple[Pool, list[Event]]
        for position, i in enumerate(env_index):
            if pool.finished[i]:
                pool.finished[i] = False
                events.append(Finished(i, float(pool.episode[i, 0]), int(pool.episode[i, 1])))
            if pool.restarted[i]:
                pool.restarted[i] = False
                out.is_first[position] = True
                causes = [f"process {fault.pid}: {fault.text}" for fault in pool.faults if fault.env_index == i]
                pool.faults = [fault for fault in pool.faults if fault.env_index != i]
                events.append(Restarted(i, "\n".join(causes)))
        return events
