"""All worker processes of a run: started in an order, heard, watched, ended. Decides nothing about packs.

The first worker of each role starts alone: it warms the caches that its peers then find warm. Every start-up phase
has a time limit; a worker over it, or one that hangs at work, leaves its stacks in its log and is killed.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from draftmill.config.schema import Config
from draftmill.run.channel import PeerClosed
from draftmill.run.process import WorkerProcess
from draftmill.wire import Record, Stop, WireError

EXIT_SECONDS = 2.0  # from a worker's closed socket to its end
Key = tuple[str, int]  # role, index


@dataclass(frozen=True, slots=True)
class _Planned:
    """A worker to start, not before `due`."""

    key: Key
    options: dict[str, Any]
    due: float


class Fleet:
    def __init__(self, config: Config, report: Callable[..., None], command: Sequence[str]) -> None:
        self._run_dir, self._start_seconds = config.run.dir, config.pipeline.start_timeout_seconds
        self._report, self._command = report, command
        self._planned: list[_Planned] = []
        self._workers: dict[Key, WorkerProcess] = {}
        self._selector = selectors.DefaultSelector()

    # Starting

    def add(self, role: str, index: int, options: dict[str, Any], delay: float = 0.0) -> None:
        self._planned.append(_Planned((role, index), options, time.monotonic() + delay))

    def start_due(self) -> None:
        """Start what is due, a role's first worker before the others."""
        for planned in list(self._planned):
            role, index = planned.key
            if planned.due <= time.monotonic() and self._may_start(role):
                self._planned.remove(planned)
                worker = WorkerProcess(role, index, self._run_dir, planned.options, self._command)
                self._workers[planned.key] = worker
                self._selector.register(worker.channel, selectors.EVENT_READ, worker)
                self._report("spawned", worker=worker.name, pid=worker.pid)

    def _may_start(self, role: str) -> bool:
        peers = [worker for worker in self._workers.values() if worker.role == role]
        return not peers or any(worker.loaded for worker in peers)

    def forget_planned(self, role: str) -> None:
        self._planned = [planned for planned in self._planned if planned.key[0] != role]

    # Talking

    def send(self, role: str, index: int, record: Record, fds: Sequence[int] = ()) -> None:
        """To a worker that may be dying: what it does not get any more, its death takes care of."""
        worker = self._workers.get((role, index))
        if worker is not None:
            with suppress(PeerClosed):  # heard again as a death
                worker.channel.post(record, fds)

    def receive(self, seconds: float) -> Iterator[tuple[WorkerProcess, Record, Sequence[int]]]:
        """What workers said within `seconds`, in the order each of them said it."""
        for worker in self._workers.values():
            if not worker.silent:
                worker.channel.watch(self._selector)
        for key, events in self._selector.select(seconds):
            worker = key.data
            try:
                if events & selectors.EVENT_WRITE:
                    worker.channel.flush()
                for record, descriptors in worker.channel.pending():
                    yield worker, record, descriptors
                    if worker.silent:  # expelled for it
                        break
            except PeerClosed:
                self._silence(worker)
            except WireError as error:
                self.expel(worker, f"sent what cannot be read: {error}")

    def expel(self, worker: WorkerProcess, why: str) -> None:
        """Hear nothing more of it; it counts as dead from now on."""
        worker.failure = why
        worker.kill()
        if not worker.silent:
            self._silence(worker)

    def ready(self, role: str) -> list[int]:
        """Indices of the role's workers that are past their start-up."""
        return [worker.index for worker in self.workers(role) if worker.ready and not worker.silent]

    def workers(self, role: str) -> list[WorkerProcess]:
        return [worker for worker in self._workers.values() if worker.role == role]

    def planned(self, role: str) -> int:
        return sum(planned.key[0] == role for planned in self._planned)

    # Ending

    def collect_dead(self) -> list[WorkerProcess]:
        """Workers that have said their last word and are gone; each is told of once."""
        dead = []
        for key, worker in list(self._workers.items()):
            if worker.silent:
                worker.wait(EXIT_SECONDS)  # its socket is closed, so it is ending, by itself if it can
                worker.kill()
                self._remove(key)
                dead.append(worker)
        return dead

    def watch_phases(self) -> None:
        for worker in self._workers.values():
            if not worker.ready and worker.seconds_in_phase() > self._start_seconds:
                worker.failure = f"hung in phase {worker.phase!r} for {self._start_seconds:g} s"
                self.condemn(worker)

    def condemn(self, worker: WorkerProcess) -> None:
        """Stacks to its log, then death, which is heard as any other."""
        self._report("hung", worker=worker.name, pid=worker.pid, phase=worker.phase, log=worker.log)
        worker.dump_and_kill()

    def kill(self, role: str) -> None:
        """All of a role, silently."""
        for key, worker in list(self._workers.items()):
            if worker.role == role:
                worker.kill()
                if not worker.silent:
                    self._selector.unregister(worker.channel)
                self._remove(key)

    def end(self, seconds: float) -> None:
        """Ask everyone to leave; who is still there after `seconds` is killed. Nothing of ours runs afterwards."""
        self._planned.clear()
        for (role, index), worker in self._workers.items():
            if worker.ready:
                self.send(role, index, Stop("the run has ended"))
        deadline = time.monotonic() + seconds
        for worker in self._workers.values():
            if worker.ready:
                worker.wait(max(0.0, deadline - time.monotonic()))
        for worker in self._workers.values():
            worker.kill()
            worker.close()
        self._workers.clear()
        self._selector.close()

    def _silence(self, worker: WorkerProcess) -> None:
        self._selector.unregister(worker.channel)
        worker.silent = True

    def _remove(self, key: Key) -> None:
        self._workers.pop(key).close()
