"""The state of a run's objects as one dict of tensors: gathered from all ranks, handed back to any number of them.

A key that ends in `_N` has environments in dimension 0, one in `_R` has ranks; the rest is equal on all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from flotilla.compute.ranks import Ranks


class Stateful(Protocol):
    """What can be saved: modules, optimizers, samplers."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: dict[str, Tensor]) -> Any: ...


def collect(ranks: Ranks, objects: Mapping[str, Stateful]) -> dict[str, Tensor]:
    """Every object's state, as <object>.<key>, with the rows of all ranks; all ranks call it together."""
    return {
        f"{name}.{key}": _all_rows(ranks, x) if key.endswith(("_N", "_R")) else x
        for name, thing in objects.items()
        for key, x in thing.state_dict().items()
    }


def restore(ranks: Ranks, objects: Mapping[str, Stateful], saved: Mapping[str, Tensor], num_envs: int) -> bool:
    """Load what `collect` gave, each rank its own rows; `num_envs` is of one rank.

    Rows that are of another number of environments, or that a new rank does not find, stay as they are; whether
    all environments found theirs.
    """
    whole = True
    for name, thing in objects.items():
        own, state = thing.state_dict(), {}
        for key, x in saved.items():
            prefix, _, rest = key.partition(".")
            if prefix != name:
                continue
            count = {"_N": num_envs, "_R": 1}.get(rest[-2:], 0)
            if not count:
                state[rest] = x
            elif (len(x) == num_envs * ranks.world_size) if rest.endswith("_N") else (ranks.rank < len(x)):
                state[rest] = x[ranks.rank * count :][:count]
            else:
                whole = whole and not rest.endswith("_N")
                if rest in own:
                    state[rest] = own[rest]
        thing.load_state_dict(state)
    return whole


def _all_rows(ranks: Ranks, x: Tensor) -> Tensor:
    """The rows of all ranks, filled up with zeros to the longest where they differ in length."""
    if ranks.world_size == 1:
        return x
    if x.dim() > 1:
        longest = ranks.max_(torch.tensor(x.shape[1:])).tolist()
        missing = [top - own for own, top in zip(x.shape[1:], longest, strict=True)]
        x = pad(x, [size for count in reversed(missing) for size in (0, count)])
    return ranks.gather(x)


def tell(ranks: Ranks, message: Any) -> list[Any]:
    """The message of each rank, in order, on all of them; of what JSON has."""
    if ranks.world_size == 1:
        return [message]
    words = torch.frombuffer(bytearray(json.dumps(message).encode() + b"\n"), dtype=torch.uint8)
    return [json.loads(line) for line in ranks.gather(words).numpy().tobytes().splitlines()]
