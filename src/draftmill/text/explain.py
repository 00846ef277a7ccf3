"""One input row as training will see it: rendered, with what is supervised set apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from draftmill.text.chunks import Fitted, fit
from draftmill.text.conversations import parse_row
from draftmill.text.refusals import Refused
from draftmill.text.render import Renderer, TokenRow
from draftmill.text.sources import MAX_LINE_BYTES, read_raw


def explain(name: str, line: int, renderer: Renderer, max_length: int | None) -> Fitted | Refused | None:
    """What becomes of the row at 1-based `line` of the input `name`; None for a blank line.

    Raises ValueError where the input has no such line.
    """
    number = 0
    for raw in read_raw(name, MAX_LINE_BYTES):
        number = raw.source.line
        if number < line:
            continue
        row = parse_row(raw)
        if row is None or isinstance(row, Refused):
            return row
        rendered = renderer.render(row)
        return rendered if isinstance(rendered, Refused) else fit(rendered, row.source, max_length)
    raise ValueError(f"{name} has {number} lines, --explain asks for line {line}")


def marked(row: TokenRow, tokenizer: Any, mark: Callable[[str], str]) -> str:
    """The row's text, each supervised part through `mark`."""
    return "".join(mark(text) if supervised else text for supervised, text in _parts(row, tokenizer))


def _parts(row: TokenRow, tokenizer: Any) -> Iterator[tuple[bool, str]]:
    at = 0
    for start, end in (*row.spans, (len(row.token_ids), len(row.token_ids))):
        for supervised, ids in ((False, row.token_ids[at:start]), (True, row.token_ids[start:end])):
            if len(ids):
                yield supervised, tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False)
        at = end
