"""`draftmill init`: a commented config file for a target."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftmill.cli.arguments import TargetPath, target_folder


def init(
    target: TargetPath,
    out: Annotated[Path, typer.Option("--out", dir_okay=False, metavar="FILE", help="Config file to write.")] = Path(
        "config.yaml"
    ),
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
) -> None:
    """Write a commented config file for a target.

    \b
    Example:
      draftmill init --target TARGET --out config.yaml
      draftmill train config.yaml --dry-run

    It holds every setting with its default and what it means. The defaults are the paper's recipe. Look at data.path,
    run.dir and train.epochs first.
    """
    from draftmill.config.load import load_config
    from draftmill.config.resolve import check_target
    from draftmill.config.template import template

    if out.exists() and not force:
        raise typer.BadParameter(f"{out} exists: choose another name, or overwrite it with --force", param_hint="--out")
    text = template(str(target_folder(target)))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    typer.echo(f"wrote {out}. Check it with: draftmill train {out} --dry-run")
    check_target(load_config(out))
