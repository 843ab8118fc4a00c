"""The tree of sums against plain sums, its draws against the exact distribution, and weights against the formula."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest

from flotilla.sampling.priorities import FANOUT, Priorities, SumTree, importance, stratified


@given(
    size=st.sampled_from([1, 2, FANOUT - 1, FANOUT, FANOUT + 1, FANOUT**2, FANOUT**2 + 1, 9000]),
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([1.0, 1e-12, 1e12]),
)
def test_the_leaf_of_a_share_is_that_of_the_cumulative_sum(size: int, seed: int, scale: float) -> None:
    """Whole numbers, whose sums are exact: a slow search over all leaves finds the same."""
    rng = np.random.default_rng(seed)
    tree, leaves = SumTree(size), np.zeros(size)
    for _ in range(4):
        index = rng.integers(0, size, rng.integers(1, 200))
        value = rng.integers(0, 5, len(index)) * 2.0 ** np.round(np.log2(scale))
        leaves[index] = value
        tree.set(index, value)
    tree.set(np.array([size - 1]), 2.0 ** np.round(np.log2(scale)))
    leaves[-1] = tree.leaves[-1]
    np.testing.assert_array_equal(tree.leaves, leaves)
    assert tree.total == leaves.sum()
    share = np.append(rng.random(50), [0.0, 1 - 2**-53])
    np.testing.assert_array_equal(tree.find(share), np.searchsorted(np.cumsum(leaves), share * leaves.sum(), "right"))
    assert (tree.leaves[tree.find(share)] > 0).all()


def test_whatever_the_rounding_a_leaf_of_zero_is_never_found() -> None:
    rng = np.random.default_rng(1)
    tree = SumTree(5000)
    tree.set(np.arange(5000), rng.random(5000) ** 30 * (rng.random(5000) < 0.1))
    share = np.append(np.linspace(0, 1, 100_000, endpoint=False), 1 - 2.0 ** -np.arange(1, 54))
    found = tree.find(share)
    assert found.max() < 5000
    assert (tree.leaves[found] > 0).all()
    assert (np.diff(found[:100_000]) >= 0).all()


def test_the_largest_share_is_inside_in_whatever_order_a_sum_is_taken() -> None:
    rng = np.random.default_rng(6)
    above = 0
    for _ in range(100):
        leaves = rng.random(FANOUT * 3)
        tree = SumTree(len(leaves))
        tree.set(np.arange(len(leaves)), leaves)
        above += tree.total > np.cumsum(leaves.reshape(3, FANOUT).sum(1))[-1] or any(
            part.sum() > np.cumsum(part)[-1] for part in leaves.reshape(3, FANOUT)
        )
        assert tree.find(np.array([1 - 2**-53])) == len(leaves) - 1
    assert above > 10


def test_sums_stay_exact_over_many_changes() -> None:
    """As each is computed anew: adding differences would have lost the small numbers beside the large."""
    rng = np.random.default_rng(2)
    tree = SumTree(3 * FANOUT**2)
    for _ in range(500):
        index = rng.integers(0, len(tree.leaves), 32)
        tree.set(index, 10.0 ** rng.integers(-15, 16, 32))
    tree.set(np.arange(len(tree.leaves)), 1e-9)
    assert tree.total == pytest.approx(1e-9 * len(tree.leaves), rel=1e-12)
    fresh = SumTree(len(tree.leaves))
    fresh.set(np.arange(len(tree.leaves)), tree.leaves)
    assert fresh.total == tree.total


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_draws_have_the_distribution_of_the_paper(alpha: float) -> None:
    """P(i) = p_i ** alpha / sum, p_i = |error| + eps; in equal parts of the sum, which are uniform together."""
    rng = np.random.default_rng(3)
    error = rng.normal(size=500)
    rule = Priorities(alpha=alpha, eps=0.05)
    tree = SumTree(700)
    where = rng.permutation(700)[:500]
    tree.set(where, rule.of(error))
    probability = (np.abs(error) + 0.05) ** alpha
    probability /= probability.sum()
    counts = np.zeros(700)
    for _ in range(4000):
        np.add.at(counts, tree.find(stratified(rng.random(32))), 1)
    assert counts.sum() == counts[where].sum() == 4000 * 32
    assert chisquare(counts[where], probability * 4000 * 32).pvalue > 1e-3
    np.testing.assert_allclose(tree.leaves[where] / tree.total, probability, rtol=1e-12)


def test_strata() -> None:
    rng = np.random.default_rng(4)
    share = np.stack([stratified(rng.random(8)) for _ in range(500)])
    np.testing.assert_array_equal(np.floor(share * 8), np.arange(8) * np.ones((500, 1)))
    assert kstest(share.ravel(), "uniform").pvalue > 1e-3


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_importance_weights(beta: float) -> None:
    probability = np.array([0.5, 0.1, 0.001, 0.1])
    expected = [(1 / 20 / p) ** beta for p in probability]
    np.testing.assert_allclose(importance(probability, 20, beta), np.array(expected) / max(expected))
    assert importance(probability, 20, beta).max() == 1


def test_weights_make_up_for_priorities() -> None:
    """With beta 1 the weighted mean over draws is the plain mean over all leaves: what the weights are for."""
    rng = np.random.default_rng(5)
    value, tree = rng.normal(size=300) + 2, SumTree(300)
    tree.set(np.arange(300), Priorities(alpha=1.0).of(value))
    index = tree.find(stratified(rng.random(200_000)))
    weight = importance(tree.leaves[index] / tree.total, 300, 1.0)
    assert (weight * value[index]).sum() / weight.sum() == pytest.approx(value.mean(), rel=0.01)
    assert value[index].mean() > 1.1 * value.mean()
