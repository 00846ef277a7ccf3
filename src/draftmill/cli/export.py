"""`draftmill export`: a checkpoint becomes a folder that other engines load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from draftmill.cli.arguments import target_folder

if TYPE_CHECKING:
    from draftmill.export.verify import OracleReport


def export(
    checkpoint: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Run folder or checkpoint.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write; it must not exist.")],
    dtype: Annotated[Literal["bfloat16", "float32"], typer.Option(help="Dtype of the written weights.")] = "bfloat16",
    verify: Annotated[
        bool, typer.Option("--verify", help="Decode with the export in the `dflash` package and compare.")
    ] = False,
    target: Annotated[
        Path | None, typer.Option("--target", exists=True, metavar="TARGET", help="For --verify: the target.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", exists=True, dir_okay=False, metavar="FILE", help="For --verify: JSONL of prompts."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="For --verify: use the first N prompts.")] = 8,
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, metavar="FILE", help="For --verify: write the comparison.")
    ] = None,
) -> None:
    """Write a drafter for serving engines.

    \b
    Examples:
      draftmill export runs/first --out drafter
      draftmill export runs/first/checkpoints/step-500 --out drafter --dtype float32
      draftmill export runs/first --out drafter --verify --target TARGET --prompts held_out.jsonl

    The z-lab layout, which vLLM, SGLang and llama.cpp's converter read: config.json and model.safetensors, without
    embedding and head, which engines take from the target. A run folder means its newest checkpoint. --verify loads
    it in the independent package `dflash`, in float32, and compares every drafted token; exit code 1 if one differs.
    """
    if verify and (target is None or prompts is None):
        raise typer.BadParameter("--verify needs --target and --prompts", param_hint="--verify")
    if not verify and (target is not None or prompts is not None or json_file is not None):
        raise typer.BadParameter("--target, --prompts and --json are for --verify", param_hint="--verify")
    if out.exists():
        raise typer.BadParameter(f"{out} exists: choose another folder or remove it", param_hint="--out")
    folder = target_folder(target) if target is not None else None
    from draftmill.run.exporting import export_drafter

    typer.echo(f"wrote {export_drafter(checkpoint, out, dtype)}")
    if folder is None or prompts is None:
        return
    report = _verify(out, folder, prompts, limit)
    if json_file is not None:
        json_file.write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
    if not report.match or report.compared == 0:
        raise typer.Exit(1)


def _verify(out: Path, target: Path, prompts: Path, limit: int) -> OracleReport:
    from draftmill.cli.display import Display
    from draftmill.run.evaluation import EvaluationSettings
    from draftmill.run.exporting import verify_export

    with Display("prompt") as display:
        report = verify_export(
            out,
            target,
            prompts,
            EvaluationSettings(limit=limit),
            on_progress=display.show,
        )
    for mismatch in report.mismatches:
        typer.echo(f"differs: {mismatch}")
    ties = report.draft_ties + report.target_ties
    typer.echo(
        f"compared {report.compared} of dflash's {report.rounds} rounds: {len(report.mismatches)} differ, {ties} ties"
    )
    return report
