"""Run's configuration: what, where, how many, how precise. How it learns stands in the algorithm's own Config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Backend = Literal["auto", "sync", "envpool", "ale"]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Flags of every run, whatever the algorithm."""

    env_id: str = "CartPole-v1"  # environment; `flotilla envs` lists what is installed
    obs_type: Literal["vector", "pixels"] = "vector"  # dm_control only: joint states or camera images
    image_size: int = 64  # pixels a side, where a suite lets one choose (dm_control, Crafter)
    action_repeat: int = 1  # simulator steps per environment step, where one may choose (dm_control)
    seed: int = 1  # root of every random stream
    total_timesteps: int = 500_000  # environment steps, all environments and ranks together
    num_envs: int = 8  # environments in parallel, all ranks together
    backend: Backend = "auto"  # how environments are stepped; auto says which it took and why
    run_dir: str = "auto"  # directory of the run; auto: runs/<algorithm>-<env>-seed<seed>-<time>
    device: str = "auto"  # auto | cpu | cuda | cuda:1; auto takes a GPU where there is one
    threads: int = 0  # CPU threads of the learner; 0: one for small networks, all cores for convolutions
    compile: Literal["none", "default"] = "none"  # torch.compile of losses and their gradients (pays off in long runs)
    eval_every: int = 0  # environment steps between evaluations; 0: only at the end
    eval_episodes: int = 10  # episodes of an evaluation, on environments of their own
    eval_policy: Literal["mode", "sample"] = "mode"  # an evaluation's action: the most likely, or a draw
    capture_video: bool = False  # MP4 of one evaluation episode in <run_dir>/videos
    log_every_s: float = 1.0  # seconds between two lines of metrics; 0: one a training iteration
    checkpoint_every: int = 0  # environment steps between checkpoints; 0: only at the end
    dashboard: Literal["auto", "live", "plain", "none"] = "auto"  # auto: live on a terminal, else plain lines
