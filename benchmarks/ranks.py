"""What a second rank is worth: learner-bound PPO on Pong by one rank with one core, and by two with one core each.

    python benchmarks/ranks.py [--rounds 3] [--steps 2048]

Both sides take turns in one run; the median of the rounds, lowest and highest beside it.  Start and evaluation are not
counted: rates are those of the run's own metrics, after its first iteration.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

FLAGS = "--preset none --env-id PongNoFrameskip-v4 --backend sync --num-envs 8 --num-steps 128 --threads 1 --device cpu"
LEARNING = "--update-epochs 4 --num-minibatches 4 --cnn nature --dashboard none --eval-episodes 1 --log-every-s 0"


def rate(ranks: int, steps: int) -> tuple[float, float]:
    """Environment steps a second, and the share of the time in communication."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = ["taskset", "-c", ",".join(map(str, range(ranks))), sys.executable, "-m", "flotilla", "train", "ppo"]
        command += [*FLAGS.split(), *LEARNING.split(), "--total-timesteps", str(steps), "--nproc", str(ranks)]
        command += ["--run-dir", str(run_dir)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "losses/entropy" in line]
    first, last = lines[0], lines[-1]
    return (last["env_steps"] - first["env_steps"]) / (last["elapsed_s"] - first["elapsed_s"]), last[
        "time/share_waiting"
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5 * 1024)
    args = parser.parse_args()
    ratios = []
    for number in range(args.rounds):
        (one, _), (two, waiting) = rate(1, args.steps), rate(2, args.steps)
        ratios.append(two / one)
        print(
            f"round {number + 1}: one rank {one:,.0f} env steps/s, two ranks {two:,.0f}, {two / one:.2f}x, "
            f"communication and waiting {waiting:.0%}",
            flush=True,
        )
    print(f"two ranks / one rank: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
