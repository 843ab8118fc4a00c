"""The memory of a rollout: rows and actions on the host, for backends, and on the device, for networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flotilla.core.types import Row, Spec, tree_map
from flotilla.sampling.base import RowArrays, pairs


class Buffers:
    """T + 1 rows and T actions: on the host, where backends write, and on the device, where networks read."""

    def __init__(self, spec: Spec, groups: Sequence[slice], num_steps: int, device: torch.device, *, pin: bool) -> None:
        self.num_steps, self._groups = num_steps, groups
        self._num_envs = num_envs = groups[-1].stop
        self._on_host = device.type == "cpu"
        leading = (num_steps + 1, num_envs)
        self.host = zeros(spec, *leading, pin=pin)
        self.rows = self.host if self._on_host else Row(*(tree_map(lambda x: x.to(device), part) for part in self.host))
        self.action: Tensor = _zeros((num_steps, num_envs), spec.action_space).to(device)
        self.extras: dict[str, Tensor] = {}
        # Views of each (step, group), made once: slicing costs as much as a small network.
        at = [[(t, envs) for envs in groups] for t in range(num_steps + 1)]
        self.device_rows = [[self.rows.at(index) for index in row] for row in at]
        self._host_rows = [[self.host.at(index) for index in row] for row in at]
        self.arrays = [[arrays(part) for part in row] for row in self._host_rows]
        self._scratch = arrays(Row(*(tree_map(lambda x: torch.empty_like(x[0]), part) for part in self.host)))
        self._actions = self._views(self.action)
        host_action = self.action if self._on_host else torch.empty_like(self.action, device="cpu")
        self.host_action: NDArray[Any] = host_action.numpy()
        self._host_actions = self._views(host_action)
        self.host_actions = [[x.numpy() for x in row] for row in self._host_actions]

    def keep(self, t: int, group: int, action: Tensor, extras: dict[str, Tensor]) -> None:
        """Store what the policy gave one group at step t, and bring the action to the host."""
        self._make_extras(extras)
        self._actions[t][group].copy_(action)
        for key, x in extras.items():
            self._extras[key][t][group].copy_(x)
        if not self._on_host:
            self._host_actions[t][group].copy_(action)

    def scatter(self, index: tuple[Tensor, Tensor], action: Tensor, extras: dict[str, Tensor]) -> NDArray[Any]:
        """The same for rows at an index (steps, environments); the action on the host."""
        self._make_extras(extras)
        self.action[index] = action.to(self.action.dtype)
        for key, x in extras.items():
            self.extras[key][index] = x
        host: NDArray[Any] = action.cpu().numpy()
        if not self._on_host:
            self.host_action[index[0].numpy(), index[1].numpy()] = host
        return host

    def scratch(self, count: int) -> RowArrays:
        """Memory for rows of `count` environments."""
        return self._scratch.at(slice(0, count))

    def store(self, steps: NDArray[np.int64], envs: Sequence[int], rows: RowArrays) -> None:
        """Rows into their places on the host."""
        whole = arrays(self.host)
        for target, source in pairs(whole, rows):
            target[steps, envs] = source

    def to_device(self, t: int, group: int) -> None:
        if not self._on_host:
            copy(self._host_rows[t][group], self.device_rows[t][group])

    def _make_extras(self, extras: dict[str, Tensor]) -> None:
        if not self.extras:
            self.extras = {
                key: torch.empty(self.num_steps, self._num_envs, *x.shape[1:], dtype=x.dtype, device=x.device)
                for key, x in extras.items()
            }
            self._extras = {key: self._views(x) for key, x in self.extras.items()}

    def _views(self, x: Tensor) -> list[list[Tensor]]:
        return [[row[envs] for envs in self._groups] for row in x]


def copy(source: Row, target: Row) -> None:
    for one, other in pairs(source, target):
        other.copy_(one, non_blocking=True)


def arrays(row: Row) -> RowArrays:
    obs = {key: x.numpy() for key, x in row.obs.items()} if isinstance(row.obs, dict) else row.obs.numpy()
    return RowArrays(obs, *(x.numpy() for x in row[1:]))


def zeros(spec: Spec, *leading: int, pin: bool = False) -> Row:
    """Rows (leading, ...) on the host."""
    reward = torch.zeros(leading, pin_memory=pin)
    flags = [torch.zeros(leading, dtype=torch.bool, pin_memory=pin) for _ in range(3)]
    return Row(_zeros(leading, spec.obs_space, pin=pin), reward, *flags)


def no_actions(spec: Spec, num_envs: int) -> Tensor:
    """(0, N, ...), for their shape and dtype."""
    actions: Tensor = _zeros((0, num_envs), spec.action_space)
    return actions


def _zeros(leading: tuple[int, ...], space: gym.Space[Any], *, pin: bool = False) -> Any:
    """A host tensor (leading, ...) for values of a space, or one per key of a Dict."""
    if isinstance(space, gym.spaces.Dict):
        return {key: _zeros(leading, part, pin=pin) for key, part in space.spaces.items()}
    assert space.shape is not None
    dtype = torch.from_numpy(np.empty(0, space.dtype)).dtype
    return torch.zeros(*leading, *space.shape, dtype=dtype, pin_memory=pin)
