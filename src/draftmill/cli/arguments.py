"""Arguments that several commands share."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

TargetPath = Annotated[
    Path,
    typer.Option("--target", exists=True, metavar="TARGET", help="Hugging Face folder or GGUF file of the target."),
]
Prompts = Annotated[
    Path,
    typer.Option("--prompts", exists=True, dir_okay=False, metavar="FILE", help="JSONL with a `messages` list a line."),
]
Dtype = Annotated[
    Literal["bfloat16", "float32"], typer.Option(help="Compute dtype of the target, as it will be served.")
]
Device = Annotated[
    str,
    typer.Option(
        callback=lambda value: device_name(value), help="auto (a GPU where there is one), cpu, cuda or cuda:N."
    ),
]
TemplateOptions = Annotated[
    list[str] | None,
    typer.Option("--template-option", metavar="KEY=VALUE", help="For the chat template, as served; may be repeated."),
]
BatchSize = Annotated[int, typer.Option(min=1, help="Conversations decoded together.")]


def device_name(value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
        raise typer.BadParameter(f"{value!r}: use auto, cpu, cuda or cuda:N")
    return value


def template_options(given: list[str] | None) -> dict[str, Any]:
    """`enable_thinking=false` -> {"enable_thinking": False}."""
    from draftmill.config.load import parse_value

    options = {}
    for option in given or []:
        key, equals, value = option.partition("=")
        if not equals or not key:
            raise typer.BadParameter(f"{option!r}: write KEY=VALUE", param_hint="--template-option")
        options[key] = parse_value(value)
    return options


def target_folder(target: Path) -> Path:
    """`target`, or the folder its GGUF file is converted into: once, in the user's cache."""
    if target.is_dir():
        return target
    if target.suffix != ".gguf":
        raise typer.BadParameter(f"{target} is neither a folder nor a .gguf file", param_hint="--target")
    from draftmill.target.gguf import convert_gguf

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return convert_gguf(target, cache / "draftmill" / "targets")
