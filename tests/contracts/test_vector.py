"""`flotilla.vector` in place of Gymnasium's vector environments: equal to Sync, bit for bit; it fails as Async does."""

from __future__ import annotations

import copy
import functools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import vector as wrappers

from flotilla import vector
from flotilla.core.errors import UsageError
from flotilla.sampling.pool import EnvironmentFailed
from flotilla.vector import WorkerVectorEnv

NEXT_STEP, SAME_STEP, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED
FLOAT16 = spaces.Box(-1, 1, (3,), np.float16)
SPACES = {
    "float16": FLOAT16,
    "number": spaces.Box(-1, 1, (), np.float32),
    "image": spaces.Box(0, 255, (8, 8, 3), np.uint8),
    "discrete": spaces.Discrete(5, start=-2),
    "multi-discrete": spaces.MultiDiscrete([[2, 3], [4, 5]]),
    "multi-binary": spaces.MultiBinary((2, 2)),
    "nested": spaces.Dict(
        {
            "a": spaces.Tuple((spaces.Discrete(3), FLOAT16)),
            "b": spaces.Dict({"c": spaces.MultiBinary(4), "d": spaces.Box(0, 1, (), np.float64)}),
        }
    ),
    "text": spaces.Text(5),
    "sequence": spaces.Sequence(spaces.Discrete(4)),
    "graph": spaces.Graph(spaces.Box(0, 1, (2,)), spaces.Discrete(3)),
    "one-of": spaces.OneOf((spaces.Discrete(3), spaces.Box(0, 1, (2,)))),
    "nested text": spaces.Dict({"text": spaces.Text(4), "box": spaces.Box(0, 1, (2,))}),
}
Makers = Sequence[Callable[[], gym.Env[Any, Any]]]


class Custom(gym.Space[Any]):
    """A space that Gymnasium does not know."""

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        return "sample"

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom)

    __hash__ = None  # type: ignore[assignment]


class Echo(gym.Env[Any, Any]):
    """The next observation is the action; infos say what the action was, in every form that infos have."""

    def __init__(self, space: gym.Space[Any], length: int = 4) -> None:
        self.observation_space = self.action_space = copy.deepcopy(space)
        self.length = length

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), {"options": str(options), "draw": float(self.np_random.random())}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        info: dict[str, Any] = {"type": str(type(action)), "dtype": str(getattr(action, "dtype", ""))}
        if self.t % 2:
            info = {
                "t": self.t,
                "half": np.float32(self.t / 2),
                "nested": {"odd": True, "array": np.arange(self.t)[:1]},
            }
        return action, self.t / 7, self.t == self.length, False, info


class Clock(gym.Env[Any, Any]):
    """Sees (its number, steps since the reset); its action is how many seconds a step takes."""

    observation_space = spaces.Box(0, 1e6, (2,), np.float32)
    action_space = spaces.Box(0, 9, (), np.float64)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012
    render_mode = "rgb_array"

    def __init__(self, number: int = 0) -> None:
        self.number, self.t = number, 0

    def observe(self) -> Any:
        return np.array([self.number, self.t], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(float(action))
        self.t += 1
        return self.observe(), 1.0, False, False, {}

    def render(self) -> Any:
        return np.full((4, 4, 3), self.number, np.uint8)

    def locked(self) -> Any:
        return multiprocessing.get_context("spawn").Lock()  # can only be handed to a process that is being started

    def fail(self) -> None:
        raise KeyError("a call")


class Breaks(Clock):
    """Its third step fails, once: the file says that it has happened."""

    def __init__(self, number: int, once: Path, how: str) -> None:
        super().__init__(number)
        self.once, self.how = once, how

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.number == 1 and self.t == 2 and not self.once.exists():
            self.once.touch()
            if self.how == "raises":
                raise ZeroDivisionError("third step, 100 %d")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


@contextmanager
def made(makers: Makers, **settings: Any) -> Iterator[WorkerVectorEnv]:
    envs = WorkerVectorEnv(makers, **{"num_workers": 2} | settings)
    try:
        yield envs
    finally:
        envs.close(terminate=True)


def same(ours: VectorEnv[Any, Any, Any], theirs: VectorEnv[Any, Any, Any], steps: int, **reset: Any) -> None:
    """Spaces, and everything that reset and step return for the same actions, are equal to the bit."""
    for name in ("observation_space", "single_observation_space", "action_space", "single_action_space", "num_envs"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert data_equivalence(ours.reset(**reset), theirs.reset(**reset), exact=True)
    theirs.action_space.seed(7)
    for _ in range(steps):
        action = theirs.action_space.sample()
        mine, other = ours.step(action), theirs.step(action)
        assert data_equivalence(mine, other, exact=True), (mine, other)


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "HalfCheetah-v5"])
def test_it_equals_sync_with_infos(env_id: str, mode: AutoresetMode) -> None:
    makers = [lambda: gym.make(env_id, max_episode_steps=30)] * 4
    theirs = SyncVectorEnv(makers, autoreset_mode=mode)
    with made(makers, autoreset_mode=mode) as ours:
        same(ours, theirs, 100, seed=3)
        assert ours.metadata == theirs.metadata
        assert ours.render_mode is None
        same(ours, theirs, 10, seed=[1, None, 3, 4])
    theirs.close()


