"""What a run does with its time: a trace of a few iterations, and a table, in <run_dir>/profile."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

WARM_UP, TRACED = 3, 3  # iterations: of compilers and caches, and in the trace
OPERATIONS = 15  # in the table


class Profile:
    """`tick` after each iteration of training, `close` at its end."""

    def __init__(self, run_dir: Path, device: torch.device) -> None:
        self._directory = run_dir / "profile"
        self._directory.mkdir(parents=True, exist_ok=True)
        self._operations = ""
        kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
        plan = schedule(wait=WARM_UP - 1, warmup=1, active=TRACED, repeat=1)
        self._profiler = profile(activities=kinds, schedule=plan, on_trace_ready=self._write)
        self._profiler.start()

    def tick(self) -> None:
        self._profiler.step()

    def close(self, seconds: Mapping[str, float]) -> str:
        """Write the table: seconds of the whole run by part, and the costliest operations; the first of them."""
        self._profiler.stop()
        total = max(sum(seconds.values()), 1e-9)
        rows = [f"{part:<14}{spent:>12.3f} s{100 * spent / total:>8.1f} %" for part, spent in seconds.items()]
        table = "\n".join(rows)
        (self._directory / "table.txt").write_text(f"{table}\n\n{self._operations}\n")
        return table

    def _write(self, found: profile) -> None:
        found.export_chrome_trace(str(self._directory / "trace.json"))
        self._operations = found.key_averages().table(sort_by="self_cpu_time_total", row_limit=OPERATIONS)
