"""The probes pay what they say: the best policy, written out, gets the known return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flotilla.envs.make import make_env

Policy = Callable[[list[Any]], Any]  # the observations of the episode so far -> action


def right_side(seen: list[Any]) -> int:
    return int(seen[-1][0] > 0)


def named(seen: list[Any]) -> list[int]:
    return [int(seen[-1][:2].argmax()), int(seen[-1][2:].argmax())]


BEST: list[tuple[str, Policy, float, int]] = [
    ("Constant", lambda seen: 0, 1.0, 1),
    ("TwoStep", lambda seen: 0, 1.0, 2),
    ("Action", right_side, 1.0, 1),
    ("Action", lambda seen: 1 - right_side(seen), -1.0, 1),
    ("TimeLimit", lambda seen: 0, 10.0, 10),
    ("Memory", lambda seen: right_side(seen[:1]), 1.0, 8),
    ("Memory", lambda seen: 1 - right_side(seen[:1]), -1.0, 8),
    ("Continuous", lambda seen: seen[-1] / 2, 0.0, 1),
    ("MultiDiscrete", named, 1.0, 1),
]


@pytest.mark.parametrize(("name", "policy", "expected", "length"), BEST)
def test_known_return(name: str, policy: Policy, expected: float, length: int) -> None:
    env = make_env(f"probe/{name}-v0")
    env.reset(seed=0)
    for _ in range(10):
        seen, info = [env.reset()[0]], {}
        while "episode" not in info:
            obs, _, terminated, truncated, info = env.step(policy(seen))
            seen.append(obs)
        assert info["episode"] == {"r": pytest.approx(expected, abs=1e-6), "l": length}
        assert (terminated, truncated) == (name != "TimeLimit", name == "TimeLimit")


def test_memory_shows_the_cue_only_once() -> None:
    env = make_env("probe/Memory-v0")
    later = set()
    for seed in range(10):
        cue = env.reset(seed=seed)[0][0]
        assert cue in (-1, 1)
        later.add(tuple(tuple(env.step(0)[0].tolist()) for _ in range(7)))
    assert later == {((0.0, 0.0),) * 6 + ((0.0, 1.0),)}


def test_reward_is_the_observation() -> None:
    env = make_env("probe/ObsReward-v0")
    env.reset(seed=0)
    seen = {float(env.reset()[0][0]): float(env.step(0)[1]) for _ in range(20)}
    assert seen == {-1.0: -1.0, 1.0: 1.0}


def test_counter_counts() -> None:
    env = make_env("probe/Counter-v0")
    obs, _ = env.reset(seed=0)
    tag = int(obs["count"][3])
    for episode in range(6):
        for step in range(1, 4 + (episode + tag) % 4):
            action = (episode + step) % 5
            obs, reward, terminated, truncated, _ = env.step(action)
            np.testing.assert_array_equal(obs["count"], [episode, step, action, tag])
            assert (obs["image"] == step).all()
            assert reward == step
            last = step == 3 + (episode + tag) % 4
            assert (terminated, truncated) == (last and (episode + tag) % 2 == 0, last and (episode + tag) % 2 == 1)
        obs, _ = env.reset()
        np.testing.assert_array_equal(obs["count"], [episode + 1, 0, -1, tag])
    assert env.reset(seed=1)[0]["count"][3] != tag
