"""Environments: from an id to one Gymnasium environment that a network can take; does not know that there are many."""

from flotilla.envs.make import (
    EnvEntry,
    EnvOptions,
    frames_per_step,
    installed_suites,
    list_envs,
    make_env,
    suite_of,
)

__all__ = [
    "EnvEntry",
    "EnvOptions",
    "frames_per_step",
    "installed_suites",
    "list_envs",
    "make_env",
    "suite_of",
]
