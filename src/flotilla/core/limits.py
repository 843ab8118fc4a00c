"""What this process may use of the machine: the control groups' grants, as containers and schedulers set them."""

from __future__ import annotations

from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")


def cpu_limit() -> float | None:
    """Cores that the control group grants, a fraction where it says so; None without a limit."""
    limits = []
    for folder in _own_cgroups():
        if maximum := _text(folder / "cpu.max"):  # version 2: "quota period", both in us
            quota, period = maximum.split()
        else:
            quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def memory_limit_bytes() -> int | None:
    """Bytes that the control group grants; None without a limit."""
    return min((limit for _, limit in _memory_limits()), default=None)


def free_memory_bytes() -> int:
    """Bytes that may still be taken: of the machine's, and of what each control group grants."""
    rooms = [psutil.virtual_memory().available]
    for folder, limit in _memory_limits():
        used = _text(folder / "memory.current") or _text(folder / "memory.usage_in_bytes") or "0"
        lines = dict(line.split() for line in _text(folder / "memory.stat").splitlines())
        # Files that nobody reads at the moment count as used, until somebody needs the memory.
        cached = lines.get("total_inactive_file", lines.get("inactive_file", "0"))  # version 1 and 2
        rooms.append(max(0, limit - int(used) + int(cached)))
    return min(rooms)


def pids_limit() -> int | None:
    """Processes and threads that the control group grants; None without a limit."""
    texts = [_text(folder / "pids.max") for folder in _own_cgroups()]
    return min((int(text) for text in texts if text.isdigit()), default=None)


def _memory_limits() -> list[tuple[Path, int]]:
    limits = []
    for folder in _own_cgroups():
        limit = _text(folder / "memory.max") or _text(folder / "memory.limit_in_bytes")
        if limit.isdigit() and int(limit) < psutil.virtual_memory().total:  # version 1 writes 2**63 for none
            limits.append((folder, int(limit)))
    return limits


def _own_cgroups() -> list[Path]:
    """The folders of this process's control groups and of all above them: each of them limits it."""
    folders = {CGROUPS}
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        for root in (CGROUPS / controllers, *(CGROUPS / name for name in controllers.split(","))):
            folder = root / path.lstrip("/")
            folders |= {folder, *(above for above in folder.parents if above.is_relative_to(root))}
    return [folder for folder in folders if folder.is_dir()]


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
