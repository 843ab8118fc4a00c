"""The doctor: finds the limits that a container really has, and only a finding that matters fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flotilla import cli, doctor
from flotilla.core.errors import EXIT_DONE, EXIT_FAILED


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A control group tree of our own, of which this process is in the root."""
    monkeypatch.setattr(doctor, "CGROUPS", tmp_path)
    return tmp_path


@pytest.mark.parametrize(("text", "cores"), [("150000 100000", 1.5), ("max 100000", None)])
def test_cpu_limit_of_version_2(cgroups: Path, text: str, cores: float | None) -> None:
    (cgroups / "cpu.max").write_text(text + "\n")
    assert doctor.cpu_limit() == cores


@pytest.mark.parametrize(("quota", "cores"), [("250000", 2.5), ("-1", None)])
def test_cpu_limit_of_version_1(cgroups: Path, quota: str, cores: float | None) -> None:
    (cgroups / "cpu.cfs_quota_us").write_text(quota)
    (cgroups / "cpu.cfs_period_us").write_text("100000")
    assert doctor.cpu_limit() == cores


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
    assert doctor.memory_limit_bytes() == limit


def test_no_control_groups_at_all(cgroups: Path) -> None:
    assert doctor.cpu_limit() is None
    assert doctor.memory_limit_bytes() is None


def test_healthy_unless_something_must_change(cgroups: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == EXIT_DONE
    assert json.loads(capsys.readouterr().out)["healthy"] is True
    (cgroups / "memory.max").write_text(str(2**20))
    assert cli.main(["doctor", "--json"]) == EXIT_FAILED
    found = json.loads(capsys.readouterr().out)
    assert found["healthy"] is False
    assert [finding["topic"] for finding in found["findings"] if finding["level"] == "must"] == ["memory"]


def test_each_finding_to_act_on_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    findings = doctor.examine()
    assert all(finding.fix for finding in findings if finding.level != "ok")
    topics = {finding.topic for finding in findings}
    assert topics >= {"Python", "torch", "CPU cores", "torch threads", "memory", "GPU", "C++ compiler", "suite atari"}
    cli.main(["doctor"])
    shown = capsys.readouterr().out
    assert all(topic in shown for topic in topics)
