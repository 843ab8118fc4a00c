"""The launcher, on programs that end in every way: its exit code, its words, and no process that is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import torch

from flotilla.compute.ranks import PeerLost, Ranks
from flotilla.launch import launch

needs_gloo = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="needs torch with gloo"
)
pytestmark = pytest.mark.usefixtures("no_hang")

PROGRAM = """
import os, sys
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
assert os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"] == "2" and os.environ["LOCAL_RANK"] == rank
codes = sys.argv[1].split(";")[int(attempt)].split(",")
sys.exit(int(codes[int(rank)]))
"""


@pytest.mark.parametrize(
    ("codes", "restarts", "code"),
    [
        ("0,0", 0, 0),
        ("75,75", 3, 75),
        ("64,64", 3, 64),
        ("64,1", 3, 64),
        ("130,130", 3, 130),
        ("0,1", 0, 1),
        ("139,0", 0, 1),
        ("1,0;1,1;0,0", 2, 0),
        ("1,0;0,75;9,9", 2, 75),
        ("1,0;2,0;0,3", 2, 1),
    ],
)
def test_exit_codes(codes: str, restarts: int, code: int) -> None:
    assert launch(2, [sys.executable, "-c", PROGRAM, codes], restarts) == code


def test_the_rank_that_broke_the_world_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    """Not the one that misses it."""
    program = """
import os, signal, sys, time
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.5)
sys.exit(1)
"""
    assert launch(2, [sys.executable, "-c", program], 1) == 1
    assert capfd.readouterr().err.splitlines() == [
        "flotilla: rank 1 ended by signal 9 (Killed); start 2 of 2",
        "flotilla: rank 1 ended by signal 9 (Killed)",
    ]


@pytest.mark.parametrize("given", ["", "3"])
def test_ranks_share_the_cores(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    program = "import os, sys; open(sys.argv[1] + os.environ['RANK'], 'w').write(os.environ['OMP_NUM_THREADS'])"
    assert launch(2, [sys.executable, "-c", program, f"{tmp_path}/"]) == 0
    threads = {(tmp_path / rank).read_text() for rank in "01"}
    assert threads == {given or str(max(1, len(os.sched_getaffinity(0)) // 2))}


def launcher(program: str, *, restarts: int = 0, stop_grace_s: float = 25.0) -> subprocess.Popen[str]:
    """A process that launches a program as two ranks, and ends with the launcher's exit code."""
    starts = (
        "import sys; from flotilla.launch import launch\n"
        f"sys.exit(launch(2, [sys.executable, '-c', {program!r}], {restarts}, stop_grace_s={stop_grace_s}))"
    )
    return subprocess.Popen([sys.executable, "-c", starts], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ranks_of(process: subprocess.Popen[str], count: int = 2) -> list[psutil.Process]:
    """Its ranks, as soon as there are so many."""
    while len(children := psutil.Process(process.pid).children()) < count:
        assert process.poll() is None
        time.sleep(0.002)
    return children


LISTENS = """
import os, signal, sys, time
def told(number, frame):
    os.write(1, b"told %d\\n" % number)  # whole: the ranks share a pipe
    sys.exit(int(CODE))
signal.signal(signal.SIGUSR1, told)
os.write(1, b"listens\\n")
time.sleep(60)
"""


def test_a_signal_reaches_every_rank() -> None:
    with launcher(LISTENS.replace("CODE", "75"), restarts=3) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["listens\n"] * 2
        process.send_signal(signal.SIGUSR1)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out.splitlines(), err) == (75, [f"told {signal.SIGUSR1:d}"] * 2, "")


def test_who_was_told_to_stop_is_not_started_again() -> None:
    """Also where a rank fails in stopping."""
    with launcher(LISTENS.replace("CODE", "3"), restarts=3) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["listens\n"] * 2
        process.send_signal(signal.SIGUSR1)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, len(out.splitlines())) == (1, 2)
    assert err.startswith("flotilla: rank ")
    assert err.endswith("ended with exit code 3\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR2, 75), (signal.SIGINT, 130)])
def test_a_signal_before_ranks_can_listen(number: signal.Signals, code: int) -> None:
    """Nothing was done yet: as if it had stopped in order."""
    program = (
        "import os, signal, time; signal.signal(signal.SIGINT, signal.SIG_DFL); os.write(1, b'up\\n'); time.sleep(60)"
    )
    with launcher(program, restarts=3) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["up\n"] * 2
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (code, "")


def test_who_does_not_stop_is_ended() -> None:
    program = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.write(1, b'up\\n'); time.sleep(60)"
    )
    with launcher(program, restarts=3, stop_grace_s=1.0) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["up\n"] * 2
        ranks = ranks_of(process)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
    assert 1 <= time.monotonic() - began < 10
    assert (process.returncode, err) == (1, "flotilla: a rank was still at work 1 s after SIGTERM\n")
    assert not any(rank.is_running() for rank in ranks)


@pytest.mark.parametrize("count", [1, 2])
def test_no_rank_outlives_a_killed_launcher(count: int) -> None:
    """Killed while it starts them, and after."""
    with launcher("import time; time.sleep(60)") as process:
        ranks = ranks_of(process, count)
        process.kill()
        _, alive = psutil.wait_procs(ranks, timeout=10)
    assert alive == []


JOINS = """
import os
import torch
from flotilla.compute.ranks import Ranks
ranks = Ranks.join("cpu", 60.0)
os.write(1, b"sum %.1f\\n" % ranks.sum_(torch.ones(1)).item())
ranks.leave(together=True)
"""


def in_namespace(hostname: str, command: Sequence[str]) -> list[str]:
    """A command on a machine of another name."""
    return ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', hostname, *command]


@needs_gloo
@pytest.mark.parametrize("by", ["flotilla", "torchrun"])
def test_a_machine_whose_name_leads_nowhere(by: str, tmp_path: Path) -> None:
    program = tmp_path / "joins.py"
    program.write_text(JOINS)
    if by == "flotilla":
        starts = (
            f"from flotilla.launch import launch; import sys; sys.exit(launch(2, [sys.executable, {str(program)!r}]))"
        )
        command = [sys.executable, "-c", starts]
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        command += ["--nproc-per-node=2", str(program)]
    try:
        subprocess.run(in_namespace("no-such-host.invalid", ["true"]), check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("may not name a machine of its own")
    done = subprocess.run(in_namespace("no-such-host.invalid", command), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.splitlines()) == (0, ["sum 2.0"] * 2), done.stderr
    assert "resolve hostname" not in done.stderr


@needs_gloo
@pytest.mark.parametrize("rank", ["0", "1"])
def test_ranks_that_never_come(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{29_900 + os.getpid() % 90}"}
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    began = time.monotonic()
    with pytest.raises(PeerLost, match=rf"rank {rank} of 2 lost another rank .*; start the same command again"):
        Ranks.join("cpu", 1.0)
    assert time.monotonic() - began < 30
