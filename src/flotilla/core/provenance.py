"""Where a result came from, for its config.yaml: command, presets, code, packages, machine."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("flotilla", "torch", "numpy", "gymnasium", "ale-py", "envpool", "mujoco")


def provenance(presets: list[str], argv: list[str]) -> dict[str, Any]:
    """What a reader needs to repeat the run that starts now."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    versions = {name: _version(name) for name in PACKAGES}
    return {
        "command": shlex.join(["flotilla", *argv]),
        "presets": presets,
        "git_commit": commit.stdout.strip() or "unknown",
        "packages": {name: version for name, version in versions.items() if version},
        "python": platform.python_version(),
        "machine": f"{platform.platform()}, {os.cpu_count()} cores",
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
