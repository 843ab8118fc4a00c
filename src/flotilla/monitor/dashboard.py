"""What people see while a run goes on: a live screen on a terminal, plain lines elsewhere."""

from __future__ import annotations

import atexit
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.style import Style

from flotilla.monitor.meters import EnvState

Mode = Literal["auto", "live", "plain", "none"]
Line = list[Segment]

REFRESH_EVERY_S = 0.25
PLAIN_EVERY_S = 5.0
PLAIN_FIRST_S = 1.0
SHOWN_ENVS = 16
CELL = 25  # columns that a loss or an environment needs
GAP = 2

PLAIN, DIM, BOLD = Style(), Style(dim=True), Style(bold=True)
HEADING = Style(color="cyan", bold=True)
STATE = {"running": Style(color="green"), "done": Style(color="green", bold=True)}
TROUBLE = Style(color="yellow", bold=True)
SHARES = {
    "env": Style(color="green"),
    "inference": Style(color="blue"),
    "learning": Style(color="magenta"),
    "waiting": Style(color="yellow"),
    "other": DIM,
}
ASCII = str.maketrans("━─·…", "=-.~")


@dataclass
class View:
    """What there is to show; the monitor keeps it up to date."""

    title: str
    total_steps: int
    envs: Sequence[EnvState]
    state: str = "running"
    env_steps: int = 0
    elapsed_s: float = 0.0
    env_steps_per_s: float | None = None  # of the last seconds
    frames_per_step: int = 1
    shares: dict[str, float] = field(default_factory=dict)
    episodes: int = 0
    mean_return: float | None = None  # of the last 100 training episodes
    best_return: float | None = None
    last_return: float | None = None
    eval_return: float | None = None
    losses: dict[str, float] = field(default_factory=dict)
    resources: dict[str, float] = field(default_factory=dict)  # by metric key

    @property
    def eta_s(self) -> float | None:
        """Seconds to the last step at the present rate."""
        if not self.env_steps_per_s:
            return None
        return max(0, self.total_steps - self.env_steps) / self.env_steps_per_s


class Dashboard:
    """Shows a View in one of three ways; `auto` is `live` on a terminal and `plain` elsewhere."""

    def __init__(self, view: View, mode: Mode) -> None:
        if mode == "auto":
            terminal = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
            mode = "live" if terminal else "plain"
        self._view = view
        self._mode = mode
        self._live: Live | None = None
        self._next_s = time.monotonic() + (PLAIN_FIRST_S if mode == "plain" else 0)
        if mode == "live":
            console = Console(force_terminal=True)
            # What is printed or warned about meanwhile goes above the screen.
            self._live = Live(Screen(view), console=console, auto_refresh=False, vertical_overflow="crop")
            self._live.start()
            atexit.register(self.close)  # the cursor must come back, whatever ends the process

    def due(self, now_s: float) -> bool:
        """Whether `refresh` at this time (time.monotonic) would show anything new."""
        return self._mode != "none" and now_s >= self._next_s

    def refresh(self, now_s: float) -> None:
        """Redraw the screen, or print a line."""
        if self._live is not None:
            self._next_s = now_s + REFRESH_EVERY_S
            self._guarded(self._live.refresh)
        else:
            self._next_s = now_s + PLAIN_EVERY_S
            self.note(plain_line(self._view))

    def note(self, text: str) -> None:
        """A line for people."""
        if self._mode == "none":
            return
        if self._live is not None:
            show = partial(self._live.console.print, text, markup=False, highlight=False, soft_wrap=True)
        else:
            show = partial(print, text, flush=True)
        self._guarded(show)

    def close(self) -> None:
        """Show the last state and give the terminal back; idempotent."""
        if self._live is not None:
            live, self._live = self._live, None
            self._guarded(live.stop)
            atexit.unregister(self.close)
        elif self._mode == "plain":
            self.note(plain_line(self._view))
        self._mode = "none"

    def _guarded(self, show: Callable[[], object]) -> None:
        """Call `show`; where nobody reads any more (a closed pipe or terminal), be silent from then on."""
        try:
            show()
        except OSError:
            self._mode = "none"
            # What is left in the buffer must not fail again when the interpreter flushes it at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def plain_line(view: View) -> str:
    """The run in one line, for log files."""
    parts = [f"{view.env_steps:,} of {view.total_steps:,} env steps ({_percent(view)})"]
    parts.append(f"return {_number(view.mean_return)} (best {_number(view.best_return)})")
    if view.eval_return is not None:
        parts.append(f"eval {_number(view.eval_return)}")
    parts.append(f"{_count(view.env_steps_per_s)} env steps/s")
    if view.state == "running":
        parts.append(f"eta {_duration(view.eta_s)}")
    else:
        parts.append(f"{view.state} after {_duration(view.elapsed_s)}")
    return "  ".join(parts)


