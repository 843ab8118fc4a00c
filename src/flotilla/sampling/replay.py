"""Replay: a ring of rows for each environment, drawn as transitions or as sequences, uniformly or by priority.

Row r and the action chosen after it have slot r % L in every column; rows are counted from 0 and for ever.
Shape legend: B batch, T steps, N environments, L slots, k frames of a stack, ... the rest of a space's shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flotilla.core.errors import UsageError
from flotilla.core.types import Obs, Rollout, Row, Spec
from flotilla.sampling.draws import Drawn, Draws, Ints
from flotilla.sampling.prefetch import Buffer, Named, Prefetch
from flotilla.sampling.priorities import Priorities
from flotilla.sampling.ring import Part, Ring, Storage, bytes_per_row, check_room, control, payload
from flotilla.sampling.stacks import Stacks, index_select

FLAGS = ("is_first", "is_last", "is_terminal")
KINDS: tuple[Literal["transitions", "sequences"], ...] = ("transitions", "sequences")
AHEAD_BYTES = 256 * 1024  # of a batch on the CPU; to hand a smaller one to a thread costs what it saves


@dataclass(frozen=True)
class Transitions:
    """What n steps led to; valid until the next draw."""

    obs: Obs  # (B, ...)
    action: Tensor  # (B, ...)
    reward: Tensor  # (B,) sum of gamma**i * reward, up to n steps or the episode's end
    next_obs: Obs  # (B, ...) where they led to
    discount: Tensor  # (B,) gamma**steps, by which the value of next_obs counts; 0 where it is terminal
    weight: Tensor  # (B,) importance weight, at most 1; all 1 where draws are uniform
    index: Tensor  # (B,) int64, names the row


@dataclass(frozen=True)
class Sequences:
    """Neighbouring rows of one environment, across ends of episodes too; valid until the next draw."""

    rows: Row  # (B, T, ...)
    action: Tensor  # (B, T, ...) chosen after each row; ignored after is_last
    extras: dict[str, Tensor]  # (B, T, ...)
    index: Tensor  # (B, T) int64, names each row


class Request(NamedTuple):
    """What a batch is asked for."""

    kind: Literal["transitions", "sequences"]
    batch_size: int
    length: int


class Replay:
    """The newest `capacity` rows of `num_envs` environments together, kept in `storage`, drawn onto `device`.

    frame_stack: k > 1 where observations are stacks (k, H, W) of uint8 frames, newest last; each is stored once.
    storage: "disk" maps files in `directory`, "device" is the memory of the device; max_bytes: 0 for what is free.
    n_step, gamma: of transitions.  extras: further columns, as shape and dtype of a row, that `update` writes.
    ahead: gather the next batch in a thread while the caller uses one (a batch of AHEAD_BYTES or more, or any for a
    GPU), so that each is drawn one call earlier, with the beta and the priorities of then.
    UsageError: a capacity that is none, or for which there is no room.
    """

    def __init__(
        self,
        spec: Spec,
        num_envs: int,
        capacity: int,
        *,
        device: torch.device,
        seed: int,
        frame_stack: int = 1,
        storage: Storage = "ram",
        directory: Path | None = None,
        max_bytes: int = 0,
        n_step: int = 1,
        gamma: float = 0.99,
        prioritized: Priorities | None = None,
        extras: Mapping[str, tuple[tuple[int, ...], torch.dtype]] | None = None,
        ahead: bool = True,
    ) -> None:
        if capacity < num_envs:
            raise UsageError(f"a replay of {capacity} rows for {num_envs} environments (needs at least {num_envs})")
        if storage == "disk" and directory is None:
            raise UsageError("a replay on disk has no directory (give one)")
        more = {key: Part(*one) for key, one in (extras or {}).items()}
        row_bytes = bytes_per_row(spec, frame_stack, more, prioritized=prioritized is not None)
        # The newest row has no action yet, and the oldest k - 1 are there for the stacks after them.
        num_rows = capacity // num_envs + frame_stack
        check_room(row_bytes, num_rows, num_envs, frame_stack, storage, device, directory, max_bytes)
        self.row_bytes, self.bytes = row_bytes, row_bytes * num_rows * num_envs  # of one environment; when it is full
        self.num_envs, self._num_rows, self._device = num_envs, num_rows, device
        self._n_step, self._k, self._ahead = n_step, frame_stack, ahead
        ring = partial(Ring, num_rows=num_rows, num_envs=num_envs, device=device, directory=directory)
        self._payload = ring(payload(spec, frame_stack, more), storage=storage)
        self._control = ring(control(frame_stack), storage="ram")
        self._stacks = Stacks(frame_stack, self._control, self._payload.flat["obs"]) if frame_stack > 1 else None
        self._draws = Draws(self._control, k=frame_stack, n_step=n_step, priorities=prioritized, seed=seed)
        self._flat = self._payload.flat | self._control.flat
        self._reward, self._is_last, self._is_terminal = (
            self._control.flat[name].numpy() for name in ("reward", "is_last", "is_terminal")
        )
        self._powers = np.float32(gamma) ** np.arange(n_step + 1, dtype=np.float32)
        self._prefetch: Prefetch[Transitions | Sequences] | None = None
        self._request: Request | None = None
        self._loaded = False  # and nothing was added since

    def __len__(self) -> int:
        """Transitions that can be drawn."""
        return self._draws.num_valid

    @property
    def rows_added(self) -> int:
        """Rows of each environment so far; the newest is `rows_added` - 1."""
        return self._draws.count

    @property
    def oldest(self) -> int:
        """The first row that is still there."""
        return self._draws.oldest

    @property
    def settled(self) -> int:
        """Rows before this one stay as they are until they are overwritten (their extras apart)."""
        return max(0, self._draws.count - 1 - self._n_step)

    def add(self, roll: Rollout) -> None:
        """Store a rollout whose row 0 is the newest row that is stored already.

        Its flags are written again, as a fault may have ended its episode afterwards.  After loading it may be another
        row, of an environment that began anew: then all of it is, and the row before becomes its episode's last.
        """
        self._wait()
        rows, before = roll.rows, self._draws.count
        base, skip = max(0, before - 1), max(0, len(rows.reward) - self._num_rows)
        anew = self._loaded and not self._is_newest(rows.at(0))
        whole = skip > 0 or anew or not before
        start = skip if whole else 1
        if anew and base > 0:
            self._seam(base, rows.is_first[0].cpu())
        oldest = self._draws.oldest
        self._draws.advance(base + len(rows.reward))
        if self._stacks is not None:
            assert isinstance(rows.obs, Tensor)
            self._stacks.forget(oldest, min(self._draws.oldest, before))
            self._stacks.add(rows.obs[skip:], base + skip, goes_on=not whole)
            self._payload.write("obs", base + start, rows.obs[start:, :, -1])
        else:
            for name, x in _columns(rows.obs).items():
                self._payload.write(name, base + start, x[start:])
        self._payload.write("action", base + skip, roll.action[skip:])
        self._control.write("reward", base + start, rows.reward[start:])
        for name in FLAGS:
            self._control.write(name, base + skip, getattr(rows, name)[skip:])
        self._draws.judge(base)
        self._loaded = False

    def sample(self, batch_size: int, *, beta: float = 0.0) -> Transitions:
        """Transitions, each of a row whose action counted and whose n steps, or the end before them, have happened.

        beta: how far weights make up for draws by priority, from 0 to 1.  UsageError where there is none yet.
        """
        batch = self._next(Request("transitions", batch_size, 1), beta)
        assert isinstance(batch, Transitions)
        return batch

    def sequences(self, batch_size: int, length: int) -> Sequences:
        """Sequences that start at any row with equal probability.  UsageError where fewer rows are stored."""
        batch = self._next(Request("sequences", batch_size, length), 0.0)
        assert isinstance(batch, Sequences)
        return batch

    def update(self, index: Tensor, values: Mapping[str, Tensor]) -> None:
        """Write extras (*index.shape, ...) of rows that were drawn; what was overwritten since is left out."""
        self._wait()
        row, slot = self._draws.rows_of(index)
        there = torch.from_numpy(row >= self._draws.oldest)
        for key, x in values.items():
            flat = self._payload.flat[f"extra.{key}"]
            kept = x.detach().flatten(0, index.dim() - 1)[there.to(x.device)]
            flat[torch.from_numpy(slot)[there].to(flat.device)] = kept.to(flat.device, flat.dtype)

    def update_priorities(self, index: Tensor, td_error: Tensor) -> None:
        """Errors (B,) of transitions that were drawn; what cannot be drawn any more is left out."""
        self._draws.prioritize(index, td_error)

    def state_dict(self) -> dict[str, Tensor]:
        """With `rows` and `extras` everything that is needed to go on bit for bit."""
        self._wait()
        state = {"count": torch.tensor(self._draws.count), "num_rows": torch.tensor(self._num_rows)}
        state |= self._draws.state()
        if self._stacks is not None:
            state |= self._stacks.state()
        if self._request and self._prefetch and self._prefetch.ahead:
            kind, batch_size, length = self._request
            state["ahead_R"] = torch.tensor([[KINDS.index(kind), batch_size, length]])
            state |= {f"ahead.{name}_R": x[None] for name, x in self._prefetch.waiting().items()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from there, before anything is added; `load_rows` comes next, with every row from `oldest` on.

        A count of 0 leaves the replay empty.  UsageError: a ring of another size that was full.
        """
        assert not self._draws.count, "rows were added already"
        count = int(state["count"])
        found = min(count, int(state["num_rows"]))
        if found != min(count, self._num_rows):
            raise UsageError(
                f"the saved replay has {found} rows of each environment, this one keeps {self._num_rows} "
                "(continue with the buffer size it was saved with)"
            )
        self._draws.load(dict(state), count)
        if self._stacks is not None and count:
            self._stacks.load(dict(state))
        self._loaded = count > 0
        if "ahead_R" in state and count:
            kind, batch_size, length = state["ahead_R"][0].tolist()
            prefetch = self._prepare(Request(KINDS[kind], batch_size, length))
            prefetch.put({name: state[f"ahead.{name}_R"][0] for name in prefetch.waiting()})

    def rows(self, first: int, last: int) -> dict[str, Tensor]:
        """Rows `first` to before `last`, their extras apart: a copy of columns (N, rows, ...) on the host.

        `older` are the older frames that these rows keep, in order of environments, then of rows.
        """
        columns = self._payload.columns | self._control.columns
        read = self._read([name for name in columns if not name.startswith("extra.")], first, last)
        return read if self._stacks is None else read | {"older": self._stacks.entries(first, last).cpu()}

    def extras(self, first: int, last: int) -> dict[str, Tensor]:
        """The same of their extras, which `update` may change as long as the rows are there."""
        return self._read([name for name in self._payload.columns if name.startswith("extra.")], first, last)

    def load_rows(self, first: int, rows: Mapping[str, Tensor], column: int = 0) -> None:
        """Put back such columns, from the row `first` on; rows that are gone are left out.

        They may be of more environments, in order, of which this replay's first one is number `column`.
        """
        skip, own = max(0, self._draws.oldest - first), slice(column, column + self.num_envs)
        for ring in (self._payload, self._control):
            for name in ring.columns.keys() & rows.keys():
                ring.write(name, first + skip, rows[name][own, skip:].transpose(0, 1))
        if self._stacks is not None and "older" in rows:
            self._stacks.load_entries(first, rows, own, skip)
        self._draws.recount()

    def close(self) -> None:
        """End the thread and let go of the memory; idempotent."""
        if self._prefetch is not None:
            self._prefetch.close()
        self._prefetch = self._stacks = None
        for ring in (self._payload, self._control):
            ring.columns.clear()
            ring.flat.clear()
        self._flat.clear()

    def _read(self, names: list[str], first: int, last: int) -> dict[str, Tensor]:
        self._wait()
        assert self._draws.oldest <= first <= last <= self._draws.count
        rings = (self._payload, self._control)
        return {
            name: ring.read(name, first, last).transpose(0, 1).contiguous().cpu()
            for ring in rings
            for name in ring.columns
            if name in names
        }

    def _wait(self) -> None:
        if self._prefetch is not None:
            self._prefetch.wait()

    def _is_newest(self, row: Row) -> bool:
        """Whether a row (N, ...) is the one that was stored last."""
        slot = (self._draws.count - 1) % self._num_rows
        obs = _columns(row.obs if self._stacks is None else row.obs[:, -1])  # type: ignore[index]
        parts = obs | {"is_first": row.is_first}
        columns = self._payload.columns | self._control.columns
        return all(torch.equal(columns[name][slot].cpu(), x.cpu()) for name, x in parts.items())

    def _seam(self, newest: int, is_first: Tensor) -> None:
        """Environments that began anew: nothing is learned of the step to the row that they no longer have."""
        anew = is_first & ~self._control.columns["is_first"][newest % self._num_rows]
        self._control.columns["is_last"][(newest - 1) % self._num_rows] |= anew

    def _next(self, request: Request, beta: float) -> Transitions | Sequences:
        prefetch = self._prefetch
        if prefetch is None or request != self._request:
            prefetch = self._prepare(request)
        if not prefetch.ahead:
            prefetch.start(partial(self._gather, request, self._draw(request, beta)))
        batch = prefetch.take()
        if prefetch.threaded:
            prefetch.start(partial(self._gather, request, self._draw(request, beta)))
        return batch

    def _draw(self, request: Request, beta: float) -> Drawn:
        if request.kind == "sequences":
            return self._draws.sequences(request.batch_size, request.length)
        return self._draws.transitions(request.batch_size, beta)

    def _prepare(self, request: Request) -> Prefetch[Transitions | Sequences]:
        """Memory for batches of another kind or size; what was drawn ahead of the old kind is given up."""
        if self._prefetch is not None:
            self._prefetch.close()
        size = sum(x.nbytes for x in self._empty(request).values())
        threaded = self._ahead and (size >= AHEAD_BYTES or self._device.type == "cuda")

        def make() -> Buffer[Transitions | Sequences]:
            return Buffer(self._empty(request), self._device, partial(_view, request))

        self._request, self._prefetch = request, Prefetch(make, self._device, threaded=threaded)
        return self._prefetch

    def _empty(self, request: Request) -> Named:
        """Tensors for a batch: the observations of transitions and of what they led to are one."""
        count, is_sequence = request.batch_size * request.length, request.kind == "sequences"
        made = {}
        for name, column in self._payload.flat.items():
            is_obs, stack = name.startswith("obs"), (self._k,) if name == "obs" and self._stacks else ()
            if is_sequence or is_obs or name == "action":
                length = 2 * count if is_obs and not is_sequence else count
                made[name] = column.new_empty((length, *stack, *column.shape[1:]))
        floats, flags = (("reward",), FLAGS) if is_sequence else (("reward", "discount", "weight"), ())
        made |= {name: torch.empty(count) for name in floats} | {"index": torch.empty(count, dtype=torch.int64)}
        return made | {name: torch.empty(count, dtype=torch.bool) for name in flags}

    def _gather(self, request: Request, drawn: Drawn, out: Named) -> None:
        """Write the batch that begins with these rows; where the batch is ahead, in its thread."""
        row, env = drawn.row, drawn.env
        if request.kind == "sequences":
            row = (row[:, None] + np.arange(request.length)).ravel()
            env = env.repeat(request.length)
            all_rows, all_envs, written = row, env, {"index"}
        else:
            out["weight"].numpy()[:] = drawn.weight
            all_rows = np.concatenate([row, self._look_ahead(row, env, out)])
            all_envs, written = np.concatenate([env, env]), {"index", "weight", "reward", "discount"}
        out["index"].numpy()[:] = row * self.num_envs + env
        slot = self._draws.slot(all_rows, all_envs)
        for name in out.keys() - written:
            if name == "obs" and self._stacks is not None:
                self._stacks.gather(all_rows, all_envs, out[name])
            else:
                index_select(self._flat[name], slot[: len(out[name])], out[name])

    def _look_ahead(self, row: Ints, env: Ints, out: Named) -> Ints:
        """Write rewards and discounts of up to n steps; the row (B,) where they end."""
        end, slot = row + 1, self._draws.slot(row + 1, env)
        total = self._reward[slot]
        goes_on = ~self._is_last[slot]
        for i in range(1, self._n_step):
            slot = self._draws.slot(row + i + 1, env)
            # Beyond an end may be anything, memory that was never written included.
            total += np.where(goes_on, self._powers[i] * self._reward[slot], 0)
            end += goes_on
            goes_on &= ~self._is_last[slot]
        out["reward"].numpy()[:] = total
        is_terminal = self._is_terminal[self._draws.slot(end, env)]
        out["discount"].numpy()[:] = np.where(is_terminal, 0, self._powers[end - row])
        return end


def _view(request: Request, named: Named) -> Transitions | Sequences:
    """A batch out of what was gathered: the observations of transitions, and behind them those they led to."""
    count, length = request.batch_size, request.length
    if request.kind == "sequences":
        named = {key: x.view(count, length, *x.shape[1:]) for key, x in named.items()}
        return Sequences(
            rows=Row(_obs(named), *(named[key] for key in Row._fields[1:])),
            action=named["action"],
            extras={key.removeprefix("extra."): x for key, x in named.items() if key.startswith("extra.")},
            index=named["index"],
        )
    return Transitions(
        obs=_obs({key: x[:count] for key, x in named.items()}),
        next_obs=_obs({key: x[count:] for key, x in named.items()}),
        **{key: named[key] for key in ("action", "reward", "discount", "weight", "index")},
    )


def _columns(obs: Obs) -> dict[str, Tensor]:
    """An observation by names of columns."""
    return {f"obs.{key}": x for key, x in obs.items()} if isinstance(obs, dict) else {"obs": obs}


def _obs(named: Named) -> Obs:
    """The observation among columns."""
    of_dict = {key.removeprefix("obs."): x for key, x in named.items() if key.startswith("obs.")}
    return of_dict or named["obs"]