@pytest.mark.parametrize("name", SPACES)
def test_any_space_is_an_observation_and_an_action(name: str) -> None:
    makers = [lambda: Echo(SPACES[name])] * 3
    mode = SAME_STEP if name in ("nested", "text") else NEXT_STEP
    with made(makers, autoreset_mode=mode) as ours:
        same(ours, SyncVectorEnv(makers, autoreset_mode=mode), 10, seed=1, options={"level": 2})


def test_a_custom_space_needs_shared_memory_off() -> None:
    makers = [lambda: Echo(Custom())] * 3
    with pytest.raises(UsageError, match="shared_memory=False"), made(makers):
        pass
    with made(makers, shared_memory=False) as envs:
        assert envs.reset()[0] == ("sample",) * 3
        assert envs.step(("a", "b", "c"))[0] == ("a", "b", "c")


def test_actions_of_another_dtype_arrive_as_they_are() -> None:
    makers = [lambda: Echo(spaces.Box(-1, 1, (2,), np.float32))] * 3
    sync = SyncVectorEnv(makers)
    with made(makers) as envs:
        for reset in (envs.reset, sync.reset):
            reset(seed=0)
        for action in (np.full((3, 2), 1 / 3), np.full((3, 2), 1 / 3, np.float32), [[0.1, 0.2]] * 3):
            envs.step(action)
            sync.step(action)
            assert data_equivalence(envs.step(action), sync.step(action), exact=True)


def test_a_wrong_number_of_actions_is_refused_and_nothing_is_lost() -> None:
    with made([Clock] * 3) as envs:
        envs.reset()
        for few_or_many in (np.zeros(2), np.zeros(4)):
            with pytest.raises(ValueError, match=r"environments|shape|argument"):
                envs.step(few_or_many)
        with pytest.raises(TypeError):
            envs.step(0.0)
        assert envs.step(np.zeros(3))[0][:, 1].tolist() == [1, 1, 1]


def test_the_trajectory_does_not_depend_on_the_number_of_workers() -> None:
    makers = [lambda: gym.make("CartPole-v1")] * 5
    for num_workers in (1, 5):
        with made(makers, num_workers=num_workers) as envs:
            assert envs.num_workers == num_workers
            same(envs, SyncVectorEnv(makers), 40, seed=11)
            assert envs.np_random_seed == (11, 12, 13, 14, 15)


def test_a_mask_resets_some_and_leaves_the_options_alone() -> None:
    with made([functools.partial(Clock, i) for i in range(3)], autoreset_mode=DISABLED) as envs:
        stats = wrappers.RecordEpisodeStatistics(envs)
        stats.reset()
        for _ in range(2):
            stats.step(np.zeros(3))
        options = {"reset_mask": np.array([True, False, True])}
        obs, _ = envs.reset(options=options)
        assert obs.tolist() == [[0, 0], [1, 2], [2, 0]]
        assert list(options) == ["reset_mask"]
        assert stats.reset(options=options)[0].tolist() == obs.tolist()
        assert stats.episode_returns.tolist() == [0, 2, 0]  # with Async the wrapper forgets those that play on
        for mask, error in (([True] * 3, TypeError), (np.ones(2, bool), ValueError), (np.zeros(3, bool), ValueError)):
            with pytest.raises(error, match="reset_mask"):
                envs.reset(options={"reset_mask": mask})


def test_late_rows_are_not_taken_for_those_of_the_next_step() -> None:
    with made([functools.partial(Clock, i) for i in range(3)]) as envs:
        envs.reset()
        envs.step_async(np.array([0, 0.4, 0]))
        with pytest.raises(multiprocessing.TimeoutError):
            envs.step_wait(timeout=0.1)
        for t in (2, 3):
            assert envs.step(np.zeros(3))[0][:, 1].tolist() == [t] * 3
        envs.reset_async()
        assert envs.reset_wait(timeout=30)[0][:, 1].tolist() == [0] * 3


def test_calls_out_of_order() -> None:
    with made([Clock] * 2) as envs:
        for wait, name in ((envs.reset_wait, "reset"), (envs.step_wait, "step"), (envs.call_wait, "call")):
            with pytest.raises(NoAsyncCallError, match=f"`{name}_wait` without any prior call to `{name}_async`"):
                wait()
        envs.reset_async()
        for begin in (envs.reset_async, lambda: envs.step_async(np.zeros(2)), lambda: envs.set_attr("t", 1)):
            with pytest.raises(AlreadyPendingCallError, match="pending call to `reset`"):
                begin()
        with pytest.warns(UserWarning, match="pending call to `reset`"):
            envs.close()
        envs.close()
        with pytest.raises(ClosedEnvironmentError):
            envs.reset()


