"""`WorkerVectorEnv`, a drop-in for `gymnasium.vector.AsyncVectorEnv`: the parameters, states and errors of that class.

Several environments share a worker process; observations, actions, rewards and numbers in infos lie in shared
memory.  It knows no trainer, no rows and no torch.
"""

from __future__ import annotations

import copy as copies
import functools
import multiprocessing
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn

import gymnasium as gym
import numpy as np
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from numpy.typing import NDArray

from flotilla.core.errors import UsageError
from flotilla.sampling import shm
from flotilla.sampling.messages import Info, Made
from flotilla.sampling.pool import EnvironmentFailed, Maker, Pool
from flotilla.vector import batch

Rows = tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_]]  # of a step, without its infos
OWN_CALLS = ("reset", "step", "close")
OTHERS_S = 1.0  # for the rest of a step in which an environment has failed


class WorkerVectorEnv(VectorEnv[Any, Any, NDArray[Any]]):
    """Environments in worker processes over shared memory.

    The positional parameters, attributes, methods and error classes are those of `AsyncVectorEnv`, except:

    shared_memory: only asked to refuse custom spaces; whatever has a fixed size is shared in any case.
    context: "forkserver" (None), "spawn", "fork"; in none of them does a script need `if __name__ == "__main__"`.
    worker: not supported.  daemon: environments may start processes of their own in any case.
    max_concurrency: no more workers than this.
    num_workers: processes; "auto": as many as there are usable cores.
    max_env_restarts, restart_window_s: how many failures of environments within a window are repaired by making
        the environment again.  0: the first one closes this and raises the environment's exception, whose cause
        says which environment and process it was.  A repaired one looks like a truncation at the last observation
        that is known: reward 0, truncated, `info["restarted"]`.
    env_timeout_s: an environment that works for longer on a step or a reset has failed.  0: none ever does.
    """

    def __init__(
        self,
        env_fns: Sequence[Maker],
        shared_memory: bool = True,
        copy: bool = True,
        context: str | None = None,
        daemon: bool = True,
        worker: None = None,
        observation_mode: batch.ObservationMode = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        max_concurrency: int | None = None,
        *,
        num_workers: int | Literal["auto"] = "auto",
        max_env_restarts: int = 0,
        restart_window_s: float = 300.0,
        env_timeout_s: float = 0.0,
    ) -> None:
        if worker is not None:
            raise UsageError(f"worker={worker!r}: a worker of one's own is not supported; put its logic into a wrapper")
        if num_workers != "auto" and num_workers < 1:
            raise UsageError(f"num_workers={num_workers}: must be at least 1, or 'auto'")
        if max_concurrency is not None and (not isinstance(max_concurrency, int | np.integer) or max_concurrency < 1):
            raise UsageError(f"max_concurrency={max_concurrency!r}: must be a positive integer or None")
        self.env_fns, self.num_envs = env_fns, len(env_fns)
        self.shared_memory, self.copy, self.context = shared_memory, copy, context
        self.daemon, self.worker, self.max_concurrency = daemon, worker, max_concurrency
        self.observation_mode, self.autoreset_mode = observation_mode, AutoresetMode(autoreset_mode)
        self._restarts = max_env_restarts > 0
        self._pending: str | None = None
        self._infos: list[Info] | None = None  # of the last step, where they are not left in the pool
        self._all = np.ones(self.num_envs, np.bool_)
        workers = 0 if num_workers == "auto" else num_workers
        try:
            self._pool = Pool(
                env_fns,
                num_workers=min(filter(None, (workers, max_concurrency)), default=0),
                autoreset=self.autoreset_mode.name.lower(),
                infos=True,
                start_method=context or "forkserver",
                max_restarts=max_env_restarts,
                window_s=restart_window_s,
                env_timeout_s=env_timeout_s,
                agree=self._agree,
            )
        except EnvironmentFailed as failed:
            _raise_original(failed)
        self._receive = functools.partial(self._pool.recv, 0)
        self._shared = shm.nested(self.single_observation_space, self._pool.obs) if self._pool.obs else None
        self._parts: list[Any] = [None] * self.num_envs  # observations that have no place in shared memory

    def _agree(self, made: Sequence[Made]) -> tuple[gym.Space[Any], gym.Space[Any]]:
        """The spaces, from what all environments say of themselves."""
        single, self.observation_space = batch.observation_spaces(made, self.observation_mode)
        if self.shared_memory and batch.is_custom(single):
            raise UsageError(f"observations in a custom space cannot be shared: {single}; use shared_memory=False")
        self.single_observation_space = single
        self.single_action_space = made[0].action_space
        for one in made:
            if one.action_space != self.single_action_space:
                raise RuntimeError(
                    f"all environments must have the same action space: {one.action_space}, {self.single_action_space}"
                )
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = {**made[0].metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = made[0].render_mode
        return single, self.single_action_space

    def describe(self, num_envs: int) -> None:
        """Take over the `spec` of the environments, as that of `num_envs` of them."""
        self.spec = copies.deepcopy(self._pool.made[0].spec)
        if self.spec is not None:
            self.spec.kwargs["num_envs"] = num_envs

    @property
    def num_workers(self) -> int:
        return self._pool.num_workers

    @property
    def observations(self) -> Any:
        """The batch as it lies in shared memory: changes with the next step or reset."""
        return self._batch(copy=False)

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        return self.get_attr("np_random")

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.get_attr("np_random_seed")

    # Stepping -------------------------------------------------------------------------------------------------

    def step(self, actions: Any) -> tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], Info]:
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Start a step of all environments.

        Actions in the dtype of the space, or one that it holds exactly, are shared; others travel as they are, slower.
        """
        pool = self._free("step_async")
        arrays = pool.action.items()
        if not (arrays and all(batch.fill(array, shm.leaf(actions, path)) for path, array in arrays)):
            given = list(iterate(self.action_space, actions))
            if len(given) != self.num_envs:
                raise UsageError(f"{len(given)} actions for {self.num_envs} environments")
            pool.order("actions", each=given)
            pool.finish_order()
        if self._restarts:
            obs = {path: array.copy() for path, array in pool.obs.items()}
            self._before = (obs, list(self._parts), pool.terminated | pool.truncated)
        pool.send()
        self._pending = "step"

    def step_wait(self, timeout: float | None = None) -> tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], Info]:
        """The batch after the step; `multiprocessing.TimeoutError` after `timeout` seconds."""
        rows = self._step_rows(timeout)
        return *rows, self._batched_infos()

    def step_wait_each(self, timeout: float | None = None) -> tuple[*Rows, list[Info]]:
        """`step_wait` with the infos as each environment gave them."""
        rows = self._step_rows(timeout)
        return *rows, self._pool.infos() if self._infos is None else self._infos

    def _step_rows(self, timeout: float | None) -> Rows:
        self._wait("step", self._receive, timeout)
        pool = self._pool
        self._infos = None if pool.obs else self._part()
        if self._restarts and pool.restarted.any():
            self._end_broken()
        return self._batch(self.copy), pool.reward.copy(), pool.terminated.copy(), pool.truncated.copy()

    def _end_broken(self) -> None:
        """Present restarts as truncations: what the environments have now is the first row of another episode."""
        pool, (obs, parts, ended) = self._pool, self._before
        infos = self._mark_restarted()
        broken = pool.restarted.copy()
        pool.restarted[:] = False
        if self.autoreset_mode == AutoresetMode.NEXT_STEP:
            broken &= ~ended  # of the others only a reset was due, and they have it
        pool.truncated[broken] = True
        for i in map(int, np.flatnonzero(broken)):
            if self.autoreset_mode == AutoresetMode.SAME_STEP:
                known = shm.nested(self.single_observation_space, {path: x[i] for path, x in obs.items()}) if obs else 0
                infos[i] = {"final_obs": known if obs else parts[i], "final_info": {}} | infos[i]
                continue
            self._parts[i] = parts[i]
            for path, array in pool.obs.items():
                array[i] = obs[path][i]
        if self.autoreset_mode == AutoresetMode.NEXT_STEP:
            pool.order("end", each=broken.tolist())
            pool.finish_order()

    # Resetting ------------------------------------------------------------------------------------------------

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, Info]:
        self.reset_async(seed, options)
        return self.reset_wait()

    def reset_async(
        self, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> None:
        """Start a reset; `options["reset_mask"]` (N,) names the environments that begin an episode."""
        mask = None if options is None else options.get("reset_mask")
        if mask is not None:
            self._check_mask(mask)
            options = {key: value for key, value in (options or {}).items() if key != "reset_mask"}
        self.reset_async_each(self._seeds(seed), options, mask)

    def reset_async_each(
        self, seeds: Sequence[int | None], options: Any = None, chosen: NDArray[np.bool_] | None = None
    ) -> None:
        """Start a reset of the chosen environments (all) with a seed for each."""
        pool = self._free("reset_async")
        pool.order_reset(seeds, options, None if chosen is None else chosen.tolist())
        self._pending = "reset"

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, Info]:
        """The first observations (of environments without a reset: the last ones); as `step_wait`."""
        self._reset_rows(timeout)
        return self._batch(self.copy), self._batched_infos()

    def reset_wait_each(self, timeout: float | None = None) -> tuple[Any, list[Info]]:
        """`reset_wait` with the infos as each environment gave them."""
        self._reset_rows(timeout)
        return self._batch(self.copy), self._pool.infos() if self._infos is None else self._infos

    def _reset_rows(self, timeout: float | None) -> None:
        self._wait("reset", self._pool.finish_order, timeout)
        self._infos = None if self._pool.obs else self._part()
        if self._pool.restarted.any():
            self._mark_restarted()
            self._pool.restarted[:] = False

    def _seeds(self, seed: int | Sequence[int | None] | None) -> Sequence[int | None]:
        if seed is None or isinstance(seed, int | np.integer):
            return [None if seed is None else int(seed) + i for i in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise UsageError(f"{len(seed)} seeds for {self.num_envs} environments: give one for each, or one integer")
        return seed

    def _check_mask(self, mask: Any) -> None:
        """The errors that Gymnasium has for a mask, in its words."""
        what, n = "`options['reset_mask']` must", self.num_envs
        if not isinstance(mask, np.ndarray):
            raise TypeError(f"{what} be a numpy array, got {type(mask)}")
        if mask.shape != (n,):
            raise UsageError(f"{what} have shape `({n},)`, got {mask.shape}")
        if mask.dtype != np.bool_:
            raise TypeError(f"{what} have `dtype=np.bool_`, got {mask.dtype}")
        if not mask.any():
            raise UsageError(f"{what} contain a boolean array with at least one True value, got reset_mask={mask}")

    # Calls ----------------------------------------------------------------------------------------------------

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """An attribute of each environment or of its wrappers; called, where it can be."""
        self.call_async(name, *args, **kwargs)
        return self.call_wait()

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        if name in OWN_CALLS:
            raise UsageError(f"call('{name}') would step around this; use {name}()")
        self._order("call_async", name, args, kwargs, self._all.tolist())
        self._pending = "call"

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """The results; an exception is that of the environment, which goes on to work."""
        return tuple(self._wait("call", self._pool.finish_order, timeout))

    def apply(self, function: Callable[..., Any], chosen: Sequence[bool], *args: Any, **kwargs: Any) -> list[Any]:
        """`function(env, *args, **kwargs)` in the workers of the chosen environments; None for the others."""
        self._order("apply", function, args, kwargs, chosen)
        self._pending = "call"
        return list(self.call_wait())

    def get_attr(self, name: str) -> tuple[Any, ...]:
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute: a list or tuple has a value for each environment, anything else is for all."""
        values = values if isinstance(values, list | tuple) else [values] * self.num_envs
        if len(values) != self.num_envs:
            raise UsageError(f"{len(values)} values of '{name}' for {self.num_envs} environments: give one for each")
        self._free("set_attr").order("set_attr", name, each=values)
        self._pending = "call"
        self.call_wait()

    def render(self) -> tuple[Any, ...]:
        return self.call("render")

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """End the workers: after `timeout` seconds (5) for the environments to close, or at once."""
        if self._pending is not None:
            gym.logger.warn(f"Calling `close` while waiting for a pending call to `{self._pending}` to complete.")
        self._pool.close(*([0.0] if terminate else [] if timeout is None else [timeout]))

    # The engine -----------------------------------------------------------------------------------------------

    def _order(self, caller: str, what: Any, args: Any, kwargs: Any, chosen: Sequence[bool]) -> None:
        self._free(caller).order("call", what, args, kwargs, each=chosen)

    def _free(self, caller: str) -> Pool:
        """The pool, when nothing is pending; after a timeout the replies that were late are waited for."""
        self._assert_running()
        if self._pending is not None:
            message = f"Calling `{caller}` while waiting for a pending call to `{self._pending}` to complete."
            raise AlreadyPendingCallError(message, self._pending)
        try:
            self._pool.settle()
        except EnvironmentFailed as failed:
            self._fail(failed)
        return self._pool

    def _wait(self, call: str, receive: Callable[[float | None], Any], timeout: float | None) -> Any:
        """What a pending call has to say."""
        self._assert_running()
        if self._pending != call:
            raise NoAsyncCallError(f"Calling `{call}_wait` without any prior call to `{call}_async`.", call)
        self._pending = None
        try:
            return receive(timeout)
        except TimeoutError:
            message = f"The call to `{call}_wait` has timed out after {timeout} second(s)."
            raise multiprocessing.TimeoutError(message) from None
        except EnvironmentFailed as failed:
            if call == "call":
                self._rest(failed)
                _raise_original(failed)
            self._fail(failed)

    def _fail(self, failed: EnvironmentFailed) -> NoReturn:
        """Close, say which environments failed, and raise what the last of them raised."""
        failed = self._rest(failed, OTHERS_S)
        faults = {fault.env_index: fault for fault in (*self._pool.faults, failed.fault)}
        self.close(terminate=True)
        for fault in faults.values():
            gym.logger.error(f"Received the following error from Worker-{fault.env_index} - Shutting it down")
            gym.logger.error("%s", fault.text)
        gym.logger.error("Raising the last exception back to the main process.")
        _raise_original(failed)

    def _rest(self, failed: EnvironmentFailed, timeout: float | None = None) -> EnvironmentFailed:
        """Take the replies of the other workers, where this one lives; the last failure."""
        while failed.fault.error is not None:
            try:
                self._pool.finish_order(timeout)
                break
            except TimeoutError:
                break
            except EnvironmentFailed as another:
                failed = another
        return failed

    def _assert_running(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError(f"Trying to operate on `{type(self).__name__}`, after a call to `close()`.")

    def _batch(self, copy: bool) -> Any:
        """The observations as they are, in the form of `observation_space`."""
        if self._shared is None:
            empty = create_empty_array(self.single_observation_space, n=self.num_envs, fn=np.zeros)
            return concatenate(self.single_observation_space, self._parts, empty)  # type: ignore[arg-type]
        if not copy:
            return self._shared
        if isinstance(self._shared, np.ndarray):
            return self._shared.copy()
        return shm.nested(self.single_observation_space, {path: array.copy() for path, array in self._pool.obs.items()})

    def _part(self) -> list[Info]:
        """The infos without the observations that travelled in them."""
        infos = self._pool.infos()
        for i, info in enumerate(infos):
            if "_obs" in info:
                self._parts[i] = info.pop("_obs")
        return infos

    def _mark_restarted(self) -> list[Info]:
        """The infos, saying which environments were made again; and a warning for each failure."""
        self._infos = infos = self._pool.infos() if self._infos is None else self._infos
        for i in map(int, np.flatnonzero(self._pool.restarted)):
            infos[i] = infos[i] | {"restarted": True}
        for fault in self._pool.faults:
            gym.logger.warn("environment %d (process %d) was restarted:\n%s", fault.env_index, fault.pid, fault.text)
        self._pool.faults.clear()
        return infos

    def _batched_infos(self) -> Info:
        """The infos of all environments in Gymnasium's form: arrays, and under "_key" where there is a value."""
        infos = self._infos
        if infos is None:
            columns = self._pool.info_columns()
            if columns is not None:
                batched: Info = {}
                for key, (_, values) in columns.items():
                    batched[key], batched[f"_{key}"] = values, self._all.copy()
                return batched
            infos = self._pool.infos()
        merged: Info = {}
        for i, info in enumerate(infos):
            merged = self._add_info(merged, info, i)
        return merged


def _raise_original(failed: EnvironmentFailed) -> NoReturn:
    """The environment's own exception, caused by the words about it; or these, where it could not travel."""
    if failed.fault.error is None:
        raise failed
    failed.__cause__ = None  # which was that exception: it would be a circle
    raise failed.fault.error from failed
