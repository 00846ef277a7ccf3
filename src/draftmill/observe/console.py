"""Progress on the console: one line redrawn in place on a terminal, a plain line every few seconds elsewhere.

Never raises into training: the first failure (a closed pipe, say) ends the display and nothing else.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

REDRAW_SECONDS = 0.2
RATE_SECONDS = 30.0  # rates and ETA look back this far, so that slow first steps do not lie for long

LEAST_RATE_SECONDS = 0.5  # no rate is told from less


class Progress:
    """Shows `step / total` with loss, accuracy, tokens/s and ETA.

        with Progress(total=500, start=120) as progress:
            progress.update(121, tokens=4096, loss=3.2, accuracy=0.31)

    `tokens` counts from the start of this process and only grows.
    """

    def __init__(
        self,
        total: int,
        start: int = 0,
        label: str = "step",
        stream: TextIO | None = None,
        heartbeat_seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total = total  # may be set later, by work that counts first
        self._label = label
        self._stream = stream if stream is not None else sys.stderr
        self._heartbeat_seconds = heartbeat_seconds
        self._clock = clock
        self._history = deque([(clock(), start, 0)])  # (time, step, tokens)
        self._shown_at = float("-inf")
        self._line = ""
        self._live: Live | None = None
        self._console: Console | None = None
        self._broken = False

    def __enter__(self) -> Progress:
        self._safely(self._start)
        return self

    def __exit__(self, *_: object) -> None:
        self._safely(self._stop)

    def update(self, step: int, *, tokens: int = 0, **metrics: float | int | str) -> None:
        """Show the newest state. Cheap enough for every step: it draws only when it is time to."""
        self._safely(lambda: self._update(step, tokens, metrics))

    def note(self, message: str) -> None:
        """A line that stays: a checkpoint written, a document dropped."""
        self._safely(lambda: self._print(message))

    def _start(self) -> None:
        if not self._stream.isatty():
            return
        self._console = Console(file=self._stream)
        # Redrawn from update(): a thread of its own would run beside the training step.
        self._live = Live(console=self._console, auto_refresh=False)
        self._live.start()

    def _stop(self) -> None:
        if self._live:
            self._live.update(Text(self._line), refresh=True)
            self._live.stop()
            self._live = None
        elif self._line:
            self._print(self._line)

    def _update(self, step: int, tokens: int, metrics: dict[str, float | int | str]) -> None:
        now = self._clock()
        self._history.append((now, step, tokens))
        while len(self._history) > 2 and now - self._history[1][0] >= RATE_SECONDS:
            self._history.popleft()
        self._line = self._describe(step, metrics)
        wait = REDRAW_SECONDS if self._live else self._heartbeat_seconds
        if now - self._shown_at < wait and step < self.total:
            return
        self._shown_at = now
        if self._live:
            self._live.update(Text(self._line, no_wrap=True, overflow="ellipsis"), refresh=True)
        else:
            self._print(self._line)
            self._line = ""

    def _describe(self, step: int, metrics: dict[str, float | int | str]) -> str:
        (then, first_step, first_tokens), (now, _, tokens) = self._history[0], self._history[-1]
        seconds = now - then
        parts = [f"{self._label} {step}/{self.total}"]
        parts += [f"{name} {_short(value)}" for name, value in metrics.items()]
        if seconds < LEAST_RATE_SECONDS:
            return "  ".join(parts)
        if tokens > first_tokens:
            rate = (tokens - first_tokens) / seconds
            parts.append(f"{rate:,.{0 if rate >= 10 else 1}f} tokens/s")
        if step > first_step:
            parts.append(f"ETA {_duration((self.total - step) * seconds / (step - first_step))}")
        return "  ".join(parts)

    def _print(self, message: str) -> None:
        if self._console:
            self._console.print(Text(message))
        else:
            print(message, file=self._stream, flush=True)

    def _safely(self, action: Callable[[], None]) -> None:
        if self._broken:
            return
        try:
            action()
        except Exception:  # the display is a courtesy; whatever is wrong with it, the work goes on
            self._broken = True


def _short(value: float | int | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
