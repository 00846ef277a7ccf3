"""Console progress of work that says how far it is through a callback."""

from __future__ import annotations

from draftmill.observe.console import Progress


class Display:
    """Shows `done / total`. A count that falls is the next phase of the work: it gets a line of its own."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._done = 0

    def __enter__(self) -> Display:
        self._open(0)
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def show(self, done: int, total: int, tokens: int = 0, **counts: int) -> None:
        if done < self._done:
            self._close()
            self._open(done)
        self._done = done
        self._progress.total = total
        self._progress.update(done, tokens=tokens, **counts)

    def _open(self, done: int) -> None:
        self._progress = Progress(total=0, start=done, label=self._label)
        self._progress.__enter__()

    def _close(self) -> None:
        self._progress.__exit__()
