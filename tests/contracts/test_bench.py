"""`bench sampling`: every backend that can, counted alike; one JSON object a line; the choice is what `auto` takes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gymnasium.spaces import MultiDiscrete

from flotilla import bench, cli
from flotilla.core.config import RunConfig
from flotilla.core.errors import EXIT_DONE, EXIT_USAGE
from flotilla.envs.make import EnvOptions

KEYS = {"backend", "env_id", "num_envs", "num_workers", "env_steps_per_s", "frames_per_s"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "flotilla" / "autotune.json"


def benched(capsys: pytest.CaptureFixture[str], typed: str) -> tuple[list[dict[str, Any]], str]:
    """The objects on stdout, and stderr."""
    capsys.readouterr()
    assert cli.main(["bench", "sampling", "--json", "--seconds", "0.2", *typed.split()]) == EXIT_DONE
    output = capsys.readouterr()
    return [json.loads(line) for line in output.out.splitlines()], output.err


def test_every_backend_that_can(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    rows, told = benched(capsys, "--env-id CartPole-v1 --num-envs 4 --num-workers auto")
    assert [row["backend"] for row in rows] == ["sync", "workers", "envpool", "gymnasium-sync", "gymnasium-async"]
    for row in rows:
        assert set(row) >= KEYS
        assert (row["env_id"], row["num_envs"]) == ("CartPole-v1", 4)
        assert row["env_steps_per_s"] == row["frames_per_s"] > 100
    workers = {row["backend"]: row["num_workers"] for row in rows}
    assert 1 <= workers.pop("workers") <= 4
    assert workers == {"sync": 0, "envpool": 0, "gymnasium-sync": 0, "gymnasium-async": 4}
    assert "skipped ale: backend 'ale' steps Atari only" in told
    assert "2 to 4 environments per core" in told
    assert "vs Async" in told
    choice = max(rows[:3], key=lambda row: float(row["env_steps_per_s"]))
    assert f"choice: {choice['backend']}, 4 environments" in told

    # The next run that asks takes it without measuring.
    flags = "describe ppo --preset none --env-id CartPole-v1 --num-envs 4 --num-workers auto --json"
    assert cli.main(flags.split()) == EXIT_DONE
    output = capsys.readouterr()
    config = json.loads(output.out)["config"]
    assert (config["backend"], config["num_workers"]) == (choice["backend"], choice["num_workers"])
    assert f"; {cache})" in output.err


def test_named_backends_only_with_frames(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    rows, told = benched(capsys, "--env-id PongNoFrameskip-v4 --num-envs 2 --backends ale,gymnasium-sync")
    assert [row["backend"] for row in rows] == ["ale", "gymnasium-sync"]
    for row in rows:
        assert row["frames_per_s"] == pytest.approx(4 * row["env_steps_per_s"], rel=1e-3)
    assert not cache.exists()  # not everything had its chance
    assert "choice: ale" in told


def test_several_numbers_are_tried_where_none_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    rows, _ = benched(capsys, "--env-id CartPole-v1 --backends sync,gymnasium-sync")
    *ours, gymnasium = rows
    assert len({row["num_envs"] for row in ours}) == len(ours) > 1
    assert gymnasium["num_envs"] in {row["num_envs"] for row in ours}


def test_options_reach_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    rows, _ = benched(capsys, "--env-id dmc_cartpole_swingup --action-repeat 4 --num-envs 1 --backends sync")
    assert rows[0]["frames_per_s"] == pytest.approx(4 * rows[0]["env_steps_per_s"], rel=1e-3)


def test_the_number_of_workers(capsys: pytest.CaptureFixture[str]) -> None:
    rows, _ = benched(capsys, "--env-id CartPole-v1 --num-envs 5 --num-workers 3 --backends workers")
    assert (rows[0]["num_envs"], rows[0]["num_workers"]) == (5, 3)


def test_tables_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "bench sampling --env-id CartPole-v1 --num-envs 2 --seconds 0.1 --backends sync,gymnasium-async"
    assert cli.main(flags.split()) == EXIT_DONE
    output = capsys.readouterr()
    assert output.err == ""
    for words in ("step ", "reset ", "memory ", "frames per step", "rule of thumb", "steps/s", "1.00x", "choice: sync"):
        assert words in output.out


def test_gymnasium_does_not_sample_actions_while_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its measure calls `sample` of the action space, which for many environments costs as much as their steps."""
    sampled = []
    sample = MultiDiscrete.sample

    def counted(space: MultiDiscrete, *arguments: Any, **options: Any) -> Any:
        sampled.append(space)
        return sample(space, *arguments, **options)

    monkeypatch.setattr(MultiDiscrete, "sample", counted)
    config: Any = RunConfig(num_envs=2, backend="gymnasium-sync")  # type: ignore[arg-type]
    with bench._gymnasium(config, EnvOptions()) as rate:
        assert rate(0.2) * 0.2 > 2 * len(sampled)


