"""Every suite keeps the contract of the environment room; a new suite file is tested by itself."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from flotilla.core.errors import UsageError
from flotilla.envs import atari, dmc, mujoco
from flotilla.envs.check import check_env, steps
from flotilla.envs.make import (
    EnvOptions,
    frames_per_step,
    installed_suites,
    list_envs,
    make_env,
    suite_of,
    suites,
)

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # windows that "human" rendering opens, where there is no screen
CHECKED = [(suite, env_id) for suite, module in suites().items() for env_id in module.CHECK_IDS]
NEEDS_SCREEN = ("mujoco", "minigrid")  # "human" rendering that needs a real window, or fonts of the system


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MuJoCo leaves its log in the working directory."""
    monkeypatch.chdir(tmp_path)


def suite_or_skip(suite: str) -> None:
    if (state := installed_suites()[suite]) != "ok":
        pytest.skip(state)


@pytest.mark.parametrize(("suite", "env_id"), CHECKED)
def test_checked(suite: str, env_id: str) -> None:
    suite_or_skip(suite)
    assert suite_of(env_id) == suite
    env = make_env(env_id)
    check_env(env, skip_render_check=suite in NEEDS_SCREEN)
    env.close()


def test_dmc_pixels() -> None:
    suite_or_skip("dmc")
    env = make_env("dmc_cartpole_balance", EnvOptions(obs_type="pixels", image_size=32, action_repeat=50))
    assert env.observation_space == spaces.Box(0, 255, (32, 32, 3), np.uint8)
    check_env(env, skip_render_check=True)
    ends = [step for step in steps(env, seed=0, limit=20) if step[2] or step[3]]
    assert [(step[2], step[3], step[4]["episode"]["l"]) for step in ends] == [(False, True, 20)], "a time limit"
    env.close()


def test_dmc_action_repeat_sums_rewards() -> None:
    suite_or_skip("dmc")
    once, twice = (make_env("dmc/walker-stand", EnvOptions(action_repeat=repeat)) for repeat in (1, 2))
    once.reset(seed=0), twice.reset(seed=0)
    action = np.full(6, 0.5, np.float32)
    first, second, both = once.step(action), once.step(action), twice.step(action)
    np.testing.assert_array_equal(both[0], second[0])
    assert both[1] == pytest.approx(float(first[1]) + float(second[1]))


def test_crafter_without_reward() -> None:
    suite_or_skip("crafter")
    runs = {}
    for env_id in ("crafter_reward", "crafter_noreward"):
        env = make_env(env_id, EnvOptions(image_size=32))
        runs[env_id] = list(steps(env, seed=0, limit=60))
    assert any(step[1] for step in runs["crafter_reward"])
    assert not any(step[1] for step in runs["crafter_noreward"])
    assert runs["crafter_reward"][-1][0].shape == (32, 32, 3)
    np.testing.assert_array_equal(runs["crafter_reward"][-1][0], runs["crafter_noreward"][-1][0])


DRAWN = ["HalfCheetah-v5", "CartPole-v1", "ALE/Pong-v5", "crafter_reward", "dmc_walker_run", "MiniGrid-Empty-5x5-v0"]


@pytest.mark.parametrize("env_id", DRAWN)
def test_draws(env_id: str) -> None:
    suite_or_skip(suite_of(env_id))
    env = make_env(env_id, EnvOptions(render_mode="rgb_array"))
    env.reset(seed=0)
    image: Any = env.render()
    assert image.dtype == np.uint8
    assert image.ndim == 3
    assert image.std() > 0
    env.close()


def test_ids_are_the_simulators() -> None:
    """Lists that are written out, so that listing imports no simulator, are those of the simulators."""
    roms = importlib.import_module("ale_py.roms").get_all_rom_ids()
    assert set(atari.GAMES) == set(roms) - {"combat", "joust", "maze_craze", "warlords"}
    suite = importlib.import_module("dm_control.suite")
    assert set(dmc.ids()) == {f"dmc_{domain}_{task}" for domain, task in suite.ALL_TASKS}


@pytest.mark.parametrize("robot", sorted({env_id.partition("-")[0] for env_id in mujoco.ids()}))
def test_frames_per_step_of_mujoco(robot: str) -> None:
    suite_or_skip("mujoco")
    env = make_env(f"{robot}-v5")
    inner: Any = env.unwrapped
    assert frames_per_step(f"{robot}-v5", EnvOptions()) == inner.frame_skip
    env.close()


