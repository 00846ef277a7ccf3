"""`draftmill train`: a config file and overrides become a run folder with checkpoints."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer


def train(
    config: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, metavar="CONFIG.yaml", help="Settings of the run.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings that win over the file's.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in run.dir.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the settings against the target, print them, and leave.")
    ] = False,
) -> None:
    """Train a drafter.

    \b
    Examples:
      draftmill train config.yaml
      draftmill train config.yaml train.lr=3e-4 drafter.layers=3 run.dir=runs/small
      draftmill train config.yaml 'target.feature_layers=[1,8,14]' train.epochs=null train.steps=2000
      draftmill train config.yaml --resume

    Settings are explained in the file that `draftmill init` writes. An unknown or impossible one is refused before
    any model is loaded. Relative paths are relative to the current directory.

    The run folder (run.dir) gets the resolved config, metrics.jsonl, events.jsonl and checkpoints. Ctrl-C finishes the
    open step, writes a checkpoint and ends with exit code 3, as does train.time_limit_minutes; --resume then goes on
    as if nothing had happened. On resume only settings that cannot change the weights may differ.
    """
    from draftmill.config.load import dump_config, load_config
    from draftmill.config.resolve import check_target

    settings = load_config(config, overrides or [])
    check_target(settings)
    typer.echo(dump_config(settings))
    if dry_run:
        return
    from draftmill.run.training import run_training
    from draftmill.train.loop import FINISHED

    result = run_training(settings, resume=resume)
    typer.echo(f"{result.reason} at step {result.step} of {result.steps}; newest checkpoint: {result.checkpoint}")
    if result.reason != FINISHED:
        typer.echo(f"go on with: {shlex.join(['draftmill', 'train', str(config), *(overrides or []), '--resume'])}")
        raise typer.Exit(3)
