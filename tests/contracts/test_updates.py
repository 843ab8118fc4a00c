"""Gradient steps are what environment steps are worth, whatever the number of environments; the replay of a run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flotilla.core.config import RunConfig
from flotilla.core.errors import UsageError
from flotilla.core.types import Row, State
from flotilla.run import Run

Train = Callable[..., Any]


@dataclass(frozen=True)
class Learning:
    """What one iteration had: steps that counted, of all since the run began, and the numbers of its updates."""

    env_steps: int
    updates: list[int]


class Idle(nn.Module):
    """Acts by choosing 0."""

    def act(self, row: Row, state: State) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        count = len(row.reward)
        return torch.zeros(count, dtype=torch.int64), torch.zeros(count, 0), {}


def learn(
    run_dir: Path, steps: int, num_envs: int, count: int, every: int, after: int, so_far: int = 0
) -> list[Learning]:
    """A run that only counts.  Steps are counted from what arrives, without the run's own count."""
    config = RunConfig(
        env_id="probe/Counter-v0",
        num_envs=num_envs,
        total_timesteps=steps,
        run_dir=str(run_dir),
        backend="sync",
        device="cpu",
        dashboard="none",
        eval_episodes=1,
    )
    run = Run("sac", config, config, {})

    def iterations() -> Iterator[Learning]:
        agent, done = Idle(), so_far
        run.state(agent=agent)
        for _ in run.ticks():
            roll = run.sampler.rollout(agent.act, max(1, every // num_envs))
            done += int((~roll.rows.is_last[:-1]).sum())
            yield Learning(done, list(run.updates(count, every=every, after=after)))

    try:
        return list(iterations())
    finally:
        run.close("failed")


@pytest.mark.parametrize("num_envs", [1, 3, 8])
@pytest.mark.parametrize(("count", "every"), [(1, 1), (2, 1), (-1, 1), (1, 4), (2, 4), (-1, 4), (3, 10)])
@pytest.mark.parametrize("after", [0, 30])
def test_updates_are_what_the_steps_are_worth(
    tmp_path: Path, num_envs: int, count: int, every: int, after: int
) -> None:
    """After every iteration; steps that are ignored after an episode's end are worth nothing."""
    numbers: list[int] = []
    for iteration in learn(tmp_path / "run", 120, num_envs, count, every, after):
        numbers += iteration.updates
        steps = max(0, iteration.env_steps - after)
        assert len(numbers) == (steps if count < 0 else steps * count // every)
    assert numbers == list(range(1, len(numbers) + 1))
    assert iteration.env_steps >= 120


@pytest.mark.parametrize(("count", "every"), [(1, 4), (3, 10), (-1, 1)])
def test_a_part_of_an_update_survives_an_end(tmp_path: Path, count: int, every: int) -> None:
    through = learn(tmp_path / "through", 200, 3, count, every, 20)
    parts: list[Learning] = []
    for steps in (50, 51, 90, 133, 200):  # on through one directory
        so_far = parts[-1].env_steps if parts else 0
        parts += learn(tmp_path / "parts", steps, 3, count, every, 20, so_far)
    assert parts == through


# The replay of a run --------------------------------------------------------------------------------------------------

SHORT: dict[str, Any] = {
    "num_envs": 2,
    "total_timesteps": 80,
    "learning_starts": 20,
    "batch_size": 8,
    "buffer_size": 40,
    "hidden_sizes": (8,),
}


def weights(agent: nn.Module) -> list[Any]:
    return [x.tolist() for x in agent.state_dict().values()]


@pytest.mark.parametrize("name", ["ddpg", "td3", "sac"])
def test_where_a_replay_lies_changes_nothing(train: Train, name: str) -> None:
    first, *others = (
        weights(train(name, "Pendulum-v1", **SHORT, buffer_storage=storage)) for storage in ("ram", "disk", "device")
    )
    assert others == [first, first]
    assert weights(train(name, "Pendulum-v1", **SHORT, seed=2)) != first


def test_a_replay_on_disk_leaves_no_file(train: Train, tmp_path: Path) -> None:
    for storage in ("ram", "disk"):
        train("sac", "Pendulum-v1", **SHORT, buffer_storage=storage, run_dir=str(tmp_path / storage))
    ram, disk = (
        {path.name for path in (tmp_path / storage).rglob("*") if "tfevents" not in path.name}
        for storage in ("ram", "disk")
    )
    assert ram == disk
    assert {path.name for path in tmp_path.iterdir()} == {"ram", "disk"}


@pytest.mark.parametrize("storage", ["ram", "disk"])
def test_a_replay_that_is_too_large_names_the_largest_that_fits(train: Train, tmp_path: Path, storage: str) -> None:
    values = SHORT | {"buffer_storage": storage, "buffer_bytes": 700}
    with pytest.raises(UsageError, match=r"a replay of 40 rows needs \d+ bytes .* the budget is 700") as caught:
        train("sac", "Pendulum-v1", **values)
    assert not list(tmp_path.iterdir()), "no half-made run"
    found = re.search(r"use a buffer of (\d+) rows at most", str(caught.value))
    assert found
    fits = int(found[1])
    train("sac", "Pendulum-v1", **values | {"buffer_size": fits})
    with pytest.raises(UsageError, match=f"use a buffer of {fits} rows at most"):
        train("sac", "Pendulum-v1", **values | {"buffer_size": fits + 2})


def test_a_replay_is_no_larger_than_its_run(train: Train) -> None:
    """A million transitions of a run of 80 steps are not asked for."""
    train("sac", "Pendulum-v1", **SHORT | {"buffer_size": 10**9, "buffer_bytes": 10_000})
