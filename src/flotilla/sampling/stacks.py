"""Stacks of frames out of single ones: a row keeps its newest frame, and its stack is put together when it is drawn."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flotilla.sampling.ring import Ring

Ints = NDArray[np.int64]
REPEATED = -1  # as a place: the older frames are the first row's own, and stored nowhere else


class Stacks:
    """Stacks (k, ...) of uint8 frames, oldest first.

    Most rows go on: their stack is the one before, moved on by a frame.  `age` counts rows since one that does not
    (k - 1 at most); that row's older frames are in a small store of its environment, at the number `place`.
    """

    def __init__(self, k: int, control: Ring, frames: Tensor) -> None:
        """`frames` (L * N, ...) is the ring's column, `control` has the columns age and place."""
        self._k, self._control, self._frames = k, control, frames
        self._age, self._place = (control.flat[name].numpy() for name in ("age", "place"))
        self._back = np.arange(k - 1, -1, -1)
        self._older = frames.new_empty(control.num_envs, 1, k - 1, *frames.shape[1:])  # (N, entries, k - 1, ...)
        self._made = np.zeros(control.num_envs, np.int64)  # entries so far of each environment
        self._gone = np.zeros(control.num_envs, np.int64)  # and how many of them no row needs any more

    def add(self, obs: Tensor, first: int, *, goes_on: bool) -> None:
        """Rows (T + 1, N, k, ...) from the absolute row `first` on; row 0 is known already where it goes on."""
        anew = torch.ones(obs.shape[:2], dtype=torch.bool)
        anew[0] = not goes_on
        anew[1:] = _differ(obs[1:, :, :-1], obs[:-1, :, 1:]).cpu()
        time = np.arange(len(obs))[:, None]
        latest = np.where(anew.numpy(), time, -self._k)
        place = np.full(latest.shape, REPEATED, np.int32)
        if goes_on:
            slot = first % self._control.num_rows
            latest[0] = -self._control.columns["age"][slot].numpy().astype(np.int64)
            place[0] = self._control.columns["place"][slot].numpy()
        if anew.any():
            self._keep(obs, anew, place)
        np.maximum.accumulate(latest, 0, out=latest)
        source = np.maximum(latest, 0)  # what began before this rollout has its place in row 0
        place = np.take_along_axis(place, source, 0)
        age = np.minimum(time - latest, self._k - 1).astype(np.uint8)
        self._control.write("age", first, torch.from_numpy(age))
        self._control.write("place", first, torch.from_numpy(place))

    def forget(self, first: int, last: int) -> None:
        """Rows from `first` to before `last` are not drawn any more."""
        age, place = (self._control.read(name, first, last).numpy() for name in ("age", "place"))
        if len(age):
            gone = np.where(age == 0, place + 1, 0).max(0)
            np.maximum(self._gone, gone, out=self._gone)

    def gather(self, row: Ints, env: Ints, out: Tensor) -> None:
        """The stacks (B, k, ...) of rows (B,) of environments (B,)."""
        num_rows, num_envs = self._control.num_rows, self._control.num_envs
        slot = row % num_rows * num_envs + env
        age, place = self._age[slot, None], self._place[slot]
        index = (row[:, None] - np.minimum(self._back, age)) % num_rows * num_envs + env[:, None]
        index_select(self._frames, index.reshape(-1), out.flatten(0, 1))
        if (place > REPEATED).any():
            sample, at = np.nonzero((self._back > age) & (place > REPEATED)[:, None])
            entry = place[sample] % self._older.shape[1]
            where = [torch.from_numpy(x) for x in (env[sample], entry, at + age[sample, 0])]
            out[torch.from_numpy(sample), torch.from_numpy(at)] = self._older[tuple(where)]

    def entries(self, first: int, last: int) -> Tensor:
        """The older frames that rows from `first` to before `last` keep, in order of environments, then of rows."""
        return self._older[self._where(first, last)]

    def load_entries(self, first: int, rows: Mapping[str, Tensor], own: slice, skip: int) -> None:
        """Put back `older` of rows (N, rows, ...) of more environments, without the first `skip` rows.

        After these rows' control columns and `load`.
        """
        keeps = _keeps(rows["age"], rows["place"])
        wanted = torch.zeros_like(keeps)
        wanted[own, skip:] = True
        where = self._where(first + skip, first + keeps.shape[1])
        self._older[where] = rows["older"][wanted[keeps]].to(self._older.device)

    def state(self) -> dict[str, Tensor]:
        """Counts; what the store holds goes with its rows."""
        return {"made_N": torch.from_numpy(self._made.copy()), "gone_N": torch.from_numpy(self._gone.copy())}

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from such a state."""
        self._made, self._gone = (state[key].numpy().copy() for key in ("made_N", "gone_N"))
        self._older = self._older[:, :1]
        self._make_room()

    def _keep(self, obs: Tensor, anew: Tensor, place: NDArray[np.int32]) -> None:
        """Store the older frames of rows that do not go on, and write their numbers into `place` (T + 1, N)."""
        time, env = torch.nonzero(anew, as_tuple=True)
        stacks = obs[time.to(obs.device), env.to(obs.device)]
        other = _differ(stacks[:, :-1], stacks[:, -1:].expand_as(stacks[:, :-1])).cpu()
        time, env = time[other], env[other]
        kept = np.zeros(anew.shape, np.int64)
        at = time.numpy(), env.numpy()
        kept[at] = 1
        number = self._made + np.cumsum(kept, 0) - 1
        self._made += kept.sum(0)
        self._make_room()
        place[at] = number[at]
        entry = torch.from_numpy(number[at] % self._older.shape[1])
        self._older[env, entry] = stacks[other.to(obs.device), :-1].to(self._older.device)

    def _make_room(self) -> None:
        """Twice as many entries, until those that are needed have one each; they keep their numbers."""
        size = old = self._older.shape[1]
        while size < (self._made - self._gone).max(initial=0):
            size *= 2
        if size == old:
            return
        larger = self._older.new_empty(self._older.shape[0], size, *self._older.shape[2:])
        for env, (gone, made) in enumerate(zip(self._gone.tolist(), self._made.tolist(), strict=True)):
            number = torch.arange(gone, min(made, gone + old))
            larger[env, number % size] = self._older[env, number % old]
        self._older = larger

    def _where(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        age, place = (self._control.read(name, first, last).T for name in ("age", "place"))
        env, time = torch.nonzero(_keeps(age, place), as_tuple=True)
        return env, place[env, time].long() % self._older.shape[1]


def _keeps(age: Tensor, place: Tensor) -> Tensor:
    """Which rows have older frames of their own in the store."""
    return (age == 0) & (place > REPEATED)


def index_select(source: Tensor, index: Ints, out: Tensor) -> None:
    """Rows of `source` at an index, into memory that is there already."""
    torch.index_select(source, 0, torch.from_numpy(index).to(source.device), out=out)


def _differ(one: Tensor, other: Tensor) -> Tensor:
    """Whether two stacks (a, b, k, ...) or (a, k, ...) of frames differ, for each leading index."""
    leading = one.dim() - 3
    return (one != other).flatten(leading).any(leading)
