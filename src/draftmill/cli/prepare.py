"""`draftmill prepare`: conversations become token rows that know which tokens the target generated."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from draftmill.cli.arguments import TargetPath, TemplateOptions, target_folder, template_options

if TYPE_CHECKING:
    from draftmill.text.prepare import PrepareOptions
    from draftmill.text.summary import Progress, Summary


def prepare(
    conversations: Annotated[
        list[str],
        typer.Argument(metavar="SOURCE...", help="JSONL, Parquet or Arrow files, dataset folders, hub:OWNER/NAME."),
    ],
    target: TargetPath,
    out: Annotated[
        Path | None, typer.Option("--out", file_okay=False, metavar="DIR", help="Dataset folder to write.")
    ] = None,
    explain: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Write nothing; show row N of SOURCE and what is learnt of it."),
    ] = None,
    turns: Annotated[
        Literal["all", "last"], typer.Option(help="Learn from every assistant turn, or from the last only.")
    ] = "all",
    max_length: Annotated[int, typer.Option(min=2, help="Longer rows are cut to this many tokens.")] = 8192,
    mask_token_id: Annotated[int | None, typer.Option(min=0, help="Token of the slots to predict; see below.")] = None,
    max_dropped_share: Annotated[
        float, typer.Option(min=0, max=1, help="Stop if more than this share of the rows is dropped.")
    ] = 0.1,
    template_option: TemplateOptions = None,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first bad row instead of counting it.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing prepared dataset.")] = False,
    append: Annotated[bool, typer.Option("--append", help="Add the rows to an existing prepared dataset.")] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes that render. Default: one per core, fewer for small files.")
    ] = None,
) -> None:
    """Turn conversations into a dataset to train on.

    \b
    Examples:
      draftmill prepare chats.jsonl --target TARGET --out data/prepared
      draftmill prepare a.jsonl b.jsonl --target TARGET --out data/prepared --turns last --max-length 4096
      draftmill prepare chats.jsonl --target TARGET --out data/prepared --template-option enable_thinking=false
      draftmill prepare more.jsonl --target TARGET --out data/prepared --append
      draftmill prepare chats.parquet hub:owner/name:train --target TARGET --out data/prepared
      draftmill prepare chats.jsonl --target TARGET --explain 17

    A line is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}, or another of
    the forms in docs/data.md. The responses should be the target's own: see draftmill regenerate. Rows are rendered by
    the target's chat template, and only tokens that the target generates are learnt. Bad rows are dropped, counted by
    reason and named by line. --explain shows the row of a line, what is learnt in colour, or in white square
    brackets where the output is not a terminal.

    An interrupted prepare goes on where it was when the same command is given again. The dataset does not depend on the
    number of workers or on interruptions.

    The mask token fills the slots to predict. It is --mask-token-id, or the tokenizer's own mask token, or a token that
    the tokenizer reserves and the data never use. Where there is none of these, the command stops and lists candidates.
    """
    options = template_options(template_option)
    _check_sources(conversations, explain, out)
    folder = target_folder(target)
    from transformers import AutoTokenizer

    from draftmill.cli.display import Display
    from draftmill.text.pool import WorkerDied
    from draftmill.text.prepare import prepare

    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    settings = _options(
        folder,
        tokenizer,
        turns=turns,
        max_length=max_length,
        mask_token_id=mask_token_id,
        max_dropped_share=max_dropped_share,
        template_options=options,
        strict=strict,
        overwrite=overwrite,
        append=append,
        workers=workers,
    )
    if explain is not None or out is None:
        typer.echo(_explanation(conversations[0], explain or 1, tokenizer, settings))
        return
    with Display("read %") as display:

        def show(now: Progress) -> None:
            percent = 100 * now.done_bytes // max(now.total_bytes, 1)
            display.show(percent, 100, kept=now.kept, dropped=now.dropped)

        try:
            summary = prepare(conversations, tokenizer, out, settings, progress=show)
        except WorkerDied as death:  # not our fault and not the data's: its message says all
            typer.echo(f"error: {death}", err=True)
            raise typer.Exit(1) from None
    _report(summary)
    typer.echo(f"wrote {out}")


def _check_sources(sources: list[str], explain: int | None, out: Path | None) -> None:
    from draftmill.text.sources import check_source

    for source in sources:
        try:
            check_source(source)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="SOURCE") from None
    if explain is None and out is None:
        raise typer.BadParameter("name the dataset folder to write", param_hint="--out")
    if explain is not None and len(sources) > 1:
        raise typer.BadParameter(f"row {explain} of which source? Name one", param_hint="--explain")


def _explanation(source: str, number: int, tokenizer: Any, settings: PrepareOptions) -> str:
    from draftmill.text.explain import explain_row
    from draftmill.text.prepare import renderer_of

    return explain_row(
        source, number, renderer_of(tokenizer, settings), settings.max_length, colour=sys.stdout.isatty()
    )


def _report(summary: Summary) -> None:
    for warning in summary.warnings:
        typer.echo(f"warning: {warning}", err=True)
    if summary.resumed_at:
        typer.echo(f"went on after {summary.resumed_at:,} input rows that an interrupted attempt had finished")
    typer.echo(summary.table())
    if mask := summary.mask_token:
        typer.echo(f"mask token {mask.id} {mask.text!r} ({mask.chosen_by})")


def _options(folder: Path, tokenizer: Any, **chosen: Any) -> PrepareOptions:
    """Adds what the target's files say. Its weights are not needed, so they are not loaded."""
    from draftmill.config.resolve import TargetShape
    from draftmill.target.loading import config_hash, stop_ids
    from draftmill.text.prepare import PrepareOptions

    return PrepareOptions(
        stop_ids=stop_ids(folder, tokenizer),
        vocab_size=TargetShape.read(folder).number("vocab_size"),
        config_hash=config_hash(folder),
        **chosen,
    )
