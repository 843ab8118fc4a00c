"""`--profile`: a trace that a viewer reads, and a table that adds up."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from flotilla import cli
from flotilla.core.errors import EXIT_DONE

FLAGS = "--preset none --backend sync --device cpu --threads 1 --eval-episodes 1 --num-steps 32 --total-timesteps 2048"


def test_where_the_time_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    flags = [*FLAGS.split(), "--run-dir", str(run_dir), "--dashboard", "plain", "--profile"]
    assert cli.main(["train", "ppo", *flags]) == EXIT_DONE
    trace = json.loads((run_dir / "profile" / "trace.json").read_text())
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"aten::linear", "aten::_fused_adam_", "ProfilerStep#3", "ProfilerStep#5"} <= names
    assert "ProfilerStep#6" not in names
    table = (run_dir / "profile" / "table.txt").read_text()
    rows = dict(re.findall(r"^(\w+) +([\d.]+) s", table, re.MULTILINE))
    assert list(rows) == ["env", "inference", "transfer", "learning", "communication"]
    assert min(float(rows[part]) for part in ("env", "inference", "learning")) > 0
    assert float(rows["communication"]) == 0
    shares = [float(x) for x in re.findall(r"([\d.]+) %$", table, re.MULTILINE)][:5]
    assert sum(shares) == pytest.approx(100, abs=0.5)
    assert "aten::" in table
    assert f"profile: {run_dir / 'profile'}" in capsys.readouterr().out


def test_it_is_off_unless_asked_for(tmp_path: Path) -> None:
    flags = [*FLAGS.split(), "--run-dir", str(tmp_path / "run"), "--dashboard", "none"]
    assert cli.main(["train", "ppo", *flags]) == EXIT_DONE
    assert not (tmp_path / "run" / "profile").exists()
