"""What travels between the rooms: rows of arrivals, rollouts, the policy's signature, the spaces.

Shape legend: T steps, N environments, ... the rest of a space's shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import gymnasium as gym
import torch
from torch import Tensor

Obs = Tensor | dict[str, Tensor]  # an observation: one tensor, or one per key of a gymnasium.spaces.Dict
State = Any  # a policy's memory: None, a tensor or a tuple of tensors, environments in the first dimension


class Row(NamedTuple):
    """Arrivals: what each environment says at one moment (shape (N, ...)), or at T + 1 of them ((T + 1, N, ...)).

    The action chosen after seeing a row stands beside it; after `is_last` it is ignored, and the next row is
    the first of the next episode, with reward 0.  `is_last` cuts traces, `is_terminal` cuts values: a time
    limit is `is_last` without `is_terminal`, and the value of its observation is bootstrapped.
    """

    obs: Obs
    reward: Tensor  # float32; of the transition that arrives here
    is_first: Tensor  # bool
    is_last: Tensor  # bool
    is_terminal: Tensor  # bool; implies is_last

    def at(self, index: Any) -> Row:
        """The rows at an index of the leading dimensions."""
        return Row(map_obs(lambda x: x[index], self.obs), *(x[index] for x in self[1:]))


def map_obs(fn: Callable[[Tensor], Tensor], obs: Obs) -> Obs:
    """`fn` of the observation's tensor, or of each tensor of a dict observation."""
    if isinstance(obs, dict):
        return {key: fn(x) for key, x in obs.items()}
    return fn(obs)


# act(row (N, ...), state) -> action (N, ...), next state, extras of shape (N, ...) that the learner wants back.
Act = Callable[[Row, State], tuple[Tensor, State, dict[str, Tensor]]]


@dataclass(frozen=True)
class Rollout:
    """T steps of N environments; a view of the sampler's buffers, valid until the next rollout.

    Row t and action t belong together; row T has no action yet: it is row 0 of the next rollout.
    """

    rows: Row  # (T + 1, N, ...)
    action: Tensor  # (T, N, ...)
    extras: dict[str, Tensor]  # (T, N, ...), as `act` gave them
    first_state: State  # the policy's memory before row 0
    last_state: State  # and before row T


@dataclass(frozen=True)
class Spec:
    """What one environment takes and gives."""

    obs_space: gym.Space[Any]
    action_space: gym.Space[Any]


@dataclass(frozen=True)
class Episode:
    """One finished episode as the simulator scored it, under every wrapper that clips or scales rewards."""

    env_index: int  # global index of the environment
    episodic_return: float  # sum of raw rewards
    length_steps: int  # environment steps after action repeat
    env_steps: int  # of the run, all environments together, when the episode ended
    extras: dict[str, float] = field(default_factory=dict)


def to_device(obs: Obs, device: torch.device) -> Obs:
    """The observation on `device`; no copy when it is there already."""
    return map_obs(lambda x: x.to(device, non_blocking=True), obs)
