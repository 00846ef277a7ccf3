"""Pure work on many items in worker processes, with the results in the order of the items.

    items --> [worker 0..N-1, two items each: one in work, one waiting] --> results, in order

Always: each item gives one result or the whole ends with an error that names it; no more than `_LEAD` items per
worker are between input and output, so memory does not grow with their number. Workers share nothing but their own
socket with the parent (a killed one cannot hold a lock of another), and end when the parent does.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_DEPTH = 2  # items given to one worker: the next is there when it ends the first
_LEAD = 4  # items per worker that are given out or done, and not yet taken as results


class WorkerDied(RuntimeError):
    """A worker process ended in the middle of its work. Results up to there were given out, none of them twice."""


def ordered_map(
    work: Callable[[Item], Result], items: Iterable[Item], workers: int, name: Callable[[Item], str]
) -> Iterator[Result]:
    """`map(work, items)` in `workers` spawned processes; `work` is pickled once. One worker is this process itself.

    `name` says what an item is, for the error of a worker that failed or died (WorkerDied).
    """
    if workers == 1:
        yield from map(work, items)
        return
    crew: list[_Worker[Item]] = []
    try:
        pickled = pickle.dumps(work)
        crew += [_Worker(pickled, name) for _ in range(workers)]
        yield from _ordered(crew, enumerate(items))
    finally:
        for worker in crew:
            worker.stop()


def _ordered(crew: list[_Worker[Item]], numbered: Iterator[tuple[int, Item]]) -> Iterator[Any]:
    done: dict[int, Any] = {}
    given = taken = 0
    ended = False
    while True:
        while not ended and given - taken < _LEAD * len(crew):
            worker = min(crew, key=lambda each: len(each.given))
            if len(worker.given) == _DEPTH:
                break
            following = next(numbered, None)
            if following is None:
                ended = True
            else:
                worker.give(*following)
                given += 1
        if taken in done:
            yield done.pop(taken)
            taken += 1
        elif ended and taken == given:
            return
        else:
            ready = wait([worker.connection for worker in crew if worker.given])
            done.update(worker.take() for worker in crew if worker.connection in ready)


class _Worker(Generic[Item]):
    """One process, and the items it has."""

    def __init__(self, pickled_work: bytes, name: Callable[[Item], str]) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.given: deque[tuple[int, Item]] = deque()
        self._name = name
        self._process = context.Process(target=_serve, args=(theirs, pickled_work), daemon=True)
        self._process.start()
        theirs.close()

    def give(self, number: int, item: Item) -> None:
        self.given.append((number, item))
        try:
            self.connection.send((number, item))
        except OSError:
            raise self._death() from None

    def take(self) -> tuple[int, Any]:
        try:
            number, result, failure = self.connection.recv()
        except (EOFError, OSError):
            raise self._death() from None
        expected, item = self.given.popleft()
        if failure is not None:
            raise RuntimeError(f"{self._name(item)} cannot be worked on:\n{failure}")
        if number != expected:
            raise RuntimeError(f"a worker answered item {number}, expected {expected}")
        return number, result

    def stop(self) -> None:
        self._process.kill()  # it holds nothing that needs an orderly end
        self._process.join()
        self.connection.close()

    def _death(self) -> WorkerDied:
        self._process.join()
        code = self._process.exitcode or 0
        how = f"with exit code {code}"
        if code < 0:
            how = f"by {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                how += " (the system's way when memory runs out: try fewer workers)"
        return WorkerDied(f"a worker process ended {how} while it had {self._name(self.given[0][1])}")


def _serve(connection: Connection, pickled_work: bytes) -> None:
    """Main function of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which stops its workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as many workers as cores: threads would only compete
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # Drains the socket while a result is being sent: two ends that both wait to send would wait for ever.
    threading.Thread(target=_receive, args=(connection, inbox), daemon=True).start()
    work = pickle.loads(pickled_work)
    while (message := inbox.get()) is not None:
        number, item = message
        try:
            answer = (number, work(item), None)
        except Exception:  # the parent raises it, with the item's name
            answer = (number, None, traceback.format_exc())
        try:
            connection.send(answer)
        except OSError:  # the parent is gone
            return


def _receive(connection: Connection, inbox: queue.SimpleQueue[Any]) -> None:
    while True:
        try:
            inbox.put(connection.recv())
        except (EOFError, OSError):
            inbox.put(None)
            return
