"""Raw rows in, normalised conversations out.

`parse_row` is pure: a row that is not blank gives exactly one `Conversation`, `Tokenised` or `Refused`. Kinds of row:

    {"messages": [{"role": ..., "content": ...}]}       OpenAI style, with tools, tool calls, reasoning_content
    {"conversations": [{"from": ..., "value": ...}]}    ShareGPT style
    {"prompt": "text"}                                  one user message, to be answered
    {"input_ids": [...], "loss_mask": [...]}            tokenised already

Nothing is guessed: a role, a field or a content part outside the tables refuses the row by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

from draftmill.text.messages import CHATS, Message, check_fields, read_message, short
from draftmill.text.refusals import DropReason, Refused, RowError, RowProblem, Source
from draftmill.text.sources import MAX_LINE_BYTES, Raw, read_raw

# Fields that a chat template or a server may read. Ignoring one would render other text than the target saw.
UNSUPPORTED_ROW_FIELDS = ("functions", "documents", "function_call", "images", "audios", "videos")
FINISHES = ("stop", "length")
MASKS = ("loss_mask", "assistant_masks", "mask")  # names of a tokenised row's supervision


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: tuple[Message, ...]
    source: Source
    response_ids: tuple[int, ...] | None = None
    """The tokens that the target generated for the last assistant message, its end token included."""
    finish: Literal["stop", "length"] | None = None
    """How that generation ended; length means it was cut and has no end of turn."""
    tools: tuple[dict[str, Any], ...] = ()
    """Tool definitions, as the template takes them."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Of this row (`chat_template_kwargs`), over those of the run."""

    @property
    def reply_turns(self) -> list[int]:
        """Indices of the assistant messages that answer a user: a greeting before any user turn is context."""
        first_user = next((i for i, message in enumerate(self.messages) if message.role == "user"), len(self.messages))
        return [i for i, message in enumerate(self.messages) if i > first_user and message.role == "assistant"]

    @property
    def question(self) -> Conversation:
        """What the target is to answer: without a last assistant message, which it writes anew."""
        if self.messages[-1].role != "assistant":
            return self
        return replace(self, messages=self.messages[:-1], response_ids=None, finish=None)


@dataclass(frozen=True, slots=True)
class Tokenised:
    """A row that came as tokens."""

    token_ids: tuple[int, ...]
    supervised: tuple[bool, ...]  # of the same length
    source: Source


