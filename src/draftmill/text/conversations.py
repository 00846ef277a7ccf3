"""Raw rows in, normalised conversations out.

Each row that is not a blank line gives exactly one `Conversation` or one `Refused`, in file order. Nothing is
guessed: a role, a field or a content part outside the tables refuses the row by name. A row is one of

    messages       OpenAI messages, with `tools` and `chat_template_kwargs` where the row has them
    conversations  ShareGPT messages, with `system` beside them
    input_ids      tokens, with a mask of those that the target generated
    prompt         one user text, or messages that end before the reply

and the first of these that it holds decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from draftmill.text.json_rows import parse_json, parse_line, short
from draftmill.text.messages import Message, read_message, read_sharegpt_message, refuse_fields
from draftmill.text.refusals import DropReason, Refused, RowError, RowProblem, Source
from draftmill.text.sources import MAX_LINE_BYTES, Raw, read_raw

FINISHES = ("stop", "length")
# Where the mask of a tokenised row may stand; transformers calls it assistant_masks.
MASK_FIELDS = ("loss_mask", "assistant_masks", "mask")
# A chat template may read these. Ignoring one would render other text than the target saw.
_UNREAD_FIELDS = ("functions", "documents")


@dataclass(frozen=True, slots=True)
class Tokens:
    """A row that comes tokenised."""

    ids: tuple[int, ...]
    mask: tuple[int, ...]  # of each token: 1 where the target generated it, else 0


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: tuple[Message, ...]
    source: Source
    response_ids: tuple[int, ...] | None = None
    """The tokens that the target generated for the last assistant message, its end token included."""
    finish: Literal["stop", "length"] | None = None
    """How that generation ended; length means it was cut and has no end of turn."""
    tools: tuple[dict[str, Any], ...] = ()
    """What the target was offered, as the template takes it."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """The row's own, which go before those of the run."""
    tokens: Tokens | None = None
    """Set where the row came tokenised; it has no messages then."""

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


