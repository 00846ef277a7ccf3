"""`draftmill prepare`: conversation files -> a prepared dataset, every input row accounted for.

    read -> render -> fit -> write

Each stage is a generator of items in input order; a `Refused` passes through all later stages, so an
input row ends exactly once: as kept, or dropped with one reason. Nothing appears under the output
folder's name unless all of it is good.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from draftmill.text.conversations import Conversation, read_conversations
from draftmill.text.dataset import DatasetWriter
from draftmill.text.identity import tokenizer_identity
from draftmill.text.mask_token import MaskToken, choose_mask_token
from draftmill.text.refusals import DropReason, Refused, RowError, Source
from draftmill.text.render import Renderer, TokenRow, Turns
from draftmill.text.sources import MAX_LINE_BYTES

EXAMPLES_PER_REASON = 3
_PROGRESS_ROWS = 256


@dataclass(frozen=True, slots=True)
class PrepareOptions:
    stop_ids: Collection[int]
    """The target's end-of-turn ids: its generation config's eos ids and its tokenizer's."""

    turns: Turns = "all"
    """Supervise every reply, or the last one only."""

    max_length: int | None = 8192
    """Tokens kept per row, counted from its start; None keeps all."""

    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Passed to the chat template, as the serving engine will (for instance enable_thinking)."""

    mask_token_id: int | None = None
    """Explicit mask token; None applies the rule of `mask_token.py`."""

    vocab_size: int | None = None
    """Rows of the target's embedding; None is the tokenizer's length."""

    config_hash: str | None = None
    """Hash of the target's config.json, recorded in the manifest."""

    strict: bool = False
    """Stop at the first bad row instead of counting it."""

    max_dropped_share: float = 0.1
    """Largest share of input rows that may be dropped."""

    overwrite: bool = False
    """Replace an existing prepared dataset."""

    max_line_bytes: int = MAX_LINE_BYTES
    """Longest line that is read."""


@dataclass(slots=True)
class Summary:
    """What became of every input row: rows_in == kept + the sum of `dropped`."""

    rows_in: int = 0
    kept: int = 0
    dropped: Counter[DropReason] = field(default_factory=Counter)
    examples: dict[DropReason, list[str]] = field(default_factory=dict)
    rows_out: int = 0  # token rows written: several per conversation where turns do not extend one another
    turns_dropped: int = 0  # rows without an anchor beside a kept row of the same conversation
    truncated: int = 0  # written rows that max_length cut
    tokens: int = 0
    supervised_tokens: int = 0
    mask_token: MaskToken | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def dropped_share(self) -> float:
        return sum(self.dropped.values()) / self.rows_in if self.rows_in else 0.0

    def drop(self, refused: Refused) -> None:
        self.rows_in += 1
        self.dropped[refused.reason] += 1
        shown = self.examples.setdefault(refused.reason, [])
        if len(shown) < EXAMPLES_PER_REASON:
            shown.append(f"{refused.source}" + (f" ({refused.detail})" if refused.detail else ""))

    def table(self) -> str:
        lines = [f"{self.rows_in:>10,}  input rows", f"{self.kept:>10,}  kept"]
        for reason, count in self.dropped.most_common():
            lines.append(f"{count:>10,}  {reason}: {reason.explanation}; first: {', '.join(self.examples[reason])}")
        lines.append(
            f"{self.rows_out:>10,}  rows written with {self.tokens:,} tokens, {self.supervised_tokens:,} supervised; "
            f"{self.truncated:,} cut, {self.turns_dropped:,} further turns without an anchor"
        )
        return "\n".join(lines)


class PrepareError(ValueError):
    """The data were read, but are not good enough. The message holds the summary; nothing was written."""

    def __init__(self, problem: str, summary: Summary) -> None:
        super().__init__(f"{summary.table()}\n{problem}")
        self.summary = summary


@dataclass(frozen=True, slots=True)
class Rendered:
    """A kept conversation on its way to the dataset."""

    source: Source
    rows: list[TokenRow]
    truncated: int = 0
    turns_dropped: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    done_bytes: int
    total_bytes: int
    kept: int
    dropped: int


def _check_made_with(source: Path, options: PrepareOptions) -> None:
    """Responses that `draftmill regenerate` wrote say how: their ids follow the prompt of those template options."""
    settings = source.with_name(source.name + ".settings.json")
    if not settings.is_file():
        return
    made = json.loads(settings.read_text(encoding="utf-8")).get("template_options", {})
    if made != dict(options.template_options):
        raise ValueError(
            f"{source} was written with template options {made}, but these are {dict(options.template_options)}: "
            "give the same (`--template-option`), or regenerate the responses"
        )