def test_frames_per_step_elsewhere() -> None:
    found = [frames_per_step(env_id, EnvOptions(action_repeat=3)) for env_id in ("atari_pong", "dmc_walker_walk")]
    assert found == [4, 3]
    assert frames_per_step("CartPole-v1", EnvOptions()) == 1


@pytest.mark.parametrize(
    ("env_id", "suite"),
    [
        ("atari_ms_pacman", "atari"),
        ("BreakoutNoFrameskip-v0", "atari"),
        ("Ant-v4", "mujoco"),
        ("LunarLander-v3", "box2d"),
        ("BabyAI-GoToObj-v0", "minigrid"),
        ("Taxi-v4", "gymnasium"),
        ("flotilla.envs.probe:probe/Memory-v0", "gymnasium"),
    ],
)
def test_suite_of(env_id: str, suite: str) -> None:
    assert suite_of(env_id) == suite


def test_list_envs_filters_by_id_and_suite() -> None:
    ids = {entry.env_id: entry for entry in list_envs()}
    assert len(ids) == len(list_envs())
    assert ids["CartPole-v1"].installed
    assert {entry.env_id for entry in list_envs("CARTPOLE")} >= {"CartPole-v1", "dmc_cartpole_swingup"}
    assert {entry.suite for entry in list_envs("crafter")} == {"crafter"}
    assert "Hopper-v2" not in ids  # Gymnasium lists it only to say that it is gone


def test_listing_imports_no_simulator() -> None:
    code = (
        "import sys; from flotilla.envs import list_envs; assert list_envs('pong');"
        "print(sorted({'ale_py', 'mujoco', 'dm_control', 'crafter', 'Box2D', 'cv2', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("env_id", "said"),
    [
        ("CartPole-v2", "CartPole-v1"),
        ("PnogNoFrameskip-v4", "PongNoFrameskip-v4"),
        ("ALE/Brekout-v5", "ALE/Breakout-v5"),
        ("atari_Pong", "atari_pong"),
        ("Pong-v4", "PongNoFrameskip-v4"),
        ("dmc_walker_wlak", "dmc_walker_walk"),
        ("crafter_rewards", "crafter_reward"),
        ("MiniGrid-Empty-5x5", "MiniGrid-Empty-5x5-v0"),
        ("no_such_module:Id-v0", "no_such_module"),
        ("HalfCheetah-v3", "HalfCheetah-v5"),
        ("Pusher-v4", "mujoco"),
    ],
)
def test_id_that_cannot_be_made_says_what_to_do(env_id: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as error:
        make_env(env_id)
    assert env_id in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "options", [EnvOptions(action_repeat=4), EnvOptions(obs_type="pixels"), EnvOptions(image_size=32)]
)
def test_option_that_a_suite_has_not(options: EnvOptions) -> None:
    with pytest.raises(UsageError, match="CartPole-v1"):
        make_env("CartPole-v1", options)


@pytest.mark.parametrize("options", [EnvOptions(action_repeat=0), EnvOptions(image_size=-1)])
def test_option_out_of_range(options: EnvOptions) -> None:
    with pytest.raises(UsageError, match="at least 1"):
        make_env("dmc_walker_walk", options)


def test_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dmc, "PACKAGES", ("not_installed_anywhere",))
    with pytest.raises(UsageError, match=r"needs not_installed_anywhere: pip install 'flotilla\[dmc\]'"):
        make_env("dmc_walker_walk")
    assert installed_suites()["dmc"] == "pip install 'flotilla[dmc]'"
    assert not next(entry for entry in list_envs("dmc_walker_walk")).installed


class Spaces(gym.Env[Any, Any]):
    """An environment of the spaces it is given, whose observations are samples."""

    def __init__(self, observation: Any, action: Any, render_mode: str | None = None) -> None:
        self.observation_space, self.action_space = observation, action
        self.acted: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.acted = action
        return self.observation_space.sample(), 0.0, False, False, {}


def made_of(observation: Any, action: Any) -> gym.Env[Any, Any]:
    gym.register("Spaces-v0", entry_point=Spaces, kwargs={"observation": observation, "action": action})
    try:
        return make_env("Spaces-v0")
    finally:
        del gym.registry["Spaces-v0"]