def read_conversations(
    path: str | Path, *, strict: bool = False, need_reply: bool = True, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[Conversation | Refused]:
    """Rows of one source. `strict` raises `RowError` at the first bad row; `need_reply=False` admits prompts alone."""
    for raw in read_raw(path, max_line_bytes):
        row = parse_row(raw, need_reply=need_reply)
        if row is None:
            continue
        if strict and isinstance(row, Refused):
            raise RowError(row)
        yield row


def parse_row(raw: Raw, *, need_reply: bool = True) -> Conversation | Refused | None:
    """Pure, for any process. None is a blank line, which is not a row; tokenised rows need `need_reply`."""
    if raw.payload is None:
        return raw.refused
    try:
        if isinstance(raw.payload, dict):
            return _conversation(_without_nulls(raw.payload), raw.source, need_reply)
        if not raw.payload.strip():
            return None
        return _conversation(parse_line(raw.payload), raw.source, need_reply)
    except RowProblem as problem:
        return problem.at(raw.source)


def _without_nulls(value: Any) -> Any:
    """A table fills the fields that a row does not have with nulls, down to the arguments of its tool calls."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _conversation(record: dict[str, Any], source: Source, need_reply: bool) -> Conversation:
    refuse_fields(record, _UNREAD_FIELDS)
    if record.get("messages") and record.get("conversations"):
        raise RowProblem(DropReason.AMBIGUOUS_ROW, "it has both messages and conversations")
    if not (record.get("messages") or record.get("conversations")) and record.get("input_ids") is not None:
        return Conversation((), source, tokens=_tokens(record, need_reply))
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
    replies = conversation.reply_turns
    if need_reply and not replies:
        raise RowProblem(DropReason.NO_ASSISTANT_TURN)
    if conversation.response_ids is not None and not replies:
        raise RowProblem(DropReason.BAD_RESPONSE_IDS, "the row has no assistant message")
    if finish == "length" and replies and messages[replies[-1]].tool_calls and not conversation.response_ids:
        raise RowProblem(DropReason.BAD_TOOL_CALL, "a reply cut at its length limit has no whole tool call")
    return conversation


def _messages(record: dict[str, Any]) -> tuple[Message, ...]:
    """Of the first field that holds some."""
    if listed := record.get("messages"):
        return _list(listed, "messages", read_message)
    if listed := record.get("conversations"):
        messages = _list(listed, "conversations", read_sharegpt_message)
        system = record.get("system")
        if not system:
            return messages
        if not isinstance(system, str) or messages[0].role == "system":
            raise RowProblem(DropReason.AMBIGUOUS_ROW, "`system` beside a system message, or not a text")
        return (Message("system", system), *messages)
    prompt = record.get("prompt")
    if isinstance(prompt, str) and prompt.strip():
        return (Message("user", prompt),)
    if isinstance(prompt, list) and prompt:
        return _list(prompt, "prompt", read_message)
    raise RowProblem(DropReason.NO_MESSAGES, f"the row's keys: {', '.join(short(key) for key in list(record)[:5])}")


def _list(listed: Any, name: str, read: Any) -> tuple[Message, ...]:
    listed = _from_text(listed, DropReason.BAD_MESSAGE)
    if not isinstance(listed, list) or not listed:
        raise RowProblem(DropReason.NO_MESSAGES, f"{name} is {short(listed)}")
    return tuple(read(_from_text(entry, DropReason.BAD_MESSAGE), i) for i, entry in enumerate(listed))


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
    value = _from_text(value, DropReason.BAD_TOOLS)
    if not value:
        return ()
    if not isinstance(value, list):
        raise RowProblem(DropReason.BAD_TOOLS, short(value))
    tools = tuple(_from_text(tool, DropReason.BAD_TOOLS) for tool in value)
    if not all(isinstance(tool, dict) for tool in tools):
        raise RowProblem(DropReason.BAD_TOOLS, short(value))
    return tools


def _from_text(value: Any, reason: DropReason) -> Any:
    """Tables often keep as JSON text what has no fixed columns."""
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        return parse_json(value)
    except RowProblem as problem:
        raise RowProblem(reason, problem.detail) from None


def _template_options(value: Any) -> dict[str, Any]:
    value = _from_text(value, DropReason.BAD_TEMPLATE_OPTIONS)
    if not value:
        return {}
    if not isinstance(value, dict):
        raise RowProblem(DropReason.BAD_TEMPLATE_OPTIONS, short(value))
    return value


def _tokens(record: dict[str, Any], need_reply: bool) -> Tokens:
    if not need_reply:
        raise RowProblem(DropReason.NO_MESSAGES, "a tokenised row has no prompt to answer")
    given = [name for name in MASK_FIELDS if record.get(name) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise RowProblem(DropReason.BAD_TOKENS, f"the mask is one of {', '.join(MASK_FIELDS)}; found {found}")
    ids, mask = record["input_ids"], record[given[0]]
    for name, values in (("input_ids", ids), (given[0], mask)):
        if not isinstance(values, list):
            raise RowProblem(DropReason.BAD_TOKENS, f"{name} is a {type(values).__name__}")
    if len(ids) != len(mask):
        raise RowProblem(DropReason.BAD_TOKENS, f"{len(ids)} input_ids, {len(mask)} in {given[0]}")
    for i, item in enumerate(ids):
        if not _is_token_id(item):
            raise RowProblem(DropReason.BAD_TOKENS, f"input_ids[{i}] is {short(item)}")
    for i, item in enumerate(mask):
        if item not in (0, 1) or isinstance(item, float):
            raise RowProblem(DropReason.BAD_TOKENS, f"{given[0]}[{i}] is {short(item)}")
    return Tokens(tuple(ids), tuple(int(item) for item in mask))


def _response_ids(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not (isinstance(value, list) and value and all(_is_token_id(item) for item in value)):
        raise RowProblem(DropReason.BAD_RESPONSE_IDS)
    return tuple(value)


def _is_token_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31
