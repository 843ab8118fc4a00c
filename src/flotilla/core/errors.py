"""The one error that means: the user can fix this; it becomes one line on stderr and exit code 64."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 64  # sysexits' EX_USAGE: never retry
EXIT_PREEMPTED = 75  # sysexits' EX_TEMPFAIL: a checkpoint is written, start the same command again
EXIT_INTERRUPTED = 130  # 128 + SIGINT


class UsageError(ValueError):
    """A value that a user gave and can correct; the message names the value and the fix, in one line."""


def nearest(name: str, choices: Iterable[str], limit: int = 3) -> str:
    """Words for an error about `name`: the nearest of `choices`, or all of them when few, or none."""
    known = sorted(set(choices))
    lower = {choice.lower(): choice for choice in reversed(known)}
    close = [lower[c] for c in difflib.get_close_matches(name.lower(), lower, n=limit, cutoff=0.6)]
    if close:
        return f"did you mean {' or '.join(close)}?"
    if len(known) <= 12:
        return f"choose from {', '.join(known)}"
    return f"{len(known)} are known, for example {', '.join(known[:limit])}"