def test_calls_reach_the_environments_under_their_wrappers() -> None:
    with made([lambda i=i: gym.wrappers.TimeLimit(Clock(i), 9) for i in range(3)]) as envs:
        envs.reset(seed=5)
        assert envs.get_attr("number") == (0, 1, 2)
        envs.set_attr("number", [7, 8, 9])
        assert envs.step(np.zeros(3))[0][:, 0].tolist() == [7, 8, 9]
        envs.set_attr("number", 3)
        assert [frame[0, 0, 0] for frame in envs.render()] == [3, 3, 3]
        with pytest.raises(AttributeError, match="nothing"):
            envs.get_attr("nothing")
        with pytest.raises(KeyError, match="a call") as raised:
            envs.call("fail")
        assert isinstance(raised.value.__cause__, EnvironmentFailed)
        with pytest.raises(RuntimeError, match="Lock"):
            envs.call("locked")
        with pytest.raises(UsageError, match="use reset"):
            envs.call("reset")
        with pytest.raises(UsageError, match="2 values"):
            envs.set_attr("number", [1, 2])
        assert envs.step(np.zeros(3))[0][:, 1].tolist() == [2, 2, 2]  # none of it broke anything


def test_a_failing_environment_raises_its_own_exception(tmp_path: Path) -> None:
    with made([functools.partial(Breaks, i, tmp_path / "once", "raises") for i in range(3)]) as envs:
        envs.reset()
        pids = envs._pool.pids
        for _ in range(2):
            envs.step(np.zeros(3))
        with (
            pytest.warns(UserWarning, match="ERROR") as said,
            pytest.raises(ZeroDivisionError, match="third step, 100 %d") as raised,
        ):
            envs.step(np.zeros(3))
        assert "Worker-1" in str(said[0].message)
        assert isinstance(raised.value.__cause__, EnvironmentFailed)
        assert str(raised.value.__cause__).startswith(f"environment 1 (process {pids[0]}) failed")
        assert "in step" in str(raised.value.__cause__)  # the traceback
        assert not any(map(psutil.pid_exists, pids))
        with pytest.raises(ClosedEnvironmentError):
            envs.step(np.zeros(3))


def test_a_dead_worker_is_an_error_that_says_which(tmp_path: Path) -> None:
    with made([functools.partial(Breaks, i, tmp_path / "once", "dies") for i in range(3)]) as envs:
        envs.reset()
        for _ in range(2):
            envs.step(np.zeros(3))
        with (
            pytest.warns(UserWarning, match="ERROR"),
            pytest.raises(EnvironmentFailed, match=r"environment 1 [^$]*signal 9"),
        ):
            envs.step(np.zeros(3))


def test_what_fails_at_the_start_is_raised() -> None:
    with pytest.raises(ZeroDivisionError), made([Clock, lambda: 1 / 0]):  # type: ignore[list-item, return-value]
        pass
    with pytest.raises(gym.error.NameNotFound):
        vector.make("NoSuch-v0", 2)


@pytest.mark.parametrize("how", ["raises", "dies"])
@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP, DISABLED])
def test_a_restart_looks_like_a_truncation(mode: AutoresetMode, how: str, tmp_path: Path) -> None:
    makers = [functools.partial(Breaks, i, tmp_path / "once", how) for i in range(2)]
    with made(makers, autoreset_mode=mode, max_env_restarts=3) as envs:
        envs.reset(seed=0)
        for _ in range(2):
            envs.step(np.zeros(2))
        with pytest.warns(UserWarning, match="environment 1 .* was restarted"):
            obs, reward, terminated, truncated, info = envs.step(np.zeros(2))
        known, first = [1, 2], [1, 0]
        assert obs.tolist() == [[0, 3], first if mode == SAME_STEP else known]
        assert reward.tolist() == [1, 0]
        assert terminated.tolist() == [False, False]
        assert truncated.tolist() == [False, True]
        assert info["restarted"].tolist() == info["_restarted"].tolist() == [False, True]
        assert ("final_obs" in info) == (mode == SAME_STEP)
        if mode == SAME_STEP:
            assert info["final_obs"][1].tolist() == known
            assert info["_final_info"].tolist() == [False, True]
        if mode == DISABLED:
            assert envs.reset(options={"reset_mask": truncated})[0].tolist() == [[0, 3], first]
        expected = {NEXT_STEP: [(first, 0), ([1, 1], 1)]}.get(mode, [([1, 1], 1), ([1, 2], 1)])
        for t, (theirs, gain) in enumerate(expected, start=4):
            obs, reward, _, truncated, info = envs.step(np.zeros(2))
            assert obs.tolist() == [[0, t], theirs]
            assert reward.tolist() == [1, gain]
            assert not truncated.any()
            assert info == {}


