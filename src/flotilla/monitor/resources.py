"""What the run takes of the machine: CPU and memory of its processes, the GPU."""

from __future__ import annotations

import time

import psutil
import torch

SAMPLE_EVERY_S = 1.0
FIND_CHILDREN_EVERY_S = 10.0  # walks over every process of the machine: some milliseconds


class Resources:
    """Samples when asked, at most once a second, in the caller's thread."""

    def __init__(self, device: str) -> None:
        self._gpu = torch.device(device) if device.startswith("cuda") and torch.cuda.is_available() else None
        self._me = psutil.Process()
        self._children: list[psutil.Process] = []
        self._cpu_s: dict[int, float] = {}  # CPU seconds by process id, at the last sample
        self._found_at = self._sampled_at = -float("inf")
        self._sample: dict[str, float] = {}

    def sample(self) -> dict[str, float]:
        """The newest sample, by metric key; the first has no CPU, as there is nothing to compare with."""
        now = time.monotonic()
        if now - self._sampled_at < SAMPLE_EVERY_S:
            return self._sample
        if now - self._found_at >= FIND_CHILDREN_EVERY_S:
            self._found_at = now
            self._children = self._me.children(recursive=True)
        self._sample = self._processes(now - self._sampled_at)
        self._sampled_at = now
        if self._gpu is not None:
            self._sample |= _gpu(self._gpu)
        return self._sample

    def _processes(self, interval_s: float) -> dict[str, float]:
        cpu_s: dict[int, float] = {}
        memory = 0
        for process in [self._me, *self._children]:
            try:
                with process.oneshot():
                    times, usage = process.cpu_times(), process.memory_info()
            except psutil.Error:
                continue  # it has ended
            cpu_s[process.pid] = times.user + times.system
            # A child maps the buffers that the parent owns, and the libraries: those count once.
            memory += usage.rss - (getattr(usage, "shared", 0) if process is not self._me else 0)
        used_s = sum(now_s - self._cpu_s[pid] for pid, now_s in cpu_s.items() if pid in self._cpu_s)
        first = not self._cpu_s
        self._cpu_s = cpu_s
        sample = {"system/memory_bytes": float(memory)}
        return sample if first else sample | {"system/cpu_percent": 100 * used_s / interval_s}


def _gpu(device: torch.device) -> dict[str, float]:
    sample: dict[str, float] = {}
    for key, read in (
        ("system/gpu_percent", torch.cuda.utilization),
        ("system/gpu_memory_bytes", torch.cuda.device_memory_used),
    ):
        try:
            sample[key] = float(read(device))
        except Exception:  # NVML's own errors: a MIG slice has no utilization, some drivers answer nothing
            continue
    return sample
