"""The rules of the house that a machine can check: what a file says, how long it is, which rooms it knows."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import flotilla
from flotilla.core import names
from flotilla.core.config import RunConfig
from flotilla.core.names import load
from flotilla.core.ranges import RANGES

SOURCE = Path(flotilla.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
ALGORITHMS = sorted(file for file in (SOURCE / "algorithms").glob("*.py") if file.name != "__init__.py")


def name(file: Path) -> str:
    return str(file.relative_to(SOURCE))


def test_there_are_files_to_check() -> None:
    assert len(FILES) > 20
    assert ALGORITHMS


@pytest.mark.parametrize("file", FILES, ids=name)
def test_a_file_says_on_its_first_line_what_it_is_for(file: Path) -> None:
    module = ast.parse(file.read_text())
    assert ast.get_docstring(module), "no module docstring"
    assert module.body[0].lineno == 1
    assert re.match(r'"""\S', file.read_text()), "the first line holds no words"


@pytest.mark.parametrize("file", FILES, ids=name)
def test_a_file_can_be_read_in_one_sitting(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= 450


@pytest.mark.parametrize("file", FILES, ids=name)
def test_no_drawer_for_everything(file: Path) -> None:
    for part in (*file.relative_to(SOURCE).parent.parts, file.stem):
        assert not re.fullmatch(r"_?(utils?|common|helpers?|misc)", part)


@pytest.mark.parametrize("file", ALGORITHMS, ids=name)
def test_an_algorithm_never_waits_for_the_device(file: Path) -> None:
    """Each of these makes the host wait, or prints; metrics stay on the device until the log tick."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            assert node.func.attr not in {"item", "cpu", "numpy", "tolist"}, f"line {node.lineno}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "print", f"line {node.lineno}"


@pytest.mark.parametrize("file", ALGORITHMS, ids=name)
def test_an_algorithm_knows_no_other_room(file: Path) -> None:
    found = re.search(r"\b(rank|world_size|argparse|writer)\b", file.read_text())
    assert found is None, f"'{found and found[0]}' belongs to the engine"


@pytest.mark.parametrize("file", ALGORITHMS, ids=name)
def test_an_algorithm_imports_no_other(file: Path) -> None:
    others = {other.stem for other in ALGORITHMS} - {file.stem}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            parts = {part for alias in node.names for part in alias.name.split(".")}
        elif isinstance(node, ast.ImportFrom):
            parts = {*(node.module or "").split("."), *(alias.name for alias in node.names)}
            parts = parts if node.level or "algorithms" in parts else set()
        else:
            continue
        assert not parts & others, f"line {node.lineno}"


@pytest.mark.parametrize("module", ["flotilla", "flotilla.cli", "flotilla.core.presets"])
def test_importing_it_is_light(module: str) -> None:
    heavy = {"torch", "gymnasium", "tyro", "numpy"}
    code = f"import sys, {module}; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_every_range_is_of_an_option() -> None:
    """A name that no configuration has would be a range that nobody is held to."""
    configs = [RunConfig, *(load("algorithm", names.ALGORITHMS, name).Config for name in names.ALGORITHMS)]
    options = {field.name for config in configs for field in fields(config)}
    assert RANGES.keys() <= options
    floats = {field.name for config in configs for field in fields(config) if field.type in ("float", "int")}
    assert floats - RANGES.keys() <= {"ent_coef", "vf_coef", "num_minibatches", "env_batch"}, "or a check of its own"
