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
    buffer_bytes: int = 0  # most memory for a replay, all ranks together; 0: all that is free
    buffer_storage: Literal["ram", "disk", "device"] = "ram"  # where a replay lies; disk: run_dir's, mapped
    run_dir: str = "auto"  # directory of the run; auto: runs/<algorithm>-<env>-seed<seed>-<time>
    device: str = "auto"  # auto | cpu | cuda | cuda:1; auto takes a GPU where there is one
    threads: int = 0  # CPU threads of the learner; 0: one, for convolutions all cores; -1 (auto): measured
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"  # number format of matrix products and convolutions
    grad_accum_steps: int = 1  # parts in which a batch goes through the network, for memory; the step is the same
    max_skipped_steps: int = 10  # optimizer steps in a row with a gradient that is not finite, before the run ends
    fused_optimizer: bool = True  # one kernel for a whole optimizer step
    channels_last: bool = True  # images and convolutions with channels as the last dimension in memory
    pin_memory: bool = True  # page-locked host memory for transfers to a GPU, which then overlap with computation
    compile: Literal["none", "default", "max", "auto"] = "none"  # torch.compile of losses with their gradients
    eval_every: int = 0  # environment steps between evaluations; 0: only at the end
    eval_episodes: int = 10  # episodes of an evaluation, on environments of their own
    eval_policy: Literal["mode", "sample"] = "mode"  # an evaluation's action: the most likely, or a draw
    capture_video: bool = False  # MP4 of one evaluation episode in <run_dir>/videos
    log_every_s: float = 1.0  # seconds between two lines of metrics; 0: one a training iteration
    checkpoint_every: int = 0  # environment steps between checkpoints; 0: every 5 minutes; and always at the end
    keep_checkpoints: int = 2  # newest checkpoints that stay, beside the best one by evaluation
    time_limit_s: float = 0.0  # seconds after which a start saves and ends with exit code 75, to be continued; 0: none
    allow_change: bool = False  # continue a run although a flag that changes its result is another one now
    nproc: int = 1  # processes (ranks) on this machine that learn together, as `torchrun` would start them
    max_restarts: int = 0  # with nproc: how often all ranks start again after one was lost
    rank_timeout_s: float = 1800.0  # how long a rank waits for the others; longer than an evaluation, which one plays
    profile: bool = False  # a trace of some iterations and a table of where the time goes, in <run_dir>/profile
    dashboard: Literal["auto", "live", "plain", "none"] = "auto"  # auto: live on a terminal, else plain lines


# Flags that change where, how fast or how visibly a run goes on, but not what it learns.
HARMLESS = frozenset(
    {
        "buffer_bytes",
        "buffer_storage",
        "num_workers",
        "start_method",
        "env_timeout_s",
        "max_env_restarts",
        "run_dir",
        "device",
        "threads",
        "compile",
        "grad_accum_steps",
        "fused_optimizer",
        "channels_last",
        "pin_memory",
        "max_skipped_steps",
        "eval_every",
        "eval_episodes",
        "eval_policy",
        "capture_video",
        "log_every_s",
        "checkpoint_every",
        "keep_checkpoints",
        "time_limit_s",
        "allow_change",
        "nproc",
        "max_restarts",
        "rank_timeout_s",
        "dashboard",
        "profile",
    }
)
