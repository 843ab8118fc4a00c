"""One worker process: makes its environments, steps them when told, and writes what they say into shared memory.

It knows no policy, no rows and no torch.  Commands and replies are one or two bytes on two pipes; only what is
rare (resets, calls, new kinds of infos, faults) is pickled.  An end of file means that the parent has gone.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import connection
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np

from flotilla.core.seeding import episode_seed
from flotilla.sampling import shm
from flotilla.sampling.messages import (
    INFO_COLUMNS,
    MESSAGE,
    OK,
    ORDER,
    PENDING,
    TABLE,
    WHOLE,
    Fault,
    Info,
    Job,
    Made,
    Message,
    dumps,
)
from flotilla.sampling.process import IDLE

EXACT = 2**53  # float64 holds every integer up to here


class Worker:
    """The environments of one process and their places in shared memory."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.index = job.index
        self.envs: list[gym.Env[Any, Any]] = []
        self.faults: list[Fault] = []
        self._refused: Fault | None = None
        self._makers: list[Callable[[], gym.Env[Any, Any]]] = []
        self._seeds = list(job.seeds)
        self._anew = [job.revived] * len(job.index)
        self._ended = [False] * len(job.index)
        self._whole = [False] * len(job.index)  # whether what has ended is an episode, and not only a life
        self._schema: tuple[tuple[str, ...], tuple[type, ...]] | None = None
        self._integers: list[int] = []  # its columns of integers
        self._given: Sequence[Any] = ()  # actions of the next step, where they are not in shared memory
        self._count = 0

    def make(self) -> bytes:
        """Make the environments; what they say of themselves or, in a message, what failed."""
        made: list[Made] = []
        try:
            self._makers = pickle.loads(self.job.makers)
            for maker in self._makers:
                env = maker()
                self.envs.append(env)
                made.append(Made(env.observation_space, env.action_space, env.metadata, env.render_mode, env.spec))
            return dumps(made)
        except BaseException as error:
            return dumps(Message([self._fault(min(len(made), len(self.index) - 1), error)], None))

    def map(self, fd: int, layout: shm.Layout, action_space: gym.Space[Any]) -> None:
        """Find the arrays of the whole pool."""
        arrays = shm.arrays(fd, layout)
        os.close(fd)
        self._arrays: dict[str, Any] = {name: array for (kind, name), array in arrays.items() if kind == "pool"}
        self._obs = [(path, array) for (kind, path), array in arrays.items() if kind == "obs"]
        self._plain = self._obs[0][1] if len(self._obs) == 1 and self._obs[0][0] == () else None
        self._action = {path: array for (kind, path), array in arrays.items() if kind == "action"}
        self._action_space = action_space
        views: list[Any] = [memoryview(self._arrays[name]) for name in ("reward", "terminated", "truncated")]
        self._reward, self._terminated, self._truncated = views  # half the cost of writing a number into an array
        self.state = memoryview(self._arrays["workers"][self.job.slot])  # see Pool._allocate
        self._steps = [env.step for env in self.envs]

    # Stepping -------------------------------------------------------------------------------------------------

    def step(self, part: range) -> list[Info]:
        """Step environments by local number; their infos, where infos travel."""
        actions, infos, keep = self._actions(part), [], self.job.infos
        for action, k in zip(actions, part, strict=True):
            self._enter(k)
            try:
                info = self._one(k, action)
                if not keep and "episode" in info:
                    self._arrays["episode"][self.index[k]] = info["episode"]["r"], info["episode"]["l"]
                    self._arrays["finished"][self.index[k]] = True
            except BaseException as error:
                info = self._failed(k, error)
            if keep:
                infos.append(info)
        return infos

    def _enter(self, k: int) -> None:
        """Say which environment is at work, so that the parent knows where a process died or stands."""
        self._count += 1
        self.state[0] = self._count << 8 | k

    def _one(self, k: int, action: Any) -> Info:
        i = self.index[k]
        if self._anew[k]:
            return self._begin_again(k)
        if self._ended[k] and self.job.autoreset == "next_step":
            seed = self._next_seed(k) if self._whole[k] and self.job.reseed else None
            obs, info = self.envs[k].reset(seed=seed)
            self._reward[i] = 0.0
            self._terminated[i] = self._truncated[i] = self._ended[k] = False
        else:
            obs, reward, terminated, truncated, info = self._steps[k](action)
            try:
                self._reward[i] = reward
            except TypeError:  # of shape (1,), as some environments have them
                self._reward[i] = np.asarray(reward).item()
            self._terminated[i], self._truncated[i] = terminated, truncated
            if terminated or truncated:
                self._ended[k], self._whole[k] = True, "episode" in info
                if self.job.autoreset == "same_step":
                    final = {"final_info": info, "final_obs": obs}
                    obs, info = self.envs[k].reset()
                    info = final | info
                    self._ended[k] = False
        if self._plain is not None:
            self._plain[i] = obs
            return info
        return self._write(i, obs, info)

    def _write(self, i: int, obs: Any, info: Info) -> Info:
        """An observation into its places; one that has none travels in the info."""
        if not self._obs:
            return info | {"_obs": obs}
        for path, array in self._obs:
            array[i] = shm.leaf(obs, path)
        return info

    def _actions(self, part: range) -> Iterable[Any]:
        """The actions of neighbours, as copies: an environment may keep what it is given."""
        rows = slice(self.index[part[0]], self.index[part[-1]] + 1)
        if self._given or not self._action:
            given, self._given = self._given, ()
            return [given[k] for k in part] if given else [None] * len(part)  # a process that is new was given none
        if () in self._action:
            block = self._action[()][rows]
            # Numbers of Python are faster; where infos travel, so does the exact type of an action.
            return block.tolist() if block.ndim == 1 and not self.job.infos else block.copy()
        blocks = {path: array[rows].copy() for path, array in self._action.items()}
        return [
            shm.nested(self._action_space, {path: block[n] for path, block in blocks.items()}) for n in range(len(part))
        ]

    def reset(self, options: Any, each: Sequence[tuple[int | None, bool]]) -> list[Info]:
        """Start an episode in each chosen environment by its seed; an empty info for the others."""
        infos: list[Info] = []
        for k, (seed, chosen) in enumerate(each):
            if not chosen:
                infos.append({})
                continue
            self._enter(k)
            try:
                if seed is not None:
                    self._seeds[k] = seed
                    infos.append(self._first(k, seed, options))
                elif self._anew[k]:
                    infos.append(self._begin_again(k, options))
                else:
                    infos.append(self._first(k, None, options))
            except BaseException as error:
                infos.append(self._failed(k, error))
        return infos

    def _first(self, k: int, seed: int | None, options: Any = None) -> Info:
        """The first row of an episode."""
        i = self.index[k]
        obs, info = self.envs[k].reset(seed=seed, options=options)
        self._reward[i] = 0.0
        self._terminated[i] = self._truncated[i] = self._ended[k] = False
        for path, array in self._obs:  # here, and not at each step: a value that broadcasts would go unnoticed
            value = np.asarray(shm.leaf(obs, path))
            if value.shape != array.shape[1:] or not np.can_cast(value.dtype, array.dtype, "same_kind"):
                raise ValueError(
                    f"the observation{''.join(f'[{key!r}]' for key in path)} has shape {value.shape} and dtype "
                    f"{value.dtype}, but its space says {array.shape[1:]} and {array.dtype}"
                )
        if self._anew[k]:
            self._anew[k], self._arrays["restarted"][i] = False, True
        return self._write(i, obs, info)

    # Faults ---------------------------------------------------------------------------------------------------

    def _fault(self, k: int, error: BaseException) -> Fault:
        """What the parent is told of an exception."""
        try:
            sent: BaseException | None = error
            pickle.loads(cloudpickle.dumps(error))
        except Exception:
            sent = None
        return Fault(self.index[k], os.getpid(), "".join(traceback.format_exception(error)), sent)

    def _failed(self, k: int, error: BaseException) -> Info:
        """Note the fault; where restarts are allowed, the environment is made again and starts an episode.

        One that fails at that, too, is tried again until its faults are more than the parent allows.
        """
        self.faults.append(self._fault(k, error))
        for _ in range(self.job.max_restarts):
            try:
                with contextlib.suppress(Exception):
                    self.envs[k].close()
                self.envs[k] = self._makers[k]()
                self._steps[k] = self.envs[k].step
                return self._begin_again(k)
            except BaseException as again:
                self.faults.append(self._fault(k, again))
        return {}

    def _begin_again(self, k: int, options: Any = None) -> Info:
        """An episode of an environment that is new."""
        self._anew[k] = True
        return self._first(k, self._next_seed(k), options)

    def _next_seed(self, k: int) -> int | None:
        """The next seed of the environment's own stream, where it has one."""
        episodes, seed, i = self._arrays["episodes"], self._seeds[k], self.index[k]
        episodes[i] += 1
        return None if seed is None else episode_seed(seed, int(episodes[i]))

    # Orders and replies ---------------------------------------------------------------------------------------

    def obey(self, order: bytes) -> bytes:
        """An order for all environments; its answer."""
        everyone = range(len(self.envs))
        result: Any = None
        name, *arguments = pickle.loads(order)
        match name:
            case "reset":
                result = self.reset(*arguments)
            case "actions":
                self._given = arguments[0]
            case "end":  # of the episodes of the chosen ones: their next step is a reset
                for k in (k for k in everyone if arguments[0][k]):
                    self._ended[k] = self._whole[k] = True
            case "call":
                what, args, kwargs, each = arguments
                result = [self._ask(k, _call, what, args, kwargs) if each[k] else None for k in everyone]
            case "set_attr":
                attribute, values = arguments
                for k in everyone:
                    self._ask(k, _call, "set_wrapper_attr", (attribute, values[k]), {})
        return self.message(result, everyone)

    def _ask(self, k: int, question: Callable[..., Any], *arguments: Any) -> Any:
        """The answer of one environment; an exception is the question's fault and not the environment's."""
        self._enter(k)
        try:
            if self._anew[k]:  # as usable as any other; the row of its restart comes with its next step
                self._begin_again(k)
                self._anew[k] = True
            return question(self.envs[k], *arguments)
        except BaseException as error:
            self._refused = self._refused or self._fault(k, error)
            return None

    def message(self, result: Any, part: Sequence[int], schema: Any = None) -> bytes:
        """A pickled message; one that says why, where something in the result cannot be pickled."""
        try:
            return dumps(Message(self.faults, result, schema, self._refused))
        except Exception:
            return dumps(Message(self.faults, None, None, self._refused or self._unpicklable(result, part)))
        finally:
            self.faults, self._refused = [], None

    def _unpicklable(self, result: Sequence[Any], part: Sequence[int]) -> Fault:
        """Whose result it is that cannot be pickled."""
        for k, one in zip(part, result, strict=True):
            try:
                dumps(one)
            except Exception as error:
                return self._fault(k, error)
        raise AssertionError("each can be pickled, but not all")

    def pending(self) -> Iterator[int]:
        """Local numbers of the environments whose action waits; one that is given is no longer pending."""
        pending = self._arrays["pending"]
        for k, i in enumerate(self.index):
            if pending[i]:
                pending[i] = False
                yield k

    def tabulate(self, part: range, infos: Sequence[Info]) -> bool:
        """Write infos into the table, where they are numbers of the same keys and types as last time."""
        keys, types = self._schema or ((), ())
        table = self._arrays["infos"]
        for k, info in zip(part, infos, strict=True):
            values = list(info.values())
            if tuple(info) != keys or tuple(map(type, values)) != types:
                return False
            if any(abs(values[n]) > EXACT for n in self._integers):
                return False
            table[self.index[k], : len(values)] = values
        return True

    def schema(self, info: Info) -> tuple[tuple[str, ...], tuple[type, ...]] | None:
        """Keys and types of an info, from now on those of the table; None where it holds more than numbers."""
        types = tuple(map(type, info.values()))
        fits = 0 < len(types) <= INFO_COLUMNS and all(map(_is_number, types))
        self._schema = (tuple(info), types) if fits else None
        self._integers = [n for n, kind in enumerate(types) if issubclass(kind, int | np.integer)]
        return self._schema


