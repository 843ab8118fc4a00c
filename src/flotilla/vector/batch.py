"""From one environment to N: their spaces, and actions into shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector.utils import batch_differing_spaces, batch_space
from numpy.typing import NDArray

from flotilla.core.errors import UsageError
from flotilla.sampling.messages import Made

ObservationMode = Literal["same", "different"] | tuple[gym.Space[Any], gym.Space[Any]]  # batch of all, single
BATCHED = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
VARYING = (spaces.Text, spaces.Sequence, spaces.Graph, spaces.OneOf)


def observation_spaces(made: Sequence[Made], mode: Any) -> tuple[gym.Space[Any], gym.Space[Any]]:
    """The space of one environment's observations and that of all; RuntimeError where they do not fit, as Gymnasium."""
    found = [one.obs_space for one in made]
    single = found[0]
    if mode == "same":
        batch = batch_space(single, len(found))
    elif mode == "different":
        batch = batch_differing_spaces(found)
    elif isinstance(mode, tuple) and len(mode) == 2:
        batch, single = mode
        if not isinstance(batch, gym.Space) or not isinstance(single, gym.Space):
            raise TypeError(f"observation_mode must hold two spaces, got {type(batch)} and {type(single)}")
    else:
        raise UsageError(
            "Invalid `observation_mode`, expected: 'same' or 'different' or tuple of single and batch observation "
            f"space, actual got {mode}"
        )
    if mode == "same" and any(space != single for space in found):
        raise RuntimeError(
            "the sub-environments observation spaces are not equivalent. If this is intentional, use "
            f"`observation_mode='different'` instead. They are {found}"
        )
    if mode != "same" and not all(is_space_dtype_shape_equiv(single, space) for space in found):
        raise RuntimeError(f"the observation spaces differ in shape or dtype: {found}")
    return single, batch


def is_custom(space: gym.Space[Any]) -> bool:
    """Whether a class that is not Gymnasium's takes part in the space."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return any(map(is_custom, space.values() if isinstance(space, spaces.Dict) else space))
    return not isinstance(space, (*BATCHED, *VARYING))


def fill(array: NDArray[Any], actions: Any) -> bool:
    """Actions of all environments into their place; False where their shape or dtype does not fit it exactly."""
    given = np.asarray(actions)
    if given.shape != array.shape or not np.can_cast(given.dtype, array.dtype):
        return False
    array[...] = given
    return True
