"""Run: what an algorithm is handed. The one room that knows all layers; it puts them together from a config."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import signal
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, TypeVar

import torch
import yaml
from torch import Tensor, nn

from flotilla.compute import checkpoint
from flotilla.compute.optimizer import Optimizer, parameter_counts
from flotilla.compute.ranks import Ranks
from flotilla.compute.statistics import moments
from flotilla.core import names
from flotilla.core.config import RunConfig
from flotilla.core.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, UsageError
from flotilla.core.presets import apply as apply_presets
from flotilla.core.provenance import provenance
from flotilla.core.seeding import stream_seed
from flotilla.core.types import Spec
from flotilla.envs.make import frames_per_step
from flotilla.evaluation import evaluate, options_of, record_video
from flotilla.monitor.monitor import Monitor, State
from flotilla.monitor.records import summary
from flotilla.nets.encoders import has_image
from flotilla.sampling.choose import choose, choose_batch, choose_groups, env_ids, make_backend
from flotilla.sampling.sampler import Sampler

M = TypeVar("M", bound=nn.Module)


class Run:
    """One training run on this rank.

    sampler: rollouts of this rank's environments.  spec: what one of them takes and gives.  num_envs: of this
    rank.  device: where networks live.  Nothing is written before the first tick, so that an algorithm may
    still refuse its configuration.
    """

    def __init__(self, algorithm: str, config: RunConfig, algorithm_config: Any, origin: dict[str, Any]) -> None:
        check(config)
        self.config = config
        self.device = _device(config.device)
        self._ranks = Ranks.join(self.device.type)
        self.num_envs = self.per_rank("num_envs", config.num_envs)
        self._algorithm, self._algorithm_config, self._origin = algorithm, algorithm_config, origin
        self._run_dir = _run_dir(config, algorithm)
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
        )
        self.spec: Spec = self.sampler.spec
        self.threads = config.threads or (os.cpu_count() or 1 if has_image(self.spec.obs_space) else 1)
        torch.set_num_threads(self.threads)
        torch.manual_seed(stream_seed(config.seed, "torch", self._ranks.rank))
        self._frames_per_step = frames_per_step(ids[0], options)
        self._backend_reason = "backend: {} ({})".format(*choose(config, options))
        self._objects: dict[str, Any] = {}
        self._monitor: Monitor | None = None
        self._stop_signal = 0
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
        """The module on the run's device."""
        return module.to(self.device)

    def optimizer(
        self, parameters: Iterable[nn.Parameter], learning_rate: float, *, clip: float, eps: float
    ) -> Optimizer:
        """Adam with gradient clipping, over all ranks."""
        return Optimizer(parameters, learning_rate, clip=clip, eps=eps, ranks=self._ranks, compile=self.config.compile)

    def moments(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, variance and count of data (B, ...) of weight (B) on all ranks."""
        return moments(self._ranks, x, weight)

    def agree(self, flag: bool | Tensor) -> bool:
        """Whether the flag is set on any rank."""
        return self._ranks.agree(flag)

    def state(self, *, agent: nn.Module, **others: Any) -> None:
        """What a checkpoint keeps: the agent's weights and statistics, and each other object's state_dict()."""
        self._objects = {"agent": agent, **others}

    def log(self, metrics: Mapping[str, Tensor | float]) -> None:
        """Numbers of this iteration, by key; tensors stay on the device until they are written."""
        if self._monitor:
            self._monitor.add(metrics)

    def ticks(self) -> Iterator[float]:
        """The iterations of training: yields the share of the environment steps that is done, in [0, 1).

        After each iteration it counts, logs, evaluates and saves, and ends when the steps are done or a
        signal came.
        """
        self._open()
        self._report()  # where the rates count from
        total = self.config.total_timesteps
        while self._env_steps < total and not self._ranks.agree(self._stop_signal > 0):
            yield self._env_steps / total
            before = self._env_steps
            self._env_steps = self._count()
            self._report()
            if self._crossed(self.config.eval_every, before) and self._env_steps < total:
                self._evaluate()
            if self._crossed(self.config.checkpoint_every, before):
                self._save()
        self._finish()

    # What stands behind it ------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Make the run's directory and its monitor, on one rank."""
        self._started = time.perf_counter()
        if self._ranks.rank:
            return
        self._run_dir.mkdir(parents=True, exist_ok=True)
        config = dataclasses.asdict(self.config) | dataclasses.asdict(self._algorithm_config)
        text = yaml.safe_dump(
            {"algorithm": self._algorithm, **_plain(config), "provenance": self._origin}, sort_keys=False
        )
        (self._run_dir / "config.yaml").write_text(text)
        self._monitor = Monitor(
            self._run_dir,
            title=f"{self._algorithm} on {self.config.env_id}, seed {self.config.seed}",
            total_steps=self.config.total_timesteps,
            num_envs=self.config.num_envs,
            frames_per_step=self._frames_per_step,
            dashboard=self.config.dashboard,
            log_every_s=self.config.log_every_s,
            device=str(self.device),
        )
        self._monitor.note(self._backend_reason)

    def _count(self) -> int:
        """Environment steps of all ranks."""
        steps = self.sampler.env_steps
        if self._ranks.world_size == 1:
            return steps
        return int(self._ranks.sum_(torch.tensor(float(steps), dtype=torch.float64, device=self.device)))

    def _crossed(self, every: int, before: int) -> bool:
        return every > 0 and self._env_steps // every > before // every

    def _report(self, *, last: bool = False) -> None:
        episodes, restarts = self.sampler.drain_episodes(), self.sampler.drain_restarts()
        if self._monitor is None:
            return
        self._monitor.episodes(episodes)
        for restart in restarts:
            self._monitor.restart(restart.env_index, restart.cause)
        seconds = self.sampler.seconds
        learning = time.perf_counter() - self._started - sum(seconds.values())
        self._monitor.times(env=seconds["env"], inference=seconds["inference"], learning=learning, waiting=0.0)
        self._monitor.tick(self._env_steps, last=last)

    def _evaluate(self) -> None:
        """Score the agent as it is; the clock of learning stands still meanwhile."""
        if self._monitor is None:
            return
        paused = time.perf_counter()
        episodes = evaluate(
            self.config,
            self._objects["agent"],
            self.device,
            episodes=self.config.eval_episodes,
            policy=self.config.eval_policy,
            stopped=lambda: self._stop_signal > 0,
        )
        if episodes:
            self._monitor.evaluation(self._env_steps, episodes)
        self._started += time.perf_counter() - paused

    def _save(self) -> None:
        if self._ranks.rank:
            return
        trainer = {
            f"{name}.{key}": x
            for name, thing in self._objects.items()
            if name != "agent"
            for key, x in thing.state_dict().items()
        }
        counters = {"env_steps": self._env_steps}
        checkpoint.save(
            self._run_dir / "checkpoints",
            self._env_steps,
            self._objects["agent"].state_dict(),
            trainer,
            counters,
        )

    def _finish(self) -> None:
        """After the last iteration, or after a signal: save first, then what may take long."""
        self._report(last=True)
        self._save()
        if self._monitor is None:
            return
        if not self._stop_signal:
            self._evaluate()
            if self.config.capture_video:
                self._capture_video()
        self._monitor.note(f"results: {self._run_dir}")
        self._monitor.close(
            "interrupted" if self._stop_signal else "done",
            signal.Signals(self._stop_signal).name if self._stop_signal else "",
        )

    def _capture_video(self) -> None:
        assert self._monitor is not None
        path = self._run_dir / "videos" / f"step_{self._env_steps:012d}.mp4"
        try:
            frames = record_video(self.config, self._objects["agent"], self.device, path, self.config.eval_policy)
            self._monitor.note(f"video: {path} ({frames} frames)")
        except Exception as error:  # rendering needs system libraries that a training machine may lack
            self._monitor.note(f"no video: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")

    # Its life -------------------------------------------------------------------------------------------------

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """First: end after this iteration, with results. Second: end at once."""
        if self._stop_signal:
            raise KeyboardInterrupt
        self._stop_signal = number
        if self._monitor:
            with contextlib.suppress(RuntimeError):  # the signal may have come in the middle of another print
                self._monitor.note("stopping after this iteration; Ctrl-C again ends at once")

    def close(self, state: State, message: str = "") -> None:
        """Free everything; the state is written unless the run has ended by itself."""
        self.sampler.close()
        if self._monitor:
            self._monitor.close(state, message)
        self._ranks.leave(together=state == "done")

    @property
    def exit_code(self) -> int:
        return 128 + self._stop_signal if self._stop_signal else EXIT_DONE


def train(algorithm: str, run_config: RunConfig, config: Any, presets: list[str], argv: list[str]) -> int:
    """Train to the end; returns the exit code. UsageError for what the configuration gets wrong."""
    module = names.load("algorithm", names.ALGORITHMS, algorithm)
    run = Run(algorithm, run_config, config, provenance(presets, argv))
    handlers = {number: signal.signal(number, run.on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        module.train(config, run)
    except UsageError:
        run.close("failed")
        raise
    except KeyboardInterrupt:
        run.close("interrupted", "ended at once")
        return run.exit_code or EXIT_INTERRUPTED
    except BaseException:
        text = traceback.format_exc()
        run.close("failed", text.strip().splitlines()[-1])
        print(text, flush=True)  # noqa: T201
        return EXIT_FAILED
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    run.close("done")
    return run.exit_code


def evaluate_run(
    run_dir: Path,
    episodes: int,
    *,
    policy: str = "",
    seed: int = 0,
    video: bool = False,
    checkpoint_dir: str = "",
) -> dict[str, Any]:
    """Score a saved run: mean and deviation of the return, mean length, and what was evaluated."""
    algorithm, module, run_config, config = _load_config(run_dir)
    if seed:
        run_config = dataclasses.replace(run_config, seed=seed)
    path = Path(checkpoint_dir) if checkpoint_dir else checkpoint.newest(run_dir / "checkpoints")
    policy = policy or run_config.eval_policy
    device = _device(
        "cpu" if run_config.device.startswith("cuda") and not torch.cuda.is_available() else run_config.device
    )
    agent = module.Agent(spec_of(run_config), config).to(device)
    agent.load_state_dict(checkpoint.load_model(path))
    result: dict[str, Any] = summary(evaluate(run_config, agent, device, episodes=episodes, policy=policy))
    result |= {"env_id": run_config.env_id, "algorithm": algorithm, "policy": policy, "checkpoint": str(path)}
    if video:
        target = run_dir / "videos" / f"{path.name}_eval.mp4"
        record_video(run_config, agent, device, target, policy)
        result["video"] = str(target)
    return result


def describe(algorithm: str, run_config: RunConfig, config: Any) -> dict[str, Any]:
    """The resolved configuration, the spaces, and the parameters of each module, without training."""
    module = names.load("algorithm", names.ALGORITHMS, algorithm)
    check(run_config)
    spec = spec_of(run_config)
    counts = parameter_counts(module.Agent(spec, config))
    return {
        "algorithm": algorithm,
        "config": _plain(dataclasses.asdict(run_config) | dataclasses.asdict(config)),
        "spaces": {"observation": str(spec.obs_space), "action": str(spec.action_space)},
        "num_parameters": sum(counts.values()),
        "modules": counts,
    }


def spec_of(config: RunConfig) -> Spec:
    """The spaces of the configured environment, as its backend gives them."""
    backend = make_backend(config, options_of(config, training=False), num_envs=1)
    backend.close()
    return backend.spec


def check(config: RunConfig) -> None:
    """Refuse counts that no run can have."""
    for name in ("num_envs", "total_timesteps", "eval_episodes", "image_size", "action_repeat"):
        if getattr(config, name) < 1:
            raise UsageError(f"{name}={getattr(config, name)} must be at least 1")
    for name in (
        "threads",
        "eval_every",
        "checkpoint_every",
        "seed",
        "log_every_s",
        "env_groups",
        "num_workers",
        "env_timeout_s",
        "max_env_restarts",
    ):
        if getattr(config, name) < 0:
            raise UsageError(f"{name}={getattr(config, name)} must not be negative")


def _load_config(run_dir: Path) -> tuple[str, ModuleType, RunConfig, Any]:
    file = run_dir / "config.yaml"
    if not file.is_file():
        raise UsageError(f"'{run_dir}' is no run directory: it has no config.yaml")
    algorithm = yaml.safe_load(file.read_text())["algorithm"]
    module = names.load("algorithm", names.ALGORITHMS, algorithm)
    run_config, config = apply_presets([str(file)], algorithm, RunConfig(), module.Config())
    return algorithm, module, run_config, config


def _run_dir(config: RunConfig, algorithm: str) -> Path:
    if config.run_dir == "auto":
        env = re.sub("[/:,]", "-", config.env_id)
        stem = f"runs/{algorithm}-{env}-seed{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
        paths = itertools.chain([stem], (f"{stem}-{i}" for i in itertools.count(2)))
        return next(path for path in map(Path, paths) if not path.exists())
    path = Path(config.run_dir)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UsageError(f"run_dir '{path}' exists and is not empty; choose another --run-dir or remove it")
    return path


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"  # one GPU a rank
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"unknown device '{name}'; choose from auto, cpu, cuda, cuda:<index>") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device '{name}' needs a CUDA GPU, and torch {torch.__version__} sees none; use --device cpu")
    return device


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """Values that YAML and JSON have: tuples as lists."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in config.items()}
