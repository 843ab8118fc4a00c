"""The named equations against slow definitions in float64, over random patterns of episode ends."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from flotilla.core.types import Row
from flotilla.functional import balanced, discounted_sum, explained_variance, gae, standardize, weighted_mean

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

SHAPES = st.tuples(st.integers(2, 12), st.integers(1, 3))
DISCOUNTS = st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0])


def alone(x: torch.Tensor) -> torch.Tensor:
    """The mean over one rank."""
    return x


@st.composite
def episodes(draw: st.DrawFn) -> tuple[Floats, Floats, Flags, Flags]:
    """Rewards, values, is_last and is_terminal of T + 1 rows of N environments, as the row contract allows."""
    shape = draw(SHAPES)
    is_last = draw(arrays.arrays(bool, shape))
    is_terminal = is_last & draw(arrays.arrays(bool, shape))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    reward, value = rng.normal(size=shape), 3 * rng.normal(size=shape)
    reward[1:][is_last[:-1]] = 0
    return reward, value, is_last, is_terminal


def rows(reward: Floats, is_last: Flags, is_terminal: Flags) -> Row:
    is_first = np.vstack([np.zeros_like(is_last[:1]), is_last[:-1]])
    flags = (torch.from_numpy(flag) for flag in (is_first, is_last, is_terminal))
    return Row(torch.zeros(*reward.shape, 1), torch.tensor(reward, dtype=torch.float32), *flags)


def slow_gae(
    reward: Floats, value: Floats, is_last: Flags, is_terminal: Flags, gamma: float, gae_lambda: float
) -> Floats:
    """The lambda-weighted mean of all n-step returns, minus the value, written out for each action of an episode."""
    adv = np.zeros_like(reward[:-1])
    for t, n in np.ndindex(*adv.shape):
        if is_last[t, n]:
            continue  # its action was ignored
        returns, rewards = [], 0.0
        for steps, k in enumerate(range(t + 1, len(reward)), start=1):
            rewards += gamma ** (steps - 1) * reward[k, n]
            returns.append(rewards + gamma**steps * (0.0 if is_terminal[k, n] else value[k, n]))
            if is_last[k, n]:
                break
        shorter = sum((1 - gae_lambda) * gae_lambda**i * x for i, x in enumerate(returns[:-1]))
        adv[t, n] = shorter + gae_lambda ** (len(returns) - 1) * returns[-1] - value[t, n]
    return adv


@given(episodes(), DISCOUNTS, DISCOUNTS)
def test_gae_is_the_mean_of_n_step_returns(
    data: tuple[Floats, Floats, Flags, Flags], gamma: float, gae_lambda: float
) -> None:
    reward, value, is_last, is_terminal = data
    adv = gae(rows(reward, is_last, is_terminal), torch.tensor(value, dtype=torch.float32), gamma, gae_lambda)
    np.testing.assert_allclose(adv, slow_gae(*data, gamma, gae_lambda), atol=1e-4)


def test_gae_by_hand() -> None:
    """Rewards 1, 2, 4 with values 10, 20, 30, 40; gamma 1/2, lambda 1/2."""
    reward, value = np.array([[0.0], [1], [2], [4]]), torch.tensor([[10.0], [20], [30], [40]])

    def adv(last: list[int], terminal: list[int]) -> list[float]:
        is_last, is_terminal = (np.array([[t in chosen] for t in range(4)]) for chosen in (last, terminal))
        return gae(rows(reward, is_last, is_terminal), value, 0.5, 0.5).squeeze(1).tolist()

    # delta: 1 + 10 - 10 = 1, 2 + 15 - 20 = -3, 4 + 20 - 30 = -6; decay 1/4.
    assert adv([], []) == [1 - 3 / 4 - 6 / 16, -3 - 6 / 4, -6]
    assert adv([3], []) == adv([], []), "a time limit at the end is bootstrapped"
    assert adv([3], [3]) == [1 - 3 / 4 - 26 / 16, -3 - 26 / 4, -26], "a terminal value counts as 0"
    assert adv([1], []) == [1, 0, -6], "no trace crosses an end, and the ignored action has no advantage"
    assert adv([1], [1]) == [-9, 0, -6]


@given(episodes(), DISCOUNTS)
def test_discounted_sum_is_a_loop(data: tuple[Floats, Floats, Flags, Flags], gamma: float) -> None:
    reward, _, is_last, is_terminal = data
    row = rows(reward, is_last, is_terminal)
    start = np.arange(1.0, reward.shape[1] + 1)
    expected, total = np.zeros_like(reward[1:]), start.copy()
    for t, n in np.ndindex(*expected.shape):
        if is_last[t, n]:
            total[n] = 0.0
        total[n] = reward[t + 1, n] + gamma * total[n]
        expected[t, n] = total[n]
    start_N = torch.tensor(start, dtype=torch.float32)
    found = discounted_sum(row.reward, row.is_first, start_N, gamma)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert start_N.tolist() == start.tolist(), "the argument is not written to"


@given(arrays.arrays(bool, st.integers(1, 40)), st.integers(0, 10_000))
def test_statistics_see_only_what_counts(mask: Flags, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, y = 5 + rng.normal(size=(2, len(mask)))
    x[~mask] = 1e3  # would be seen
    weight = balanced(torch.tensor(mask, dtype=torch.float32)[None], alone)[0]
    x_, y_ = torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)
    assert weight.mean().item() == pytest.approx(float(mask.any()), abs=1e-6)
    assert (weight[~torch.from_numpy(mask)] == 0).all()
    if mask.sum() < 3:
        return
    kept_x, kept_y = x[mask], y[mask]
    assert weighted_mean(x_, weight).item() == pytest.approx(kept_x.mean(), rel=1e-5)
    normal = standardize(x_[None], weight[None], alone)[0].numpy()[mask]
    np.testing.assert_allclose(normal, (kept_x - kept_x.mean()) / kept_x.std(), atol=1e-3)
    expected = 1 - (kept_x - kept_y).var() / kept_x.var()
    assert explained_variance(y_, x_, weight).item() == pytest.approx(expected, rel=1e-3, abs=1e-3)


def test_statistics_of_nothing_are_finite() -> None:
    none, x = balanced(torch.zeros(1, 4), alone), torch.randn(4)
    assert none.tolist() == [[0, 0, 0, 0]]
    assert torch.isfinite(standardize(torch.zeros(1, 4), none, alone)).all()
    assert explained_variance(x, x, none[0]) == 1


def test_minibatches_are_standardised_each_for_itself() -> None:
    """Of sequences (M, B, T) as of samples."""
    generator = torch.Generator().manual_seed(0)
    x = 5 + torch.randn(2, 6, 3, generator=generator, dtype=torch.float64)
    weight = (torch.rand(2, 6, 3, generator=generator) < 0.7).double()
    normal = standardize(x, balanced(weight, alone), alone)
    for m in range(2):
        kept = x[m][weight[m] > 0]
        torch.testing.assert_close(normal[m][weight[m] > 0], (kept - kept.mean()) / kept.std(correction=0))


def test_explained_variance_of_known_predictors() -> None:
    target, share = torch.tensor([1.0, 2, 3, 4]), torch.ones(4)
    assert explained_variance(target, target, share) == pytest.approx(1)
    assert explained_variance(target + 7, target, share) == pytest.approx(1), "a constant error is no variance"
    assert explained_variance(torch.zeros(4), target, share) == pytest.approx(0)
    assert explained_variance(-target, target, share) == pytest.approx(-3)
