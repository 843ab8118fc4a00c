"""The documentation is true: commands and snippets run, links lead somewhere, tables show what the code has."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from flotilla import cli
from flotilla.core import presets
from flotilla.core.config import RunConfig
from flotilla.core.errors import EXIT_DONE, EXIT_USAGE
from flotilla.core.names import ALGORITHMS, load

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
COMMANDS = ("flotilla", "make", "pip", "torchrun", "python")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# What makes a documented training a short one; the page's own flags are parsed and used all the same.
BRIEF = shlex.split("--total-timesteps 64 --eval-episodes 1 --dashboard none --device cpu --threads 1")
ON_POLICY = shlex.split("--num-steps 16 --num-minibatches 1")
OFF_POLICY = shlex.split("--learning-starts 32 --buffer-size 1000 --batch-size 8")


@dataclass(frozen=True)
class Snippet:
    """A fenced block; or one command of it, with what the page says that it prints."""

    language: str
    text: str
    output: str = ""


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def snippets(page: Path) -> Iterator[Snippet]:
    """The blocks of a page in its order, those of a shell split into commands."""
    for language, text in FENCE.findall(page.read_text()):
        if language in ("sh", "console", ""):
            yield from commands(language, text)
        else:
            yield Snippet(language, text)


def commands(language: str, text: str) -> Iterator[Snippet]:
    if language == "console":
        for block in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, _, output = block.partition("\n")
            yield Snippet("sh", command, output.strip())
        return
    for line in text.replace("\\\n", " ").splitlines():
        for command in line.split("&&"):
            if command.split() and command.split()[0] in COMMANDS:
                yield Snippet("sh", command)


def without_running(words: list[str]) -> None:
    """`make` finds the target and expands it; `pip` names extras that exist; a benchmark has the flags named."""
    if words[0] == "python":
        command = [sys.executable, str(ROOT / words[1]), "--help"]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        missing = [word for word in words[2:] if not word.isdigit() and word not in said]
        assert not missing, f"{words[1]} does not know {missing}"
        return
    if words[0] == "make":
        subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, check=True, capture_output=True)
        return
    assert words[:2] == ["pip", "install"], words
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"\[([\w,-]+)\]", words[-1])
    assert named, words
    assert set(named[0].split(",")) <= set(extras)


def brief(arguments: list[str]) -> list[str]:
    """The flags to add; a run that goes on has those of its directory's algorithm, which is PPO."""
    match arguments:
        case ["train", algorithm, *_]:
            return BRIEF + (OFF_POLICY if algorithm in ALGORITHMS and algorithm != "ppo" else ON_POLICY)
        case ["eval", *_]:
            return ["--episodes", "1"]
    return []


def run_command(snippet: Snippet, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(snippet.text, comments=True)
    if "flotilla" in words and words[0] in ("flotilla", "python", "torchrun"):
        arguments = words[words.index("flotilla") + 1 :]
    else:
        without_running(words)
        return
    capsys.readouterr()
    if snippet.output:  # a mistake, and what it is answered with
        assert cli.main(arguments) == EXIT_USAGE
        assert capsys.readouterr().err.strip() == snippet.output
        return
    try:
        code = cli.main([*arguments, *brief(arguments)])
    except SystemExit as stop:  # --help
        code = int(stop.code or 0)
    assert code == EXIT_DONE, f"{snippet.text}\n{capsys.readouterr()}"


def write_if_named(text: str, folder: Path) -> bool:
    """A block whose first line is a comment with a file's name is that file."""
    found = re.match(r"# ([\w/]+\.(?:py|yaml))\n", text)
    if not found:
        return False
    file = folder / found[1]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    if found[1] == "my_package/envs.py":  # whose class is the reader's own: here, one that exists
        file.write_text(f"from gymnasium.envs.classic_control import CartPoleEnv as Mine\n{text}")
    return True


@pytest.mark.filterwarnings(
    "ignore:.*is deprecated:DeprecationWarning"
)  # torch's compiler imports what torch deprecates
@pytest.mark.parametrize("page", [page for page in PAGES if any(snippets(page))], ids=page_name)
def test_a_page_does_what_it_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All blocks of a page in its order, in one empty directory, as a reader would."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for variable in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL"):  # of the `make test` around this
        monkeypatch.delenv(variable, raising=False)
    for snippet in snippets(page):
        if snippet.language == "sh":
            run_command(snippet, capsys)
        elif not write_if_named(snippet.text, tmp_path) and snippet.language == "python":
            exec(compile(snippet.text, page_name(page), "exec"), {"__name__": "__main__"})
    sys.modules.pop("my_package.envs", None)


def test_there_is_something_to_run() -> None:
    found = [snippet for page in PAGES for snippet in snippets(page)]
    assert sum(snippet.language == "sh" for snippet in found) > 30
    assert sum(snippet.language == "python" for snippet in found) >= 4


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text())):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page_name(page)} links {target}"
        assert not anchor or anchor in anchors(file), f"{page_name(page)} links {target}"


def rows(page: str, first_cell: str, head: str = "") -> list[list[str]]:
    """The table rows of a page whose first cell matches, as cells; or those heads of tables that begin with a word."""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    return [
        [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        for line in lines
        if re.match(rf"\| {head} \|" if head else rf"\| `{first_cell}` \|", line)
    ]


def config_of(algorithm: str) -> Any:
    """Its options as they are without a preset."""
    return load("algorithm", ALGORITHMS, algorithm).Config()


@pytest.mark.parametrize("page", ["usage", *ALGORITHMS])
def test_the_tables_name_every_flag_with_its_default(page: str, tmp_path: Path) -> None:
    """The tables, read as a preset, leave the defaults as they are."""
    algorithm = page if page in ALGORITHMS else "ppo"
    config = config_of(page) if page in ALGORITHMS else RunConfig()
    table = {flag[2:].replace("-", "_"): default for flag, default, *_ in rows(f"{page}.md", "--[a-z0-9-]+")}
    assert list(table) == list(asdict(config))
    file = tmp_path / "defaults.yaml"
    file.write_text("".join(f"{name}: {default}\n" for name, default in table.items()))
    other = replace(config_of(algorithm), gamma=0.5)
    applied = presets.apply([str(file)], algorithm, RunConfig(num_envs=99), other)
    assert config in applied


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_table_of_presets_is_what_they_say(algorithm: str) -> None:
    """Of all presets that have a section for the algorithm."""
    files = presets.shipped()
    names = [name for name in files if algorithm in yaml.safe_load(files[name].read_text())]
    (header,) = rows(f"{algorithm}.md", "[a-z0-9_]+", head="option")
    table = [row for row in rows(f"{algorithm}.md", "[a-z0-9_]+") if len(row) == len(header)]
    assert sorted(header[1:]) == sorted(names)
    listed = {row[0] for row in table}
    default = asdict(RunConfig()) | asdict(config_of(algorithm))
    for column, name in enumerate(header[1:], start=1):
        run_config, config = presets.apply([name], algorithm, RunConfig(), config_of(algorithm))
        resolved = asdict(run_config) | asdict(config)
        for row in table:
            value = resolved[row[0]]
            assert type(value)(yaml.safe_load(row[column])) == value, f"{row[0]} of {name}"
        assert {key for key, value in resolved.items() if value != default[key]} <= listed
