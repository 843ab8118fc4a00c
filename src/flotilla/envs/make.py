"""The door of the room: finds the suite that an environment id belongs to and makes the environment.

A suite is one module of this package that has the names of `Suite`; it is found by itself.  Simulators are
imported only when one of their environments is made, so that listing ids is cheap and needs none of them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Protocol, cast

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from flotilla.core.errors import UsageError, nearest
from flotilla.envs.wrappers import adapt

FALLBACK = "gymnasium"  # the suite of every id that no other suite claims


@dataclass(frozen=True, kw_only=True)
class EnvOptions:
    """What one may ask of an environment besides its id; a suite takes those that it names in `OPTIONS`."""

    training: bool = True  # False: whole episodes and raw rewards, for evaluation
    obs_type: Literal["vector", "pixels"] = "vector"
    image_size: int = 64  # pixels a side
    action_repeat: int = 1  # simulator steps per environment step
    render_mode: str | None = None  # as Gymnasium's; "rgb_array" for videos


@dataclass(frozen=True)
class EnvEntry:
    """One line of `flotilla envs`."""

    env_id: str
    suite: str
    installed: bool


class Suite(Protocol):
    """The names that a module of this package has in order to be a suite."""

    NAME: str
    EXTRA: str | None  # the extra of the package that installs it; None where nothing is needed
    PACKAGES: tuple[str, ...]  # modules that must be importable before an environment is made
    OPTIONS: tuple[str, ...]  # fields of EnvOptions that it heeds, besides training and render_mode
    TRAINING_ONLY: tuple[Literal["reward_clip", "life_loss"], ...]  # what its evaluation leaves out
    FRAME_STACK: int  # frames of an observation that is a stack of them, else 1
    CHECK_IDS: tuple[str, ...]  # the ids that the contract test makes

    def ids(self) -> Sequence[str]:
        """Every id, in its canonical spelling; without importing a simulator where that is possible."""

    def matches(self, env_id: str) -> bool:
        """Whether the id is this suite's, even when it names nothing that exists."""

    def frames_per_step(self, env_id: str, options: EnvOptions) -> int:
        """Raw simulator frames per environment step."""

    def make(self, env_id: str, options: EnvOptions) -> gym.Env[Any, Any]:
        """The environment, with `RecordEpisode` under whatever changes rewards or cuts episodes."""


@functools.cache
def suites() -> dict[str, Suite]:
    """All suites by name, the fallback last."""
    package = importlib.import_module(__package__ or "flotilla.envs")
    modules = (importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__))
    found = {module.NAME: cast(Suite, module) for module in modules if hasattr(module, "CHECK_IDS")}
    return dict(sorted(found.items(), key=lambda item: item[0] == FALLBACK))


def suite_of(env_id: str) -> str:
    """Name of the suite that the id belongs to; an id that nobody claims is Gymnasium's."""
    return next(name for name, suite in suites().items() if suite.matches(env_id))


def list_envs(text: str = "") -> list[EnvEntry]:
    """Every id whose name or suite contains `text`, in either case."""
    entries: dict[str, EnvEntry] = {}
    for name, suite in suites().items():
        installed = not _missing(suite)
        for env_id in suite.ids():
            if text.lower() in env_id.lower() or text.lower() in name:
                entries.setdefault(env_id, EnvEntry(env_id, name, installed))
    return list(entries.values())


def installed_suites() -> dict[str, str]:
    """Suite name -> "ok", or the command that installs it."""
    return {name: _install(suite) if _missing(suite) else "ok" for name, suite in suites().items()}


def frames_per_step(env_id: str, options: EnvOptions) -> int:
    """Raw simulator frames per environment step: Atari 4, HalfCheetah 5, CartPole 1, dm_control its repeat."""
    return suites()[suite_of(env_id)].frames_per_step(env_id, options)


def frame_stack(env_id: str) -> int:
    """How many frames an observation stacks, the newest last, each the stack before it moved on by one; 1: none."""
    return suites()[suite_of(env_id)].FRAME_STACK


def make_env(env_id: str, options: EnvOptions | None = None) -> gym.Env[Any, Any]:
    """One environment whose spaces a network can take; UsageError where the id, an option or a space is wrong.

    Observations are float32 or uint8 boxes, or a flat dict of them; actions are Discrete, MultiDiscrete or
    float32 Box, and a Box action may overshoot its bounds: it is clipped.  The step on which the simulator's
    own episode ends has `info["episode"] = {"r": raw return, "l": environment steps}`.
    """
    options = options or EnvOptions()
    suite = suites()[suite_of(env_id)]
    _check_options(suite, env_id, options)
    if missing := _missing(suite):
        raise UsageError(f"environment '{env_id}' needs {missing}: {_install(suite)}")
    env = suite.make(env_id, options)
    max_steps = env.spec.max_episode_steps if env.spec else None
    try:
        env = adapt(env, env_id)
    except UsageError:
        env.close()
        raise
    assert isinstance(env, gym.Wrapper)
    env._cached_spec = _spec(env_id, options, max_steps)  # so that env.spec.make() repeats all of the above
    return env


def require(package: str, env_id: str, extra: str) -> None:
    """UsageError with the command to run, where `package` cannot be imported."""
    if importlib.util.find_spec(package) is None:
        raise UsageError(f"environment '{env_id}' needs {package}: pip install 'flotilla[{extra}]'")


def unknown(env_id: str, choices: Sequence[str] | None = None) -> UsageError:
    """The error about an id that names nothing, with the nearest of `choices` or of all ids."""
    known = [entry.env_id for entry in list_envs()] if choices is None else choices
    return UsageError(f"unknown environment '{env_id}': {nearest(env_id, known)}")


def remake(env_id: str, options: EnvOptions, render_mode: str | None = None) -> gym.Env[Any, Any]:
    """What `env.spec.make(render_mode=...)` calls."""
    return make_env(env_id, replace(options, render_mode=render_mode))


def _spec(env_id: str, options: EnvOptions, max_steps: int | None) -> EnvSpec:
    arguments = {"env_id": env_id, "options": options}
    spec = EnvSpec(
        env_id,
        entry_point=f"{__name__}:{remake.__name__}",
        kwargs=arguments,
        order_enforce=False,
        disable_env_checker=True,
    )
    spec.max_episode_steps = max_steps
    return spec


def _missing(suite: Suite) -> str:
    absent = [package for package in suite.PACKAGES if importlib.util.find_spec(package) is None]
    return " and ".join(absent)


def _install(suite: Suite) -> str:
    return f"pip install 'flotilla[{suite.EXTRA}]'"


def _check_options(suite: Suite, env_id: str, options: EnvOptions) -> None:
    for option in fields(EnvOptions):
        value = getattr(options, option.name)
        free = option.name in ("training", "render_mode", *suite.OPTIONS)
        if not free and value != option.default:
            raise UsageError(f"{option.name} {value!r}: environment '{env_id}' has no such choice; leave it out")
    for name in ("image_size", "action_repeat"):
        if getattr(options, name) < 1:
            raise UsageError(f"{name} {getattr(options, name)}: must be at least 1")
