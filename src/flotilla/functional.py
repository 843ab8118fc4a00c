"""Named equations that algorithms share, as functions from tensors to tensors; no modules, no state.

Shape legend: T steps, N environments, M minibatches of B samples; suffix 1 as in T1 means T + 1 rows of arrivals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from flotilla.core.types import Row

Mean = Callable[[Tensor], Tensor]  # over ranks


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


def balanced(weight_MB: Tensor, mean: Mean) -> Tensor:
    """Weights (M, ...) scaled to mean 1 in each of M minibatches, of all ranks together; all 0 stays all 0."""
    mean_M = mean(weight_MB.flatten(1).mean(1))
    return weight_MB / _column(mean_M, weight_MB).clamp(min=1e-8)


def standardize(x_MB: Tensor, weight_MB: Tensor, mean: Mean, eps: float = 1e-8) -> Tensor:
    """`x` (M, ...) with mean 0 and (biased) standard deviation 1 in each of M minibatches; weights are `balanced`."""
    centred = x_MB - _column(mean((x_MB * weight_MB).flatten(1).mean(1)), x_MB)
    var_M = mean((centred.square() * weight_MB).flatten(1).mean(1))
    return centred / (_column(var_M.sqrt(), x_MB) + eps)


def _column(x_M: Tensor, like: Tensor) -> Tensor:
    return x_M.view(-1, *(1,) * (like.dim() - 1))


def weighted_mean(x: Tensor, weight: Tensor) -> Tensor:
    """Mean of `x` times `weight` (same shape): the mean over the entries that count, where weights are balanced."""
    return torch.dot(x.flatten(), weight.flatten()) / x.numel()


def epsilon_greedy(greedy: Tensor, num_actions: int, epsilon: Tensor) -> Tensor:
    """Each action (...) with probability `epsilon` replaced by any, all of them equally probable."""
    is_random = torch.rand_like(greedy, dtype=epsilon.dtype) < epsilon
    return torch.where(is_random, torch.randint_like(greedy, num_actions), greedy)


def categorical_projection(p_BK: Tensor, reward_B: Tensor, discount_B: Tensor, v_min: float, v_max: float) -> Tensor:
    """The distribution of reward + discount * value on the atoms (Bellemare et al. 2017, algorithm 1).

    `p_BK` are probabilities of K values from `v_min` to `v_max`.  What falls between two atoms is shared in inverse
    proportion to the distance, and what falls on one is all its own; what falls outside goes to the outermost.
    """
    last = p_BK.shape[-1] - 1
    width = (v_max - v_min) / last
    atom_K = torch.linspace(v_min, v_max, last + 1, device=p_BK.device, dtype=p_BK.dtype)
    place_BK = torch.addcmul(reward_B[:, None], discount_B[:, None], atom_K)
    place_BK = ((place_BK - v_min) / width).clamp(0, last)
    lower_BK = place_BK.floor()
    upper_share_BK = place_BK - lower_BK
    lower_BK = lower_BK.long()
    out_BK = torch.zeros_like(p_BK)
    out_BK.scatter_add_(1, lower_BK, p_BK * (1 - upper_share_BK))
    return out_BK.scatter_add_(1, (lower_BK + 1).clamp(max=last), p_BK * upper_share_BK)


def polyak(targets: Iterable[Tensor], sources: Iterable[Tensor], tau: float) -> None:
    """Move each target the share `tau` of the way to its source (Lillicrap et al. 2016); 1 copies."""
    with torch.no_grad():
        torch._foreach_lerp_(list(targets), list(sources), tau)


def schedule(start: float, end: float, share: float) -> float:
    """From `start` to `end` on a straight line while `share` goes from 0 to 1; there it stays."""
    return start + (end - start) * min(share, 1.0)


def explained_variance(prediction: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """1 - Var[target - prediction] / Var[target]: 1 is perfect, 0 no better than a constant, negative worse."""
    weight = balanced(weight[None], lambda x: x)[0]

    def variance(x: Tensor) -> Tensor:
        return weighted_mean((x - weighted_mean(x, weight)).square(), weight)

    return 1.0 - variance(target - prediction) / variance(target).clamp(min=1e-8)
