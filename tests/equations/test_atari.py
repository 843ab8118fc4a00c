"""The Atari preprocessing against Gymnasium's own, and the conventions of lives, rewards and limits."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

pytest.importorskip("ale_py")
pytest.importorskip("cv2")

from flotilla.envs import atari
from flotilla.envs.make import EnvOptions, make_env

WHOLE = EnvOptions(training=False)


def play(env: gym.Env[Any, Any], steps: int, seed: int = 3) -> list[Any]:
    """The results of seeded random actions, from the reset on, up to the first end."""
    env.action_space.seed(seed)
    results: list[Any] = [(env.reset(seed=seed)[0], 0.0, False, False, {})]
    while len(results) <= steps and not (results[-1][2] or results[-1][3]):
        results.append(env.step(env.action_space.sample()))
    return results


@pytest.mark.parametrize(("env_id", "sticky"), [("ALE/MsPacman-v5", 0.25), ("MsPacmanNoFrameskip-v4", 0.0)])
def test_equals_gymnasium_preprocessing(env_id: str, sticky: float) -> None:
    """MsPacman starts without FIRE, which Gymnasium's wrapper does not press."""
    from ale_py.env import AtariEnv

    plain = AtariEnv("ms_pacman", frameskip=1, repeat_action_probability=sticky)
    reference = gym.wrappers.FrameStackObservation(gym.wrappers.AtariPreprocessing(plain, noop_max=30), 4)
    for ours, theirs in zip(play(make_env(env_id, WHOLE), 200), play(reference, 200), strict=True):
        np.testing.assert_array_equal(ours[0], theirs[0])
        assert ours[1:4] == theirs[1:4]


def test_training_reward_is_the_sign() -> None:
    raw = [step[1] for step in play(make_env("MsPacmanNoFrameskip-v4", WHOLE), 150)]
    clipped = [step[1] for step in play(make_env("MsPacmanNoFrameskip-v4"), 150)]
    assert max(raw) >= 10
    assert clipped == list(np.sign(raw[: len(clipped)]))


def test_lost_life_ends_the_agents_episode_only() -> None:
    env = make_env("BreakoutNoFrameskip-v4")
    env.action_space.seed(0)
    env.reset(seed=0)
    game: Any = env.unwrapped
    lives, total, length, seen = [game.ale.lives()], 0.0, 0, []
    while not seen:
        _, reward, terminated, truncated, info = env.step(env.action_space.sample())
        total, length = total + reward, length + 1
        assert not truncated
        assert terminated == (info["lives"] < lives[-1])
        if "episode" in info:
            seen.append(info["episode"])
        elif terminated:
            lives.append(info["lives"])
            obs, info = env.reset()
            length += 3  # the no-op and the two start actions
            assert info["lives"] == lives[-1], "the game went on"
            assert all(np.array_equal(obs[0], image) for image in obs[1:]), "no image of the life before"
    assert lives == [5, 4, 3, 2, 1]
    assert seen[0]["l"] == length
    assert seen[0]["r"] >= total  # what the no-op and the start actions earned is in the raw score only
    assert env.reset()[1]["lives"] == 5, "a real end resets the game"


def test_reset_in_the_middle_of_a_life_is_a_new_game() -> None:
    env = make_env("BreakoutNoFrameskip-v4")
    env.reset(seed=0)
    game: Any = env.unwrapped
    for _ in range(40):
        env.step(0)
    before = game.ale.getEpisodeFrameNumber()
    env.reset()
    assert game.ale.getEpisodeFrameNumber() < before


def test_evaluation_plays_all_lives() -> None:
    results = play(make_env("BreakoutNoFrameskip-v4", WHOLE), 2000)
    assert results[-1][2]
    assert results[-1][4]["lives"] == 0
    assert results[-1][4]["episode"] == {"r": sum(step[1] for step in results), "l": len(results) - 1}


def test_frame_limit_truncates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atari, "MAX_FRAMES", 400)
    obs, _, terminated, truncated, info = play(make_env("PongNoFrameskip-v4"), 200)[-1]
    assert (terminated, truncated) == (False, True)
    assert info["episode"]["l"] <= 100
    assert obs.shape == (4, 84, 84)


def test_game_that_ends_while_a_life_begins_keeps_its_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frame limit falls into the no-op after a lost life: the record stands in the info of `reset`."""
    env = make_env("BreakoutNoFrameskip-v4")
    results = play(env, 2000, seed=1)
    assert results[-1][2]
    frame = results[-1][4]["lives"], env.unwrapped.ale.getEpisodeFrameNumber()  # type: ignore[attr-defined]
    monkeypatch.setattr(atari, "MAX_FRAMES", frame[1] + 2)
    short = make_env("BreakoutNoFrameskip-v4")
    assert len(play(short, 2000, seed=1)) == len(results)
    _, info = short.reset()
    assert info["episode"]["l"] == len(results)
    assert info["lives"] == 5


@pytest.mark.parametrize("env_id", ["PongNoFrameskip-v4", "ALE/Pong-v5", "atari_pong", "PongNoFrameskip-v0"])
def test_parse(env_id: str) -> None:
    game = atari.parse(env_id)
    assert game is not None
    assert game.rom == "pong"
    assert game.sticky == (0.25 if env_id in ("ALE/Pong-v5", "PongNoFrameskip-v0") else 0.0)


def test_parse_of_another_suite() -> None:
    assert atari.parse("CartPole-v1") is None
