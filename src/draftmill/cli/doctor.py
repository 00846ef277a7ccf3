"""`draftmill doctor`: what this machine can do, and whether a target fits."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from draftmill.cli.arguments import target_folder


def doctor(
    target: Annotated[
        Path | None, typer.Option(exists=True, metavar="TARGET", help="Check this target as well: loads it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of lines.")] = False,
) -> None:
    """Check this machine, and a target if one is given.

    \b
    Examples:
      draftmill doctor
      draftmill doctor --target TARGET

    Looks at versions, GPUs, threads, memory, shared memory and disk. With --target: at its config.json, its chat
    template and mask token, and, on the loaded model, at its embedding and head and at whether documents packed
    together give the same features as alone. Each line is ok, warning or failure, with the remedy. Exit code 1 after
    a failure.
    """
    from itertools import chain

    from draftmill.cli.checks import machine_checks, target_checks

    checks = []
    for check in chain(machine_checks(), target_checks(target_folder(target)) if target else ()):
        checks.append(check)
        if not as_json:
            remedy = f" -> {check.remedy}" if check.remedy else ""
            typer.echo(f"{check.status:8} {check.name}: {check.detail}{remedy}")
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(check) for check in checks], indent=2))
    if any(check.status == "failure" for check in checks):
        raise typer.Exit(1)
