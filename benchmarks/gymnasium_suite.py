"""Run Gymnasium's own tests of vector environments and their wrappers with Flotilla's class for `AsyncVectorEnv`.

    python benchmarks/gymnasium_suite.py CHECKOUT [--reference] [pytest arguments]

CHECKOUT is a clone of Gymnasium at the installed version, for example by
`git clone --branch v1.4.0 https://github.com/Farama-Foundation/Gymnasium`.  With `--reference` nothing is replaced.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import gymnasium
import pytest

from flotilla.vector import WorkerVectorEnv

PARTS = ("tests/vector", "tests/wrappers/vector")
WITHOUT_ASYNC = ("tests/vector/test_sync_vector_env.py", "tests/vector/utils")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="folder of Gymnasium's repository")
    parser.add_argument("--reference", action="store_true", help="Gymnasium's own class, to compare")
    arguments, rest = parser.parse_known_args()
    if not (arguments.checkout / PARTS[0]).is_dir():
        parser.error(f"{arguments.checkout} has no {PARTS[0]}: give a clone of Gymnasium's repository")
    os.chdir(arguments.checkout)
    sys.path.insert(0, os.getcwd())  # workers take it over
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # drawing without a display
    os.environ.setdefault("MUJOCO_GL", "egl")
    if not arguments.reference:
        gymnasium.vector.AsyncVectorEnv = WorkerVectorEnv  # type: ignore[misc, assignment]
    ignored = [f"--ignore={path}" for path in WITHOUT_ASYNC]
    return int(pytest.main(["-q", "-p", "no:cacheprovider", *PARTS, *ignored, *rest]))


if __name__ == "__main__":
    raise SystemExit(main())
