"""The numbers that each option may have: a name means the same in every algorithm, and so has one range."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from flotilla.core.errors import UsageError

ABOVE_0 = (
    "num_envs total_timesteps eval_episodes image_size action_repeat keep_checkpoints grad_accum_steps nproc "
    "rank_timeout_s num_steps update_epochs memory_size hidden_sizes buffer_size batch_size train_frequency "
    "policy_frequency target_frequency target_network_frequency n_step"
)
NOT_BELOW_0 = (
    "eval_every checkpoint_every seed log_every_s env_groups num_workers env_timeout_s max_env_restarts time_limit_s "
    "max_restarts max_skipped_steps buffer_bytes learning_rate policy_lr q_lr adam_eps clip_coef max_grad_norm "
    "target_kl learning_starts exploration_noise policy_noise noise_clip per_eps sigma_0"
)
SHARES = "gamma gae_lambda tau start_e end_e exploration_fraction per_alpha per_beta target_entropy_scale"
RANGES = {
    **dict.fromkeys(ABOVE_0.split(), (1.0, math.inf)),
    **dict.fromkeys(NOT_BELOW_0.split(), (0.0, math.inf)),
    **dict.fromkeys(SHARES.split(), (0.0, 1.0)),
    **dict.fromkeys(("threads", "gradient_steps"), (-1.0, math.inf)),
    **dict.fromkeys(("v_min", "v_max", "target_entropy"), (-math.inf, math.inf)),
    "num_atoms": (2.0, math.inf),
    "alpha": (1e-8, math.inf),
}


def check_ranges(config: Any) -> None:
    """UsageError for the first field of a dataclass that is out of its range; each entry of a tuple has to be in it."""
    for name in (field.name for field in fields(config) if field.name in RANGES):
        value, (low, high) = getattr(config, name), RANGES[name]
        for entry in value if isinstance(value, tuple) else (value,):
            if not low <= entry <= high:  # not a number is never in a range
                choice = f"choose from {low:g} to {high:g}" if high < math.inf else f"choose {low:g} or more"
                raise UsageError(f"{name}={value} is out of range; {choice}")