class Screen:
    """Draws a View as lines that fit the terminal.

    The lines are made of segments by hand, so that four redraws a second take less than 1 % of a core.
    """

    def __init__(self, view: View) -> None:
        self._view = view

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.size.width, options.size.height - 1
        view = self._view
        half = (width - GAP) // 2
        lines = [self._title(width), self._progress(width), self._speed(), self._machine()]
        lines += _beside([self._shares(half), self._returns(width - GAP - half)], [half, width - GAP - half])
        if view.losses:
            cells = [_pair(_short(key), _number(x), CELL - GAP) for key, x in view.losses.items()]
            lines += [_heading("Losses", width), *_grid(cells, width)]
        lines += self._environments(width, height - len(lines))
        for line in lines[:height]:
            for segment in Segment.adjust_line_length(line, width):
                yield Segment(segment.text.translate(ASCII), segment.style) if options.ascii_only else segment
            yield Segment.line()

    def _title(self, width: int) -> Line:
        state = self._view.state
        title = Segment(self._view.title, BOLD)
        line = Segment.adjust_line_length([title], max(0, width - len(state) - 1))
        return [*line, Segment(f" {state}", STATE.get(state, TROUBLE))]

    def _progress(self, width: int) -> Line:
        view = self._view
        steps = f"{view.env_steps:,} / {view.total_steps:,}"
        eta = f"  eta {_duration(view.eta_s)}" if view.state == "running" else ""
        text = f" {_percent(view)}  {steps}{eta}"
        return [*_bar(_fraction(view), width - len(text), STATE["running"]), Segment(text)]

    def _speed(self) -> Line:
        view = self._view
        rate = view.env_steps_per_s
        frames = None if rate is None else rate * view.frames_per_step
        return _row(
            [
                (_count(rate), " env steps/s"),
                (_count(frames), " frames/s"),
                (_duration(view.elapsed_s), " elapsed"),
            ]
        )

    def _machine(self) -> Line:
        shown: list[tuple[str, str]] = []
        formats: dict[str, tuple[Callable[[float], str], str]] = {
            "system/cpu_percent": (lambda x: f"{x:.0f} %", f" CPU of {100 * (os.cpu_count() or 1)}"),
            "system/memory_bytes": (_bytes, " memory"),
            "system/gpu_percent": (lambda x: f"{x:.0f} %", " GPU"),
            "system/gpu_memory_bytes": (_bytes, " GPU memory"),
        }
        for key, (to_text, label) in formats.items():
            if key in self._view.resources:
                shown.append((to_text(self._view.resources[key]), label))
        return _row(shown)

    def _shares(self, width: int) -> list[Line]:
        lines = [_heading("Time", width)]
        for part, style in SHARES.items():
            share = self._view.shares.get(part, 0.0)
            bar = _bar(share, width - 16, style)
            lines.append([Segment(f"{part:<10}", DIM), *bar, Segment(f"{100 * share:>4.0f} %")])
        return lines

    def _returns(self, width: int) -> list[Line]:
        view = self._view
        rows = {
            "mean of the last 100": _number(view.mean_return),
            "best": _number(view.best_return),
            "last": _number(view.last_return),
            "last evaluation": _number(view.eval_return),
            "episodes": f"{view.episodes:,}",
        }
        return [_heading("Returns", width), *(_pair(label, text, width) for label, text in rows.items())]

    def _environments(self, width: int, height: int) -> list[Line]:
        envs = self._view.envs
        columns = _columns(width)
        shown = min(SHOWN_ENVS, len(envs), columns * max(0, height - 2))
        more = f" ({len(envs) - shown:,} more)" if shown < len(envs) else ""
        header: Line = []
        for _ in range(min(columns, shown)):
            header += [Segment(f"{'env':>3} {'eps':>4} {'return':>6} {'st/s':>5} {'rst':>3}", DIM), _space()]
        cells = [
            [
                Segment(f"{index:>3} ", DIM),
                Segment(f"{_compact(env.episodes):>4} "),
                Segment(f"{_compact(env.last_return):>6} ", BOLD),
                Segment(f"{_compact(env.steps_per_s):>5} "),
                Segment(f"{_compact(env.restarts):>3}", TROUBLE if env.restarts else DIM),
            ]
            for index, env in enumerate(envs[:shown])
        ]
        return [_heading(f"Environments{more}", width), header, *_grid(cells, width)]


