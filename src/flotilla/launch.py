"""Starts several ranks on this machine, as `torchrun --standalone` does, and ends as they end.

torchrun itself ends with 1 whatever its workers say; schedulers need to know 75 (start me again) from 64 (never).
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from types import FrameType

from flotilla.core.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_USAGE

ENDS = (EXIT_USAGE, EXIT_INTERRUPTED, EXIT_PREEMPTED)  # exit codes that are no faults, the most telling first
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
FAULT_GRACE_S = 10.0  # for the other ranks to notice that one was lost, and to end by themselves
STOP_GRACE_S = 25.0  # to save and end after a signal; schedulers kill 30 s after theirs
PR_SET_PDEATHSIG = 1  # of Linux's prctl: a signal for the child when its parent dies


def launch(nproc: int, command: Sequence[str], max_restarts: int = 0, *, stop_grace_s: float = STOP_GRACE_S) -> int:
    """Run a command as `nproc` ranks; its exit code.  After a fault all of them start again, so many times.

    Signals to this process go to all ranks, which then have so many seconds to end; they are not started again.
    """
    world = _World(nproc, command, stop_grace_s)
    before = {number: signal.signal(number, world.tell) for number in FORWARDED}
    try:
        for attempt in range(max_restarts + 1):
            code = world.run(attempt)
            if code == EXIT_DONE or code in ENDS:
                break
            again = attempt < max_restarts and world.told is None
            what = f"; start {attempt + 2} of {max_restarts + 1}" if again else ""
            sys.stderr.write(f"flotilla: {world.fault}{what}\n")
            if not again:
                break
        return code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _World:
    """The ranks of one start after the other.

    told: the signal that this process was sent.  fault: words for the rank that broke the last start.
    """

    def __init__(self, nproc: int, command: Sequence[str], stop_grace_s: float) -> None:
        self.told: signal.Signals | None = None
        self.fault = ""
        self._told_at = math.inf
        self._nproc, self._command, self._stop_grace_s = nproc, command, stop_grace_s
        self._ranks: list[subprocess.Popen[bytes]] = []

    def tell(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on, as its handler."""
        if self.told is None:
            self.told, self._told_at = signal.Signals(number), time.monotonic()
        for rank in self._ranks:
            rank.send_signal(number)

    def run(self, attempt: int) -> int:
        """Start all ranks and wait for the last one; the exit code of all."""
        self._ranks = []
        try:
            self._start(attempt)
            self._wait()
        finally:
            for rank in self._ranks:
                rank.kill()
                rank.wait()
        return self._outcome()

    def _start(self, attempt: int) -> None:
        usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "WORLD_SIZE": str(self._nproc),
            "LOCAL_WORLD_SIZE": str(self._nproc),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, usable // self._nproc))),
        }
        follow = partial(_die_with, os.getpid())
        for number in map(str, range(self._nproc)):
            env = os.environ | shared | {"RANK": number, "LOCAL_RANK": number}
            # Sessions of their own: a terminal's Ctrl-C reaches them once, from here.
            self._ranks.append(subprocess.Popen(self._command, env=env, start_new_session=True, preexec_fn=follow))
        if self.told is not None:  # perhaps before the last one was there to hear it
            for rank in self._ranks:
                rank.send_signal(self.told)

    def _wait(self) -> None:
        """Until all ranks have ended, or those that are left have had their time."""
        self.fault, fault_at = "", math.inf
        while True:
            codes, now = [rank.poll() for rank in self._ranks], time.monotonic()
            faults = [(code, number) for number, code in enumerate(codes) if code]
            if faults and not self.fault:
                # One that a signal ended comes before those that miss it.
                self.fault, fault_at = _words(*min(faults)), now
            if None not in codes or now > fault_at + FAULT_GRACE_S:
                return
            if self.told is not None and now > self._told_at + self._stop_grace_s:
                self.fault = f"a rank was still at work {self._stop_grace_s:g} s after {self.told.name}"
                return
            time.sleep(0.02)

    def _outcome(self) -> int:
        codes = {rank.returncode for rank in self._ranks}
        if codes == {EXIT_DONE}:
            return EXIT_DONE
        if self.told is not None and -self.told in codes:  # before it could listen: nothing was done yet
            return EXIT_INTERRUPTED if self.told == signal.SIGINT else EXIT_PREEMPTED
        return next((code for code in ENDS if code in codes), EXIT_FAILED)


def _words(code: int, number: int) -> str:
    how = f"with exit code {code}" if code > 0 else f"by signal {-code} ({signal.strsignal(-code)})"
    return f"rank {number} ended {how}"


def _die_with(parent: int) -> None:
    """In a new rank: end when the launcher does, by whatever."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before it was asked for
            os._exit(EXIT_FAILED)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
