"""`draftmill`: the program, its logging and its exit codes.

0 done; 1 failed; 2 bad usage or settings, before anything was started; 3 stopped before the end, resume with --resume.
An error that the user can mend is one message; any other keeps its traceback.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated, NoReturn

import typer

from draftmill import __version__
from draftmill.cli import bench, doctor, evaluate, export, init, prepare, regenerate, train
from draftmill.config.load import ConfigError

FAILED, BAD_USAGE, STOPPED_EARLY = 1, 2, 3

app = typer.Typer(
    name="draftmill",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: examples stay as written, and can be copied
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for _command in (
    regenerate.regenerate,
    prepare.prepare,
    init.init,
    train.train,
    evaluate.evaluate,
    export.export,
    doctor.doctor,
):
    app.command()(_command)
app.add_typer(bench.app, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"draftmill {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where an error came from, not only its message.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """Train DFlash drafters for speculative decoding of a frozen target model.

    \b
    From prompts to a served drafter:
      draftmill regenerate prompts.jsonl --target TARGET --out chats.jsonl   # the target's own responses
      draftmill prepare chats.jsonl --target TARGET --out data/prepared      # token rows with supervision
      draftmill init --target TARGET --out config.yaml                       # settings, explained
      draftmill train config.yaml train.lr=3e-4
      draftmill evaluate runs/first --target TARGET --prompts held_out.jsonl
      draftmill export runs/first --out drafter                              # for vLLM, SGLang, llama.cpp

    TARGET is a Hugging Face folder, or a GGUF file. Each command explains itself: draftmill train --help

    \b
    Exit codes: 0 done, 1 failed, 2 bad usage or settings, 3 stopped early (go on with --resume).
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Format())
    logger = logging.getLogger("draftmill")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


class _Format(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        return level + super().format(record)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run one command line and exit."""
    given = sys.argv[1:] if arguments is None else arguments
    show_traceback = "--traceback" in given
    os.environ.setdefault("TQDM_DISABLE", "1")  # libraries' bars would tear our own progress apart
    try:  # understood after the command, too
        app([argument for argument in given if argument != "--traceback"], prog_name="draftmill")
    except Exception as error:
        if show_traceback or not _is_for_user(error):
            raise
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(BAD_USAGE if isinstance(error, ConfigError) else FAILED) from None
    raise SystemExit(0)


def _is_for_user(error: Exception) -> bool:
    """Whether the message says all: our own ValueErrors do, and the system's about a file; a library's do not."""
    if isinstance(error, ConfigError):
        return True
    if isinstance(error, OSError):
        return error.filename is not None
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    raised_in = "" if traceback is None else str(traceback.tb_frame.f_globals.get("__name__", ""))
    return isinstance(error, ValueError) and raised_in.partition(".")[0] == "draftmill"
