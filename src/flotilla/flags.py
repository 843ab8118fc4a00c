"""Reads flags: spellings, aliases, numbers such as 1e6, the word auto; what tyro refuses becomes one line."""

import contextlib
import io
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from flotilla.core.errors import UsageError, nearest

if TYPE_CHECKING:
    from tyro.constructors import ConstructorRegistry

# The names that people bring along from other packages.
ALIASES = {
    "--task": "--env-id",
    "--envs": "--num-envs",
    "--logdir": "--run-dir",
    "--configs": "--preset",
    "--time-limit": "--time-limit-s",
}

# The fields of RunConfig whose flags also take the word auto.
AUTOMATIC = ("num_envs", "num_workers", "threads")


def parse(prog: str, description: str, blank: Any, tokens: list[str]) -> Any:
    """`tokens` read by tyro as the type of `blank`, which holds the defaults; UsageError where it refuses."""
    import tyro

    tokens = list(spelled_out(prog, _flags_of(blank), tokens))
    refusal = io.StringIO()
    try:
        with contextlib.redirect_stderr(refusal):
            return tyro.cli(
                type(blank),
                prog=prog,
                description=description,
                args=tokens,
                default=blank,
                config=(tyro.conf.OmitArgPrefixes,),
                registry=_numbers(),
            )
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        raise UsageError(f"{_essence(refusal.getvalue())} (see {prog} --help)") from None


def _flags_of(blank: Any) -> set[str]:
    """Every flag that fills a field of the dataclass or of the dataclasses in it."""
    flags = {"--help"}
    for entry in fields(blank):
        value = getattr(blank, entry.name)
        if is_dataclass(value):
            flags |= _flags_of(value)
            continue
        name = entry.name.replace("_", "-")
        flags.add(f"--{name}")
        if isinstance(value, bool):
            flags.add(f"--no-{name}")
    return flags


def without_auto(tokens: Sequence[str]) -> tuple[list[str], set[str]]:
    """The tokens without flags that were given the word auto, and the names of those flags' fields; the last counts."""
    rest: list[str] = []
    automatic: set[str] = set()
    waiting = iter(tokens)
    for token in waiting:
        typed, equals, value = token.partition("=")
        field_name = _canonical(typed)[2:].replace("-", "_")
        if not typed.startswith("--") or field_name not in AUTOMATIC:
            rest.append(token)
            continue
        given = [value] if equals else list(itertools.islice(waiting, 1))
        if given == ["auto"] and field_name == "threads":
            rest += [typed, "-1"]  # measured when there is something to compute
        elif given == ["auto"]:
            automatic.add(field_name)
        else:
            automatic.discard(field_name)
            rest += [typed, *given]
    return rest, automatic


def value_of(flag: str, tokens: Sequence[str]) -> str:
    """What a flag was given, under any of its names; the last counts, empty where it is not there."""
    found = ""
    for token, following in itertools.pairwise([*tokens, ""]):
        typed, equals, value = token.partition("=")
        if typed.startswith("--") and _canonical(typed) == flag:
            found = value if equals else following
    return found


def _canonical(flag: str) -> str:
    """A flag as --help spells it."""
    flag = flag.replace("_", "-")
    return ALIASES.get(flag, flag)


def spelled_out(prog: str, flags: set[str], tokens: list[str]) -> Iterator[str]:
    """The tokens with aliases replaced; an unknown flag names the nearest one."""
    for token in tokens:
        typed, equals, value = token.partition("=")
        if not typed.startswith("--"):
            yield token
            continue
        if token == "--parallel" and "--backend" in flags:
            yield from ("--backend", "workers")
            continue
        flag = _canonical(typed)
        if flag not in flags:
            raise UsageError(f"unknown flag '{typed}' ({nearest(flag, flags)}; see {prog} --help)")
        if equals and f"--no-{flag[2:]}" in flags:
            raise UsageError(f"{flag} takes no value (write {flag} or --no-{flag[2:]})")
        yield flag + equals + value


def _numbers() -> "ConstructorRegistry":
    """Teaches tyro that 1e6 is a whole number too."""
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

    from flotilla.core.presets import whole_number

    registry = ConstructorRegistry()

    @registry.primitive_rule
    def whole(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[int] | None:
        if info.type is not int:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="INT",
            instance_from_str=lambda texts: whole_number(texts[0]),
            is_instance=lambda value: type(value) is int,
            str_from_instance=lambda value: [str(value)],
        )

    return registry


def _essence(box: str) -> str:
    """The sentence in the box that tyro draws around an error: from its title to its first rule."""
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", row).strip(" │|") for row in box.splitlines()]
    sentence = []
    for row in rows[1:]:
        if not re.search(r"\w", row):
            break
        sentence.append(row)
    return " ".join(sentence or rows)
