"""What decoding leaves behind: one `Response` per prompt, one `Round` per draft-and-verify step.

No torch. Enough is recorded to compare two engines round by round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Round:
    start: int  # position of the anchor, the last token known before the round
    drafted: tuple[int, ...]  # tokens drafted for start + 1, start + 2, ...
    accepted: int  # leading drafted tokens equal to the target's own choice
    produced: int  # tokens kept: accepted + 1, cut at the length limit and after a stop token


@dataclass(frozen=True, slots=True)
class Response:
    prompt_tokens: int
    tokens: tuple[int, ...]  # generated, the stop token included
    finish: Finish
    rounds: tuple[Round, ...] = ()  # empty after plain decoding, or where the first token ended the text


@dataclass(frozen=True, slots=True)
class Progress:
    done: int  # finished prompts
    prompts: int
    tokens: int  # generated so far
    rounds: int  # target passes after the prefill, summed over rows


OnProgress = Callable[[Progress], None]
