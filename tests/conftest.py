"""What the tests share: one thread, hypothesis without memory of its own, and agents trained in this process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # of the programs that tests start, too

import torch
from hypothesis import settings

from flotilla.core.config import RunConfig
from flotilla.core.names import ALGORITHMS, load
from flotilla.run import Run

Train = Callable[..., Any]

settings.register_profile("suite", database=None, deadline=None, derandomize=True)
settings.load_profile("suite")


@pytest.fixture(autouse=True, scope="session")
def _cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What autotune measures here is not for this user's runs, nor the other way round."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """A run sets the number of threads for the whole process."""
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def no_hang() -> Iterator[None]:
    """A test that waits for ever fails."""
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it hangs"))
    signal.alarm(120)
    yield
    signal.alarm(0)


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """`train(algorithm, env_id, **values)`: the agent after training; values are fields of RunConfig or its Config.

    Without a `run_dir` of its own a run is written below the test's directory.
    """
    runs = 0

    def train(algorithm: str, env_id: str, **values: Any) -> Any:
        nonlocal runs
        runs += 1
        names = {field.name for field in fields(RunConfig)}
        defaults: dict[str, Any] = {
            "run_dir": str(tmp_path / f"run{runs}"),
            "device": "cpu",
            "threads": 1,
            "backend": "sync",
            "dashboard": "none",
            "eval_episodes": 1,
        }
        module = load("algorithm", ALGORITHMS, algorithm)
        of_run = {name: value for name, value in values.items() if name in names}
        config = module.Config(**{name: value for name, value in values.items() if name not in names})
        run = Run(algorithm, RunConfig(env_id=env_id, **defaults | of_run), config, {})
        try:
            return module.train(config, run)
        finally:
            run.close("failed")  # says nothing where the run has ended by itself

    return train


@pytest.fixture
def train_ppo(train: Train) -> Train:
    """`train_ppo(env_id, **values)`: `train` of PPO."""
    return partial(train, "ppo")
