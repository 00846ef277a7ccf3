"""One worker as its supervisor sees it: process, socket, log, phase. Owns no decisions.

Started by spawn: a fresh interpreter that inherits one socket and nothing else, so no lock, no CUDA state and no
tokenizer of the parent can reach it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from draftmill.run.channel import Channel, socketpair

COMMAND = (sys.executable, "-m", "draftmill.run.worker")
STACK_DUMP_SECONDS = 2.0  # for a hung worker to write its stacks before it is killed


class WorkerProcess:
    def __init__(
        self, role: str, index: int, run_dir: Path, options: dict[str, Any], command: Sequence[str] = COMMAND
    ) -> None:
        self.role, self.index = role, index
        self.name = f"{role} {index}"
        self.log = run_dir / "logs" / f"{role}-{index}.log"
        self.phase = "spawned"
        self.phase_since = time.monotonic()
        self.ready = False
        self.silent = False  # its socket is closed: it has ended, or has nothing more to say
        self.failure: str | None = None  # what the worker itself said of its end
        self.log.parent.mkdir(exist_ok=True)
        ours, theirs = socketpair()
        with theirs, self.log.open("ab") as log:
            self._process = self._spawn(theirs.fileno(), log, [*command], run_dir, options)
        self.channel = Channel(ours)

    def _spawn(
        self, descriptor: int, log: IO[bytes], command: list[str], run_dir: Path, options: dict[str, Any]
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*command, self.role, str(self.index), str(descriptor), str(run_dir), json.dumps(options)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(descriptor,),
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def enter(self, phase: str) -> None:
        self.phase, self.phase_since = phase, time.monotonic()
        self.ready = phase == "ready"

    @property
    def loaded(self) -> bool:
        """Past loading: its peers may start, and find what it has warmed."""
        return self.phase not in ("spawned", "loading")

    def seconds_in_phase(self) -> float:
        return time.monotonic() - self.phase_since

    def running(self) -> bool:
        return self._process.poll() is None

    def dump_and_kill(self) -> None:
        """The stacks of all its threads go to its log, then it ends."""
        if self.running():
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(STACK_DUMP_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Ended and gone when this returns: what it wrote to is written to no more."""
        if self.running():
            self._process.kill()
        self._process.wait()

    def wait(self, seconds: float) -> bool:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self) -> str:
        """How it ended, for events and errors."""
        code = self._process.returncode
        how = "still runs" if code is None else f"killed by {_signal_name(-code)}" if code < 0 else f"exit code {code}"
        return f"{self.name} (pid {self.pid}): {self.failure or how}; see {os.path.relpath(self.log)}"

    def close(self) -> None:
        self.channel.close()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
