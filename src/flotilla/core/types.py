"""What travels between the rooms: rows of arrivals, rollouts, the policy's signature, the spaces.

Shape legend: T steps, N environments, ... the rest of a space's shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import gymnasium as gym
from torch import Tensor

Obs = Tensor | dict[str, Tensor]  # an observation: one tensor, or one per key of a gymnasium.spaces.Dict
State = Tensor | None  # a policy's memory, (N, S); None stands for zeros


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
        return Row(tree_map(lambda x: x[index], self.obs), *(x[index] for x in self[1:]))


def tree_map(fn: Callable[[Any], Any], tree: Any) -> Any:
    """`fn` of a tensor, or of every tensor in a (nested) dict of them, in the same form."""
    if isinstance(tree, dict):
        return {key: tree_map(fn, x) for key, x in tree.items()}
    return fn(tree)


# act(row (N, ...), state (N, S)) -> action (N, ...), next state (N, S), extras (N, ...) for the learner.
Act = Callable[[Row, State], tuple[Tensor, Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class Rollout:
    """T steps of N environments; a view of the sampler's buffers, valid until the next rollout.

    Row t and action t belong together; row T has no action yet: it is row 0 of the next rollout.
    """

    rows: Row  # (T + 1, N, ...)
    action: Tensor  # (T, N, ...)
    extras: dict[str, Tensor]  # (T, N, ...), as `act` gave them
    first_state: Tensor  # (N, S), the policy's memory before row 0
    last_state: Tensor  # (N, S), and before row T

    def with_reward(self, reward: Tensor) -> Rollout:
        """The same rollout with other rewards (T + 1, N)."""
        return replace(self, rows=self.rows._replace(reward=reward))


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
    env_id: str = ""  # of its environment, where a run mixes several
