"""Run's configuration: what, where, how many, how precise. How it learns stands in the algorithm's own Config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Backend = Literal["auto", "sync", "workers", "envpool", "ale"]
StartMethod = Literal["forkserver", "spawn", "fork"]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Flags of every run, whatever the algorithm."""

    env_id: str = "CartPole-v1"  # environment, or several to mix, with commas between; `flotilla envs` lists them
    env_weights: tuple[float, ...] = ()  # shares of the environments, where env_id has several ids; empty: equal
    obs_type: Literal["vector", "pixels"] = "vector"  # dm_control only: joint states or camera images
    image_size: int = 64  # pixels a side, where a suite lets one choose (dm_control, Crafter)
    action_repeat: int = 1  # simulator steps per environment step, where one may choose (dm_control)
    seed: int = 1  # root of every random stream
    total_timesteps: int = 500_000  # environment steps, all environments and ranks together
    num_envs: int = 8  # environments in parallel, all ranks together; auto measures a number
    backend: Backend = "auto"  # how environments are stepped; auto says which it took and why
    num_workers: int = 0  # processes of the workers backend; 0: one a core; auto measures a number
    start_method: StartMethod = "forkserver"  # how worker processes begin
    env_timeout_s: float = 300.0  # a worker's environment at work for longer is restarted; 0: never
    max_env_restarts: int = 10  # environments that failed and were restarted within 5 minutes, before the run ends
    env_batch: int = 0  # act for the first so many environments that are ready (workers backend); 0: for all
    env_groups: int = 0  # groups of environments that take turns: one steps while the policy acts; 0: chosen
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
