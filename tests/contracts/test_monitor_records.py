"""Metrics: each kind's reduction against a plain list, bounded memory, and a line in the documentation for each key."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch

from flotilla.core.errors import UsageError
from flotilla.core.types import Episode
from flotilla.monitor import records
from flotilla.monitor.meters import EnvState, Rates
from flotilla.monitor.records import METRICS, Aggregator, Metric

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
REDUCE = {"mean": lambda x: sum(x) / len(x), "sum": sum, "max": max, "last": lambda x: x[-1]}


@pytest.mark.parametrize("as_tensor", [True, False])
@pytest.mark.parametrize("calls", [1, 63, 64, 65, 300])
def test_each_kind_reduces_like_a_list(monkeypatch: pytest.MonkeyPatch, calls: int, as_tensor: bool) -> None:
    kinds = ("mean", "sum", "max", "last")
    monkeypatch.setattr(records, "METRICS", {kind: Metric(kind, "1", "") for kind in kinds})
    values = [{kind: random.Random(i).uniform(-9, -1) for kind in kinds} for i in range(calls)]
    aggregator = Aggregator()
    for value in values:
        aggregator.add({key: torch.tensor(x) if as_tensor else x for key, x in value.items()})
    fetched = aggregator.fetch()
    for kind in kinds:
        assert fetched[kind] == pytest.approx(REDUCE[kind]([value[kind] for value in values]), rel=1e-5)
    assert aggregator.fetch() == {}


def test_keys_may_come_in_different_company() -> None:
    aggregator = Aggregator()
    aggregator.add({"losses/entropy": torch.tensor(1.0), "losses/explained_variance": torch.tensor(0.1)})
    aggregator.add({"losses/entropy": torch.tensor(2.0)})
    aggregator.add({"losses/explained_variance": 0.3, "losses/entropy": 6.0})
    aggregator.add({"losses/entropy": torch.tensor(3.0), "losses/skipped_steps": torch.tensor(True)})
    assert aggregator.fetch() == {
        "losses/entropy": 3.0,
        "losses/explained_variance": 0.3,
        "losses/skipped_steps": 1.0,
    }


def test_a_value_is_that_of_the_moment_it_was_added() -> None:
    aggregator = Aggregator()
    loss = torch.tensor(1.0)
    for _ in range(3):
        aggregator.add({"losses/value_loss": loss})
        loss += 1  # as a graphed loss does: the same memory, the next value
    assert aggregator.fetch() == {"losses/value_loss": 2.0}


def test_nan_is_not_averaged_away() -> None:
    aggregator = Aggregator()
    for x in (1.0, math.nan, 2.0):
        aggregator.add({"losses/value_loss": torch.tensor(x)})
    assert math.isnan(aggregator.fetch()["losses/value_loss"])


def test_memory_and_graph_do_not_grow() -> None:
    aggregator = Aggregator()
    weight = torch.ones((), requires_grad=True)
    for _ in range(1000):
        aggregator.add({"losses/value_loss": weight * 2})
    (group,) = aggregator._groups.values()
    assert len(group._waiting) < records.FOLD_AT
    assert not group.fold().requires_grad


def test_an_undeclared_key_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="unknown metric 'losses/polcy_loss': did you mean losses/policy_loss"):
        Aggregator().add({"losses/polcy_loss": 0.0})


def test_every_metric_has_its_line_in_the_documentation() -> None:
    lines = {line for line in DOCS.read_text().splitlines() if line.startswith("| `")}
    declared = {
        f"| `{key}` | {metric.kind} | {metric.unit} | {metric.text.replace('|', chr(92) + '|')} |"
        for key, metric in METRICS.items()
    }
    assert lines == declared


def test_rates_are_of_the_window_and_not_of_the_whole_run() -> None:
    rates = Rates()
    assert rates.env_steps_per_s is None
    steps, learning = 0, 0.0
    for second in range(100):  # 10 steps/s, and from the 80th second on 50 steps/s
        rates.add(float(second), steps, {"env": second / 4, "learning": learning})
        steps += 10 if second < 80 else 50
        learning += 0.0 if second < 80 else 0.5
    assert rates.env_steps_per_s == pytest.approx(50)
    assert rates.shares == pytest.approx({"env": 0.25, "inference": 0, "learning": 0.5, "waiting": 0, "other": 0.25})


def test_a_slow_iteration_still_has_a_rate() -> None:
    rates = Rates()
    for minute in range(4):
        rates.add(60.0 * minute, 600 * minute, {})
    assert rates.env_steps_per_s == pytest.approx(10)


def test_an_environment_has_its_own_rate() -> None:
    env = EnvState()
    for episode in range(1, 31):  # 20 steps in 2 s, later in 1 s
        now_s = 2.0 * episode if episode <= 10 else 20.0 + episode - 10
        env.add(now_s, Episode(0, float(episode), 20, 0))
    assert (env.episodes, env.last_return) == (30, 30.0)
    assert env.steps_per_s == pytest.approx(20)
