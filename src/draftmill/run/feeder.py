"""The feeder: packs made ahead of the leases, by a thread of their own, in the order of the stream.

    stream --thread--> at most `ahead` packs --__next__--> planner

An epoch's plan and the reading of rows happen here, so the supervisor finds the next pack ready. Waits for room,
unblocked by `__next__` and `close`; `__next__` waits for a pack, unblocked by the thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from threading import Condition, Thread

from draftmill.wire import Pack


class Feeder:
    """An iterator over `packs`. Owns the thread; what `packs` raises is raised to the reader at its place."""

    def __init__(self, packs: Iterator[Pack], ahead: int) -> None:
        self._packs, self._ahead = packs, ahead
        self._ready: deque[Pack] = deque()
        self._ended: BaseException | None = None  # after the last pack in `_ready`; StopIteration at the end
        self._closed = False
        self._changed = Condition()
        self._thread = Thread(target=self._feed, name="feeder", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Pack]:
        return self

    def __next__(self) -> Pack:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended)
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
            assert self._ended is not None
            raise self._ended

    def close(self) -> None:
        """No pack is read after this."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _feed(self) -> None:
        try:
            for pack in self._packs:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or len(self._ready) < self._ahead)
                    if self._closed:
                        return
                    self._ready.append(pack)
                    self._changed.notify_all()
            self._end(StopIteration())
        except BaseException as error:
            self._end(error)

    def _end(self, error: BaseException) -> None:
        with self._changed:
            self._ended = error
            self._changed.notify_all()
