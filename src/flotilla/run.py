"""Run: what an algorithm is handed. The one room that knows all layers; it puts them together from a config."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from types import FrameType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from flotilla import rundir
from flotilla.compute import checkpoint
from flotilla.compute.checkpoint import Checkpoints, Snapshot
from flotilla.compute.chunks import Chunk
from flotilla.compute.device import device_of
from flotilla.compute.optimizer import Optimizer
from flotilla.compute.precision import autocast, place
from flotilla.compute.profile import Profile
from flotilla.compute.randomness import Randomness
from flotilla.compute.ranks import Ranks
from flotilla.compute.rows import Rows
from flotilla.compute.state import Stateful, collect, restore, tell
from flotilla.compute.statistics import moments
from flotilla.core.config import RunConfig
from flotilla.core.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_PREEMPTED, UsageError
from flotilla.core.ranges import check_ranges
from flotilla.core.seeding import stream_seed
from flotilla.core.types import Episode, Spec
from flotilla.envs.make import frame_stack, frames_per_step
from flotilla.evaluation import evaluate, options_of, record_video
from flotilla.monitor.monitor import Monitor, State
from flotilla.monitor.records import over_ranks, summary
from flotilla.nets.encoders import has_image
from flotilla.sampling.choose import choose, choose_batch, choose_groups, env_ids, make_backend
from flotilla.sampling.priorities import Priorities
from flotilla.sampling.replay import Replay
from flotilla.sampling.sampler import Sampler

M = TypeVar("M", bound=nn.Module)

CHECKPOINT_EVERY_S = 300.0  # where no number of steps is asked for
LEARNING = {"learned_steps": 0, "due": 0.0, "updates": 0}  # what `updates` counts
TIME_LIMIT = "time limit"  # beside the names of signals, why a run stops early


class Run:
    """One training run on this rank.

    sampler: rollouts of this rank's environments.  spec: what one of them takes and gives.  num_envs: of this
    rank.  device: where networks live.  Nothing is written before the first tick, so that an algorithm may
    still refuse its configuration.  Where the run's directory holds a checkpoint, the run goes on from it.
    """

    def __init__(self, algorithm: str, config: RunConfig, algorithm_config: Any, origin: dict[str, Any]) -> None:
        check_ranges(config)
        self._started = time.perf_counter()
        self._run_dir = rundir.locate(config, algorithm)
        self.config = config
        self.device = device_of(config.device)
        self._ranks = Ranks.join(self.device.type, config.rank_timeout_s)
        self.num_envs = self.per_rank("num_envs", config.num_envs)
        self._algorithm, self._algorithm_config, self._origin = algorithm, algorithm_config, origin
        first_index = self._ranks.rank * self.num_envs
        options = options_of(config, training=True)
        ids = env_ids(config, range(first_index, first_index + self.num_envs))
        batch = choose_batch(config, options, self.num_envs)
        num_groups = choose_groups(config, options, self.num_envs)
        self.sampler = Sampler(
            make_backend(config, options, num_envs=self.num_envs, first_index=first_index, num_groups=num_groups),
            self.device,
            first_index,
            first_ready=batch,
            env_ids=ids,
            pin_memory=config.pin_memory,
        )
        self.spec: Spec = self.sampler.spec
        cores = max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self._measured_threads = cores if config.threads == -1 else 0
        torch.set_num_threads(max(config.threads, 0) or (cores if has_image(self.spec.obs_space) else 1))
        self._random = Randomness(self.device, config.seed, self._ranks.rank)
        self._frames_per_step, self._frame_stack = frames_per_step(ids[0], options), frame_stack(ids[0])
        self._closing = contextlib.ExitStack()
        self._notes = ["backend: {} ({})".format(*choose(config, options))]  # for people, until the monitor is there
        self._checkpoints = Checkpoints(self._run_dir / "checkpoints", keep_last=config.keep_checkpoints)
        self._objects: dict[str, Stateful] = {}
        self._rows: dict[str, Rows] = {}  # of replays
        self._optimizers: list[Optimizer] = []
        self._saved: dict[str, Tensor] = {}  # the random generators of the checkpoint that the run goes on from
        self._counters: dict[str, Any] = {"env_steps": 0, "best_score": None, "monitor": None} | LEARNING
        self._metrics: dict[str, Tensor | float] = {}  # of this iteration, where other ranks have theirs
        self._monitor: Monitor | None = None
        self._signal: signal.Signals | None = None
        self._signalled = 0.0
        self._stop = ""  # why all ranks stop
        self._env_steps = 0  # of all ranks

    # What an algorithm calls ----------------------------------------------------------------------------------

    def per_rank(self, name: str, total: int) -> int:
        """This rank's share of a count that is of all ranks together."""
        world = self._ranks.world_size
        if total % world:
            low = total // world * world
            near = f"{low} or {low + world}" if low else f"{world}"
            raise UsageError(f"{name}={total} does not divide over {world} ranks; nearest: {near}")
        return total // world

    def place(self, module: M) -> M:
        """The module on the run's device, its convolutions in the memory format of the configuration."""
        return place(module, self.device, channels_last=self.config.channels_last)

    def optimizer(
        self, parameters: Iterable[nn.Parameter], learning_rate: float, *, clip: float, eps: float
    ) -> Optimizer:
        """Adam with gradient clipping, over all ranks."""
        config = self.config
        optimizer = Optimizer(
            parameters,
            learning_rate,
            clip=clip,
            eps=eps,
            ranks=self._ranks,
            compile=config.compile,
            precision=config.precision,
            grad_accum_steps=config.grad_accum_steps,
            fused=config.fused_optimizer,
            most_threads=self._measured_threads,
            max_skipped=config.max_skipped_steps,
        )
        self._optimizers.append(optimizer)
        return optimizer

    def replay(
        self,
        capacity: int,
        *,
        gamma: float,
        n_step: int = 1,
        prioritized: Priorities | None = None,
    ) -> Replay:
        """The newest `capacity` transitions of all ranks together, this rank's own share of them.

        No more than a run of this length can fill.
        """
        config, ranks = self.config, self._ranks
        longest = 2 * config.total_timesteps // ranks.world_size  # every second row may be an ignored one
        folder = next(path for path in (self._run_dir, *self._run_dir.parents) if path.is_dir())  # may not be there yet
        replay = Replay(
            self.spec,
            self.num_envs,
            min(self.per_rank("buffer_size", capacity), max(longest, self.num_envs * (n_step + 1))),
            device=self.device,
            seed=stream_seed(config.seed, "replay", ranks.rank),
            frame_stack=self._frame_stack,
            storage=config.buffer_storage,
            directory=folder if config.buffer_storage == "disk" else None,
            max_bytes=-(-config.buffer_bytes // ranks.world_size),
            gamma=gamma,
            n_step=n_step,
            prioritized=prioritized,
        )
        where = "RAM" if config.buffer_storage == "ram" else config.buffer_storage
        self._notes.append(f"replay: {replay.bytes / 1e9:.3g} GB of {where} when it is full")
        self._closing.callback(replay.close)
        return replay

    @property
    def env_steps(self) -> int:
        """Environment steps of all ranks before this iteration."""
        return self._env_steps

    def updates(self, count: int, *, every: int, after: int) -> Iterator[int]:
        """The gradient steps that are due, by their number since the run began (the first is 1).

        They are `count` for `every` environment steps of all ranks that came after the first `after`, whatever the
        number of environments: what is left of a step is kept.  count: -1 for as many as environment steps.
        """
        counters = self._counters
        steps = int(self._ranks.sum_(torch.tensor(self.sampler.env_steps)))
        new = max(0, steps - max(counters["learned_steps"], after))
        counters["learned_steps"] = steps
        due = counters["due"] + (new if count < 0 else new * count / every)
        counters["due"] = due - int(due + 1e-9)  # a sum of tenths may lack its last bit
        for _ in range(int(due + 1e-9)):
            counters["updates"] += 1
            yield counters["updates"]

    def moments(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, variance and count of data (B, ...) of weight (B) on all ranks."""
        return moments(self._ranks, x, weight)

    def mean(self, x: Tensor) -> Tensor:
        """The mean over ranks of a tensor, which may be overwritten."""
        return self._ranks.mean_(x)

    def state(self, *, agent: nn.Module, **others: Any) -> None:
        """What a checkpoint keeps: the agent's weights and statistics, and each other object's state_dict().

        All of them are as they were where the run's directory has a checkpoint to go on from.
        """
        self._objects = {"agent": agent, "sampler": self.sampler, **others}
        replays = {name: thing for name, thing in others.items() if isinstance(thing, Replay)}
        self._rows = {name: Rows(self._ranks, name, thing, self._checkpoints) for name, thing in replays.items()}
        for x in agent.state_dict().values():  # targets and statistics as well, which no optimizer owns
            self._ranks.broadcast_(x)
        saved = self._ranks.share(self._load() if self._ranks.rank == 0 else None)
        if not saved:
            return
        self._counters |= json.loads(saved.pop("counters").numpy().tobytes())
        self._env_steps = steps = self._counters["env_steps"]
        chunks = [Chunk(**stated) for stated in self._counters.pop("chunks")]
        for name, rows in self._rows.items():
            if told := rows.misfit(chunks):
                saved[f"{name}.count"] = torch.tensor(0)
                self._notes.append(told)
        found = restore(self._ranks, self._objects, saved, self.num_envs)
        for rows in self._rows.values():
            rows.restore(chunks)
        # The sum over ranks is what counts.
        self.sampler.env_steps = steps // self._ranks.world_size
        if self._ranks.rank == 0:
            self.sampler.env_steps += steps % self._ranks.world_size
        self._saved = {key: x for key, x in saved.items() if key.startswith("random.")}
        self._random.reseed(f" from {steps}")  # for ranks that have no state to go on from
        began = self.num_envs if not found else self.sampler.begun_anew
        anew = f"; {began} environments begin a new episode" if began else ""
        self._notes.append(f"continues at {steps:,} env steps{anew}")

    def log(self, metrics: Mapping[str, Tensor | float]) -> None:
        """Numbers of this iteration, by key; tensors stay on the device until they are written."""
        if self._ranks.world_size > 1:
            self._metrics |= metrics
        elif self._monitor:
            self._monitor.add(metrics)

    def ticks(self) -> Iterator[float]:
        """The iterations of training: yields the share of the environment steps that is done, in [0, 1).

        After each iteration it counts, logs, evaluates and saves, and ends when the steps are done, a signal
        came, or the time is over.
        """
        self._open()
        total = self.config.total_timesteps
        while self._env_steps < total and not self._stop:
            with autocast(self.device, self.config.precision):
                yield self._env_steps / total
            before = self._env_steps
            if self._profile:
                self._profile.tick()
            self._exchange()
            for rows in self._rows.values():
                rows.settle()
            for optimizer in self._optimizers:
                if optimizer.is_stuck():
                    names = dict(self._agent.named_parameters())
                    raise RuntimeError(f"training diverged: {optimizer.problem(names)}")
            is_best = self._crossed(self.config.eval_every, before) and self._env_steps < total and self._evaluate()
            if self._due(before) or is_best:
                self._save(is_best)
        self._finish()

    # What stands behind it ------------------------------------------------------------------------------------

    @property
    def _agent(self) -> nn.Module:
        agent = self._objects["agent"]
        assert isinstance(agent, nn.Module)
        return agent

    def _load(self) -> dict[str, Tensor]:
        """Everything in the newest valid checkpoint, its counters as bytes; empty where there is none."""
        path, damaged = checkpoint.find(self._run_dir / "checkpoints")
        self._notes += damaged
        if path is None:
            return {}
        found = checkpoint.load(path)
        words = json.dumps({**found.counters, "chunks": [asdict(chunk) for chunk in found.chunks]})
        counters = torch.from_numpy(np.frombuffer(words.encode(), np.uint8).copy())
        return {f"agent.{key}": x for key, x in found.model.items()} | dict(found.trainer) | {"counters": counters}

    def _open(self) -> None:
        """Make the run's directory and its monitor, on one rank; the random generators go on from here."""
        if self._ranks.rank == 0:
            rundir.save(self._run_dir, self._algorithm, self.config, self._algorithm_config, self._origin)
            self._monitor = Monitor(
                self._run_dir,
                title=f"{self._algorithm} on {self.config.env_id}, seed {self.config.seed}",
                total_steps=self.config.total_timesteps,
                num_envs=self.config.num_envs,
                frames_per_step=self._frames_per_step,
                dashboard=self.config.dashboard,
                log_every_s=self.config.log_every_s,
                device=str(self.device),
                resumed=self._counters["monitor"],
            )
            for note in self._notes:
                self._monitor.note(note)
        self._saved_at = self._began = time.perf_counter()
        self._waited = self._ranks.seconds
        self._profile = Profile(self._run_dir, self.device) if self.config.profile and self._monitor else None
        if self._saved:
            restore(self._ranks, {"random": self._random}, self._saved, self.num_envs)
        self._report([], [])  # where the rates count from

    def _exchange(self) -> None:
        """Tell the other ranks what happened in this iteration, hear of them, and report it all."""
        restarts = [(restart.env_index, restart.cause) for restart in self.sampler.drain_restarts()]
        timed_out = 0 < self.config.time_limit_s < time.perf_counter() - self._started
        stop = self._signal.name if self._signal else TIME_LIMIT if timed_out else ""
        episodes, steps = self.sampler.drain_episodes(), self.sampler.env_steps
        due = time.perf_counter() - self._saved_at > CHECKPOINT_EVERY_S
        if self._ranks.world_size > 1:
            values = [torch.as_tensor(x, device=self.device).float() for x in self._metrics.values()]
            metrics = dict(zip(self._metrics, torch.stack(values).tolist(), strict=True)) if values else {}
            told = tell(self._ranks, [steps, stop, [list(vars(x).values()) for x in episodes], restarts, metrics, due])
            steps, stop = sum(one[0] for one in told), next((one[1] for one in told if one[1]), "")
            episodes = [Episode(*values) for one in told for values in one[2]]
            restarts = [tuple(restart) for one in told for restart in one[3]]
            due = told[0][5]
            self._metrics = {}
            if self._monitor:
                self._monitor.add(over_ranks([one[4] for one in told]))
        self._env_steps, self._stop, self._due_by_clock = steps, stop, due
        self._report(episodes, restarts)

    def _report(self, episodes: list[Episode], restarts: list[tuple[int, str]]) -> None:
        if self._monitor is None:
            return
        self._monitor.episodes(episodes)
        for env_index, cause in restarts:
            self._monitor.restart(env_index, cause)
        seconds = self.sampler.seconds
        waiting = self._ranks.seconds - self._waited
        learning = time.perf_counter() - self._began - sum(seconds.values()) - waiting
        self._spent = {**seconds, "learning": learning, "communication": waiting}
        self._monitor.times(env=seconds["env"], inference=seconds["inference"], learning=learning, waiting=waiting)
        last = self._env_steps >= self.config.total_timesteps or bool(self._stop)
        self._monitor.tick(self._env_steps, last=last)

    def _crossed(self, every: int, before: int) -> bool:
        return every > 0 and self._env_steps // every > before // every

    def _due(self, before: int) -> bool:
        """Whether it is time for a checkpoint: by steps, or by the clock of one rank."""
        every = self.config.checkpoint_every
        return self._crossed(every, before) if every else self._due_by_clock

    def _evaluate(self) -> bool:
        """Score the agent as it is; the clock of learning stands still meanwhile.  Whether it is the best so far."""
        best = False
        if self._monitor is not None:
            paused = time.perf_counter()
            episodes = evaluate(
                self.config,
                self._agent,
                self.device,
                episodes=self.config.eval_episodes,
                policy=self.config.eval_policy,
                stopped=lambda: self._signal is not None,
            )
            if len(episodes) == self.config.eval_episodes:
                score = summary(episodes)["episodic_return_mean"]
                best = self._counters["best_score"] is None or score > self._counters["best_score"]
                self._counters["best_score"] = score if best else self._counters["best_score"]
            if episodes:
                self._monitor.evaluation(self._env_steps, episodes)
            self._began += time.perf_counter() - paused
        return bool(tell(self._ranks, best)[0])

    def _save(self, is_best: bool = False) -> None:
        """A checkpoint, written while training goes on; what goes wrong is told and does not end the run."""
        others = {name: thing for name, thing in self._objects.items() if name != "agent"}
        trainer = collect(self._ranks, others | {"random": self._random})
        parts = [part for rows in self._rows.values() for part in rows.save()]
        self._saved_at = time.perf_counter()
        if self._monitor is None:
            return
        if problem := self._checkpoints.wait():
            self._monitor.note(problem)
        self._counters |= {"env_steps": self._env_steps, "monitor": self._monitor.state()}
        snapshot = Snapshot(self._env_steps, self._agent.state_dict(), trainer, self._counters)
        self._checkpoints.save(snapshot, parts=parts, score=self._counters["best_score"] if is_best else None)

    def _finish(self) -> None:
        """After the last iteration, or after a signal: save first, then what may take long."""
        self._save()
        if not self._stop:
            if self._evaluate():
                self._save(is_best=True)
            if self.config.capture_video and self._monitor:
                self._capture_video()
        if self._monitor is None:
            return
        if problem := self._checkpoints.wait():
            raise RuntimeError(problem)
        if self._profile:
            self._monitor.note(f"{self._profile.close(self._spent)}\nprofile: {self._run_dir / 'profile'}")
        self._monitor.note(f"results: {self._run_dir}")
        state: State = "done" if not self._stop else "interrupted" if self._stop == "SIGINT" else "preempted"
        self._monitor.close(state, self._stop)

    def _capture_video(self) -> None:
        assert self._monitor is not None
        path = self._run_dir / "videos" / f"step_{self._env_steps:012d}.mp4"
        try:
            frames = record_video(self.config, self._agent, self.device, path, self.config.eval_policy)
            self._monitor.note(f"video: {path} ({frames} frames)")
        except Exception as error:  # rendering needs system libraries that a training machine may lack
            self._monitor.note(f"no video: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")

    # Its life -------------------------------------------------------------------------------------------------

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """End after this iteration, with a checkpoint. A second Ctrl-C: end at once."""
        again = self._signal == number == signal.SIGINT
        if again and time.monotonic() - self._signalled > 0.5:  # a terminal and a launcher may both pass one on
            raise KeyboardInterrupt
        if self._signal is None:
            self._signal, self._signalled = signal.Signals(number), time.monotonic()
            if self._monitor:
                with contextlib.suppress(RuntimeError):  # the signal may have come in the middle of another print
                    self._monitor.note("stopping after this iteration; Ctrl-C again ends at once")

    def close(self, state: State, message: str = "") -> None:
        """Free everything; the state is written unless the run has ended by itself."""
        self.sampler.close()
        self._checkpoints.close()
        self._closing.close()
        if self._monitor:
            self._monitor.close(state, message)
        self._ranks.leave(together=state == "done")

    @property
    def exit_code(self) -> int:
        if not self._stop:
            return EXIT_DONE
        return EXIT_INTERRUPTED if self._stop == "SIGINT" else EXIT_PREEMPTED
