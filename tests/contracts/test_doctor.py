"""The doctor: finds the limits that a container really has, and only a finding that matters fails."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import cv2
import pytest
import torch

from flotilla import cli, doctor
from flotilla.core import limits
from flotilla.core.config import RunConfig
from flotilla.core.errors import EXIT_DONE, EXIT_FAILED
from flotilla.envs.profile import Profile
from flotilla.sampling import autotune


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A control group tree of our own, of which this process is in the root."""
    monkeypatch.setattr(limits, "CGROUPS", tmp_path)
    return tmp_path


@pytest.mark.parametrize(("text", "cores"), [("150000 100000", 1.5), ("max 100000", None)])
def test_cpu_limit_of_version_2(cgroups: Path, text: str, cores: float | None) -> None:
    (cgroups / "cpu.max").write_text(text + "\n")
    assert limits.cpu_limit() == cores


@pytest.mark.parametrize(("quota", "cores"), [("250000", 2.5), ("-1", None)])
def test_cpu_limit_of_version_1(cgroups: Path, quota: str, cores: float | None) -> None:
    (cgroups / "cpu.cfs_quota_us").write_text(quota)
    (cgroups / "cpu.cfs_period_us").write_text("100000")
    assert limits.cpu_limit() == cores


@pytest.mark.parametrize(
    ("name", "text", "limit"),
    [
        ("memory.max", "1048576", 2**20),
        ("memory.max", "max", None),
        ("memory.limit_in_bytes", "1048576", 2**20),
        ("memory.limit_in_bytes", str(2**63 - 4096), None),
    ],
)
def test_memory_limit(cgroups: Path, name: str, text: str, limit: int | None) -> None:
    (cgroups / name).write_text(text)
    assert limits.memory_limit_bytes() == limit


@pytest.mark.parametrize(
    ("names", "cached"),
    [
        (("memory.max", "memory.current"), "inactive_file"),
        (("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_inactive_file"),
    ],
)
def test_memory_that_is_used_is_not_free(cgroups: Path, names: tuple[str, str], cached: str) -> None:
    limit, used = names
    assert limits.free_memory_bytes() > 2**20
    (cgroups / limit).write_text(str(2**20))
    assert limits.free_memory_bytes() == 2**20
    (cgroups / used).write_text(str(3 * 2**18))
    assert limits.free_memory_bytes() == 2**18
    (cgroups / "memory.stat").write_text(f"anon 12345\n{cached} {2**18}\n")
    assert limits.free_memory_bytes() == 2**19
    (cgroups / used).write_text(str(2**22))
    assert limits.free_memory_bytes() == 0


@pytest.mark.parametrize(("text", "limit"), [("512", 512), ("max", None)])
def test_pids_limit(cgroups: Path, text: str, limit: int | None) -> None:
    (cgroups / "pids.max").write_text(text + "\n")
    assert limits.pids_limit() == limit


def test_no_control_groups_at_all(cgroups: Path) -> None:
    assert limits.cpu_limit() is None
    assert limits.pids_limit() is None
    assert limits.memory_limit_bytes() is None


def test_healthy_unless_something_must_change(cgroups: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == EXIT_DONE
    assert json.loads(capsys.readouterr().out)["healthy"] is True
    (cgroups / "memory.max").write_text(str(2**20))
    assert cli.main(["doctor", "--json"]) == EXIT_FAILED
    found = json.loads(capsys.readouterr().out)
    assert found["healthy"] is False
    assert [finding["topic"] for finding in found["findings"] if finding["level"] == "must"] == ["memory"]


def findings() -> dict[str, doctor.Finding]:
    return {finding.topic: finding for finding in doctor.examine()}


def test_the_machine_is_what_its_control_groups_grant(cgroups: Path) -> None:
    free = doctor.machine()
    assert free.cores >= 1
    assert free.cpu
    (cgroups / "cpu.max").write_text("50000 100000")
    (cgroups / "memory.max").write_text(str(2**30))
    bound = doctor.machine()
    assert (bound.cores, bound.memory_bytes) == (1, 2**30)  # half a core is one process
    assert bound.free_bytes <= 2**30


def test_few_files_and_processes_are_worth_a_change(cgroups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {findings()[topic].level for topic in ("open files", "processes")} == {"ok"}
    (cgroups / "pids.max").write_text("100")
    limits = {resource.RLIMIT_NOFILE: (256, 4096), resource.RLIMIT_NPROC: (resource.RLIM_INFINITY,) * 2}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    found = findings()
    assert (found["open files"].found, found["open files"].level) == ("at most 256", "could")
    assert "ulimit -n 1024" in found["open files"].fix
    assert (found["processes"].found, found["processes"].level) == ("at most 100", "could")
    assert "--pids-limit" in found["processes"].fix


def test_more_threads_than_cores_are_worth_a_change(cgroups: Path) -> None:
    (cgroups / "cpu.max").write_text("100000 100000")
    threads = torch.get_num_threads()
    cv2_threads = cv2.getNumThreads()
    try:
        torch.set_num_threads(2)
        cv2.setNumThreads(2)
        found = findings()
    finally:
        torch.set_num_threads(threads)
        cv2.setNumThreads(cv2_threads)
    assert "export OMP_NUM_THREADS=1" in found["torch threads"].fix
    assert "export OPENCV_FOR_THREADS_NUM=1" in found["OpenCV threads"].fix


def test_what_auto_will_take_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "flotilla bench sampling" in findings()["autotune"].fix
    choice = autotune.Trial("sync", "CartPole-v1", 8, 0, 81_234.5, 81_234.5)
    one = Profile(10.0, 1.0, 20.0, 50.0, 0.1, 1.0, env_bytes=1, process_bytes=1, frames_per_step=1)
    autotune.remember(RunConfig(num_envs=0), doctor.machine(), choice, one)
    assert "sync, 8 environments: 81,234 steps/s" in findings()["autotune CartPole-v1"].found


def test_each_finding_to_act_on_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    found = findings()
    assert all(finding.fix for finding in found.values() if finding.level != "ok")
    topics = set(found)
    assert topics >= {"Python", "torch", "CPU cores", "torch threads", "memory", "GPU", "C++ compiler", "suite atari"}
    cli.main(["doctor"])
    shown = capsys.readouterr().out
    assert all(topic in shown for topic in topics)
