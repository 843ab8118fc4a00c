"""Autotune: measures what it says, proposes what fits, and `auto` is a plain number before a run sees it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import yaml

from flotilla import bench, cli
from flotilla.core.config import RunConfig
from flotilla.core.errors import EXIT_DONE, EXIT_USAGE, UsageError
from flotilla.envs.make import EnvOptions
from flotilla.envs.profile import Profile, profile
from flotilla.flags import without_auto
from flotilla.sampling import autotune
from flotilla.sampling.autotune import Machine, Trial

GIB, MIB = 2**30, 2**20
MACHINE = Machine("a processor", cores=2, memory_bytes=8 * GIB, free_bytes=4 * GIB)
ONE = Profile(10.0, 1.0, 20.0, 50.0, 0.1, 1.0, env_bytes=MIB, process_bytes=30 * MIB, frames_per_step=1)
FREE = RunConfig(num_envs=0, num_workers=0)

SLEEPER = """
import time

import gymnasium as gym
import numpy as np


class Sleeper(gym.Env):
    '''Episodes of one step, which takes 2 ms; holds 16 MiB.'''

    observation_space = gym.spaces.Box(0, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.ballast = np.ones(2**21)

    def reset(self, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        time.sleep(0.002)
        return np.zeros(2, np.float32), 0.0, True, False, {}


gym.register("Sleeper-v0", Sleeper)
"""


@pytest.fixture
def sleeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The id of an environment that also other processes find."""
    (tmp_path / "sleeper_envs.py").write_text(SLEEPER)
    monkeypatch.syspath_prepend(tmp_path)
    yield "sleeper_envs:Sleeper-v0"
    gym.registry.pop("Sleeper-v0", None)
    sys.modules.pop("sleeper_envs", None)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(bench, "TUNE_S", 0.05)
    return tmp_path / "cache" / "flotilla" / "autotune.json"


# What is measured -----------------------------------------------------------------------------------------------


def test_one_environment(sleeper: str) -> None:
    found = profile(sleeper, EnvOptions(), seconds=0.3)
    assert 2_000 <= found.step_mean_us <= found.step_max_us
    assert found.reset_mean_us < found.step_mean_us
    assert 0 < found.reset_share < 0.5
    assert found.cpu_share < 0.5  # it sleeps
    assert 16 * MIB <= found.env_bytes < 20 * MIB
    assert found.process_bytes > found.env_bytes


def test_frames_and_the_processor_of_one_environment() -> None:
    found = profile("PongNoFrameskip-v4", EnvOptions(), seconds=0.3)
    assert found.frames_per_step == 4
    assert 0.5 < found.cpu_share < 1.5


@pytest.mark.parametrize("backend", ["sync", "workers"])
def test_the_ignored_step_after_an_episode_does_not_count(backend: Any, sleeper: str) -> None:
    """Every second step of the sleeper is a reset, which costs nothing: counted, it would double the rate."""
    config = RunConfig(env_id=sleeper, num_envs=1, num_workers=1 if backend == "workers" else 0, backend=backend)
    trial = autotune.measure(config, EnvOptions(), seconds=0.3)
    assert 100 < trial.env_steps_per_s <= 500
    assert trial.frames_per_s == trial.env_steps_per_s


def test_workers_sleep_at_the_same_time(sleeper: str) -> None:
    config = RunConfig(env_id=sleeper, num_envs=4, num_workers=4, backend="workers")
    assert autotune.measure(config, EnvOptions(), seconds=0.5).env_steps_per_s > 600


# What is proposed and chosen ------------------------------------------------------------------------------------


def numbers(config: RunConfig, machine: Machine, one: Profile, *backends: str) -> list[list[tuple[int, int]]]:
    return [
        [(tried.num_envs, tried.num_workers) for tried in way]
        for way in autotune.proposals(config, machine, one, backends)
    ]


@pytest.mark.parametrize(
    ("cores", "counts"), [(1, [4, 8, 16]), (2, [8, 16, 32]), (6, [16, 32, 64]), (64, [256, 512, 1024])]
)
def test_powers_of_two_from_four_a_core_on(cores: int, counts: list[int]) -> None:
    machine = replace(MACHINE, cores=cores, free_bytes=64 * GIB)
    assert numbers(FREE, machine, ONE, "sync") == [[(count, 0) for count in counts]]
    assert numbers(FREE, machine, ONE, "workers") == [[(count, min(cores, count)) for count in counts]]


def test_numbers_that_are_given_stay() -> None:
    assert numbers(replace(FREE, num_envs=6), MACHINE, ONE, "sync", "workers") == [[(6, 0)], [(6, 2)]]
    assert numbers(replace(FREE, num_workers=12), MACHINE, ONE, "workers") == [[(16, 12), (32, 12)]]
    assert numbers(replace(FREE, num_envs=1), MACHINE, ONE, "workers") == [[(1, 1)]]


def test_an_environment_that_waits_gets_more_workers_than_cores() -> None:
    waiting = replace(ONE, cpu_share=0.1)
    assert numbers(replace(FREE, num_envs=32), MACHINE, waiting, "sync", "workers") == [
        [(32, 0)],
        [(32, 2)],
        [(32, 20)],
    ]


@pytest.mark.parametrize(("free_gib", "counts"), [(7.0, [8]), (2.5, [2]), (1.5, [1])])
def test_memory_bounds_the_number(free_gib: float, counts: list[int]) -> None:
    heavy = replace(ONE, env_bytes=GIB // 3, process_bytes=GIB // 3)
    machine = replace(MACHINE, free_bytes=int(free_gib * GIB))
    assert numbers(FREE, machine, heavy, "sync") == [[(count, 0) for count in counts]]


def test_nothing_that_fits_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"no environment fits into half of the free memory, 4\.0 GiB"):
        autotune.proposals(FREE, MACHINE, replace(ONE, env_bytes=3 * GIB), ["sync"])


def trial(backend: str, num_envs: int, rate: float) -> Trial:
    return Trial(backend, "CartPole-v1", num_envs, 0, rate, rate)


def test_the_fewest_environments_that_are_nearly_as_fast() -> None:
    found = [trial("a", 8, 95.0), trial("a", 16, 100.0), trial("b", 8, 97.0), trial("b", 4, 50.0)]
    assert autotune.fastest(found) == found[2]
    assert autotune.fastest(found[:1]) == found[0]


def test_more_environments_are_tried_only_while_they_gain(sleeper: str) -> None:
    """One after another they sleep: twice as many are no faster."""
    config = RunConfig(env_id=sleeper, backend="sync")
    way = [replace(config, num_envs=count) for count in (1, 2, 4)]
    told: list[str] = []
    found = list(autotune.trials([way], EnvOptions(), 0.1, told.append, None))
    assert [one.num_envs for one in found] == [1, 2]
    assert told == ["measuring sync with 1 environments", "measuring sync with 2 environments"]


def test_what_cannot_be_is_skipped_or_an_error() -> None:
    way = [RunConfig(backend="ale", num_envs=2)]
    skipped: list[str] = []
    assert list(autotune.trials([way], EnvOptions(), 0.1, lambda text: None, skipped.append)) == []
    assert skipped == ["skipped ale: backend 'ale' steps Atari only, not 'CartPole-v1'; use --backend sync"]
    with pytest.raises(UsageError, match="steps Atari only"):
        list(autotune.trials([way], EnvOptions(), 0.1, lambda text: None, None))


# What is remembered ---------------------------------------------------------------------------------------------


def test_an_equal_question_has_the_same_answer(cache: Path) -> None:
    assert autotune.recall(FREE, MACHINE) is None
    for config, rate in ((FREE, 1.0), (replace(FREE, env_id="Acrobot-v1"), 2.0), (FREE, 3.0)):
        autotune.remember(config, MACHINE, trial("sync", 8, rate), ONE)
    found = autotune.recall(replace(FREE, seed=7, total_timesteps=5), MACHINE)
    assert found is not None
    assert found[0] == trial("sync", 8, 3.0)
    assert len(json.loads(cache.read_text())) == len(autotune.stored(MACHINE)) == 2
    assert [file.name for file in cache.parent.iterdir()] == [cache.name]


@pytest.mark.parametrize(
    "change", [{"env_id": "Acrobot-v1"}, {"backend": "sync"}, {"num_envs": 8}, {"num_workers": 2}, {"image_size": 32}]
)
def test_another_question_is_measured(change: dict[str, Any]) -> None:
    autotune.remember(FREE, MACHINE, trial("sync", 8, 1.0), ONE)
    assert autotune.recall(replace(FREE, **change), MACHINE) is None


@pytest.mark.parametrize("change", [{"cpu": "another"}, {"cores": 3}, {"memory_bytes": GIB}, {"free_bytes": 64 * MIB}])
def test_another_machine_is_measured(change: dict[str, Any]) -> None:
    """The last has the same memory, but less of it is free than the choice needs."""
    autotune.remember(FREE, MACHINE, trial("sync", 8, 1.0), ONE)
    assert autotune.recall(FREE, MACHINE) is not None
    assert autotune.recall(FREE, replace(MACHINE, **change)) is None


def test_another_version_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    autotune.remember(FREE, MACHINE, trial("sync", 8, 1.0), ONE)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "99")
    assert autotune.recall(FREE, MACHINE) is None


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": 1}', '[{"here": 1}]', "null"])
def test_a_file_that_is_not_ours_is_replaced(text: str, cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text(text)
    assert autotune.recall(FREE, MACHINE) is None
    autotune.remember(FREE, MACHINE, trial("sync", 8, 1.0), ONE)
    assert autotune.recall(FREE, MACHINE) is not None


# On the command line --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "rest", "automatic"),
    [
        ("--num-envs auto --seed 3", "--seed 3", {"num_envs"}),
        ("--envs=auto --num_workers auto", "", {"num_envs", "num_workers"}),
        ("--num-envs auto --num-envs 4", "--num-envs 4", set()),
        ("--num-envs=4 --num_envs=auto", "--num-envs=4", {"num_envs"}),
        ("--run-dir auto --num-envs", "--run-dir auto --num-envs", set()),
    ],
)
def test_the_word_auto(typed: str, rest: str, automatic: set[str]) -> None:
    found, names = without_auto(typed.split())
    assert names == automatic
    assert " ".join(found).replace("--num-envs 4", "--num-envs=4") == rest.replace("--num-envs 4", "--num-envs=4")


def test_auto_becomes_plain_numbers_and_is_remembered(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    flags = "train ppo --env-id CartPole-v1 --backend sync --num-envs auto --num-workers auto --eval-episodes 1"
    typed = [*flags.split(), "--total-timesteps", "1024", "--dashboard", "none", "--run-dir", str(run)]
    assert cli.main(typed) == EXIT_DONE
    said = capsys.readouterr().out
    assert "steps/s" in said
    assert f"(kept in {cache})" in said
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["num_envs"] in {2**exponent for exponent in range(12)}
    assert (config["num_workers"], config["backend"]) == (0, "sync")

    assert cli.main(["describe", *typed[1:-2], "--json"]) == EXIT_DONE
    output = capsys.readouterr()
    assert json.loads(output.out)["config"]["num_envs"] == config["num_envs"]
    assert f"environments: {autotune.stored(bench.machine())[0]['choice']['env_steps_per_s']:,.0f}" in output.err
    assert f"; {cache})" in output.err
    assert "frames/s" not in output.err  # no table: nothing was measured


def test_auto_may_choose_any_backend(capsys: pytest.CaptureFixture[str]) -> None:
    typed = "--env-id CartPole-v1 --num-envs 4 --num-workers auto --json"
    assert cli.main(["describe", "ppo", *typed.split()]) == EXIT_DONE
    output = capsys.readouterr()
    assert json.loads(output.out)["config"]["backend"] in autotune.BACKENDS
    assert json.loads(output.out)["config"]["num_envs"] == 4
    assert "skipped ale: " in output.err
    assert {"sync", "workers", "envpool"} <= set(output.err.split())


def test_a_number_of_workers_asks_for_the_backend_that_has_them(capsys: pytest.CaptureFixture[str]) -> None:
    typed = "--env-id CartPole-v1 --num-envs auto --num-workers 1 --json"
    assert cli.main(["describe", "ppo", *typed.split()]) == EXIT_DONE
    config = json.loads(capsys.readouterr().out)["config"]
    assert (config["backend"], config["num_workers"]) == ("workers", 1)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--num-envs 0 --num-workers auto", "num_envs=0 is out of range; choose 1 or more"),
        ("--num-envs automatic", "'automatic' is not a whole number"),
        ("--seed auto", "'auto' is not a whole number"),
        ("--num-envs auto --backend ale", "steps Atari only"),
        ("--num-envs auto --env-id CartPoll-v1", "unknown environment 'CartPoll-v1'"),
    ],
)
def test_mistakes(typed: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "ppo", "--preset", "none", *typed.split()]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_ranks_must_not_choose_for_themselves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["describe", "ppo", "--num-envs", "auto"]) == EXIT_USAGE
    assert "auto is not for several ranks" in capsys.readouterr().err


def test_a_cache_that_cannot_be_written_costs_nothing_but_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cli.main(["describe", "ppo", "--num-envs", "auto", "--backend", "sync"]) == EXIT_DONE
    assert "(not kept: " in capsys.readouterr().out