def test_backends_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what else the machine does falls on all of them."""
    turns: list[str] = []

    def noting(name: str) -> Callable[..., Any]:
        door = getattr(bench, name) if name == "_gymnasium" else bench.autotune.opened

        @contextlib.contextmanager
        def opened(config: RunConfig, options: EnvOptions) -> Iterator[Callable[[float], float]]:
            with door(config, options) as rate:
                yield lambda seconds: (turns.append(config.backend), rate(seconds))[1]

        return opened

    monkeypatch.setattr(bench.autotune, "opened", noting("opened"))
    monkeypatch.setattr(bench, "_gymnasium", noting("_gymnasium"))
    names = ["sync", "workers", "gymnasium-sync"]
    sampling = bench.Sampling(RunConfig(num_envs=2), names, 0.1)
    sampling.alone(lambda text: None)
    assert [trial.backend for trial in sampling.trials(lambda text: None, lambda text: None)] == names
    assert turns == names * 3


def test_a_gymnasium_without_the_measure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delattr("gymnasium.utils.performance.benchmark_vector_step")
    rows, told = benched(capsys, "--env-id CartPole-v1 --num-envs 2")
    assert {row["backend"] for row in rows} >= {"sync", "workers"}
    assert not any("gymnasium" in row["backend"] for row in rows)
    assert "skipped gymnasium-async: backend 'gymnasium-async' needs gymnasium 1.4 or newer" in told
    flags = "bench sampling --env-id CartPole-v1 --num-envs 2 --backends gymnasium-sync"
    assert cli.main(flags.split()) == EXIT_USAGE


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("", "bench '' is unknown (flotilla bench sampling --env-id ID"),
        ("learning", "bench 'learning' is unknown"),
        ("sampling", "Missing from flotilla bench sampling: --env-id"),
        ("sampling --env-id CartPoll-v1", "unknown environment 'CartPoll-v1': did you mean CartPole-v1"),
        ("sampling --env-id CartPole-v1 --seconds 0", "--seconds 0 measures nothing (give 1 or more)"),
        ("sampling --env-id CartPole-v1 --seconds nan", "--seconds nan measures nothing"),
        ("sampling --env-id CartPole-v1 --num-envs 0", "num_envs=0 is out of range; choose 1 or more"),
        ("sampling --env-id CartPole-v1 --num-workers -1", "num_workers=-1 is out of range; choose 0 or more"),
        ("sampling --env-id CartPole-v1 --backends sync,envpol", "unknown backend 'envpol': did you mean envpool?"),
        ("sampling --env-id CartPole-v1 --backends sync,", "unknown backend ''"),
        ("sampling --env-id CartPole-v1 --backends gymnasium-sync", "num_envs=auto needs one of Flotilla's backends"),
        ("sampling --env-id CartPole-v1 --num-envs 2 --backends ale", "backend 'ale' steps Atari only"),
        ("sampling --env-id CartPole-v1 --obs-type pixels", "obs_type 'pixels'"),
        ("sampling --env CartPole-v1", "unknown flag '--env' (did you mean --"),
    ],
)
def test_a_mistake_is_one_line(typed: str, said: str, capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    assert cli.main(["bench", *typed.split()]) == EXIT_USAGE
    output = capsys.readouterr()
    assert output.err.startswith("flotilla: ")
    assert output.err.count("\n") == 1
    assert said in output.err
    assert output.out == ""
    assert not cache.exists()
