"""Looks at this machine as a run will find it, and says for each finding whether and how to change it."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import psutil
import torch

from flotilla.core.limits import cpu_limit, free_memory_bytes, memory_limit_bytes, pids_limit
from flotilla.envs.make import installed_suites
from flotilla.sampling import autotune
from flotilla.sampling.autotune import Machine

GIB = 2**30
SHM_BYTES = GIB // 4  # a container's usual 64 MiB hold neither image batches nor a data loader
OPEN_FILES = 1024  # a usual soft limit; 256, as on some systems, holds few dozens of workers
FREE_PROCESSES, PROCESSES_PER_CORE = 256, 16  # torch alone starts a pool of threads or two per core
MEMORY_BYTES = GIB  # torch, one simulator and a small network need most of it


@dataclass(frozen=True)
class Finding:
    """One fact about the machine; `level` says whether `fix` has to be followed."""

    topic: str
    found: str
    level: Literal["ok", "could", "must"] = "ok"
    fix: str = ""


def examine() -> list[Finding]:
    """All findings; takes seconds, because the suites are imported. The machine is left as it is."""
    found = [*_software(), *_processors(), *_threads(), *_limits(), *_memory(), _gpu(), _compiler(), *_suites()]
    return [*found, *_measured()]


def machine() -> Machine:
    """What environments may use here."""
    cores, info = len(os.sched_getaffinity(0)), Path("/proc/cpuinfo")
    models = re.findall(r"^model name\s*: (.+)$", info.read_text() if info.exists() else "", re.MULTILINE)
    return Machine(
        cpu=models[0] if models else platform.machine(),
        cores=max(1, int(min(cores, cpu_limit() or cores))),
        memory_bytes=memory_limit_bytes() or psutil.virtual_memory().total,
        free_bytes=free_memory_bytes(),
    )


def _software() -> list[Finding]:
    findings = [Finding("Python", f"{sys.version.split()[0]} at {sys.executable}")]
    for requirement in metadata.requires("flotilla") or []:
        if "extra ==" in requirement:
            continue
        name = re.split(r"[^\w.-]", requirement)[0]
        try:
            findings.append(Finding(name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            findings.append(Finding(name, "missing", "must", f"pip install '{requirement}'"))
    return findings


def _processors() -> list[Finding]:
    limit = cpu_limit()
    found = f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}"
    return [Finding("CPU cores", found + (f", the cgroup grants {limit:g}" if limit else ""))]


def _threads() -> list[Finding]:
    """The pools that libraries make in this process; worker processes have one thread each whatever is set."""
    pools = [("torch", torch.get_num_threads(), "OMP_NUM_THREADS")]
    if importlib.util.find_spec("cv2"):
        import cv2

        pools.append(("OpenCV", cv2.getNumThreads(), "OPENCV_FOR_THREADS_NUM"))
    cores = machine().cores
    findings = []
    for name, threads, variable in pools:
        found = f"{threads} ({variable} {os.environ.get(variable) or 'not set'})"
        if threads > cores:
            fix = f"export {variable}={cores}: threads beyond the cores wait for each other"
            findings.append(Finding(f"{name} threads", found, "could", fix))
        else:
            findings.append(Finding(f"{name} threads", found))
    return findings


def _limits() -> list[Finding]:
    """How many files and processes one may have: what worker processes run into first."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = files != resource.RLIM_INFINITY and files < OPEN_FILES
    fix = f"ulimit -n {OPEN_FILES}: each worker process holds several" if few else ""
    findings = [Finding("open files", _count(files), "could" if few else "ok", fix)]
    processes, limit = resource.getrlimit(resource.RLIMIT_NPROC)[0], pids_limit()
    if limit is not None and (processes == resource.RLIM_INFINITY or limit < processes):
        processes = limit
    needed = FREE_PROCESSES + PROCESSES_PER_CORE * machine().cores
    few = processes != resource.RLIM_INFINITY and processes < needed
    fix = f"ulimit -u {needed}, docker run --pids-limit {needed}: threads count as well" if few else ""
    return [*findings, Finding("processes", _count(processes), "could" if few else "ok", fix)]


def _count(limit: int) -> str:
    return "no limit" if limit == resource.RLIM_INFINITY else f"at most {limit:,}"


def _memory() -> list[Finding]:
    free, limit = free_memory_bytes(), memory_limit_bytes()
    found = f"{free / GIB:.1f} GiB free of {psutil.virtual_memory().total / GIB:.1f}"
    if limit is not None:
        found += f", the cgroup grants {limit / GIB:.1f}"
    low = free < MEMORY_BYTES
    fix = f"give it {MEMORY_BYTES / GIB:g} GiB or more (docker run --memory, sbatch --mem)" if low else ""
    findings = [Finding("memory", found, "must" if low else "ok", fix)]
    if Path("/dev/shm").is_dir():
        size = shutil.disk_usage("/dev/shm").total
        small = size < SHM_BYTES
        fix = "docker run --shm-size=2g: processes pass observations through it" if small else ""
        findings.append(Finding("/dev/shm", f"{size / GIB:.2f} GiB", "could" if small else "ok", fix))
    return findings


def _gpu() -> Finding:
    driver = _output("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return Finding("GPU", f"{', '.join(names)}; CUDA {torch.version.cuda}; driver: {driver or 'unknown'}")
    if not driver:
        return Finding("GPU", "none: runs use the CPU")
    found = f"{driver}, but torch {torch.__version__} does not see it"
    if torch.version.cuda is None:
        return Finding("GPU", found, "must", "install a CUDA build of torch: https://pytorch.org/get-started")
    fix = f"a driver for CUDA {torch.version.cuda}, and CUDA_VISIBLE_DEVICES not empty"
    return Finding("GPU", found, "must", fix)


def _compiler() -> Finding:
    for name in filter(None, (os.environ.get("CXX"), "g++", "clang++")):
        if shutil.which(name):
            return Finding("C++ compiler", _output(name, "--version").partition("\n")[0] or name)
    fix = "apt-get install g++: --compile default needs one"
    return Finding("C++ compiler", "none", "could", fix)


def _suites() -> list[Finding]:
    return [
        Finding(f"suite {suite}", "installed")
        if state == "ok"
        else Finding(f"suite {suite}", "missing", "could", state)
        for suite, state in installed_suites().items()
    ]


def _measured() -> list[Finding]:
    """What `auto` has found on this machine, and from now on takes without measuring."""
    stored = autotune.stored(machine())
    if not stored:
        fix = "flotilla bench sampling --env-id ID finds the fastest backend and how many environments"
        return [Finding("autotune", "nothing measured here with these packages", fix=fix)]
    return [
        Finding(f"autotune {entry['asked']['env_id']}", f"{autotune.Trial(**entry['choice'])} ({entry['measured']})")
        for entry in stored
    ]


def _output(*command: str) -> str:
    """What a command prints; empty where it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
