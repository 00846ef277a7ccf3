"""Training data: the target's own responses to the prompts of JSONL files, written so that a kill loses no row.

Each input row ends exactly once: as one output line, or refused with a counted reason. Output lines are only
appended, batch by batch; a line cut short by a kill is removed at the next start, and rows already there are not
generated again. Rows that the target answered with nothing go to `<out>.empty.jsonl`, for the same reason.
Batches are planned over all input rows, finished ones too, so an interrupted run that goes on computes the same
batches as a straight one. `<out>.settings.json` says how the file was made; going on with other settings is refused.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from draftmill.target.generate import Response, Sampling, generate
from draftmill.target.model import Target
from draftmill.text.conversations import Conversation, Tokenised, read_conversations
from draftmill.text.refusals import DropReason, Refused, RowProblem
from draftmill.text.render import Renderer

log = logging.getLogger(__name__)

SORTED_BATCHES = 16  # rows of this many batches are sorted by length together, so that rows of a batch are alike
Progress = Callable[[int, int, int], None]  # (rows ended, rows in all, response tokens of this call)
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Prompt:
    source: str  # file name and line: the row's identity
    messages: list[Message]
    token_ids: list[int]
    how: dict[str, Any]  # what else the row's rendering depends on: tools, chat_template_kwargs


@dataclass(slots=True)
class RegenerateReport:
    written: int = 0
    already_there: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # reason -> rows
    response_tokens: int = 0  # of the rows written by this call
    stopped: int = 0  # of those, ended by the target itself

    @property
    def ended(self) -> int:
        return self.written + self.already_there + self.refused.total()


def regenerate(
    target: Target,
    prompts: Sequence[str | Path],
    out: str | Path,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    batch_size: int = 64,
    template_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> RegenerateReport:
    """Answers the last user turn of every row of `prompts`; a last assistant message is dropped and written anew.

    An output line has `messages` (the answer last), `response_ids` (the stop token included), `finish` (stop or
    length) and `source` (file name and line of the input row).
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}: use at least 1")
    sampling = Sampling(max_new_tokens, temperature, top_p, seed)
    renderer = Renderer(target.tokenizer, template_options, stop_ids=target.stop_ids)
    report, out = RegenerateReport(), Path(out)
    rows = list(_read_prompts([Path(path) for path in prompts], report))
    total = len(rows) + report.refused.total()
    _check_settings(out, {**asdict(sampling), "template_options": dict(template_options or {}), **_made_by(target)})
    with _open_for_append(out) as file, _open_for_append(_empty_path(out)) as empty_file:
        done, empty = _written_rows(file, out), _written_rows(empty_file, _empty_path(out))
        for batch in _batches(rows, renderer, target, sampling, batch_size, report):
            wanted = set()
            for prompt in batch:
                if _is_written(prompt, done, out):
                    report.already_there += 1
                elif _is_written(prompt, empty, _empty_path(out)):
                    report.refused["empty_response"] += 1
                else:
                    wanted.add(prompt.source)
            if wanted:
                answers = generate(
                    target, [row.token_ids for row in batch], sampling, row_keys=[row.source for row in batch]
                )
                pairs = [(row, answer) for row, answer in zip(batch, answers, strict=True) if row.source in wanted]
                _append(file, empty_file, pairs, target, report)
            if progress is not None:
                progress(report.ended, total, report.response_tokens)
        leave_no_empty_file = os.fstat(empty_file.fileno()).st_size == 0
    if leave_no_empty_file:
        _empty_path(out).unlink()
    return report


def _read_prompts(paths: list[Path], report: RegenerateReport) -> Iterator[tuple[str, Conversation]]:
    """(source, conversation that ends before the answer to write)."""
    names = [path.name for path in paths]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"prompt files share the name {twice[0]}, by which rows are told apart: rename one")
    for path in paths:
        for row in read_conversations(path, need_reply=False):
            if isinstance(row, Tokenised):
                row = Refused(DropReason.NO_MESSAGES, row.source, "tokens have no prompt to answer")
            if isinstance(row, Refused):
                _refuse(report, str(row.reason), str(row))
                continue
            yield f"{path.name}:{row.source.line}", row.question


