"""Presets: every value arrives in its field with its type, the last one wins, and each mistake is named."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import pytest
import yaml

from flotilla.algorithms import ppo
from flotilla.core import presets
from flotilla.core.config import RunConfig
from flotilla.core.errors import UsageError
from flotilla.core.names import ALGORITHMS, load


@dataclass(frozen=True, kw_only=True)
class Config:
    """One field of each type that a preset can hold."""

    learning_rate: float = 1.0
    num_steps: int = 1
    anneal_lr: bool = False
    hidden_sizes: tuple[int, ...] = (1,)
    cnn: Literal["nature", "impala"] = "nature"


def apply(file: Path, text: str) -> tuple[RunConfig, Config]:
    file.write_text(text)
    return presets.apply([str(file)], "ppo", RunConfig(), Config())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "mine.yaml"


def test_every_type_is_converted(file: Path) -> None:
    run_config, config = apply(
        file,
        """
        env_id: Acrobot-v1
        total_timesteps: 1e6
        capture_video: true
        log_every_s: 2
        ppo:
          learning_rate: 3e-4
          num_steps: 2_048
          anneal_lr: true
          hidden_sizes: [256, 1e2]
          cnn: impala
        """,
    )
    expected = RunConfig(env_id="Acrobot-v1", total_timesteps=1_000_000, capture_video=True, log_every_s=2.0)
    assert run_config == expected
    assert config == Config(learning_rate=3e-4, num_steps=2048, anneal_lr=True, hidden_sizes=(256, 100), cnn="impala")
    assert type(run_config.total_timesteps) is int
    assert type(run_config.log_every_s) is float


def test_the_last_preset_wins_and_a_section_wins_over_the_top(file: Path, tmp_path: Path) -> None:
    file.write_text("num_envs: 3\nseed: 9\nnum_steps: 5\nppo: {num_steps: 6, num_envs: 4}")
    second = tmp_path / "second.yaml"
    second.write_text("num_envs: 7")
    run_config, config = presets.apply([str(file), str(second)], "ppo", RunConfig(), Config())
    assert (run_config.num_envs, run_config.seed, config.num_steps) == (7, 9, 6)
    run_config, _ = presets.apply([str(second), str(file)], "ppo", RunConfig(), Config())
    assert run_config.num_envs == 4


def test_the_config_of_a_run_repeats_it_elsewhere(file: Path) -> None:
    run_config = RunConfig(seed=5, num_envs=16, run_dir="runs/first", backend="sync")
    config = ppo.Config(learning_rate=1e-3, hidden_sizes=(32,), memory="gru")
    flat = asdict(run_config) | asdict(config) | {"hidden_sizes": [32]}
    file.write_text(yaml.safe_dump({"algorithm": "ppo", "provenance": {"git_commit": "abc"}} | flat))
    again = presets.apply([str(file)], "ppo", RunConfig(), ppo.Config())
    assert again == (replace(run_config, run_dir="auto"), config)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("learning_rat: 1", "unknown key 'learning_rat' (did you mean learning_rate?"),
        ("ppo: {num_env: 1}", "unknown key 'num_env' (did you mean num_envs"),
        ("learning_rate: fast", "learning_rate is 'fast' (needs a number)"),
        ("learning_rate: true", "learning_rate is True (needs a number)"),
        ("num_envs: 1.5", "num_envs is 1.5 (needs a whole number)"),
        ("num_envs: [1]", "num_envs is [1] (needs a whole number)"),
        ("num_steps: .inf", "num_steps is inf (needs a whole number)"),
        ("anneal_lr: 1", "anneal_lr is 1 (needs true or false)"),
        ("env_id: 3", "env_id is 3 (needs text)"),
        ("cnn: resnet", "cnn is 'resnet' (needs one of nature, impala)"),
        ("cnn: [nature]", "cnn is ['nature'] (needs one of nature, impala)"),
        ("hidden_sizes: 64", "hidden_sizes is 64 (needs a list)"),
        ("hidden_sizes: [a]", "hidden_sizes is ['a'] (needs a whole number)"),
        ("ppo: 3", "ppo is 3 (needs indented keys below it)"),
        ("algorithm: sac", "is of a run of sac"),
        ("- num_envs", "has no keys"),
        ("a: [", "cannot be read"),
    ],
)
def test_each_mistake_names_the_file_the_key_and_the_fix(file: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        apply(file, text)
    assert said in str(caught.value)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("atary", "unknown preset 'atary' (did you mean atari?)"),
        ("missing.yaml", "preset file 'missing.yaml' does not exist (shipped presets: atari, classic"),
        ("tests/", "is a directory"),
    ],
)
def test_a_preset_that_is_not_there(name: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        presets.apply([name], "ppo", RunConfig(), Config())
    assert said in str(caught.value)


def test_none_and_an_empty_file_change_nothing(file: Path) -> None:
    file.write_text("# nothing yet")
    assert presets.apply(["none", str(file)], "ppo", RunConfig(), Config()) == (RunConfig(), Config())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", presets.shipped())
def test_shipped_presets_fit_every_algorithm(name: str, algorithm: str) -> None:
    bare = load("algorithm", ALGORITHMS, algorithm).Config()
    assert presets.apply([name], algorithm, RunConfig(), bare) != (RunConfig(), bare)


def test_shipped_presets_hold_the_reference_values() -> None:
    """The figures that CleanRL and rl-starter-files publish, and which batch they make."""
    expected = {  # envs, steps, minibatches, epochs, learning rate, clip, entropy, total
        "classic": (4, 128, 4, 4, 2.5e-4, 0.2, 0.01, 500_000),
        "atari": (8, 128, 4, 4, 2.5e-4, 0.1, 0.01, 10_000_000),
        "mujoco": (1, 2048, 32, 10, 3e-4, 0.2, 0.0, 1_000_000),
        "minigrid": (16, 128, 8, 4, 1e-3, 0.2, 0.01, 1_000_000),
    }
    assert set(presets.shipped()) == {*expected, "rainbow"}
    for name, values in expected.items():
        run, how = presets.apply([name], "ppo", RunConfig(), ppo.Config())
        shape = (run.num_envs, how.num_steps, how.num_minibatches, how.update_epochs)
        assert (*shape, how.learning_rate, how.clip_coef, how.ent_coef, run.total_timesteps) == values
        assert (how.norm_obs, how.norm_reward) == ((True, True) if name == "mujoco" else (False, False))


OFF_POLICY = {  # buffer, starts, batch, environment steps between gradient steps, steps of the run
    ("classic", "dqn"): (10_000, 10_000, 128, 10, 500_000),
    ("classic", "c51"): (10_000, 10_000, 128, 10, 500_000),
    ("atari", "dqn"): (1_000_000, 80_000, 32, 4, 10_000_000),
    ("atari", "c51"): (1_000_000, 80_000, 32, 4, 10_000_000),
    ("rainbow", "c51"): (1_000_000, 20_000, 32, 4, 10_000_000),
    ("atari", "sac"): (1_000_000, 20_000, 64, 4, 5_000_000),
    ("mujoco", "sac"): (1_000_000, 5_000, 256, 1, 1_000_000),
    ("mujoco", "td3"): (1_000_000, 25_000, 256, 1, 1_000_000),
    ("mujoco", "ddpg"): (1_000_000, 25_000, 256, 1, 1_000_000),
}


@pytest.mark.parametrize(("name", "algorithm"), OFF_POLICY)
def test_the_reference_values_of_those_with_a_replay(name: str, algorithm: str) -> None:
    run, how = presets.apply([name], algorithm, RunConfig(), load("algorithm", ALGORITHMS, algorithm).Config())
    assert (run.num_envs, how.gradient_steps) == (1, 1), "counts mean the same for any number of environments"
    steps = (how.buffer_size, how.learning_starts, how.batch_size, how.train_frequency, run.total_timesteps)
    assert steps == OFF_POLICY[name, algorithm]


def test_rainbow_has_all_its_colours() -> None:
    _, how = presets.apply(["rainbow"], "c51", RunConfig(), load("algorithm", ALGORITHMS, "c51").Config())
    assert all([how.double, how.dueling, how.prioritized, how.noisy, how.n_step == 3, how.num_atoms == 51])


@pytest.mark.parametrize(
    ("suite", "name"),
    [
        ("classic", "classic"),
        ("atari", "atari"),
        ("mujoco", "mujoco"),
        ("dmc", "mujoco"),
        ("minigrid", "minigrid"),
    ],
)
def test_a_suite_has_one_preset(suite: str, name: str) -> None:
    assert presets.for_suite(suite) == name
    assert sum(suite in yaml.safe_load(file.read_text())["suites"] for file in presets.shipped().values()) == 1


def test_a_suite_without_a_preset() -> None:
    assert presets.for_suite("unheard-of") == presets.NONE


@pytest.mark.parametrize(("text", "number"), [("1e6", 1_000_000), ("500_000", 500_000), ("-3", -3), (7.0, 7)])
def test_whole_numbers(text: object, number: int) -> None:
    assert presets.whole_number(text) == number


@pytest.mark.parametrize("text", ["1.5", "nan", "inf", "x", "", 2.5, float("nan")])
def test_what_is_no_whole_number(text: object) -> None:
    with pytest.raises(ValueError, match="is not a whole number"):
        presets.whole_number(text)