def _is_number(kind: type) -> bool:
    return kind in (bool, int, float) or issubclass(kind, np.bool_ | np.integer | np.float16 | np.float32 | np.float64)


def _call(env: gym.Env[Any, Any], what: str | Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An attribute of an environment or of a wrapper around it, called where it can be; or a function of it."""
    if callable(what):
        return what(env, *args, **kwargs)
    found = env.get_wrapper_attr(what)
    return found(*args, **kwargs) if callable(found) else found


def main(job: Job, go: connection.Connection, done: connection.Connection, fd: int) -> None:
    """The life of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # fork copies the parent's handlers
    multiprocessing.current_process().daemon = False  # an environment may have processes of its own
    worker = Worker(job)
    try:
        _single_threaded()
        made = worker.make()
        _single_threaded()  # what the environments have imported
        done.send_bytes(made)
        worker.map(fd, *pickle.loads(go.recv_bytes()))
        serve(worker, go, done)
    except (EOFError, BrokenPipeError):
        pass  # the parent has gone, or has no use for it any more
    finally:
        for env in worker.envs:
            with contextlib.suppress(Exception):
                env.close()


def serve(worker: Worker, go: connection.Connection, done: connection.Connection) -> None:
    """Obey until there is nobody to obey."""
    commands, replies = go.fileno(), done.fileno()
    state, spin_s, seen = worker.state, worker.state[2] * 1e-6, 0
    while True:
        if spin_s:
            deadline = time.perf_counter() + spin_s
            while state[1] == seen and time.perf_counter() < deadline:
                pass
        command = os.read(commands, 1)
        seen += 1
        if not command:
            return
        if command[0] == PENDING:
            for k in worker.pending():
                part = range(k, k + 1)
                reply(worker, done, part, worker.step(part), k)
        elif command[0] == ORDER:
            answer = worker.obey(go.recv_bytes())
            state[0] = IDLE
            os.write(replies, bytes((MESSAGE, WHOLE)))
            done.send_bytes(answer)
        else:
            part = worker.job.groups[command[0]]
            reply(worker, done, part, worker.step(part), WHOLE)


def reply(worker: Worker, done: connection.Connection, part: range, infos: list[Info], number: int) -> None:
    """Two bytes, and a message where there is more to say."""
    kind = OK if not any(infos) else TABLE if worker.tabulate(part, infos) else MESSAGE
    if kind == MESSAGE or worker.faults:
        message = worker.message(infos, part, worker.schema(next((info for info in infos if info), {})))
        worker.state[0] = IDLE  # first: the time that it waits for a reader is none of an environment's
        os.write(done.fileno(), bytes((MESSAGE, number)))
        done.send_bytes(message)
    else:
        worker.state[0] = IDLE
        os.write(done.fileno(), bytes((kind, number)))


def _single_threaded() -> None:
    """What reads no variables, or has read them before (fork): one thread, too."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(1)
