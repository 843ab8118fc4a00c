"""Learning curves as PNG files: of one run, and of groups of runs that differ in their seeds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flotilla.core.errors import UsageError
from flotilla.monitor.writers import EPISODES_FILE, METRICS_FILE, read_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]

RECENT_EPISODES = 100  # most episodes that a smoothed point is the mean of
MAX_POINTS = 20_000  # more raw episodes than this are thinned out: the eye cannot tell, the file can
GRID_POINTS = 500
INK, FAINT = "#333333", "#dddddd"
COLOURS = ("#2266aa", "#dd7722", "#338844", "#aa3355", "#775599", "#778822", "#118899", "#886644")
EVALUATIONS = "#c0392b"


def learning_curve(run_dir: Path) -> Path:
    """Draw the training episodes and the evaluations of a run; returns <run_dir>/plots/learning_curve.png."""
    steps, returns = _training(run_dir)
    figure, axes = _figure(run_dir.resolve().name)
    if len(steps):
        thin = slice(None, None, 1 + len(steps) // MAX_POINTS)
        alpha = float(np.clip(60 / len(steps) ** 0.75, 0.06, 0.45))
        label = "training episodes"
        axes.scatter(steps[thin], returns[thin], s=7, color=COLOURS[0], alpha=alpha, linewidths=0, label=label)
        window = _window(len(returns))
        label = f"mean of {window} episodes" if window > 1 else "training return"
        axes.plot(*_smooth(steps, returns), color=COLOURS[0], linewidth=2, label=label)
    evaluations = [r for r in read_lines(run_dir / METRICS_FILE) if r.get("eval/episodic_return_mean") is not None]
    if evaluations:
        axes.errorbar(
            [record["env_steps"] for record in evaluations],
            [record["eval/episodic_return_mean"] for record in evaluations],
            yerr=[record["eval/episodic_return_std"] for record in evaluations],
            fmt="o-", color=EVALUATIONS, markersize=5, linewidth=1.2, capsize=3,
            label="evaluation, mean ± std",
        )  # fmt: skip
    if not len(steps) and not evaluations:
        axes.set(xticks=[], yticks=[])
        axes.text(0.5, 0.5, "no episode has ended", transform=axes.transAxes, ha="center", color=INK)
    return _save(figure, axes, run_dir / "plots" / "learning_curve.png")


def compare(curves: dict[str, list[Path]], out: Path, title: str = "") -> Path:
    """Draw, for each label, the mean over its run directories (one a seed) and the band from worst to best.

    Each seed is smoothed like a learning curve; the mean covers the steps that all seeds of a group have.
    Raises UsageError where a run has no training episode.
    """
    figure, axes = _figure(title)
    for index, (label, run_dirs) in enumerate(curves.items()):
        colour = COLOURS[index % len(COLOURS)]
        seeds = []
        for run_dir in run_dirs:
            steps, returns = _training(run_dir)
            if not len(steps):
                raise UsageError(f"'{run_dir}' has no training episode in {EPISODES_FILE}: give the directory of a run")
            seeds.append(_smooth(steps, returns))
        grid = np.linspace(max(x[0] for x, _ in seeds), min(x[-1] for x, _ in seeds), GRID_POINTS)
        values = np.stack([np.interp(grid, x, y) for x, y in seeds])
        count = f" ({len(seeds)} seeds)" if len(seeds) > 1 else ""
        axes.plot(grid, values.mean(0), color=colour, linewidth=2, label=f"{label}{count}")
        axes.fill_between(grid, values.min(0), values.max(0), color=colour, alpha=0.18, linewidth=0)
    return _save(figure, axes, out)


def _training(run_dir: Path) -> tuple[Floats, Floats]:
    """Environment steps and raw return of each training episode, in the order of the steps."""
    records = [r for r in read_lines(run_dir / EPISODES_FILE) if r["return"] is not None]
    steps = np.array([record["env_steps"] for record in records], dtype=np.float64)
    returns = np.array([record["return"] for record in records], dtype=np.float64)
    order = np.argsort(steps, kind="stable")
    return steps[order], returns[order]


def _window(episodes: int) -> int:
    return int(np.clip(episodes // 10, 1, RECENT_EPISODES))


def _smooth(steps: Floats, returns: Floats) -> tuple[Floats, Floats]:
    """Mean of the last `_window` episodes at the end of each, from the first full window on."""
    window = _window(len(returns))
    sums = np.cumsum(np.concatenate([[0.0], returns]))
    return steps[window - 1 :], (sums[window:] - sums[:-window]) / window


def _figure(title: str) -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_agg import (
        FigureCanvasAgg,
    )  # here, as importing it takes most of a second
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(8, 4.8), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, color=INK, fontsize=12, loc="left", pad=10)
    axes.set_xlabel("environment steps", color=INK)
    axes.set_ylabel("episodic return", color=INK)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(color=FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.tick_params(colors=INK, length=3)
    return figure, axes


def _save(figure: Figure, axes: Axes, path: Path) -> Path:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        legend = axes.legend(handles, labels, frameon=True, framealpha=0.9, edgecolor="none", labelcolor=INK)
        for handle in legend.legend_handles:
            if handle is not None:
                handle.set_alpha(1)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, facecolor="white")
    return path
