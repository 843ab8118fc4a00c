"""Learning curves: trains each setting of benchmarks/settings over seeds, and prints the table of docs/results.md.

    python benchmarks/learning.py                              every setting, seeds 1 2 3, into runs/learning
    python benchmarks/learning.py cartpole --seeds 1 2 3 4 5
    python benchmarks/learning.py halfcheetah --jobs 2         two runs at a time, one thread each
    python benchmarks/learning.py sac-hopper --peer            beside Stable-Baselines3 with the same values and seeds

A run that is there already is read, not repeated.  Each setting leaves a figure of its seeds (mean line, band from
lowest to highest) in docs/images.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from flotilla.core.presets import algorithm_of
from flotilla.monitor.plots import compare

HERE = Path(__file__).parent
SETTINGS = sorted(file.stem for file in (HERE / "settings").glob("*.yaml"))


def train(name: str, seed: int, out: Path, jobs: int) -> Path:
    """One run, in a process of its own; its directory."""
    run_dir, file = out / f"{name}-seed{seed}", HERE / "settings" / f"{name}.yaml"
    if not is_done(run_dir):
        command = [sys.executable, "-m", "flotilla", "train", algorithm_of(file), "--preset", str(file)]
        command += ["--seed", str(seed), "--run-dir", str(run_dir), "--eval-episodes", "20", "--dashboard", "none"]
        command += ["--threads", "1"] if jobs > 1 else []
        subprocess.run(command, check=True)
    return run_dir


def train_peer(name: str, seed: int, out: Path) -> Path:
    """The same by Stable-Baselines3, on one thread."""
    run_dir = out / f"sb3-{name}-seed{seed}"
    if not is_done(run_dir):
        command = [sys.executable, str(HERE / "peer.py"), name, "--seed", str(seed), "--run-dir", str(run_dir)]
        subprocess.run(command, check=True)
    return run_dir


def is_done(run_dir: Path) -> bool:
    file = run_dir / "status.json"
    return file.exists() and json.loads(file.read_text())["state"] == "done"


def row(name: str, runs: list[Path]) -> str:
    """The evaluation of each seed, the steps and the minutes."""
    status = [json.loads((run / "status.json").read_text()) for run in runs]
    scores = [one["eval"]["episodic_return_mean"] for one in status]
    minutes = statistics.median(one["elapsed_s"] for one in status) / 60
    return (
        f"| {name} | {', '.join(f'{score:,.1f}' for score in scores)} | {statistics.fmean(scores):,.1f} "
        f"| {status[0]['env_steps']:,} | {minutes:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="SETTING", help=f"of {', '.join(SETTINGS)}; none: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--peer", action="store_true", help="train Stable-Baselines3 as well")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--out", type=Path, default=Path("runs/learning"))
    parser.add_argument("--images", type=Path, default=HERE.parent / "docs" / "images")
    args = parser.parse_args()
    unknown = sorted(set(args.settings) - set(SETTINGS))
    if unknown:
        parser.error(f"unknown setting {unknown[0]}; choose from {', '.join(SETTINGS)}")
    args.images.mkdir(parents=True, exist_ok=True)
    print("| setting | evaluation of each seed | mean | env steps | minutes a run |")
    print("|---|---|---|---|---|")
    with ThreadPoolExecutor(args.jobs) as pool:
        for name in args.settings or SETTINGS:
            runs = list(pool.map(lambda seed, name=name: train(name, seed, args.out, args.jobs), args.seeds))
            curves = {"flotilla": runs} if args.peer else {name: runs}
            if args.peer:
                curves["sb3"] = list(pool.map(lambda seed, name=name: train_peer(name, seed, args.out), args.seeds))
            compare(curves, args.images / f"{name}.png", title=name)
            for label, run_dirs in curves.items():
                print(row(name if label == name else f"{name}, {label}", run_dirs), flush=True)


if __name__ == "__main__":
    main()
