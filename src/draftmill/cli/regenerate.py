"""`draftmill regenerate`: the target answers prompts itself, which is what its drafter must learn from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftmill.cli.arguments import BatchSize, Device, Dtype, TargetPath, TemplateOptions, target_folder
from draftmill.cli.arguments import template_options as parse_template_options
from draftmill.config.load import ConfigError

if TYPE_CHECKING:
    from draftmill.target.answers import Answerer
    from draftmill.target.regenerate import RegenerateReport
    from draftmill.target.server import ServerSettings

STOPPED_EARLY = 3
_SERVER_ONLY = ("model", "concurrency", "timeout", "attempts", "max_failed_share", "api_key")
_EMBEDDED_ONLY = ("batch_size", "dtype", "device")


def regenerate(
    context: typer.Context,
    target: TargetPath,
    out: Annotated[Path, typer.Option("--out", dir_okay=False, metavar="FILE", help="JSONL file to write.")],
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="INPUT", help="Prompts: files, dataset folders or hub:OWNER/NAME[:SPLIT]."),
    ] = None,
    self_prompt: Annotated[
        int | None,
        typer.Option(min=1, metavar="COUNT", help="Instead of INPUT: the target writes so many prompts, too."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest response, in tokens.")] = 1024,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy. Use what you will serve with.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from this much probability: above 0, up to 1.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the sampling.")] = 0,
    template_option: TemplateOptions = None,
    batch_size: BatchSize = 64,
    dtype: Dtype = "bfloat16",
    device: Device = "auto",
    server: Annotated[
        str | None, typer.Option(metavar="URL", help="Ask a server that holds the target: http://HOST:PORT/v1.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="As the server calls the target; by default its only one.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests to the server at a time.")] = 32,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for one whole response.")] = 600.0,
    attempts: Annotated[int, typer.Option(min=1, help="Times that a prompt is sent before it is left for later.")] = 6,
    max_failed_share: Annotated[
        float, typer.Option(min=0, max=1, help="Stop once a larger share of the prompts has failed at the server.")
    ] = 0.1,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Where the server wants one.")] = None,
) -> None:
    """Let the target write the responses to train on.

    \b
    Examples:
      draftmill regenerate prompts.jsonl --target TARGET --out chats.jsonl
      draftmill regenerate prompts.jsonl --target TARGET --out chats.jsonl --temperature 0.7 --top-p 0.95
      draftmill regenerate prompts.jsonl --target TARGET --out chats.jsonl --template-option enable_thinking=false
      draftmill regenerate prompts.jsonl --target TARGET --out chats.jsonl --server http://localhost:8000/v1
      draftmill regenerate --self-prompt 20000 --target TARGET --out chats.jsonl

    A drafter guesses what its target will say, so it learns from the target's own words, not from a dataset's. A row
    is {"prompt": "..."} or a conversation, as for draftmill prepare: its last user turn is answered; a last assistant
    message is dropped and written anew.

    The target runs in this process, or in a server that speaks OpenAI's protocol (vLLM, SGLang).

    Rows are appended as they are done. After an interruption the same command goes on where it stopped; exit code 3
    says that rows are left.
    """
    from draftmill.target.answers import Sampling

    _check_usage(context, prompts, self_prompt, server)
    try:
        sampling = Sampling(max_new_tokens, temperature, top_p, seed)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    asked = _server_settings(server, model, concurrency, attempts, timeout, max_failed_share, api_key)
    options = parse_template_options(template_option)
    folder = target_folder(target)
    _check_template_options(folder, options)
    from draftmill.cli.display import Display
    from draftmill.target.regenerate import regenerate

    answerer: Answerer
    if asked is None:
        from draftmill.target.embedded import Embedded
        from draftmill.target.model import Target

        answerer = Embedded(Target.load(folder, dtype, device, (0,)), batch_size)
    else:
        from draftmill.target.server import Server

        answerer = Server.connect(asked, folder, options)
    inputs: list[str | Path] = [*(prompts or [])]
    try:
        if self_prompt is not None:
            inputs = [_write_prompts(answerer, out, self_prompt, seed, options)]
        with Display("row") as display:
            report = regenerate(answerer, inputs, out, sampling, template_options=options, progress=display.show)
    except KeyboardInterrupt:
        typer.echo(f"interrupted: {out} keeps what is done, the same command goes on with the rest", err=True)
        raise typer.Exit(STOPPED_EARLY) from None
    _tell(report, out, getattr(answerer, "failed_attempts", {}))


def _check_usage(
    context: typer.Context, prompts: list[str] | None, self_prompt: int | None, server: str | None
) -> None:
    """Raises BadParameter for what cannot be meant."""
    from draftmill.text.sources import check_source

    try:
        for prompt in prompts or []:
            check_source(prompt)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="INPUT") from None
    if not prompts and self_prompt is None:
        raise typer.BadParameter("no prompts: name inputs, or give --self-prompt COUNT", param_hint="INPUT")
    if prompts and self_prompt is not None:
        raise typer.BadParameter("give either inputs or --self-prompt, not both", param_hint="--self-prompt")
    foreign, why = (
        (_SERVER_ONLY, "needs --server") if server is None else (_EMBEDDED_ONLY, "is the server's own matter")
    )
    for name in foreign:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = "--" + name.replace("_", "-")
            raise typer.BadParameter(f"{option} {why}: remove it", param_hint=option)


def _server_settings(
    url: str | None,
    model: str | None,
    concurrency: int,
    attempts: int,
    timeout_s: float,
    max_failed_share: float,
    api_key: str | None,
) -> ServerSettings | None:
    """None without a server. Raises BadParameter for an address that is none, or a key that cannot be sent."""
    if url is None:
        return None
    from draftmill.target.completions import Retry
    from draftmill.target.server import ServerSettings

    retry = Retry(attempts=attempts, timeout_s=timeout_s)
    try:
        return ServerSettings(url, model, concurrency, retry, max_failed_share, api_key)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--server") from None


def _check_template_options(folder: Path, options: dict[str, Any]) -> None:
    """Before a model is loaded: its tokenizer knows all."""
    from draftmill.target.loading import load_tokenizer, stop_ids
    from draftmill.text.render import Renderer

    try:
        tokenizer = load_tokenizer(folder)
        Renderer(tokenizer, options, stop_ids=stop_ids(folder, tokenizer))
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _write_prompts(answerer: Answerer, out: Path, count: int, seed: int, options: dict[str, Any]) -> Path:
    """The file of prompts beside `out`."""
    from draftmill.cli.display import Display
    from draftmill.target.self_prompt import write_prompts

    path = out.with_name(out.name + ".prompts.jsonl")
    with Display("prompt") as display:
        report = write_prompts(answerer, path, count, seed=seed, template_options=options, progress=display.show)
    typer.echo(f"{report.written} prompts written to {path}, {report.already_there} were there already")
    for reason, draws in report.left_out.most_common():
        typer.echo(f"{draws} draws left out: {reason}")
    if report.stopped_early is not None:
        typer.echo(f"stopped early: {report.stopped_early}", err=True)
        raise typer.Exit(STOPPED_EARLY)
    return path


def _tell(report: RegenerateReport, out: Path, failed_attempts: dict[str, int]) -> None:
    """The account of every row, and an exit code other than 0 where rows are left."""
    typer.echo(f"{report.written} rows written to {out}, {report.already_there} were there already")
    if report.without_ids:
        typer.echo(f"{report.without_ids} of them without response_ids: the server does not tell token ids")
    for reason, count in report.refused.most_common():
        typer.echo(f"{count} refused: {reason}")
    if failed_attempts:
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(failed_attempts.items()))
        typer.echo(f"failed attempts at the server: {kinds}")
    if report.stopped_early is not None:
        typer.echo(f"stopped early: {report.stopped_early}", err=True)
        typer.echo(f"{report.left} of {report.rows} rows are left: the same command goes on with them", err=True)
        raise typer.Exit(STOPPED_EARLY)
    if report.written + report.already_there == 0:
        raise ValueError("no row was answered: see the reasons above")
