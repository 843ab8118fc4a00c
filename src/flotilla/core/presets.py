"""Presets: YAML files of configuration values, checked key by key against the dataclasses that they fill.

A shipped preset, a user's own file and the config.yaml of an earlier run are the same thing: flat keys of
RunConfig or of the algorithm's Config, and a section per algorithm for what holds for that algorithm only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from flotilla.core.config import RunConfig
from flotilla.core.errors import UsageError, nearest
from flotilla.core.names import ALGORITHMS

NONE = "none"  # as a preset's name: bare defaults
FACTS = {"suites", "algorithm", "provenance"}  # what a file says about itself rather than sets


def shipped() -> dict[str, Path]:
    """The presets that come with the package: name -> file."""
    folder = Path(str(files("flotilla"))) / "presets"
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def for_suite(suite: str) -> str:
    """The name of the shipped preset for a suite of environments; NONE where there is none."""
    for name, file in shipped().items():
        if suite in _read(file)["suites"]:
            return name
    return NONE


def algorithm_of(file: Path, default: str = "ppo") -> str:
    """The algorithm that a file says it is made for."""
    return str(_read(file).get("algorithm", default))


def apply(names: Sequence[str], algorithm: str, run_config: RunConfig, config: Any) -> tuple[RunConfig, Any]:
    """Both configurations with the presets' values in place of theirs; a later preset overrides an earlier.

    `names` are shipped presets, YAML files, or NONE.  UsageError: no such preset, not YAML, a key that
    neither dataclass has, a value of the wrong type.
    """
    for name in names:
        if name == NONE:
            continue
        file = _find(name)
        for key, value in _settings(file, algorithm, run_config, config).items():
            if key in _hints(run_config):
                run_config = replace(run_config, **{key: value})
            else:
                config = replace(config, **{key: value})
    return run_config, config


def whole_number(value: object) -> int:
    """An int from 500000, '500_000', 1e6 or '1e6'; ValueError for anything that is not a whole number."""
    with suppress(ValueError):
        return int(str(value))
    try:
        number = float(str(value))
    except ValueError:
        number = math.nan
    if not number.is_integer():
        raise ValueError(f"{value!r} is not a whole number")
    return int(number)


def _find(name: str) -> Path:
    known = shipped()
    if name in known:
        return known[name]
    file = Path(name).expanduser()
    if file.is_file():
        return file
    if file.is_dir():
        raise UsageError(f"preset '{name}' is a directory (name the YAML file in it)")
    if file.suffix in {".yaml", ".yml"} or "/" in name:
        raise UsageError(f"preset file '{name}' does not exist (shipped presets: {', '.join([*known, NONE])})")
    raise UsageError(f"unknown preset '{name}' ({nearest(name, [*known, NONE])})")


def _read(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text())
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise UsageError(f"preset {file} cannot be read (fix its YAML: {error})") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"preset {file} has no keys (write lines such as 'num_envs: 8')")
    return content


def _settings(file: Path, algorithm: str, run_config: RunConfig, config: Any) -> dict[str, Any]:
    """A file's values for one algorithm, converted to the types of the dataclasses' fields."""
    content = _read(file)
    made_for = content.get("algorithm", algorithm)
    if made_for != algorithm:
        raise UsageError(f"preset {file} is of a run of {made_for} (train {made_for} with it, not {algorithm})")
    section = content.get(algorithm) or {}
    if not isinstance(section, dict):
        raise UsageError(f"preset {file}: {algorithm} is {section!r} (needs indented keys below it)")
    flat = {key: value for key, value in content.items() if key not in FACTS and key not in ALGORITHMS}
    if "provenance" in content:
        for own in ("run_dir", "allow_change"):  # of that start: repeating a run must not write into its directory
            flat.pop(own, None)
    hints = _hints(run_config) | _hints(config)
    settings = {}
    for key, value in (flat | section).items():
        if key not in hints:
            raise UsageError(f"preset {file}: unknown key '{key}' ({nearest(str(key), hints)})")
        try:
            settings[key] = _convert(value, hints[key])
        except ValueError as error:
            raise UsageError(f"preset {file}: {key} is {value!r} (needs {error})") from None
    return settings


def _hints(config: Any) -> dict[str, Any]:
    hints = get_type_hints(type(config))
    return {field.name: hints[field.name] for field in fields(config)}


def _convert(value: Any, hint: Any) -> Any:
    """`value` as the type `hint`; the ValueError's message says what is needed."""
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise ValueError(f"one of {', '.join(map(str, get_args(hint)))}")
        return value
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise ValueError("a list")
        return tuple(_convert(entry, get_args(hint)[0]) for entry in value)
    if hint is int:
        return _number(value, whole_number, "a whole number")
    if hint is float:
        return _number(value, float, "a number")
    assert hint in (bool, str), f"presets know no conversion to {hint}"
    if type(value) is not hint:
        raise ValueError("true or false" if hint is bool else "text")
    return value


def _number(value: Any, convert: Callable[[Any], float], needed: str) -> float:
    """Text counts as a number where it reads as one: YAML 1.1 takes 3e-4, without a point, for text."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(needed)
    try:
        return convert(value)
    except (ValueError, OverflowError):
        raise ValueError(needed) from None
