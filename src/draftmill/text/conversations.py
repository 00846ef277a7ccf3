"""Raw rows in, normalised conversations out.

Each row that is not a blank line gives exactly one `Conversation` or one `Refused`, in file order. Nothing
is guessed: a role, a field or a content part outside the tables below refuses the row by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from draftmill.text.refusals import DropReason, Refused, RowError, RowProblem, Source
from draftmill.text.sources import MAX_LINE_BYTES, Raw, read_raw

# The role as written -> the role that the template sees. Exact spelling: "Assistant" is not a role.
ROLES: dict[str, Literal["system", "user", "assistant"]] = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
}
# Fields a chat template may read. Ignoring one would render other text than the target saw.
UNSUPPORTED_ROW_FIELDS = ("tools", "functions", "documents", "chat_template_kwargs")
UNSUPPORTED_MESSAGE_FIELDS = (
    "tool_calls",
    "tool_call_id",
    "function_call",
    "reasoning_content",
    "reasoning",
    "thinking",
    "name",
    "audio",
)
FINISHES = ("stop", "length")


@dataclass(frozen=True, slots=True)
class Message:
    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: tuple[Message, ...]
    source: Source
    response_ids: tuple[int, ...] | None = None
    """The tokens that the target generated for the last assistant message, its end token included."""
    finish: Literal["stop", "length"] | None = None
    """How that generation ended; length means it was cut and has no end of turn."""

    @property
    def reply_turns(self) -> list[int]:
        """Indices of the assistant messages that answer a user: a greeting before any user turn is context."""
        first_user = next((i for i, message in enumerate(self.messages) if message.role == "user"), len(self.messages))
        return [i for i, message in enumerate(self.messages) if i > first_user and message.role == "assistant"]


def read_conversations(
    path: str | Path, *, strict: bool = False, need_reply: bool = True, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[Conversation | Refused]:
    """Rows of one file. `strict` raises `RowError` at the first bad row; `need_reply=False` admits prompts alone."""
    for raw in read_raw(path, max_line_bytes):
        row = parse_row(raw, need_reply=need_reply)
        if row is None:
            continue
        if strict and isinstance(row, Refused):
            raise RowError(row)
        yield row


def parse_row(raw: Raw, *, need_reply: bool = True) -> Conversation | Refused | None:
    """Pure, for any process. None is a blank line, which is not a row."""
    if raw.payload is None:
        return raw.refused
    try:
        if isinstance(raw.payload, dict):
            return _conversation(raw.payload, raw.source, need_reply)
        if not raw.payload.strip():
            return None
        return _conversation(_parse(raw.payload), raw.source, need_reply)
    except RowProblem as problem:
        return problem.at(raw.source)


def _parse(line: bytes) -> dict[str, Any]:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowProblem(DropReason.UNDECODABLE, f"byte {error.start} of the line") from None
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
        raise RowProblem(DropReason.DUPLICATE_KEY, _short(twice))
    return result


def _no_constant(literal: str) -> NoReturn:
    raise RowProblem(DropReason.NAN_LITERAL, literal)


def _conversation(record: dict[str, Any], source: Source, need_reply: bool) -> Conversation:
    _refuse_fields(record, UNSUPPORTED_ROW_FIELDS)
    listed = record.get("messages")
    if not isinstance(listed, list) or not listed:
        keys = ", ".join(_short(key) for key in list(record)[:5])
        raise RowProblem(DropReason.NO_MESSAGES, f"the row's keys: {keys}" if "messages" not in record else "")
    messages = tuple(_message(entry, i) for i, entry in enumerate(listed))
    if not any(message.role == "user" for message in messages):
        raise RowProblem(DropReason.NO_USER_TURN)
    finish = record.get("finish")
    if finish is not None and finish not in FINISHES:
        raise RowProblem(DropReason.UNKNOWN_FINISH, _short(finish))
    conversation = Conversation(messages, source, _response_ids(record.get("response_ids")), finish)
    if need_reply and not conversation.reply_turns:
        raise RowProblem(DropReason.NO_ASSISTANT_TURN)
    if conversation.response_ids is not None and not conversation.reply_turns:
        raise RowProblem(DropReason.BAD_RESPONSE_IDS, "the row has no assistant message")
    return conversation


def _message(entry: Any, index: int) -> Message:
    if not isinstance(entry, dict) or "role" not in entry:
        raise RowProblem(DropReason.BAD_MESSAGE, f"message {index}")
    role = ROLES.get(entry["role"]) if isinstance(entry["role"], str) else None
    if role is None:
        raise RowProblem(DropReason.UNKNOWN_ROLE, f"message {index}: {_short(entry['role'])}")
    _refuse_fields(entry, UNSUPPORTED_MESSAGE_FIELDS)
    content = entry.get("content")
    if content is None and role == "assistant":
        raise RowProblem(DropReason.EMPTY_ASSISTANT, f"message {index}")
    text = _text(content, index)
    if role == "assistant" and not text.strip():
        raise RowProblem(DropReason.EMPTY_ASSISTANT, f"message {index}")
    return Message(role, text)


def _refuse_fields(record: dict[str, Any], fields: tuple[str, ...]) -> None:
    for field in fields:
        if record.get(field):  # null and empty lists say nothing
            raise RowProblem(DropReason.UNSUPPORTED_FIELD, field)


def _text(content: Any, index: int) -> str:
    if isinstance(content, list):
        content = "".join(_part(part, index) for part in content)
    if not isinstance(content, str):
        raise RowProblem(DropReason.BAD_CONTENT, f"message {index}: {type(content).__name__}")
    if not content.isascii():
        try:
            content.encode("utf-8")
        except UnicodeEncodeError:
            raise RowProblem(DropReason.UNDECODABLE, f"message {index} holds a lone surrogate") from None
    return content


def _part(part: Any, index: int) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise RowProblem(DropReason.BAD_CONTENT, f"message {index}: a part is not an object with a type")
    if part["type"] != "text":
        raise RowProblem(DropReason.MEDIA_CONTENT, f"message {index}: {_short(part['type'])}")
    if not isinstance(part.get("text"), str):
        raise RowProblem(DropReason.BAD_CONTENT, f"message {index}: a text part without text")
    return str(part["text"])


def _response_ids(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    valid = isinstance(value, list) and value and all(type(item) is int and 0 <= item < 2**31 for item in value)
    if not valid:
        raise RowProblem(DropReason.BAD_RESPONSE_IDS)
    return tuple(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
