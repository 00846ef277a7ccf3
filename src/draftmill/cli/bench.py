"""`draftmill bench`: how fast the parts are on this machine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from draftmill.train.bench import Result

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure the parts alone, with random weights.")


@app.callback()
def _bench() -> None:
    """Keeps `step` a command of its own."""


@app.command()
def step(
    shape: Annotated[Literal["qwen3-8b", "qwen3.6-27b", "smollm2-135m"], typer.Option(help="The target's sizes.")],
    mode: Annotated[
        Literal["graph", "compile", "eager", "all"], typer.Option(help="One way of stepping, or all in turn.")
    ] = "all",
    tokens: Annotated[int, typer.Option(min=128, help="Context tokens of a pack.")] = 8192,
    anchors: Annotated[int, typer.Option(min=1, help="Anchors of a pack.")] = 512,
    block_size: Annotated[int, typer.Option(min=2, help="Slots per block.")] = 16,
    documents: Annotated[int, typer.Option(min=1, help="Documents of a pack, of equal length.")] = 8,
    repeats: Annotated[int, typer.Option(min=3, help="Steps that are timed.")] = 20,
    kernels: Annotated[int, typer.Option(min=0, help="Show so many of the slowest kernels.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object per mode.")] = False,
) -> None:
    """Time the drafter's step on a GPU: forward and backward, and the update, apart.

    \b
    Examples:
      draftmill bench step --shape qwen3-8b
      draftmill bench step --shape smollm2-135m --tokens 2048 --anchors 64 --documents 2 --mode graph --kernels 20

    Weights and packs are random, the drafter has four sliding layers and a full one. TFLOP count matrix products alone:
    2 x rows x inputs x outputs, three times for trained ones (forward, weights, input).
    """
    import gc

    import torch

    from draftmill.config.schema import TrainConfig
    from draftmill.train.bench import Bench, Work

    work = Work(shape, tokens, anchors, block_size, documents)
    for name in ("graph", "compile", "eager") if mode == "all" else (mode,):
        bench = Bench(work, name, TrainConfig(steps=1))
        result = bench.run(repeats, kernels > 0)
        typer.echo(json.dumps(result.row()) if as_json else _lines(result))
        for kernel, ms, calls in result.kernels[:kernels]:
            typer.echo(f"  {ms:8.3f} ms  x{calls:<4} {kernel[:90]}", err=as_json)
        del bench
        gc.collect()
        torch.cuda.empty_cache()
        torch._dynamo.reset()


def _lines(result: Result) -> str:
    row = result.row()
    work = result.work
    return (
        f"{work.shape}, {work.tokens} tokens, {work.anchors} anchors x {work.block_size} "
        f"(rate {row['anchor_rate']:.4f}), {work.documents} documents, {result.mode}\n"
        f"  forward + backward {_spread(result.step_ms)}   update {_spread(result.update_ms)}   "
        f"host {row['host_ms']:.2f} ms\n"
        f"  {row['context_tokens_per_second']:,} context tokens/s, {row['draft_positions_per_second']:,} draft "
        f"positions/s, {row['tflop']} TFLOP at {row['tflop_per_second']} TFLOP/s\n"
        f"  {row['parameters']:,} parameters, peak {row['peak_gib']} GiB, first calls {row['first_call_seconds']} s, "
        f"loss {row['loss']}"
    )


def _spread(values: tuple[float, float, float]) -> str:
    return f"{values[0]:.2f} ms [{values[1]:.2f}, {values[2]:.2f}]"
