"""Every other environment of Gymnasium's registry, `package.module:Id-v0` included; and what suites on it share."""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Sequence
from typing import Any

import gymnasium as gym

from flotilla.core.errors import UsageError
from flotilla.envs.make import FALLBACK, EnvOptions, unknown
from flotilla.envs.wrappers import RecordEpisode

NAME = FALLBACK
EXTRA = None
PACKAGES: tuple[str, ...] = ()
OPTIONS: tuple[str, ...] = ()
TRAINING_ONLY: tuple[Any, ...] = ()
FRAME_STACK = 1
CHECK_IDS = ("FrozenLake-v1", "Blackjack-v1")

_GONE = "gymnasium.envs:_raise"  # ids that Gymnasium keeps only to say where they went
_UNLISTED = (_GONE, "gymnasium.envs.phys2d", "gymnasium.envs.tabular", "ale_py")  # JAX's, and raw Atari


def ids() -> Sequence[str]:
    return [env_id for env_id, spec in gym.registry.items() if not _entry(spec).startswith(_UNLISTED)]


def matches(env_id: str) -> bool:
    return True


def frames_per_step(env_id: str, options: EnvOptions) -> int:
    return 1


def make(env_id: str, options: EnvOptions) -> gym.Env[Any, Any]:
    """The registered environment, without the layers of `gymnasium.make` that only check."""
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")  # its greeting would spoil machine-readable output
    if options.render_mode == "rgb_array":
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame draws into memory: no display, no complaint
    module, _, registered_id = env_id.rpartition(":")
    if module:
        _import(module, env_id)
    if registered_id not in gym.registry or _entry(gym.registry[registered_id]).startswith(_GONE):
        raise unknown(env_id)
    spec = copy.deepcopy(gym.registry[registered_id])
    spec.order_enforce = False
    try:
        env = gym.make(spec, disable_env_checker=True, render_mode=options.render_mode)
    except (gym.error.DependencyNotInstalled, ImportError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"environment '{env_id}' cannot be made: {reason}") from error
    return RecordEpisode(env)


def from_module(prefix: str) -> list[str]:
    """Ids of the registry whose class stands in a module that starts with `prefix`."""
    return [env_id for env_id, spec in gym.registry.items() if _entry(spec).startswith(prefix)]


def _entry(spec: Any) -> str:
    """Where the class of a registered id stands: "module:Class"."""
    if isinstance(spec.entry_point, str):
        return spec.entry_point
    return f"{spec.entry_point.__module__}:{spec.entry_point.__qualname__}"


def _import(module: str, env_id: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"environment '{env_id}': cannot import '{module}' ({error}); install it or put its folder on PYTHONPATH"
        ) from error
