"""The monitor of a run: takes what happens, and shows, counts and writes it."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from flotilla.core.types import Episode
from flotilla.monitor.dashboard import Dashboard, Mode, View
from flotilla.monitor.meters import EnvState, Rates
from flotilla.monitor.plots import learning_curve
from flotilla.monitor.records import METRICS, Aggregator, summary
from flotilla.monitor.resources import Resources
from flotilla.monitor.writers import Writers

State = Literal["running", "done", "preempted", "interrupted", "failed"]

RECENT_EPISODES = 100
STATUS_EVERY_S = 1.0
RESUMED = ("env_steps", "episodes", "last_return", "best_return", "eval_return")  # of the view, that go on counting


class Monitor:
    """What a run tells people, and the files it leaves in its directory.

    Call `tick` once before the first iteration, so that it counts in the rates, and once after each.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        title: str,
        total_steps: int,
        num_envs: int,
        frames_per_step: int,
        dashboard: Mode,
        log_every_s: float,
        device: str,
        resumed: Mapping[str, Any] | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._log_every_s = log_every_s
        self._started_s = time.monotonic()
        self._next_log_s = self._started_s + log_every_s
        self._next_status_s = 0.0
        self._logged_steps = -1
        self._closed = False
        self._aggregator = Aggregator()
        self._rates = Rates()
        self._spent_s: dict[str, float] = {}
        self._recent: deque[float] = deque(maxlen=RECENT_EPISODES)
        self._evaluation: dict[str, float] | None = None
        self._envs = [EnvState() for _ in range(num_envs)]
        self._resources = Resources(device)
        self._writers = Writers(run_dir, resumed and resumed["files"])
        self._view = View(title, total_steps, self._envs, frames_per_step=frames_per_step)
        if resumed:
            self._resume(resumed)
        self.set_status("running")
        self._dashboard = Dashboard(self._view, dashboard)

    def state(self) -> dict[str, Any]:
        """What a later start needs, as JSON, to go on counting and writing from here: `resumed` of its monitor."""
        view = self._view
        return {
            "files": self._writers.positions() | {"env_steps": view.env_steps},
            "elapsed_s": self._elapsed_s(),
            "recent_returns": list(self._recent),
            "view": {name: getattr(view, name) for name in RESUMED},
            "envs": [[env.episodes, env.last_return, env.restarts, env.steps] for env in self._envs],
            "evaluation": self._evaluation,
        }

    def _resume(self, state: Mapping[str, Any]) -> None:
        self._started_s -= state["elapsed_s"]
        self._recent.extend(state["recent_returns"])
        self._evaluation = state["evaluation"]
        for name, value in state["view"].items():
            setattr(self._view, name, value)
        for env, (episodes, last_return, restarts, steps) in zip(self._envs, state["envs"], strict=False):
            env.episodes, env.last_return, env.restarts, env.steps = episodes, last_return, restarts, steps
            env.anchor_s, env.anchor_steps = state["elapsed_s"], steps

    def add(self, metrics: Mapping[str, Tensor | float]) -> None:
        """Metrics of one iteration, by a key of METRICS; tensors stay on their device until the log line."""
        self._aggregator.add(metrics)

    def episodes(self, episodes: Sequence[Episode]) -> None:
        """Training episodes that have ended."""
        if not episodes:
            return
        elapsed_s = self._elapsed_s()
        self._writers.episodes(elapsed_s, episodes)
        view = self._view
        for episode in episodes:
            self._envs[episode.env_index].add(elapsed_s, episode)
            self._recent.append(episode.episodic_return)
            of = f"/{episode.env_id}" if episode.env_id else ""
            self._aggregator.add(
                {
                    "charts/episodic_return": episode.episodic_return,
                    "charts/episodic_length": episode.length_steps,
                    "env/episodes": 1,
                }
                | ({f"charts/episodic_return{of}": episode.episodic_return, f"env/episodes{of}": 1} if of else {})
            )
        view.episodes += len(episodes)
        view.last_return = episodes[-1].episodic_return
        best = max(episode.episodic_return for episode in episodes)
        view.best_return = best if view.best_return is None else max(best, view.best_return)

    def restart(self, env_index: int, cause: str) -> None:
        """An environment failed and was restarted; the cause is told where it is known."""
        self._envs[env_index].restarts += 1
        self._aggregator.add({"env/restarts": 1})
        if cause:
            self.note(f"environment {env_index} was restarted: {cause.strip()}")

    def times(self, *, env: float, inference: float, learning: float, waiting: float) -> None:
        """Seconds spent on each since the run began."""
        self._spent_s = {"env": env, "inference": inference, "learning": learning, "waiting": waiting}

    def tick(self, env_steps: int, *, last: bool = False) -> None:
        """An iteration has ended, after so many environment steps of the run: log and redraw what is due."""
        now_s = time.monotonic()
        self._view.env_steps = env_steps
        if last or self._rates.due(now_s):
            self._rates.add(now_s, env_steps, self._spent_s)
        if last or now_s >= self._next_log_s:
            self._next_log_s = now_s + self._log_every_s
            self._log()
        if last or now_s >= self._next_status_s:
            self.set_status("running")
        if self._dashboard.due(now_s):
            self._update_view()
            self._dashboard.refresh(now_s)

    def evaluation(self, env_steps: int, episodes: Sequence[Episode]) -> None:
        """The episodes of an evaluation of the policy that had learned from so many environment steps."""
        figures = summary(episodes)
        self._writers.metrics(env_steps, self._elapsed_s(), {f"eval/{key}": x for key, x in figures.items()})
        mean, std = figures["episodic_return_mean"], figures["episodic_return_std"]
        self._evaluation = {"env_steps": env_steps} | figures
        self._view.eval_return = mean
        self.set_status("running")
        count = f"{len(episodes)} episode{'s' if len(episodes) > 1 else ''}"
        self.note(f"evaluation at {env_steps:,} env steps: return {mean:,.2f} ± {std:,.2f} over {count}")

    def note(self, text: str) -> None:
        """A line for people: above the live dashboard, or between the plain lines."""
        self._dashboard.note(text)

    def set_status(self, state: State, **more: Any) -> None:
        """Replace status.json."""
        self._next_status_s = time.monotonic() + STATUS_EVERY_S
        self._view.state = state
        status = {
            "state": state,
            "env_steps": self._view.env_steps,
            "total_timesteps": self._view.total_steps,
            "episodes": self._view.episodes,
            "episodic_return_mean": self._mean_return(),
            "env_restarts": sum(env.restarts for env in self._envs),
            "env_steps_per_s": self._rates.env_steps_per_s,
            "elapsed_s": round(self._elapsed_s(), 3),
            "eval": self._evaluation,
        }
        self._writers.status(status | more)

    def close(self, state: State, message: str = "") -> None:
        """The last log line, the learning curve, the status, and the terminal back; idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._view.env_steps != self._logged_steps:
                self._log()
            self._update_view()  # before the curve, whose drawing is no part of the run
            self._writers.guarded(lambda: learning_curve(self._run_dir))
            self.set_status(state, message=message)
            if message:
                self.note(message)
        finally:
            self._dashboard.close()
            self._writers.close()

    def _log(self) -> None:
        values = self._aggregator.fetch()
        values |= {"charts/episodes": float(self._view.episodes), "time/elapsed_s": self._elapsed_s()}
        rate = self._rates.env_steps_per_s
        if rate is not None:
            values["time/env_steps_per_s"] = rate
            values["time/frames_per_s"] = rate * self._view.frames_per_step
        values |= {f"time/share_{part}": share for part, share in self._rates.shares.items()}
        values |= self._resources.sample()
        self._writers.metrics(self._view.env_steps, self._elapsed_s(), values)
        self._logged_steps = self._view.env_steps
        losses = self._view.losses | values
        shown = ("losses/", "charts/learning_rate")
        self._view.losses = {key: losses[key] for key in METRICS if key in losses and key.startswith(shown)}

    def _update_view(self) -> None:
        view = self._view
        view.elapsed_s = self._elapsed_s()
        view.env_steps_per_s = self._rates.env_steps_per_s
        view.shares = self._rates.shares
        view.mean_return = self._mean_return()
        view.resources = self._resources.sample()

    def _mean_return(self) -> float | None:
        return statistics.fmean(self._recent) if self._recent else None

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_s
