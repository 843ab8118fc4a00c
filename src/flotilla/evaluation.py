"""Evaluation: whole episodes on separate environments, scored in raw rewards, and one of them on video."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from flotilla.core.config import RunConfig
from flotilla.core.seeding import stream_seed
from flotilla.core.types import Episode, Spec
from flotilla.envs.make import EnvOptions, make_env
from flotilla.monitor.video import VideoWriter
from flotilla.sampling.choose import env_ids, make_backend
from flotilla.sampling.sampler import Sampler
from flotilla.sampling.sync import SyncBackend

CHUNK_STEPS = 32  # between two looks at which episodes ended
MAX_ENVS = 10  # that play episodes at the same time
MAX_VIDEO_FRAMES = 5_000  # a policy that never ends its episode must not fill the disk


def options_of(config: RunConfig, *, training: bool, render: bool = False) -> EnvOptions:
    """The environment options that a run's configuration asks for."""
    return EnvOptions(
        training=training,
        obs_type=config.obs_type,
        image_size=config.image_size,
        action_repeat=config.action_repeat,
        render_mode="rgb_array" if render else None,
    )


def spec_of(config: RunConfig) -> Spec:
    """The spaces of the configured environment, as its backend gives them."""
    backend = make_backend(config, options_of(config, training=False), num_envs=1)
    backend.close()
    return backend.spec


@contextlib.contextmanager
def _acting(agent: nn.Module, policy: str, seed: int) -> Iterator[None]:
    """The agent as an evaluation uses it; training's mode and random streams are as before afterwards."""
    was_training = agent.training
    agent.train(policy == "sample")
    try:
        with torch.random.fork_rng():
            torch.manual_seed(stream_seed(seed, "evaluation policy"))
            yield
    finally:
        agent.train(was_training)


def evaluate(
    config: RunConfig,
    agent: Any,
    device: torch.device,
    *,
    episodes: int,
    policy: str,
    stopped: Callable[[], bool] = lambda: False,
) -> list[Episode]:
    """Whole episodes on environments of their own, which start from the same seeds every time.

    They are divided evenly over up to 10 environments, so that short episodes have no advantage.  `policy` is
    "mode" or "sample".  Ends early, with the episodes that are whole, when `stopped` says so.
    """
    num_envs = min(episodes, MAX_ENVS)
    quota = [len(range(i, episodes, num_envs)) for i in range(num_envs)]
    options = options_of(config, training=False)
    backend = make_backend(config, options, num_envs=num_envs, purpose="evaluation")
    sampler = Sampler(backend, device, env_ids=env_ids(config, range(num_envs)))
    scored: list[Episode] = []
    try:
        with _acting(agent, policy, config.seed):
            while any(quota) and not stopped():
                sampler.rollout(agent.act, CHUNK_STEPS)
                for episode in sampler.drain_episodes():
                    if quota[episode.env_index]:
                        quota[episode.env_index] -= 1
                        scored.append(episode)
    finally:
        sampler.close()
    return scored


def record_video(config: RunConfig, agent: Any, device: torch.device, path: Path, policy: str) -> int:
    """An MP4 of one evaluation episode; returns its number of frames."""
    env = make_env(env_ids(config, range(1))[0], options_of(config, training=False, render=True))
    seed = stream_seed(config.seed, "video")
    sampler = Sampler(SyncBackend([lambda: env], [seed]), device)
    frames = 0
    try:
        with _acting(agent, policy, seed), VideoWriter(path, _frames_per_s(env)) as video:
            while not sampler.drain_episodes() and frames < MAX_VIDEO_FRAMES:
                sampler.rollout(agent.act, 1)
                video.add(np.asarray(env.render()))
                frames += 1
    finally:
        sampler.close()
    return frames


def _frames_per_s(env: gym.Env[Any, Any]) -> float:
    return float(env.metadata.get("render_fps") or 30)