VECTOR = spaces.Box(-1.0, 1.0, (2,), np.float32)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (spaces.Box(-1.0, 1.0, (2,), np.float64), (2,)),
        (spaces.Box(-9, 9, (2, 3), np.int32), (2, 3)),
        (spaces.Box(-1.0, 1.0, (), np.float32), (1,)),
        (spaces.Discrete(5, start=2), (5,)),
        (spaces.MultiBinary(4), (4,)),
        (spaces.MultiDiscrete([2, 3]), (5,)),
    ],
)
def test_observation_becomes_a_float32_vector(given: Any, taken: tuple[int, ...]) -> None:
    env = made_of(given, spaces.Discrete(2))
    assert env.observation_space.shape == taken
    assert env.observation_space.dtype == np.float32
    for obs, *_ in steps(env, seed=0, limit=5):
        assert obs.dtype == np.float32
        assert env.observation_space.contains(obs)


def test_one_hot_is_of_the_value() -> None:
    space = spaces.MultiDiscrete([2, 3], start=[0, 1])
    env, raw = made_of(space, spaces.Discrete(2)), Spaces(space, spaces.Discrete(2))
    one_hot, value = env.reset(seed=4)[0], raw.reset(seed=4)[0]
    np.testing.assert_array_equal(one_hot, [*np.eye(2)[value[0]], *np.eye(3)[value[1] - 1]])


def test_nested_observation_becomes_a_flat_dict() -> None:
    nested = spaces.Dict({"a": VECTOR, "b": spaces.Dict({"c": spaces.Discrete(3)}), "d": spaces.Tuple([VECTOR])})
    env = made_of(nested, spaces.Discrete(2))
    assert {key: space.shape for key, space in env.observation_space.items()} == {  # type: ignore[attr-defined]
        "a": (2,),
        "b.c": (3,),
        "d.0": (2,),
    }
    assert env.observation_space.contains(env.reset(seed=0)[0])


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(5),
        spaces.Sequence(VECTOR),
        spaces.Graph(VECTOR, None),
        spaces.Dict({"image": VECTOR, "words": spaces.Text(5)}),
    ],
)
def test_observation_that_no_network_takes(space: Any) -> None:
    with pytest.raises(UsageError, match=r"Text|Sequence|Graph"):
        made_of(space, spaces.Discrete(2))


@pytest.mark.parametrize(
    "space",
    [
        spaces.MultiBinary(3),
        spaces.Discrete(3, start=1),
        spaces.MultiDiscrete([[2, 2], [3, 3]]),
        spaces.Box(0, 3, (2,), np.int64),
        spaces.Tuple([spaces.Discrete(2)]),
    ],
)
def test_action_space_that_no_policy_gives(space: Any) -> None:
    with pytest.raises(UsageError, match="action space"):
        made_of(VECTOR, space)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_action_is_clipped_to_its_bounds(dtype: Any) -> None:
    env = made_of(VECTOR, spaces.Box(-1.0, 2.0, (3,), dtype))
    assert env.action_space == spaces.Box(-1.0, 2.0, (3,), np.float32)
    env.reset(seed=0)
    env.step(np.array([-5, 0.5, 5], np.float32))
    inner: Any = env.unwrapped
    np.testing.assert_array_equal(inner.acted, np.array([-1, 0.5, 2], dtype))
    assert inner.acted.dtype == dtype


def test_id_of_a_module_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "import gymnasium as gym",
        "from gymnasium.envs.classic_control import CartPoleEnv",
        "gym.register('Own-v0', entry_point=CartPoleEnv, max_episode_steps=7)",
    ]
    (tmp_path / "my_envs.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    env = make_env("my_envs:Own-v0")
    assert env.spec is not None
    assert env.spec.max_episode_steps == 7
    ended = [step[4]["episode"]["l"] for step in steps(env, seed=0, limit=20) if step[3]]
    assert ended
    assert set(ended) == {7}


def test_plain_environment_has_one_layer_more_than_gymnasium_needs() -> None:
    """What a step costs is what the product is about: CartPole pays for its time limit and its statistics."""
    layers, env = [], make_env("CartPole-v1")
    while isinstance(env, gym.Wrapper):
        layers.append(type(env).__name__)
        env = env.env
    assert layers == ["RecordEpisode", "TimeLimit"]