def read_conversations(
    path: str | Path, *, strict: bool = False, need_reply: bool = True, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[Conversation | Tokenised | Refused]:
    """Rows of one input. `strict` raises `RowError` at the first bad row; `need_reply=False` admits prompts alone."""
    for raw in read_raw(path, max_line_bytes):
        row = parse_row(raw, need_reply=need_reply, max_line_bytes=max_line_bytes)
        if row is None:
            continue
        if strict and isinstance(row, Refused):
            raise RowError(row)
        yield row


def parse_row(
    raw: Raw, *, need_reply: bool = True, max_line_bytes: int = MAX_LINE_BYTES
) -> Conversation | Tokenised | Refused | None:
    """None for a blank line."""
    try:
        if raw.damage is not None:
            raise RowProblem(DropReason.FILE_DAMAGED, raw.damage)
        if raw.payload is None:
            raise RowProblem(DropReason.LINE_TOO_LONG, f"over {max_line_bytes:,} bytes")
        if isinstance(raw.payload, dict):
            return _row(raw.payload, raw.source, need_reply)
        if not raw.payload.strip():
            return None
        return _row(_parse(raw.payload, raw.source), raw.source, need_reply)
    except RowProblem as problem:
        return problem.at(raw.source)


def _parse(line: bytes, source: Source) -> dict[str, Any]:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        at = f"byte {error.start} of the line, byte {source.offset + error.start} of the file"
        raise RowProblem(DropReason.UNDECODABLE, at) from None
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise RowProblem(DropReason.MALFORMED_JSON, f"{error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
        raise RowProblem(DropReason.MALFORMED_JSON, type(error).__name__) from None
    if not isinstance(value, dict):
        raise RowProblem(DropReason.NOT_AN_OBJECT, f"it is a {type(value).__name__}")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise RowProblem(DropReason.DUPLICATE_KEY, short(twice))
    return result


def _no_constant(literal: str) -> NoReturn:
    raise RowProblem(DropReason.NAN_LITERAL, literal)


def _row(record: dict[str, Any], source: Source, need_reply: bool) -> Conversation | Tokenised:
    check_fields(record, UNSUPPORTED_ROW_FIELDS)
    if record.get("input_ids") is not None:
        return _tokenised(record, source)
    messages = _messages(record)
    if not any(message.role == "user" for message in messages):
        raise RowProblem(DropReason.NO_USER_TURN)
    finish = record.get("finish")
    if finish is not None and finish not in FINISHES:
        raise RowProblem(DropReason.UNKNOWN_FINISH, short(finish))
    conversation = Conversation(
        messages,
        source,
        _response_ids(record.get("response_ids")),
        finish,
        _tools(record.get("tools")),
        _template_options(record.get("chat_template_kwargs")),
    )
    if need_reply and not conversation.reply_turns:
        raise RowProblem(DropReason.NO_ASSISTANT_TURN)
    if conversation.response_ids is not None and not conversation.reply_turns:
        raise RowProblem(DropReason.BAD_RESPONSE_IDS, "the row has no assistant message")
    return conversation


def _messages(record: dict[str, Any]) -> tuple[Message, ...]:
    for key, chat in CHATS.items():
        listed = record.get(key)
        if listed is None:
            continue
        if not isinstance(listed, list) or not listed:
            raise RowProblem(DropReason.NO_MESSAGES, f"{key} is {short(listed)}")
        return tuple(read_message(entry, i, chat) for i, entry in enumerate(listed))
    prompt = record.get("prompt")
    if isinstance(prompt, str) and prompt.strip():
        return (read_message({"role": "user", "content": prompt}, 0, CHATS["messages"]),)
    if isinstance(prompt, list) and prompt:
        return tuple(read_message(entry, i, CHATS["messages"]) for i, entry in enumerate(prompt))
    raise RowProblem(DropReason.NO_MESSAGES, f"the row's keys: {', '.join(short(key) for key in list(record)[:5])}")


def _tokenised(record: dict[str, Any], source: Source) -> Tokenised:
    ids = _response_ids(record["input_ids"], DropReason.BAD_TOKENS)
    named = [name for name in MASKS if record.get(name) is not None]
    if len(named) != 1:
        raise RowProblem(DropReason.BAD_TOKENS, f"{len(named)} of {', '.join(MASKS)} are given, one is needed")
    mask = record[named[0]]
    if not isinstance(mask, list) or len(mask) != len(ids or ()):
        raise RowProblem(DropReason.BAD_TOKENS, f"{len(ids or ())} input_ids, {named[0]} does not have as many")
    if any(type(value) not in (int, bool) or value not in (0, 1) for value in mask):
        raise RowProblem(DropReason.BAD_TOKENS, f"{named[0]} holds other values than 0 and 1")
    return Tokenised(ids or (), tuple(map(bool, mask)), source)


def _response_ids(value: Any, reason: DropReason = DropReason.BAD_RESPONSE_IDS) -> tuple[int, ...] | None:
    if value is None:
        return None
    valid = isinstance(value, list) and value and all(type(item) is int and 0 <= item < 2**31 for item in value)
    if not valid:
        raise RowProblem(reason)
    return tuple(value)


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
    """A list, or the text of one, as columnar files often have it."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise RowProblem(DropReason.BAD_TOOLS, "a text that is not JSON") from None
    if not value:
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowProblem(DropReason.BAD_TOOLS, short(value))
    return tuple(value)


def _template_options(value: Any) -> dict[str, Any]:
    if not value:
        return {}
    if not isinstance(value, dict):
        raise RowProblem(DropReason.BAD_TEMPLATE_OPTION, short(value))
    return {name: option for name, option in value.items() if option is not None}
