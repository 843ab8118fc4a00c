"""Starts several ranks on this machine, as `torchrun --standalone` does, and ends as they end.

torchrun itself ends with 1 whatever its workers say; schedulers need to know 75 (start me again) from 64 (never).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from types import FrameType

from flotilla.core.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_USAGE

ENDS = (EXIT_USAGE, EXIT_INTERRUPTED, EXIT_PREEMPTED)  # exit codes that are no faults, the most telling first
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
GRACE_S = 10.0  # for the other ranks to notice that one was lost, and to end by themselves
PR_SET_PDEATHSIG = 1  # of Linux's prctl: a signal for the child when its parent dies


def launch(nproc: int, command: Sequence[str], max_restarts: int = 0) -> int:
    """Run a command as `nproc` ranks; its exit code.  After a fault all of them start again, so many times."""
    for attempt in range(max_restarts + 1):
        code = _world(nproc, command, attempt)
        if code == EXIT_DONE or code in ENDS:
            return code
        if attempt < max_restarts:
            sys.stderr.write(f"flotilla: a rank was lost; start {attempt + 2} of {max_restarts + 1}\n")
    return code


def _world(nproc: int, command: Sequence[str], attempt: int) -> int:
    """One start of all ranks, until the last one has ended."""
    ranks: list[subprocess.Popen[bytes]] = []
    cores = max(1, (os.cpu_count() or 1) // nproc)
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(cores)),
    }
    with _forwarding(ranks):
        try:
            for number in map(str, range(nproc)):
                env = os.environ | shared | {"RANK": number, "LOCAL_RANK": number}
                # Sessions of their own: a terminal's Ctrl-C reaches them once, from here.
                ranks.append(subprocess.Popen(command, env=env, start_new_session=True, preexec_fn=_die_with_parent))
            deadline = float("inf")
            while any(rank.poll() is None for rank in ranks):
                codes = {rank.poll() for rank in ranks}
                if codes - {None, EXIT_DONE} and deadline == float("inf"):
                    deadline = time.monotonic() + GRACE_S
                if time.monotonic() > deadline:
                    break
                time.sleep(0.02)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    codes = {rank.returncode for rank in ranks}
    if codes == {EXIT_DONE}:
        return EXIT_DONE
    return next((code for code in ENDS if code in codes), EXIT_FAILED)


@contextlib.contextmanager
def _forwarding(ranks: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Signals to this process go to all ranks, which agree on when to end."""

    def forward(number: int, frame: FrameType | None) -> None:
        for rank in ranks:
            rank.send_signal(number)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
