"""One message of a conversation, from either style of writing it, as the chat template will see it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from draftmill.text.refusals import DropReason, RowProblem

# The role as written -> the role that the template sees. Exact spelling: "Assistant" is not a role.
ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")}
SHAREGPT_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "tool": "tool",
}  # fmt: skip
# Fields that would change the rendering, or that say what text cannot.
UNSUPPORTED_FIELDS = ("function_call", "reasoning", "thinking", "audio", "refusal")


@dataclass(frozen=True, slots=True)
class Chat:
    """How one style names things."""

    role: str
    content: str
    roles: Mapping[str, str]


CHATS = {"messages": Chat("role", "content", ROLES), "conversations": Chat("from", "value", SHAREGPT_ROLES)}


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What else the template may read: reasoning_content, tool_calls, tool_call_id, name."""

    @property
    def plain(self) -> dict[str, Any]:
        """As the template sees it."""
        return {"role": self.role, "content": self.content, **self.extra}


def read_message(entry: Any, index: int, chat: Chat) -> Message:
    """Raises RowProblem."""
    if not isinstance(entry, dict) or chat.role not in entry:
        raise RowProblem(DropReason.BAD_MESSAGE, f"message {index}")
    written = entry[chat.role]
    role = chat.roles.get(written) if isinstance(written, str) else None
    if role is None:
        raise RowProblem(DropReason.UNKNOWN_ROLE, f"message {index}: {short(written)}")
    check_fields(entry, UNSUPPORTED_FIELDS)
    extra = _extra(entry, role, index)
    content = entry.get(chat.content)
    if content is None and role == "assistant":
        content = ""
    text = _text(content, index)
    if role == "assistant" and not text.strip() and "tool_calls" not in extra:
        raise RowProblem(DropReason.EMPTY_ASSISTANT, f"message {index}")
    return Message(role, text, extra)


def check_fields(record: dict[str, Any], fields: tuple[str, ...]) -> None:
    for name in fields:
        if record.get(name):  # null and empty lists say nothing
            raise RowProblem(DropReason.UNSUPPORTED_FIELD, name)


def _extra(entry: dict[str, Any], role: str, index: int) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    for name in ("name", "tool_call_id"):
        if entry.get(name) is not None:
            extra[name] = _text(entry[name], index)
    for name, owner in (("reasoning_content", "assistant"), ("tool_calls", "assistant")):
        if entry.get(name) and role != owner:
            raise RowProblem(DropReason.UNSUPPORTED_FIELD, f"message {index}: {name} in a {role} message")
    if entry.get("reasoning_content"):
        extra["reasoning_content"] = _text(entry["reasoning_content"], index)
    if entry.get("tool_calls"):
        calls = entry["tool_calls"]
        if not isinstance(calls, list):
            raise RowProblem(DropReason.BAD_TOOL_CALL, f"message {index}: {short(calls)}")
        extra["tool_calls"] = [_tool_call(call, index) for call in calls]
    return extra


def _tool_call(call: Any, index: int) -> dict[str, Any]:
    """{"type": "function", "function": {"name", "arguments" as an object}}, however the arguments were written."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RowProblem(DropReason.BAD_TOOL_CALL, f"message {index}: no function name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise RowProblem(DropReason.BAD_TOOL_CALL, f"message {index}: arguments are not JSON") from None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise RowProblem(DropReason.BAD_TOOL_CALL, f"message {index}: arguments are {short(arguments)}")
    made = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {**made, "id": call["id"]} if isinstance(call.get("id"), str) else made


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
        raise RowProblem(DropReason.MEDIA_CONTENT, f"message {index}: {short(part['type'])}")
    if not isinstance(part.get("text"), str):
        raise RowProblem(DropReason.BAD_CONTENT, f"message {index}: a text part without text")
    return str(part["text"])


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
