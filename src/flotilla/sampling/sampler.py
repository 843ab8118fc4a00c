"""The sampler: drives a backend with a policy, keeps rows in preallocated buffers, counts steps and seconds.

Where the backend has several groups of environments they take turns: while the policy acts for one, the others step.
Or the policy acts for the first so many that are ready, so that slow environments hold nobody up.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flotilla.core.types import Act, Episode, Rollout, Row, Spec, State, tree_map
from flotilla.sampling.base import Backend, Event, Restarted, Resumable, same
from flotilla.sampling.buffers import Buffers, arrays, copy, no_actions, zeros
from flotilla.sampling.history import History
from flotilla.sampling.workers import WorkersBackend

clock = time.perf_counter
REPLAY_LIMIT_S = 60.0  # for the actions of open episodes to be played again


class Sampler:
    """Rollouts of one backend's environments, on `device`.

    `env_steps` counts steps that the policy chose (not the ignored ones after an episode's last row);
    `seconds` says where the time went; whole episodes and restarts are collected until they are drained.
    first_ready: act for so many environments at once, as they come (worker processes only); 0: for all, or by groups.
    env_ids: of each environment, where they differ.  pin_memory: page-locked buffers, where the device is a GPU.
    """

    def __init__(
        self,
        backend: Backend,
        device: torch.device,
        first_env_index: int = 0,
        *,
        first_ready: int = 0,
        env_ids: Sequence[str] = (),
        pin_memory: bool = True,
    ) -> None:
        self.spec: Spec = backend.spec
        self.num_envs = backend.num_envs
        self.env_steps = 0
        self.seconds = {"env": 0.0, "inference": 0.0, "transfer": 0.0}
        self._backend, self._device, self._first = backend, device, first_env_index
        self._pin = pin_memory and device.type == "cuda"
        self._batch, self._env_ids = first_ready, env_ids if len(set(env_ids)) > 1 else ()
        self._episodes: list[Episode] = []
        self._restarts: list[Restarted] = []
        self._buffers: Buffers | None = None
        self._state: State = None
        self._first_row: Row | None = None  # of the first rollout, where it is not a reset's
        self._history = History(no_actions(self.spec, self.num_envs)) if isinstance(backend, Resumable) else None
        self._start = 0  # how often simulators without seeds for episodes have begun before
        self.begun_anew = 0  # environments that `load_state_dict` could not bring back to where they were

    @torch.no_grad()
    def rollout(self, act: Act, num_steps: int) -> Rollout:
        """`num_steps` steps of every environment; a view of buffers that the next rollout overwrites.

        `act` is called with the rows and the memory of one group, or of what is ready, at a time.
        """
        start, others = clock(), self.seconds["inference"] + self.seconds["transfer"]
        buffers, first_state = self._buffers_of(num_steps), self._state
        if self._batch:
            self._state = self._act_for_ready(act, buffers, first_state)
        else:
            with _threads_beside(self._backend):
                self._state = self._take_turns(act, buffers, first_state)
        if self._history is not None:
            self._history.extend(buffers.host_action)
        self.seconds["env"] += clock() - start - (self.seconds["inference"] + self.seconds["transfer"] - others)
        return Rollout(
            rows=buffers.rows,
            action=buffers.action,
            extras=buffers.extras,
            first_state=torch.zeros_like(self._state) if first_state is None else first_state,
            last_state=self._state,
        )

    def drain_episodes(self) -> list[Episode]:
        """The whole episodes that ended since the last call."""
        drained, self._episodes = self._episodes, []
        return drained

    def drain_restarts(self) -> list[Restarted]:
        """The environments that failed and were made again since the last call, by their index in the run."""
        drained, self._restarts = self._restarts, []
        return drained

    def close(self) -> None:
        """Close the environments; idempotent."""
        self._backend.close()

    def state_dict(self) -> dict[str, Tensor]:
        """Where each environment and the policy's memory are; nothing before the first rollout."""
        row = self._first_row
        if row is None and self._buffers is not None:
            row = self._buffers.host.at(-1)
        if row is None or self._state is None:
            return {}
        state = {f"{name}_N": x.clone() for name, x in _named(row)}
        state["memory_N"] = self._state.clone()
        if self._history is None:
            return state | {"start_N": torch.full((self.num_envs,), self._start)}
        episodes = cast(Resumable, self._backend).episodes
        return state | self._history.state() | {"episode_N": torch.from_numpy(episodes.copy())}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from there, before the first rollout.

        A simulator that is not deterministic, or that cannot be given a seed for each episode, begins a new one.
        """
        assert self._buffers is None, "rollouts were made already"
        if not state:
            return
        row = zeros(self.spec, self.num_envs)
        if self._history is None or "count_N" not in state:
            self._start = 1 + int(state["start_N"].max()) if "start_N" in state else 1
            self._report_restarts(self._backend.reset(arrays(row), self._start))
            self.begun_anew = self.num_envs
        else:
            self.begun_anew = self._play_again(state, self._history, row)
        self._first_row, self._state = row, state["memory_N"].to(self._device)

    def _play_again(self, state: dict[str, Tensor], history: History, out: Row) -> int:
        """Bring the environments to the rows of a state, written to `out`; how many begin an episode instead."""
        backend, reached = cast(Resumable, self._backend), arrays(out)
        counts, actions, over = state["count_N"].clone(), state["action_N"], state["over_N"].clone()
        played = [actions[i, : max(count, 0)].numpy() for i, count in enumerate(counts.tolist())]
        late = backend.resume(state["episode_N"].tolist(), played, reached, REPLAY_LIMIT_S)
        saved = zeros(self.spec, self.num_envs)
        for name, x in _named(saved):
            x.copy_(state[f"{name}_N"])
        there = same(reached, arrays(saved)) & (counts >= 0).numpy()
        there[list(late)] = False
        anew = np.flatnonzero(~there).tolist()
        if anew:
            backend.begin(anew, reached)
            counts[anew], over[anew] = 0, False
        history.load(counts, actions, over)
        return len(anew)

    def _take_turns(self, act: Act, buffers: Buffers, first_state: State) -> Tensor:
        """Fill the buffers in time order; the memory after the last action, (N, S)."""
        groups, seconds = self._backend.groups, self.seconds
        states: list[Any] = [None if first_state is None else first_state[envs] for envs in groups]
        for t in range(buffers.num_steps):
            for group in range(len(groups)):
                if t > 0:
                    self._receive(buffers, t, group)
                start = clock()
                action, states[group], extras = act(buffers.device_rows[t][group], states[group])
                buffers.keep(t, group, action, extras)
                seconds["inference"] += clock() - start
                self._backend.send(buffers.host_actions[t][group], group)
        for group in range(len(groups)):
            self._receive(buffers, buffers.num_steps, group)
        return torch.cat(states) if len(states) > 1 else cast(Tensor, states[0])

    def _receive(self, buffers: Buffers, t: int, group: int) -> None:
        """Row t of one group, which was sent the action of the row before."""
        events = self._backend.recv(buffers.arrays[t][group], group)
        ignored = buffers.arrays[t - 1][group].is_last
        if events:
            envs = self._backend.groups[group]
            is_last = buffers.arrays[t][group].is_last
            self._note(events, range(self.num_envs)[envs], ignored, is_last, [t] * len(is_last))
            for event in events:
                if isinstance(event, Restarted):
                    buffers.rows.is_last[t - 1, event.env_index] = True
        self.env_steps += len(ignored) - int(np.count_nonzero(ignored))
        if self._device.type != "cpu":
            start = clock()
            buffers.to_device(t, group)
            self.seconds["transfer"] += clock() - start

    def _act_for_ready(self, act: Act, buffers: Buffers, first_state: State) -> Tensor:
        """Fill the buffers in whatever order environments become ready; the memory after the last action, (N, S)."""
        backend = cast(WorkersBackend, self._backend)
        at_N = np.zeros(self.num_envs, np.int64)  # the row that each environment has reached
        ready, in_flight = list(range(self.num_envs)), 0
        state_NS = None if first_state is None else first_state.clone()
        is_last_T1N = buffers.host.is_last.numpy()
        while ready or in_flight:
            if len(ready) >= self._batch or not in_flight:
                batch, ready = ready[: self._batch], ready[self._batch :]
                index = (torch.from_numpy(at_N[batch]), torch.tensor(batch))
                start = clock()
                row = Row(*(tree_map(lambda x: x[index].to(self._device), x) for x in buffers.host))  # noqa: B023
                action, state, extras = act(row, None if state_NS is None else state_NS[index[1]])
                if state_NS is None:
                    state_NS = state.new_zeros(self.num_envs, state.shape[-1])
                state_NS[index[1]] = state
                host_action = buffers.scatter(index, action, extras)
                self.seconds["inference"] += clock() - start
                backend.send_some(host_action, batch)
                in_flight += len(batch)
            else:
                count = min(self._batch - len(ready), in_flight)
                rows = buffers.scratch(count)
                came, events = backend.recv_some(count, rows)
                in_flight -= count
                at_N[came] += 1
                buffers.store(at_N[came], came, rows)
                ignored = is_last_T1N[at_N[came] - 1, came]
                self._note(events, came, ignored, rows.is_last, at_N[came].tolist())
                is_last_T1N[at_N[came] - 1, came] = ignored
                self.env_steps += count - int(np.count_nonzero(ignored))
                ready += [i for i in came if at_N[i] < buffers.num_steps]
        copy(buffers.host, buffers.rows)
        assert state_NS is not None
        return state_NS

    def _note(
        self,
        events: Sequence[Event],
        env_index: Sequence[int],
        ignored: NDArray[np.bool_],
        is_last: NDArray[np.bool_],
        t: Sequence[int],
    ) -> None:
        """Keep what is reported of some environments, which are at rows `t` of the rollout.

        The step to the row of a restart was none: it is ignored, too.
        """
        for event in events:
            position = env_index.index(event.env_index)
            if isinstance(event, Restarted):
                ignored[position] = True
                self._report_restarts([event])
            if self._history is not None and (isinstance(event, Restarted) or is_last[position]):
                self._history.begins(event.env_index, t[position] + (not isinstance(event, Restarted)))
        for event in events:
            if isinstance(event, Restarted):
                continue
            until = env_index.index(event.env_index) + 1
            self._episodes.append(
                Episode(
                    env_index=self._first + event.env_index,
                    episodic_return=event.episodic_return,
                    length_steps=event.length_steps,
                    # Environments that end together keep a step of their own.
                    env_steps=self.env_steps + until - int(np.count_nonzero(ignored[:until])),
                    env_id=self._env_ids[event.env_index] if self._env_ids else "",
                )
            )

    def _report_restarts(self, events: Sequence[Restarted]) -> None:
        self._restarts += [event._replace(env_index=self._first + event.env_index) for event in events]

    def _buffers_of(self, num_steps: int) -> Buffers:
        """The buffers with row 0 filled: by a reset at the start, else by the last row of the rollout before."""
        old = self._buffers
        if old is None or old.num_steps != num_steps:
            self._buffers = Buffers(self.spec, self._backend.groups, num_steps, self._device, pin=self._pin)
        buffers = self._buffers
        assert buffers is not None
        if self._first_row is not None:
            copy(self._first_row, buffers.host.at(0))
            self._first_row = None
        elif old is None:
            self._report_restarts(self._backend.reset(arrays(buffers.host.at(0))))
        else:
            copy(old.host.at(-1), buffers.host.at(0))
        for group in range(len(self._backend.groups)):
            buffers.to_device(0, group)
        return buffers


def _named(row: Row) -> Iterator[tuple[str, Tensor]]:
    """The parts of a row, by names for a file."""
    if isinstance(row.obs, dict):
        yield from ((f"obs.{key}", x) for key, x in row.obs.items())
    else:
        yield "obs", row.obs
    yield from zip(Row._fields[1:], row[1:], strict=True)


@contextlib.contextmanager
def _threads_beside(backend: Backend) -> Iterator[None]:
    """Half of the learner's threads while groups take turns: the backend's own work at the same time."""
    threads = torch.get_num_threads()
    if len(backend.groups) > 1:
        torch.set_num_threads(max(1, threads // 2))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
