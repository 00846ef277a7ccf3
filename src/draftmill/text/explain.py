"""One input row, rendered as the target reads it, with what the target itself wrote set apart.

The text is decoded from the very tokens that training would use. Nothing of the row can act on a terminal: control
characters are shown as pictures.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from draftmill.text.chunks import fit
from draftmill.text.conversations import parse_row
from draftmill.text.refusals import Refused
from draftmill.text.render import Renderer, TokenRow
from draftmill.text.sources import MAX_LINE_BYTES, Raw, read_raw

COLOURS = ("\x1b[1;32m", "\x1b[0m")
MARKERS = ("\u27e6", "\u27e7")  # white square brackets, which hardly any text has

_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_PICTURES |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)  # C1 controls: terminals act on these too


def explain_row(
    source: str | Path,
    number: int,
    renderer: Renderer,
    max_length: int | None,
    *,
    colour: bool = False,
    max_line_bytes: int = MAX_LINE_BYTES,
) -> str:
    """Row `number`, counted from 1 as the summary counts; raises ValueError where the source has no such row."""
    raw = _row(source, number, max_line_bytes)
    conversation = parse_row(raw)
    if conversation is None:
        raise ValueError(f"{raw.source} is blank: it is not a row")
    if isinstance(conversation, Refused):
        return _refused(conversation)
    rows = renderer.render(conversation)
    if isinstance(rows, Refused):
        return _refused(rows)
    fitted = fit(rows, conversation.source, max_length)
    outcome = [_refused(fitted)] if isinstance(fitted, Refused) else []
    shown = [_shown(row, max_length, renderer, COLOURS if colour else MARKERS) for row in rows]
    heads = [f"{raw.source}: " + _head(row, max_length, i, len(rows)) for i, row in enumerate(rows, start=1)]
    return "\n".join([part for pair in zip(heads, shown, strict=True) for part in pair] + outcome)


def _row(source: str | Path, number: int, max_line_bytes: int) -> Raw:
    last = 0
    for raw in read_raw(source, max_line_bytes):
        if raw.source.line == number:
            return raw
        last = raw.source.line
    raise ValueError(f"{source} has {last:,} lines, there is no row {number:,}: choose a lower one")


def _head(row: TokenRow, max_length: int | None, number: int, total: int) -> str:
    cut = row.truncated(max_length)
    parts = [f"{len(row.token_ids):,} tokens, {sum(end - start for start, end in row.spans):,} supervised"]
    if total > 1:
        parts.insert(0, f"row {number} of {total} (the history is rendered otherwise than the reply was generated)")
    if len(cut.token_ids) < len(row.token_ids):
        parts.append(f"cut after {max_length:,} tokens")
    return "; ".join(parts)


def _shown(row: TokenRow, max_length: int | None, renderer: Renderer, marks: tuple[str, str]) -> str:
    return "".join(
        f"{marks[0]}{text}{marks[1]}" if supervised else text
        for text, supervised in _segments(row.truncated(max_length), renderer)
    )


def _segments(row: TokenRow, renderer: Renderer) -> Iterator[tuple[str, bool]]:
    ids = row.token_ids.tolist()
    at = 0
    for start, end in (*row.spans, (len(ids), len(ids))):
        for first, last, supervised in ((at, start, False), (start, end, True)):
            if first < last:
                text = renderer.tokenizer.decode(
                    ids[first:last], skip_special_tokens=False, clean_up_tokenization_spaces=False
                )
                yield text.translate(_PICTURES), supervised
        at = end


def _refused(refused: Refused) -> str:
    return f"dropped: {refused}".translate(_PICTURES)
