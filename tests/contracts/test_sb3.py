"""`flotilla.sb3` in place of the vector environments of Stable-Baselines3: equal to DummyVecEnv, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import data_equivalence

pytest.importorskip("stable_baselines3", reason="needs pip install 'flotilla[sb3]'")

from stable_baselines3 import PPO
from stable_baselines3.common import env_util
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecFrameStack, VecMonitor, VecNormalize

from flotilla.sb3 import FlotillaVecEnv, make_vec_env


class Number(gym.Env[Any, Any]):
    """A dict of its number, the step and the level that the reset was given; one environment fails once."""

    observation_space = spaces.Dict({"step": spaces.Discrete(99), "who": spaces.Box(0, 99, (2,), np.float32)})
    action_space = spaces.MultiDiscrete([2, 3])
    render_mode = "rgb_array"

    def __init__(self, number: int = 0, breaks: Path | None = None) -> None:
        self.number, self.breaks = number, breaks

    def observe(self) -> dict[str, Any]:
        return {"step": self.t, "who": np.array([self.number, self.level], np.float32)}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.level = 0, (options or {}).get("level", 0)
        return self.observe(), {"fresh": True, "seed": seed}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.breaks and self.t == 1 and not self.breaks.exists():
            self.breaks.touch()
            raise RuntimeError("once")
        self.t += 1
        return self.observe(), float(sum(action)), self.t == 3, self.t == 4, {"step": self.t}

    def shifted(self, by: int, *, times: int = 1) -> int:
        return self.number + by * times

    def render(self) -> Any:
        return np.full((2, 2, 3), self.number, np.uint8)


@pytest.fixture
def numbers() -> Iterator[FlotillaVecEnv]:
    envs = FlotillaVecEnv([lambda i=i: gym.wrappers.TimeLimit(Number(i), 5) for i in range(4)], num_workers=2)
    yield envs
    envs.close()


def plain(obs: Any) -> Any:
    """DummyVecEnv's OrderedDict as the dict that SubprocVecEnv gives."""
    return dict(obs) if isinstance(obs, dict) else obs


def same(ours: VecEnv, theirs: VecEnv, steps: int) -> None:
    """Everything that reset and step give for the same actions is equal, but for seconds."""
    assert data_equivalence(ours.reset(), plain(theirs.reset()), exact=True)
    for _ in range(steps):
        action = np.array([theirs.action_space.sample() for _ in range(theirs.num_envs)])
        *mine, my_infos = ours.step(action)
        obs, *other, other_infos = theirs.step(action)
        for info in (*my_infos, *other_infos):
            info.get("episode", {}).pop("t", None)
        assert data_equivalence(tuple(mine), (plain(obs), *other), exact=True), (mine, other)
        assert data_equivalence(list(my_infos), list(other_infos)), (my_infos, other_infos)
        assert list(ours.reset_infos) == list(theirs.reset_infos)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_it_equals_dummy_with_seeds(env_id: str) -> None:
    how: dict[str, Any] = {"wrapper_class": gym.wrappers.TimeLimit, "wrapper_kwargs": {"max_episode_steps": 25}}
    ours = make_vec_env(env_id, 3, seed=5, num_workers=2, **how)
    theirs = env_util.make_vec_env(env_id, 3, seed=5, **how)
    try:
        assert isinstance(ours, FlotillaVecEnv)
        same(ours, theirs, 80)
        assert ours.seed(9) == theirs.seed(9)
        same(ours, theirs, 5)
    finally:
        ours.close()


def test_dicts_infos_and_options(numbers: FlotillaVecEnv) -> None:
    theirs = DummyVecEnv([lambda i=i: gym.wrappers.TimeLimit(Number(i), 5) for i in range(4)])
    for envs in (numbers, theirs):
        envs.seed(1)
        envs.set_options([{"level": 1}, {"level": 2}, {"level": 1}, {}])
    same(numbers, theirs, 9)
    for envs in (numbers, theirs):
        envs.set_options({"level": 7})
    same(numbers, theirs, 2)
    assert [info["TimeLimit.truncated"] for info in numbers.step(np.zeros((4, 2), int))[3]] == [False] * 4


def test_attributes_and_methods_of_some(numbers: FlotillaVecEnv) -> None:
    numbers.reset()
    assert numbers.get_attr("number") == [0, 1, 2, 3]
    assert numbers.get_attr("number", [3, 1]) == [3, 1]
    numbers.set_attr("number", 8, indices=[2])
    assert numbers.reset()["who"][:, 0].tolist() == [0, 1, 8, 3]  # type: ignore[call-overload, index]
    assert numbers.env_method("shifted", 10, times=2, indices=1) == [21]
    assert numbers.env_is_wrapped(gym.wrappers.TimeLimit) == [True] * 4
    assert numbers.env_is_wrapped(Monitor, indices=0) == [False]
    assert numbers.has_attr("level")
    assert not numbers.has_attr("nothing")
    images = numbers.get_images()
    assert [image[0, 0, 0] for image in images if image is not None] == [0, 1, 8, 3]
    assert numbers.render() is not None
    assert numbers.reset()["who"][:, 0].tolist() == [0, 1, 8, 3]  # type: ignore[call-overload, index]


@pytest.mark.parametrize(
    "wrapper",
    [VecMonitor, lambda envs: VecNormalize(envs, gamma=0.9), lambda envs: VecFrameStack(envs, 3)],
    ids=["VecMonitor", "VecNormalize", "VecFrameStack"],
)
def test_wrappers_give_what_they_give_on_dummy(wrapper: Any) -> None:
    makers = [lambda: gym.make("CartPole-v1", max_episode_steps=20)] * 3
    ours, theirs = wrapper(FlotillaVecEnv(makers, num_workers=2)), wrapper(DummyVecEnv(makers))
    ours.seed(2)
    theirs.seed(2)
    try:
        same(ours, theirs, 50)
    finally:
        ours.close()


def test_ppo_learns_the_same_as_on_dummy() -> None:
    weights = []
    for make in (make_vec_env, env_util.make_vec_env):
        envs = make("CartPole-v1", 4, seed=0)
        agent = PPO("MlpPolicy", envs, n_steps=32, batch_size=64, n_epochs=2, seed=3, device="cpu")
        weights.append(agent.learn(256).policy.state_dict())
        envs.close()
    ours, theirs = weights
    assert all(ours[name].equal(theirs[name]) for name in theirs)


def test_a_restart_looks_like_a_time_limit(tmp_path: Path) -> None:
    makers = [lambda: Number(0), lambda: Number(1, tmp_path / "once")]
    envs = FlotillaVecEnv(makers, num_workers=2, max_env_restarts=1)
    try:
        envs.reset()
        action = np.ones((2, 2), int)
        envs.step(action)
        with pytest.warns(UserWarning, match="environment 1 .* was restarted"):
            obs, rewards, dones, infos = envs.step(action)
        assert obs["step"].tolist() == [2, 0]  # type: ignore[call-overload, index]
        assert rewards.tolist() == [2, 0]
        assert dones.tolist() == [False, True]
        assert infos[1]["restarted"]
        assert infos[1]["TimeLimit.truncated"]
        assert infos[1]["terminal_observation"]["step"] == 1
        assert envs.reset_infos[1]["fresh"]
    finally:
        envs.close()
