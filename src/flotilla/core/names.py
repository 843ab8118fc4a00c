"""Names that people type, and the object behind each: resolved late, so that listing them imports nothing."""

from __future__ import annotations

import importlib
from typing import Any

from flotilla.core.errors import UsageError, nearest

ALGORITHMS = {name: f"flotilla.algorithms.{name}" for name in ("ppo", "dqn", "c51", "ddpg", "td3", "sac")}


def load(kind: str, table: dict[str, str], name: str) -> Any:
    """The module (or `module:object`) that `table` has for `name`; an unknown name names the nearest one."""
    if name not in table:
        raise UsageError(f"unknown {kind} '{name}': {nearest(name, table)}")
    module, _, attribute = table[name].partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, attribute) if attribute else loaded
