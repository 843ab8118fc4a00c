"""Rates and shares over the last seconds, and the state of each environment, while a run goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from flotilla.core.types import Episode

WINDOW_S = 10.0
SAMPLE_EVERY_S = 0.25
PARTS = (
    "env",
    "inference",
    "learning",
    "waiting",
)  # what a run says that its time went into; the rest is "other"


class _Sample(NamedTuple):
    at_s: float
    env_steps: int
    spent_s: tuple[float, ...]  # cumulative, in the order of PARTS


class Rates:
    """Steps per second and shares of time between the newest sample and the one about WINDOW_S before it."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque()

    def due(self, now_s: float) -> bool:
        """Whether a sample would be new enough to keep."""
        return not self._samples or now_s - self._samples[-1].at_s >= SAMPLE_EVERY_S

    def add(self, now_s: float, env_steps: int, spent_s: Mapping[str, float]) -> None:
        """The run's environment steps and the seconds spent on each of PARTS, both since it began."""
        self._samples.append(_Sample(now_s, env_steps, tuple(spent_s.get(part, 0.0) for part in PARTS)))
        # The second sample is old enough to be the window's start: the first has served.
        while len(self._samples) > 2 and now_s - self._samples[1].at_s >= WINDOW_S:
            self._samples.popleft()

    @property
    def env_steps_per_s(self) -> float | None:
        """None until two samples are there."""
        seconds = self._seconds()
        return (self._samples[-1].env_steps - self._samples[0].env_steps) / seconds if seconds else None

    @property
    def shares(self) -> dict[str, float]:
        """Fraction of the window by part, "other" included; empty until two samples are there."""
        seconds = self._seconds()
        if not seconds:
            return {}
        first, last = self._samples[0].spent_s, self._samples[-1].spent_s
        shares = {part: (b - a) / seconds for part, a, b in zip(PARTS, first, last, strict=True)}
        return shares | {"other": max(0.0, 1 - sum(shares.values()))}

    def _seconds(self) -> float:
        return self._samples[-1].at_s - self._samples[0].at_s if self._samples else 0.0


@dataclass(slots=True)
class EnvState:
    """What is known of one environment: it speaks when an episode ends, and when it had to be restarted."""

    episodes: int = 0
    last_return: float | None = None
    steps_per_s: float | None = None  # over the last WINDOW_S or the last episode, whichever is longer
    restarts: int = 0
    steps: int = 0  # in finished episodes
    anchor_s: float = 0.0  # time and steps at the start of the window
    anchor_steps: int = 0

    def add(self, now_s: float, episode: Episode) -> None:
        """Count an episode; `now_s` is seconds since the run began."""
        self.episodes += 1
        self.last_return = episode.episodic_return
        self.steps += episode.length_steps
        elapsed_s = now_s - self.anchor_s
        if elapsed_s >= WINDOW_S or (self.anchor_s == 0 and elapsed_s > 0):
            self.steps_per_s = (self.steps - self.anchor_steps) / elapsed_s
        if elapsed_s >= WINDOW_S:
            self.anchor_s, self.anchor_steps = now_s, self.steps
