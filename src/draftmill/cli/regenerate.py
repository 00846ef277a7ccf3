"""`draftmill regenerate`: the target answers prompts itself, which is what its drafter must learn from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftmill.cli.arguments import BatchSize, Device, Dtype, TargetPath, TemplateOptions, target_folder
from draftmill.cli.arguments import template_options as parse_template_options


def regenerate(
    prompts: Annotated[
        list[Path], typer.Argument(exists=True, dir_okay=False, metavar="FILE...", help="JSONL files of prompts.")
    ],
    target: TargetPath,
    out: Annotated[Path, typer.Option("--out", dir_okay=False, metavar="FILE", help="JSONL file to write.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest response, in tokens.")] = 1024,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy. Use what you will serve with.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Sample from this much probability.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the sampling.")] = 0,
    template_option: TemplateOptions = None,
    batch_size: BatchSize = 64,
    dtype: Dtype = "bfloat16",
    device: Device = "auto",
) -> None:
    """Let the target write the responses to train on.

    \b
    Examples:
      draftmill regenerate prompts.jsonl --target TARGET --out chats.jsonl
      draftmill regenerate prompts.jsonl --target TARGET --out chats.jsonl --temperature 0.7 --top-p 0.95
      draftmill regenerate prompts.jsonl --target TARGET --out chats.jsonl --template-option enable_thinking=false

    A drafter guesses what its target will say, so it learns from the target's own words, not from a dataset's. A line
    is {"messages": [...]}: the last user turn is answered; a last assistant message is dropped and written anew.

    Rows are appended as they are done. After an interruption the same command goes on where it stopped.
    """
    options = parse_template_options(template_option)
    folder = target_folder(target)
    from draftmill.cli.display import Display
    from draftmill.target.model import Target
    from draftmill.target.regenerate import regenerate

    model = Target.load(folder, dtype, device, (0,))
    with Display("row") as display:
        report = regenerate(
            model,
            prompts,
            out,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            batch_size=batch_size,
            template_options=options,
            progress=display.show,
        )
    typer.echo(f"{report.written} rows written to {out}, {report.already_there} were there already")
    for reason, count in report.refused.most_common():
        typer.echo(f"{count} refused: {reason}")
    if report.written + report.already_there == 0:
        raise ValueError("no row was answered: see the reasons above")
