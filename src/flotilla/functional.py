"""Named equations that algorithms share, as functions from tensors to tensors; no modules, no state.

Shape legend: T steps, N environments; suffix 1 as in T1 means T + 1 rows of arrivals.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flotilla.core.types import Row


def gae(rows: Row, value_T1N: Tensor, gamma: float, gae_lambda: float) -> Tensor:
    """Generalised advantage estimates (T, N) of the actions at rows 0 .. T-1 (Schulman et al. 2016, eq. 16).

    `value_T1N` are the values of all T + 1 rows.  A terminal row's value counts as 0; at a time limit the
    value of the last observation is bootstrapped; no trace crosses `is_last`.  Where row t is itself the last
    of an episode its action was ignored and the estimate is 0.
    """
    not_terminal_TN = (~rows.is_terminal[1:]).float()
    decay_TN = (gamma * gae_lambda) * (~rows.is_last[1:]).float()
    delta_TN = rows.reward[1:] + gamma * not_terminal_TN * value_T1N[1:] - value_T1N[:-1]
    adv_TN = torch.empty_like(delta_TN)
    trace_N = torch.zeros_like(delta_TN[0])
    for t in range(len(delta_TN) - 1, -1, -1):
        trace_N = torch.addcmul(delta_TN[t], decay_TN[t], trace_N, out=adv_TN[t])
    return adv_TN.masked_fill_(rows.is_last[:-1], 0.0)


def discounted_sum(reward_T1N: Tensor, is_first_T1N: Tensor, start_N: Tensor, gamma: float) -> Tensor:
    """Running discounted sums of rewards (T, N) for rows 1 .. T, restarted at `is_first`; `start_N` is row 0's.

    The quantity whose standard deviation scales rewards (Engstrom et al. 2020, "reward scaling").
    """
    keep_TN = gamma * (~is_first_T1N[1:]).float()
    out_TN = torch.empty_like(reward_T1N[1:])
    total_N = start_N
    for t in range(len(out_TN)):
        total_N = torch.addcmul(reward_T1N[t + 1], keep_TN[t], total_N, out=out_TN[t])
    return out_TN


def shares(weight: Tensor) -> Tensor:
    """Weights (0 or 1, at least one dimension) scaled to sum to 1; all 0 stays all 0."""
    return weight / weight.sum().clamp(min=1.0)


def weighted_sum(x: Tensor, share: Tensor) -> Tensor:
    """Sum of `x` times `share` (same shape): the mean over the entries that count, where shares sum to 1."""
    return torch.dot(x.flatten(), share.flatten())


def standardize(x: Tensor, share: Tensor, eps: float = 1e-8) -> Tensor:
    """`x` with mean 0 and (biased) standard deviation 1 over the entries that count; shares sum to 1."""
    centred = x - weighted_sum(x, share)
    return centred / (weighted_sum(centred.square(), share).sqrt() + eps)


def explained_variance(prediction: Tensor, target: Tensor, share: Tensor) -> Tensor:
    """1 - Var[target - prediction] / Var[target]: 1 is perfect, 0 no better than a constant, negative worse."""

    def variance(x: Tensor) -> Tensor:
        return weighted_sum((x - weighted_sum(x, share)).square(), share)

    return 1.0 - variance(target - prediction) / variance(target).clamp(min=1e-8)