def test_observation_modes() -> None:
    boxes = [spaces.Box(0, high, (2,), np.float32) for high in (1, 2, 3)]
    different = [lambda box=box: gym.wrappers.TransformAction(Echo(box), lambda a: a, boxes[0]) for box in boxes]
    theirs = SyncVectorEnv(different, observation_mode="different")
    with made(different, observation_mode="different") as ours:
        same(ours, theirs, 5, seed=2)
    with pytest.raises(RuntimeError, match="observation_mode='different'"), made(different):
        pass
    with pytest.raises(UsageError, match="Invalid `observation_mode`"), made(different, observation_mode="other"):
        pass


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP])
def test_vector_wrappers_give_what_they_give_on_sync(mode: AutoresetMode) -> None:
    makers = [lambda: gym.make("CartPole-v1")] * 4

    def wrapped(envs: VectorEnv[Any, Any, Any]) -> VectorEnv[Any, Any, Any]:
        envs = wrappers.NormalizeReward(wrappers.TransformReward(envs, lambda reward: reward * 2))
        return envs if mode == SAME_STEP else wrappers.NormalizeObservation(wrappers.DtypeObservation(envs, np.float64))

    with made(makers, autoreset_mode=mode) as envs:
        same(wrapped(envs), wrapped(SyncVectorEnv(makers, autoreset_mode=mode)), 60, seed=4)
    with made(makers, autoreset_mode=mode) as envs:
        ours, theirs = map(wrappers.RecordEpisodeStatistics, (envs, SyncVectorEnv(makers, autoreset_mode=mode)))
        ours.reset(seed=1)
        theirs.reset(seed=1)
        for _ in range(80):
            action = envs.action_space.sample()
            ours.step(action)
            theirs.step(action)
        assert len(ours.return_queue) > 4
        assert list(ours.length_queue) == list(theirs.length_queue)


def test_without_copies_the_batch_is_the_shared_memory() -> None:
    with made([Clock] * 2, copy=False) as envs, made([Clock] * 2) as copying:
        first, kept = envs.reset()[0], copying.reset()[0]
        assert envs.step(np.zeros(2))[0] is first
        assert first[:, 1].tolist() == envs.observations[:, 1].tolist() == [1, 1]
        copying.step(np.zeros(2))
        assert kept[:, 1].tolist() == [0, 0]


def test_make_takes_ids_with_arguments_and_wrappers() -> None:
    wrapper = functools.partial(gym.wrappers.TimeLimit, max_episode_steps=3)
    envs = vector.make(
        "CartPole-v1", 2, num_workers=1, wrappers=[wrapper], render_mode="rgb_array", sutton_barto_reward=True
    )
    try:
        assert repr(envs) == "WorkerVectorEnv(CartPole-v1, num_envs=2)"
        assert envs.render_mode == "rgb_array"
        envs.reset(seed=0)
        steps = [envs.step(np.zeros(2, np.int64)) for _ in range(3)]
        assert steps[0][1].tolist() == [0, 0]  # the argument
        assert steps[-1][3].tolist() == [True, True]  # the wrapper
    finally:
        envs.close()


def test_make_takes_what_only_this_process_has_registered() -> None:
    gym.register("OnlyHere-v0", entry_point=lambda: Clock(4), max_episode_steps=2)
    for what, num_envs in (("OnlyHere-v0", 2), (Clock, 2), ([Clock, Clock], 1)):
        envs = vector.make(what, num_envs, num_workers=1)
        assert envs.reset()[0].shape == (2, 2)
        envs.close()
    del gym.registry["OnlyHere-v0"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_envs": 0}, "at least 1"),
        ({"num_workers": 0}, "'auto'"),
        ({"env_id_or_fns": [Clock] * 3, "num_envs": 2}, "3 functions"),
        ({"env_id_or_fns": Clock, "gravity": 3}, "gravity"),
    ],
)
def test_what_make_refuses(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        vector.make(**{"env_id_or_fns": "CartPole-v1", **arguments})


def test_what_the_class_refuses() -> None:
    with pytest.raises(UsageError, match="wrapper"):
        WorkerVectorEnv([Clock], worker=print)  # type: ignore[arg-type]
    for wrong in (0, -1, 1.5):
        with pytest.raises(UsageError, match="max_concurrency"):
            WorkerVectorEnv([Clock], max_concurrency=wrong)  # type: ignore[arg-type]
    with made([Clock] * 4, max_concurrency=1) as envs:
        assert envs.num_workers == 1
