"""`draftmill evaluate`: real draft-and-verify decoding, the measure of a drafter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from draftmill.cli.arguments import BatchSize, Device, Dtype, Prompts, TargetPath, target_folder


def evaluate(
    drafter: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="Run folder, checkpoint or exported drafter.")
    ],
    target: TargetPath,
    prompts: Prompts,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest response, in tokens.")] = 128,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N prompts.", metavar="N")] = None,
    batch_size: BatchSize = 8,
    dtype: Dtype = "bfloat16",
    device: Device = "auto",
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, metavar="FILE", help="Write all numbers to FILE, too.")
    ] = None,
) -> None:
    """Measure acceptance by greedy draft-and-verify decoding.

    \b
    Examples:
      draftmill evaluate runs/first --target TARGET --prompts held_out.jsonl
      draftmill evaluate drafter --target TARGET --prompts held_out.jsonl --dtype float32 --json result.json

    Reports tau: accepted draft tokens + 1 per round, as mean of the responses' means with a 95 % interval, and pooled;
    the acceptance of each slot; and whether the text equals plain greedy decoding. In float32 it must be equal; in
    bfloat16 it may differ where the target's two best logits are nearly equal, and these places are counted.

    Each line of FILE is {"messages": [...]}: a last assistant message is dropped, the target writes its own. Use
    prompts that are not in the training data. Ends with exit code 1 if the text differs where it must not.
    """
    if json_file is not None and not json_file.parent.is_dir():
        raise typer.BadParameter(f"{json_file.parent} is no folder", param_hint="--json")
    folder = target_folder(target)
    from draftmill.cli.display import Display
    from draftmill.run.evaluation import EvaluationSettings, evaluate_pair, load_pair

    settings = EvaluationSettings(
        max_new_tokens=max_new_tokens, limit=limit, batch_size=batch_size, dtype=dtype, device=device
    )
    pair = load_pair(drafter, folder, prompts, settings)
    with Display("prompt") as display:
        report = evaluate_pair(
            pair, settings, on_progress=lambda now: display.show(now.done, now.prompts, tokens=now.tokens)
        )
    typer.echo(report.table())
    for reason, count in pair.refused.items():
        typer.echo(f"refused        {count}: {reason}")
    if json_file is not None:
        numbers = {"drafter": str(pair.found.path), "refused": pair.refused, **report.to_dict()}
        json_file.write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    if report.lossless is not None and not report.lossless.holds:
        raise typer.Exit(1)
