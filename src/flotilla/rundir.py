"""The directory of a run: where it lies, the configuration that it keeps, and whether a command may go on with it."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import time
from pathlib import Path
from typing import Any

import yaml

from flotilla.core import names
from flotilla.core.config import HARMLESS, RunConfig
from flotilla.core.errors import UsageError
from flotilla.core.presets import apply as apply_presets
from flotilla.monitor.writers import replace_file

CONFIG_FILE = "config.yaml"


def locate(config: RunConfig, algorithm: str) -> Path:
    """The run's directory; UsageError for one that is full of something else."""
    if config.run_dir != "auto":
        path = Path(config.run_dir)
        if path.exists() and (not path.is_dir() or (any(path.iterdir()) and not holds_run(path))):
            raise UsageError(f"run_dir '{path}' exists and is no run; choose another --run-dir or remove it")
        return path
    env = re.sub("[/:,]", "-", config.env_id)
    # torchrun's name of the job is the same after its restarts, the time is not.
    job = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    stamp = time.strftime("%Y%m%d-%H%M%S") if job == "none" else re.sub("[^A-Za-z0-9_.-]", "-", job)
    stem = f"runs/{algorithm}-{env}-seed{config.seed}-{stamp}"
    if job != "none":
        return Path(stem)
    paths = itertools.chain([stem], (f"{stem}-{i}" for i in itertools.count(2)))
    return next(path for path in map(Path, paths) if not path.exists())


def holds_run(run_dir: Path) -> bool:
    return (run_dir / CONFIG_FILE).is_file()


def algorithm_of(run_dir: Path) -> str:
    """The algorithm of the run that lies there; UsageError where none does."""
    return str(_read(run_dir)["algorithm"])


def load(run_dir: Path) -> tuple[str, RunConfig, Any]:
    """The algorithm's name and both configurations of the run that lies there; UsageError where none does."""
    algorithm = algorithm_of(run_dir)
    module = names.load("algorithm", names.ALGORITHMS, algorithm)
    return algorithm, *apply_presets([str(run_dir / CONFIG_FILE)], algorithm, RunConfig(), module.Config())


def save(run_dir: Path, algorithm: str, run_config: RunConfig, config: Any, origin: dict[str, Any]) -> None:
    """Write what the run is, and where it came from; each later start is added to the first one's origin.

    UsageError where the directory cannot be written.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if holds_run(run_dir):
            first = _read(run_dir)["provenance"]
            origin = first | {"continued": [*first.get("continued", ()), origin]}
        values = plain(dataclasses.asdict(run_config) | dataclasses.asdict(config))
        text = yaml.safe_dump({"algorithm": algorithm, **values, "provenance": origin}, sort_keys=False)
        replace_file(run_dir / CONFIG_FILE, text)
    except OSError as error:
        raise UsageError(
            f"run_dir '{run_dir}' cannot be written ({error.strerror}); choose another --run-dir"
        ) from error


def refuse_changes(run_dir: Path, algorithm: str, run_config: RunConfig, config: Any) -> None:
    """UsageError that names each value with which the run in the directory would not have come out as it does."""
    before, *old = load(run_dir)
    if before != algorithm:
        raise UsageError(f"run_dir '{run_dir}' is a run of {before}, not of {algorithm}; choose another --run-dir")
    if run_config.allow_change:
        return
    changed = [
        f"--{field.name.replace('_', '-')} {_word(getattr(mine, field.name))} (was {_word(getattr(its, field.name))})"
        for mine, its in zip((run_config, config), old, strict=True)
        for field in dataclasses.fields(mine)
        if field.name not in HARMLESS
        and getattr(mine, field.name) != getattr(its, field.name)
        and not {getattr(mine, field.name), getattr(its, field.name)} <= SAME_ROWS
    ]
    if changed:
        raise UsageError(
            f"run_dir '{run_dir}' would go on with another {' and '.join(changed)}; "
            "leave that out, add --allow-change, or choose another --run-dir"
        )


SAME_ROWS = {"sync", "workers"}  # backends whose rows are equal bit for bit


def plain(config: dict[str, Any]) -> dict[str, Any]:
    """Values that YAML and JSON have: tuples as lists."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in config.items()}


def _word(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _read(run_dir: Path) -> dict[str, Any]:
    file = run_dir / CONFIG_FILE
    if not file.is_file():
        raise UsageError(f"'{run_dir}' is no run directory: it has no {CONFIG_FILE}")
    try:
        content = yaml.safe_load(file.read_text())
        content["algorithm"], content["provenance"]
    except (yaml.YAMLError, KeyError, TypeError) as error:
        raise UsageError(f"{file} is damaged ({type(error).__name__}); choose another --run-dir") from error
    return dict(content)
