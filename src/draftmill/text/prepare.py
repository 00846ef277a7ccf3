"""`draftmill prepare`: conversation files -> a prepared dataset, every input row accounted for.

    read -> chunks -> parse, render, fit (worker processes) -> write, in input order

An input row ends exactly once: as kept, or dropped with one reason. Nothing appears under the output folder's name
unless all of it is good. A killed run leaves its finished rows beside it, and the same command goes on from there.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from draftmill.text.chunks import Chunk, Made, MakeRows, in_chunks
from draftmill.text.dataset import PreparedDataset
from draftmill.text.dataset_writer import DatasetWriter
from draftmill.text.identity import tokenizer_identity
from draftmill.text.mask_token import MaskToken, choose_mask_token
from draftmill.text.pool import WorkerDied, ordered_map
from draftmill.text.refusals import RowError
from draftmill.text.render import Renderer, Turns
from draftmill.text.sources import MAX_LINE_BYTES, check_source, read_raw, source_files
from draftmill.text.summary import PrepareError, Progress, Summary

_BYTES_PER_WORKER = 4 * 2**20  # starting a process costs as much as rendering some megabytes


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

    append: bool = False
    """Add the rows to an existing prepared dataset, after its own."""

    max_line_bytes: int = MAX_LINE_BYTES
    """Longest line that is read."""

    workers: int | None = None
    """Processes that render; 1 is this process alone. None: one per core, fewer for small input. The dataset is the
    same, byte by byte, whatever their number."""


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
    """Writes the dataset and returns the account of it.

    Raises `PrepareError` with the account, `RowError` in strict mode, `WorkerDied` if a worker process was killed.
    """
    names = [str(path) for path in sources]
    sizes = _check_sources(names)
    for name in names:
        _check_made_with(Path(name), options)
    renderer = renderer_of(tokenizer, options)
    begun_with = _begun_with(names, tokenizer, options)
    base = PreparedDataset.open(folder) if options.append else None
    if base:
        _check_base(base, begun_with, names)
    _mask_token(tokenizer, options, None, base)  # a missing mask token ends here, before the data are read
    with DatasetWriter(folder, begun_with, overwrite=options.overwrite, base=base) as writer:
        summary = Summary.restored(writer.state)
        if writer.afresh:
            summary.warnings.append(f"an interrupted attempt is not continued: {writer.afresh}")
        first = len(base.manifest["sources"]) if base else 0
        work = MakeRows(renderer, options.max_length, names, first)
        for made in _made(work, names, sizes, summary.raws, options):
            if options.strict and made.refused:
                writer.discard()
                raise RowError(made.refused[0])
            summary.enter(made)
            writer.add(made.block)
            if writer.due:
                writer.checkpoint(summary.state())
            if progress:
                done = sum(sizes[: names.index(made.last.file)]) + made.last.offset
                progress(Progress(done, sum(sizes), summary.kept, sum(summary.dropped.values())))
        writer.checkpoint(summary.state())
        _finish(writer, names, sizes, tokenizer, options, summary)
    if progress:
        progress(Progress(sum(sizes), sum(sizes), summary.kept, sum(summary.dropped.values())))
    return summary


def renderer_of(tokenizer: Any, options: PrepareOptions) -> Renderer:
    return Renderer(
        tokenizer,
        options.template_options,
        stop_ids=options.stop_ids,
        turns=options.turns,
        vocab_size=options.vocab_size,
    )


def _made(
    work: MakeRows, names: Sequence[str], sizes: Sequence[int], done: int, options: PrepareOptions
) -> Iterator[Made]:
    """What became of the input after its first `done` rows, chunk by chunk."""
    raws = chain.from_iterable(read_raw(name, options.max_line_bytes) for name in names)
    chunks = in_chunks(islice(raws, done, None))
    workers = options.workers or min(len(os.sched_getaffinity(0)), 1 + sum(sizes) // _BYTES_PER_WORKER)
    try:
        yield from ordered_map(work, chunks, workers, Chunk.__str__)
    except WorkerDied as death:
        raise WorkerDied(f"{death}. What was finished before is kept: give the same command again to go on") from None


def _finish(
    writer: DatasetWriter,
    names: Sequence[str],
    sizes: Sequence[int],
    tokenizer: Any,
    options: PrepareOptions,
    summary: Summary,
) -> None:
    base = writer.base
    summary.rows_out = writer.rows - (len(base) if base else 0)
    summary.tokens = writer.tokens - (base.manifest["tokens"] if base else 0)
    summary.supervised_tokens = writer.supervised_tokens - (base.manifest["supervised_tokens"] if base else 0)
    if problem := _problem(summary, options):
        writer.discard()
        raise PrepareError(problem, summary)
    mask = _mask_token(tokenizer, options, writer.occurrences, base)
    summary.mask_token = mask
    if mask.warning:
        summary.warnings.append(mask.warning)
    writer.commit(_manifest(names, sizes, tokenizer, options, summary, mask, base))


def _problem(summary: Summary, options: PrepareOptions) -> str | None:
    if summary.kept == 0:
        return "no row is left to train on: nothing was written"
    if summary.dropped_share > options.max_dropped_share:
        return (
            f"{summary.dropped_share:.1%} of the input rows were dropped, the limit max_dropped_share is "
            f"{options.max_dropped_share:.1%}: repair the data, or raise the limit (`--max-dropped-share`)"
        )
    return None


def _begun_with(names: Sequence[str], tokenizer: Any, options: PrepareOptions) -> dict[str, Any]:
    """All that the rows depend on: what an interrupted attempt, or the dataset to append to, must share."""
    stats = [[os.stat(file) for file in source_files(name)] for name in names]
    return {
        **_settings(tokenizer, options),
        "input files": [
            [name, *([stat.st_size, stat.st_mtime_ns] for stat in files)]
            for name, files in zip(names, stats, strict=True)
        ],
        "max_line_bytes": options.max_line_bytes,
    }


def _settings(tokenizer: Any, options: PrepareOptions) -> dict[str, Any]:
    return {
        "target": {"config_hash": options.config_hash, **tokenizer_identity(tokenizer)},
        "template_options": dict(options.template_options),
        "turns": options.turns,
        "max_length": options.max_length,
        "stop_ids": sorted(int(i) for i in options.stop_ids),
    }


def _check_base(base: PreparedDataset, begun_with: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in ("target", "template_options", "turns", "max_length", "stop_ids"):
        if base.manifest[name] != begun_with[name]:
            raise ValueError(
                f"{base.folder} was prepared with {name} {base.manifest[name]}, but these rows have "
                f"{begun_with[name]}: append with the same, or prepare another dataset"
            )
    known = {source["path"] for source in base.manifest["sources"]}
    for name in names:
        if name in known:
            raise ValueError(
                f"{base.folder} holds the rows of {name} already, they would count double: put new rows into a file "
                "of their own"
            )


def _check_sources(names: Sequence[str]) -> list[int]:
    """Sizes in bytes."""
    if not names:
        raise ValueError("no input files: name at least one")
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"input file {name} is named twice: its rows would count double")
        check_source(name)
    return [sum(map(os.path.getsize, source_files(name))) for name in names]


def _mask_token(
    tokenizer: Any, options: PrepareOptions, occurrences: np.ndarray | None, base: PreparedDataset | None
) -> MaskToken:
    """The dataset's own where rows are added to one: drafters may have been trained with it."""
    explicit = options.mask_token_id
    if base:
        explicit = base.manifest["mask_token"]["id"]
        if options.mask_token_id not in (None, explicit):
            raise ValueError(
                f"{base.folder} has mask token {explicit}, but mask_token_id is {options.mask_token_id}: leave it out"
            )
    return choose_mask_token(
        tokenizer, occurrences, explicit=explicit, stop_ids=options.stop_ids, vocab_size=options.vocab_size
    )


def _manifest(
    names: Sequence[str],
    sizes: Sequence[int],
    tokenizer: Any,
    options: PrepareOptions,
    summary: Summary,
    mask: MaskToken,
    base: PreparedDataset | None,
) -> dict[str, Any]:
    sources = [{"path": name, "bytes": size} for name, size in zip(names, sizes, strict=True)]
    counts = summary.state()
    del counts["examples"], counts["raws"]
    chosen_by = str(mask.chosen_by)
    if base:
        before = base.manifest
        sources = before["sources"] + sources
        dropped = Counter(before["counts"]["dropped"]) + Counter(counts.pop("dropped"))
        counts = {name: count + before["counts"][name] for name, count in counts.items()}
        counts["dropped"] = dict(sorted(dropped.items()))
        chosen_by = before["mask_token"]["chosen_by"]
    return {
        **_settings(tokenizer, options),
        "mask_token": {"id": mask.id, "text": mask.text, "chosen_by": chosen_by, "occurrences": mask.occurrences},
        "sources": sources,
        "counts": counts,
    }