def prepare(
    sources: Sequence[str | Path],
    tokenizer: Any,
    folder: str | Path,
    options: PrepareOptions,
    progress: Callable[[Progress], None] | None = None,
) -> Summary:
    """Writes the dataset and returns the account of it; raises `PrepareError` with the account, or `RowError`."""
    sizes = _check_sources(sources)
    for source in sources:
        _check_made_with(Path(source), options)
    renderer = Renderer(tokenizer, options.template_options, stop_ids=options.stop_ids, turns=options.turns)
    _mask_token(tokenizer, options, None)  # a missing mask token ends here, before the data are read
    occurrences = np.zeros(max(len(tokenizer), options.vocab_size or 0), dtype=np.int64)
    summary = Summary()
    with DatasetWriter(folder, overwrite=options.overwrite) as writer:
        items = fit_rows(render_rows(read_sources(sources, options), renderer), options.max_length)
        for item in _with_progress(items, sources, sizes, summary, progress):
            if isinstance(item, Refused):
                if options.strict:
                    raise RowError(item)
                summary.drop(item)
                continue
            summary.rows_in += 1
            summary.kept += 1
            summary.truncated += item.truncated
            summary.turns_dropped += item.turns_dropped
            for row in item.rows:
                writer.add(row, sources_index(sources, item.source), item.source.line)
                occurrences += np.bincount(row.token_ids, minlength=len(occurrences))
        summary.rows_out, summary.tokens = writer.rows, writer.tokens
        summary.supervised_tokens = writer.supervised_tokens
        _check_share(summary, options)
        summary.mask_token = _mask_token(tokenizer, options, occurrences)
        if summary.mask_token.warning:
            summary.warnings.append(summary.mask_token.warning)
        writer.commit(_manifest(sources, sizes, tokenizer, options, summary))
    return summary


def read_sources(sources: Iterable[str | Path], options: PrepareOptions) -> Iterator[Conversation | Refused]:
    for path in sources:
        yield from read_conversations(path, max_line_bytes=options.max_line_bytes)


def render_rows(items: Iterable[Conversation | Refused], renderer: Renderer) -> Iterator[Rendered | Refused]:
    for item in items:
        if isinstance(item, Refused):
            yield item
            continue
        rows = renderer.render(item)
        yield rows if isinstance(rows, Refused) else Rendered(item.source, rows)


def fit_rows(items: Iterable[Rendered | Refused], max_length: int | None) -> Iterator[Rendered | Refused]:
    """Cuts rows to `max_length` and drops those that no anchor fits in."""
    for item in items:
        if isinstance(item, Refused):
            yield item
            continue
        fitted = [(row, row.truncated(max_length)) for row in item.rows]
        usable = [(row, cut) for row, cut in fitted if cut.eligible]
        if not usable:
            cut_away = any(row.eligible for row in item.rows)
            reason = DropReason.TRUNCATED_AWAY if cut_away else DropReason.NO_ANCHOR
            yield Refused(reason, item.source, f"max_length {max_length}" if cut_away else "")
            continue
        yield Rendered(
            item.source,
            [cut for _, cut in usable],
            truncated=sum(len(cut.token_ids) < len(row.token_ids) for row, cut in usable),
            turns_dropped=len(item.rows) - len(usable),
        )


def sources_index(sources: Sequence[str | Path], source: Source) -> int:
    return next(i for i, path in enumerate(sources) if str(path) == source.file)


def _check_sources(sources: Sequence[str | Path]) -> list[int]:
    if not sources:
        raise ValueError("no input files: name at least one JSONL file")
    names = [str(path) for path in sources]
    for path in names:
        if names.count(path) > 1:
            raise ValueError(f"input file {path} is named twice: its rows would count double")
        if not os.path.isfile(path):
            raise ValueError(f"input file {path} does not exist or is not a file")
    return [os.path.getsize(path) for path in names]


def _with_progress(
    items: Iterable[Rendered | Refused],
    sources: Sequence[str | Path],
    sizes: list[int],
    summary: Summary,
    progress: Callable[[Progress], None] | None,
) -> Iterator[Rendered | Refused]:
    """Reports every few rows and once at the end."""
    total = sum(sizes)
    for number, item in enumerate(items):
        if progress and number % _PROGRESS_ROWS == 0:
            done = sum(sizes[: sources_index(sources, item.source)]) + item.source.offset
            progress(Progress(done, total, summary.kept, sum(summary.dropped.values())))
        yield item
    if progress:
        progress(Progress(total, total, summary.kept, sum(summary.dropped.values())))


def _mask_token(tokenizer: Any, options: PrepareOptions, occurrences: np.ndarray | None) -> MaskToken:
    return choose_mask_token(
        tokenizer,
        occurrences,
        explicit=options.mask_token_id,
        stop_ids=options.stop_ids,
        vocab_size=options.vocab_size,
    )


def _check_share(summary: Summary, options: PrepareOptions) -> None:
    if summary.kept == 0:
        raise PrepareError("no row is left to train on: nothing was written", summary)
    if summary.dropped_share > options.max_dropped_share:
        raise PrepareError(
            f"{summary.dropped_share:.1%} of the input rows were dropped, the limit max_dropped_share is "
            f"{options.max_dropped_share:.1%}: repair the data, or raise the limit (`--max-dropped-share`)",
            summary,
        )


def _manifest(
    sources: Sequence[str | Path], sizes: list[int], tokenizer: Any, options: PrepareOptions, summary: Summary
) -> dict[str, Any]:
    assert summary.mask_token is not None
    mask = summary.mask_token
    return {
        "target": {"config_hash": options.config_hash, **tokenizer_identity(tokenizer)},
        "template_options": dict(options.template_options),
        "turns": options.turns,
        "max_length": options.max_length,
        "stop_ids": sorted(int(i) for i in options.stop_ids),
        "mask_token": {
            "id": mask.id,
            "text": mask.text,
            "chosen_by": str(mask.chosen_by),
            "occurrences": mask.occurrences,
        },
        "sources": [{"path": str(path), "bytes": size} for path, size in zip(sources, sizes, strict=True)],
        "counts": {
            "rows_in": summary.rows_in,
            "kept": summary.kept,
            "dropped": {str(reason): count for reason, count in sorted(summary.dropped.items())},
            "turns_dropped": summary.turns_dropped,
            "truncated": summary.truncated,
        },
    }