def _heading(text: str, width: int) -> Line:
    return [Segment("── ", DIM), Segment(text, HEADING), Segment(" " + "─" * (width - len(text) - 4), DIM)]


def _row(values: Iterable[tuple[str, str]]) -> Line:
    line: Line = []
    for text, label in values:
        line += [Segment(text, BOLD), Segment(label, DIM), Segment("   ")]
    return line


def _pair(label: str, text: str, width: int) -> Line:
    return [Segment(label, DIM), Segment(" " * (width - len(label) - len(text))), Segment(text)]


def _bar(fraction: float, width: int, style: Style) -> Line:
    width = max(0, width)
    full = round(min(1.0, max(0.0, fraction)) * width)
    return [Segment("━" * full, style), Segment("─" * (width - full), DIM)]


def _space() -> Segment:
    return Segment(" " * GAP)


def _columns(width: int) -> int:
    return max(1, (width + GAP) // (CELL + GAP))


def _grid(cells: list[Line], width: int) -> list[Line]:
    """Cells of CELL columns in as many as fit side by side, filled row by row."""
    columns = _columns(width)
    rows = [cells[start : start + columns] for start in range(0, len(cells), columns)]
    return [
        [segment for cell in row for segment in (*Segment.adjust_line_length(cell, CELL), _space())] for row in rows
    ]


def _beside(blocks: list[list[Line]], widths: list[int]) -> list[Line]:
    """Blocks of equal height next to each other."""
    lines = []
    for row in zip(*blocks, strict=True):
        padded = [Segment.adjust_line_length(line, width) for line, width in zip(row, widths, strict=True)]
        lines.append([segment for line in padded for segment in (*line, _space())])
    return lines


def _fraction(view: View) -> float:
    return view.env_steps / max(1, view.total_steps)


def _percent(view: View) -> str:
    return f"{math.floor(100 * _fraction(view))} %"


def _short(key: str) -> str:
    return key.partition("/")[2].replace("variance", "var")


def _number(x: float | None) -> str:
    if x is None:
        return "-"
    if x == 0 or not math.isfinite(x):
        return f"{x:g}"
    if abs(x) < 1e-3 or abs(x) >= 1e6:
        return f"{x:.2e}"
    return f"{x:,.1f}" if abs(x) >= 100 else f"{x:.2f}" if abs(x) >= 10 else f"{x:.4f}"


def _compact(x: float | None) -> str:
    """At most six characters, five of a count."""
    if x is None or not math.isfinite(x):
        return "-" if x is None else f"{x:g}"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(x) >= size:
            return f"{x / size:.0f}{letter}" if abs(x) >= 10 * size else f"{x / size:.1f}{letter}"
    return f"{x}" if isinstance(x, int) else f"{x:.0f}" if abs(x) >= 100 else f"{x:.1f}"


def _count(x: float | None) -> str:
    return "-" if x is None else f"{x:,.0f}"


def _bytes(x: float) -> str:
    return f"{x / 2**30:.2f} GiB"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days} d {hours:02}:{minutes:02}:{rest:02}" if days else f"{hours}:{minutes:02}:{rest:02}"
