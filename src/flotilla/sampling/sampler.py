"""The sampler: drives a backend with a policy, keeps rows in preallocated buffers, counts steps and seconds."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from flotilla.core.types import Act, Episode, Rollout, Row, Spec, State, tree_map
from flotilla.sampling.base import Backend, RowArrays


class Sampler:
    """Rollouts of one backend's environments, on `device`.

    `env_steps` counts steps that the policy chose (not the ignored ones after an episode's last row);
    `seconds` says where the time went; `episodes` collects whole episodes until `drain_episodes`.
    """

    def __init__(self, backend: Backend, device: torch.device, first_env_index: int = 0) -> None:
        self.spec: Spec = backend.spec
        self.num_envs = backend.num_envs
        self.env_steps = 0
        self.seconds = {"env": 0.0, "inference": 0.0}
        self._backend, self._device, self._first = backend, device, first_env_index
        self._episodes: list[Episode] = []
        self._buffers: _Buffers | None = None
        self._state: State = None

    @torch.no_grad()
    def rollout(self, act: Act, num_steps: int) -> Rollout:
        """`num_steps` steps of every environment; a view of buffers that the next rollout overwrites."""
        buffers = self._buffers_of(num_steps)
        first_state, state = self._state, self._state
        clock = time.perf_counter
        for t in range(num_steps):
            start = clock()
            action, state, extras = act(buffers.device_rows[t], state)
            buffers.keep(t, action, extras)
            host_action = buffers.host_actions[t]
            acted = clock()
            self._step(host_action, buffers.arrays[t], buffers.arrays[t + 1])
            buffers.to_device(t + 1)
            self.seconds["inference"] += acted - start
            self.seconds["env"] += clock() - acted
        self._state = state
        assert state is not None
        return Rollout(
            rows=buffers.rows,
            action=buffers.action,
            extras=buffers.extras,
            first_state=torch.zeros_like(state) if first_state is None else first_state,
            last_state=state,
        )

    def drain_episodes(self) -> list[Episode]:
        """The whole episodes that ended since the last call."""
        drained, self._episodes = self._episodes, []
        return drained

    def close(self) -> None:
        """Close the environments; idempotent."""
        self._backend.close()

    def _step(self, action: Any, now: RowArrays, then: RowArrays) -> None:
        """One step of every environment, with its bookkeeping."""
        for finished in self._backend.step(action, then):
            self._episodes.append(
                Episode(
                    env_index=self._first + finished.env_index,
                    episodic_return=finished.episodic_return,
                    length_steps=finished.length_steps,
                    # Environments that end together keep a step of their own.
                    env_steps=self.env_steps + finished.env_index + 1,
                )
            )
        self.env_steps += self.num_envs - int(np.count_nonzero(now.is_last))

    def _buffers_of(self, num_steps: int) -> _Buffers:
        """The buffers with row 0 filled: by a reset at the start, else by the last row of the rollout before."""
        old = self._buffers
        if old is None or old.num_steps != num_steps:
            self._buffers = _Buffers(self.spec, self.num_envs, num_steps, self._device)
        buffers = self._buffers
        assert buffers is not None
        if old is None:
            self._backend.reset(buffers.arrays[0])
        else:
            _copy(old.host_rows[-1], buffers.host_rows[0])
        buffers.to_device(0)
        return buffers


class _Buffers:
    """T + 1 rows and T actions: on the host, where backends write, and on the device, where networks read."""

    def __init__(self, spec: Spec, num_envs: int, num_steps: int, device: torch.device) -> None:
        self.num_steps = num_steps
        self._on_host = device.type == "cpu"
        pin, leading = device.type == "cuda", (num_steps + 1, num_envs)
        reward = torch.zeros(leading, pin_memory=pin)
        flags = [torch.zeros(leading, dtype=torch.bool, pin_memory=pin) for _ in range(3)]
        self._host = Row(_zeros(leading, spec.obs_space, pin=pin), reward, *flags)
        self.rows = (
            self._host if self._on_host else Row(*(tree_map(lambda x: x.to(device), part) for part in self._host))
        )
        self.action: Tensor = _zeros((num_steps, num_envs), spec.action_space).to(device)
        self.extras: dict[str, Tensor] = {}
        # Views made once: slicing costs as much as a small network.
        self.device_rows = [self.rows.at(t) for t in range(num_steps + 1)]
        self.host_rows = [self._host.at(t) for t in range(num_steps + 1)]
        self.arrays = [RowArrays(*(_numpy(part) for part in row)) for row in self.host_rows]
        self._host_action = self.action if self._on_host else torch.empty_like(self.action, device="cpu")
        self.host_actions = list(self._host_action.numpy())
        self._action_rows = list(self.action)

    def keep(self, t: int, action: Tensor, extras: dict[str, Tensor]) -> None:
        """Store what the policy gave at step t, and bring the action to the host."""
        if not self.extras:
            self.extras = {
                k: torch.empty(self.num_steps, *x.shape, dtype=x.dtype, device=x.device) for k, x in extras.items()
            }
            self._extra_rows = {k: list(x) for k, x in self.extras.items()}
        self._action_rows[t].copy_(action)
        for key, x in extras.items():
            self._extra_rows[key][t].copy_(x)
        if not self._on_host:
            self._host_action[t].copy_(action)

    def to_device(self, t: int) -> None:
        if not self._on_host:
            _copy(self.host_rows[t], self.device_rows[t])


def _copy(source: Row, target: Row) -> None:
    pairs: list[tuple[Any, Any]] = list(zip(source[1:], target[1:], strict=True))
    if isinstance(source.obs, dict) and isinstance(target.obs, dict):
        pairs += zip(source.obs.values(), target.obs.values(), strict=True)
    else:
        pairs.append((source.obs, target.obs))
    for one, other in pairs:
        other.copy_(one, non_blocking=True)


def _numpy(part: Any) -> Any:
    return {key: x.numpy() for key, x in part.items()} if isinstance(part, dict) else part.numpy()


def _zeros(leading: tuple[int, int], space: gym.Space[Any], *, pin: bool = False) -> Any:
    """A host tensor (leading, ...) for values of a space, or one per key of a Dict."""
    if isinstance(space, gym.spaces.Dict):
        return {key: _zeros(leading, part, pin=pin) for key, part in space.spaces.items()}
    assert space.shape is not None
    dtype = torch.from_numpy(np.empty(0, space.dtype)).dtype
    return torch.zeros(*leading, *space.shape, dtype=dtype, pin_memory=pin)
