"""What the commands `train`, `eval` and `describe` do, once their flags are read."""

from __future__ import annotations

import dataclasses
import json
import signal
import traceback
from pathlib import Path
from typing import Any

import torch

from flotilla import rundir
from flotilla.compute import checkpoint
from flotilla.compute.device import device_of
from flotilla.compute.optimizer import parameter_counts
from flotilla.compute.precision import place
from flotilla.compute.ranks import PeerLost
from flotilla.core import names
from flotilla.core.config import RunConfig
from flotilla.core.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, UsageError
from flotilla.core.provenance import provenance
from flotilla.core.ranges import check_ranges
from flotilla.evaluation import evaluate, record_video, spec_of
from flotilla.monitor.records import summary
from flotilla.monitor.writers import STATUS_FILE
from flotilla.run import Run

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def train(algorithm: str, run_config: RunConfig, config: Any, presets: list[str], argv: list[str]) -> int:
    """Train to the end; returns the exit code. UsageError for what the configuration gets wrong."""
    module = names.load("algorithm", names.ALGORITHMS, algorithm)
    if (steps := _done(algorithm, run_config, config)) is not None:
        print(f"{run_config.run_dir} is done: {steps:,} env steps (flotilla eval {run_config.run_dir})", flush=True)  # noqa: T201
        return EXIT_DONE
    run = Run(algorithm, run_config, config, provenance(presets, argv))
    handlers = {number: signal.signal(number, run.on_signal) for number in SIGNALS}
    try:
        module.train(config, run)
    except UsageError:
        run.close("failed")
        raise
    except KeyboardInterrupt:
        run.close("interrupted", "ended at once")
        return EXIT_INTERRUPTED
    except BaseException as error:
        text = str(error) if isinstance(error, PeerLost) else traceback.format_exc()
        run.close("failed", text.strip().splitlines()[-1])
        print(text, flush=True)  # noqa: T201
        return EXIT_FAILED
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    run.close("done")
    return run.exit_code


def _done(algorithm: str, run_config: RunConfig, config: Any) -> int | None:
    """The environment steps of the finished run that lies in the directory already, or None."""
    run_dir = rundir.locate(run_config, algorithm)
    if not rundir.holds_run(run_dir):
        return None
    rundir.refuse_changes(run_dir, algorithm, run_config, config)
    try:
        status = json.loads((run_dir / STATUS_FILE).read_text())
    except (OSError, ValueError):
        return None
    steps = status.get("env_steps", 0)
    return steps if status.get("state") == "done" and steps >= run_config.total_timesteps else None


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
    algorithm, run_config, config = rundir.load(run_dir)
    module = names.load("algorithm", names.ALGORITHMS, algorithm)
    if seed:
        run_config = dataclasses.replace(run_config, seed=seed)
    path = Path(checkpoint_dir) if checkpoint_dir else checkpoint.newest(run_dir / "checkpoints")
    policy = policy or run_config.eval_policy
    device = device_of(
        "cpu" if run_config.device.startswith("cuda") and not torch.cuda.is_available() else run_config.device
    )
    agent = place(module.Agent(spec_of(run_config), config), device, channels_last=run_config.channels_last)
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
    check_ranges(run_config)
    spec = spec_of(run_config)
    counts = parameter_counts(module.Agent(spec, config))
    return {
        "algorithm": algorithm,
        "config": rundir.plain(dataclasses.asdict(run_config) | dataclasses.asdict(config)),
        "spaces": {"observation": str(spec.obs_space), "action": str(spec.action_space)},
        "num_parameters": sum(counts.values()),
        "modules": counts,
    }
