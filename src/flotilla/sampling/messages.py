"""What the parent and its workers say to each other: commands and replies of a byte, messages that are pickled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cloudpickle
import gymnasium as gym

from flotilla.sampling.process import IDLE

INFO_COLUMNS = 32  # numbers of one info that travel unpickled

# Commands: the number of a group to step, or one of these.
PENDING, ORDER = 0xFE, 0xFF
# Replies: one of these, and the local number of the environment that a PENDING command stepped, else WHOLE.
OK, TABLE, MESSAGE = 0, 1, 2
WHOLE = 0xFF
MAX_ENVS = min(WHOLE, IDLE)  # in one worker

Info = dict[str, Any]


class Made(NamedTuple):
    """What an environment says of itself."""

    obs_space: gym.Space[Any]
    action_space: gym.Space[Any]
    metadata: dict[str, Any]
    render_mode: str | None
    spec: Any


class Fault(NamedTuple):
    """An environment that failed, and why."""

    env_index: int
    pid: int
    text: str  # the traceback, or what happened to the process
    error: BaseException | None = None  # where it can be pickled


class Message(NamedTuple):
    """What does not fit into a reply of two bytes."""

    faults: list[Fault]
    result: Any  # infos of the environments that were stepped, or the answer to an order
    schema: tuple[tuple[str, ...], tuple[type, ...]] | None = None  # of infos that will come as a table
    refused: Fault | None = None  # why there is no answer, though no environment failed


@dataclass(frozen=True)
class Job:
    """What a worker is told at its start."""

    makers: bytes  # cloudpickle of a list: a function without arguments for each environment
    index: tuple[int, ...]  # of its environments, in the whole pool
    groups: tuple[range, ...]  # local numbers of the environments that each group's command steps
    slot: int  # its own line of the array "workers"
    autoreset: str  # next_step | same_step | disabled
    infos: bool  # whether infos travel, or only the statistics of finished episodes
    max_restarts: int  # how often an environment that raises is made again before it is given up
    revived: bool  # replaces a worker that died: each environment begins anew at its next command
    seeds: tuple[int | None, ...]  # of the last reset, from which those of later episodes follow
    reseed: bool  # whether each whole episode has a seed of its own, and not only the one after a restart


def dumps(message: Any) -> bytes:
    """Pickled so that functions and classes of a script travel, too."""
    return bytes(cloudpickle.dumps(message))