def _batches(
    rows: list[tuple[str, Conversation]],
    renderer: Renderer,
    target: Target,
    sampling: Sampling,
    batch_size: int,
    report: RegenerateReport,
) -> Iterator[list[_Prompt]]:
    """A function of the rows and the batch size alone; shortest prompts first within a window."""
    limit = getattr(target.config, "max_position_embeddings", None)
    window = SORTED_BATCHES * batch_size
    for start in range(0, len(rows), window):
        prompts = []
        for source, conversation in rows[start : start + window]:
            try:
                ids = renderer.prompt_ids(conversation)
            except RowProblem as problem:
                refused = problem.at(conversation.source)
                _refuse(report, str(refused.reason), str(refused))
                continue
            if limit is not None and len(ids) + sampling.max_new_tokens > limit:
                _refuse(report, "prompt_too_long", f"{source}: {len(ids)} prompt tokens, the target holds {limit}")
                continue
            messages = [message.plain for message in conversation.messages]
            how = {"tools": list(conversation.tools), "chat_template_kwargs": dict(conversation.template_options)}
            prompts.append(_Prompt(source, messages, ids, {name: value for name, value in how.items() if value}))
        prompts.sort(key=lambda prompt: len(prompt.token_ids))
        yield from (prompts[i : i + batch_size] for i in range(0, len(prompts), batch_size))


def _append(
    file: IO[bytes],
    empty_file: IO[bytes],
    pairs: list[tuple[_Prompt, Response]],
    target: Target,
    report: RegenerateReport,
) -> None:
    lines: dict[IO[bytes], list[dict[str, Any]]] = {file: [], empty_file: []}
    for prompt, answer in pairs:
        body = answer.token_ids[:-1] if answer.finish == "stop" else answer.token_ids
        content = target.tokenizer.decode(body, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        line = {
            "messages": [*prompt.messages, {"role": "assistant", "content": content}],
            "response_ids": list(answer.token_ids),
            "finish": answer.finish,
            "source": prompt.source,
            **prompt.how,
        }
        if not content.strip():
            lines[empty_file].append(line)
            _refuse(report, "empty_response", f"{prompt.source}: the target answered nothing")
            continue
        lines[file].append(line)
        report.written += 1
        report.response_tokens += len(answer.token_ids)
        report.stopped += answer.finish == "stop"
    for place, rows in lines.items():
        place.write(b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows))
        place.flush()
        os.fsync(place.fileno())


def _empty_path(out: Path) -> Path:
    return out.with_name(out.name + ".empty.jsonl")


def _open_for_append(out: Path) -> IO[bytes]:
    out.parent.mkdir(parents=True, exist_ok=True)
    file = out.open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ValueError(f"{out} is being written by another process: wait for it, or choose another file") from None
    return file


def _written_rows(file: IO[bytes], out: Path) -> dict[str, list[Message]]:
    """source -> messages of the rows already there, after cutting a last line that a kill left unfinished."""
    file.seek(0)
    done: dict[str, list[Message]] = {}
    end = 0
    for number, line in enumerate(file, 1):
        try:
            row = json.loads(line)
            source, messages = row["source"], row["messages"]
        except (ValueError, TypeError, KeyError):
            row = None
        if not line.endswith(b"\n"):  # a kill: even a line that parses may lack its last digits
            log.warning("%s: cutting the unfinished last line %d", out, number)
            file.truncate(end)
            break
        if row is None:
            raise ValueError(f"{out}:{number} is not a row written by regenerate: repair it, or choose another file")
        done[source] = messages
        end += len(line)
    file.seek(0, os.SEEK_END)
    return done


def _is_written(prompt: _Prompt, done: Mapping[str, list[Message]], out: Path) -> bool:
    written = done.get(prompt.source)
    if written is None:
        return False
    if written[:-1] != prompt.messages:
        raise ValueError(
            f"{out} answers another prompt for {prompt.source}: the prompts changed, use a new output file"
        )
    return True


def _made_by(target: Target) -> dict[str, Any]:
    identity = target.identity()
    return {"target": {key: value for key, value in identity.items() if key != "name"}}


def _check_settings(out: Path, settings: dict[str, Any]) -> None:
    path = out.with_name(out.name + ".settings.json")
    settings = json.loads(json.dumps(settings))  # as they come back: tuples become lists
    if out.exists() and out.stat().st_size > 0:
        if not path.exists():
            raise ValueError(f"{out} has rows, but {path.name}, which says how they were made, is gone: use a new file")
        before = json.loads(path.read_text(encoding="utf-8"))
        for name in sorted(before.keys() | settings.keys()):
            if before.get(name) != settings.get(name):
                raise ValueError(
                    f"{out} was made with {name}={before.get(name)}, now it is {settings.get(name)}: "
                    "use the same value to go on, or a new output file"
                )
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    aside.replace(path)


def _refuse(report: RegenerateReport, reason: str, detail: str) -> None:
    report.refused[reason] += 1
    log.warning("refused %s", detail)
