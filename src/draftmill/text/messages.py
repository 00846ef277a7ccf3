"""One message of a conversation: from its JSON object to what a chat template is given.

Roles come from the two tables below, by exact spelling. Text is a string or a list of text parts; tool calls carry
their arguments as an object, whichever way the row wrote them, so that both ways give the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from draftmill.text.json_rows import parse_json, short
from draftmill.text.refusals import DropReason, RowProblem

Role = Literal["system", "developer", "user", "assistant", "tool"]

# The role as written -> the role that the template sees: `role` of OpenAI messages, `from` of ShareGPT messages.
ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
SHAREGPT_ROLES: dict[str, Role] = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
}
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
# A chat template may read these. Ignoring one would render other text than the target saw.
_UNREAD_FIELDS = ("function_call", "audio", "prefix", "partial")


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    content: str
    reasoning: str = ""
    """What the target thought before `content`, where the row keeps it apart."""
    tool_calls: tuple[dict[str, Any], ...] = ()
    """As OpenAI writes them, but with `arguments` an object."""
    tool_call_id: str | None = None
    name: str | None = None
    """Of the tool that replies."""

    def fields(self, reasoning_field: str = "reasoning_content") -> dict[str, Any]:
        """The message as an object again; fields that say nothing are left out, as templates ask for presence."""
        result: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning:
            result[reasoning_field] = self.reasoning
        if self.tool_calls:
            result["tool_calls"] = list(self.tool_calls)
        if self.tool_call_id is not None:
            result["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            result["name"] = self.name
        return result


def read_message(entry: Any, index: int) -> Message:
    """An OpenAI message; raises `RowProblem`."""
    if not isinstance(entry, dict) or "role" not in entry:
        raise RowProblem(DropReason.BAD_MESSAGE, f"message {index}")
    return _message(entry, _role(entry["role"], ROLES, index), entry.get("content"), index)


def read_sharegpt_message(entry: Any, index: int) -> Message:
    """A message with `from` and `value`; some sets list `role` and `content` under the same name."""
    if isinstance(entry, dict) and "from" in entry and "role" not in entry:
        return _message(entry, _role(entry["from"], SHAREGPT_ROLES, index), entry.get("value"), index)
    return read_message(entry, index)


def _role(written: Any, table: Mapping[str, Role], index: int) -> Role:
    role = table.get(written) if isinstance(written, str) else None
    if role is None:
        raise RowProblem(DropReason.UNKNOWN_ROLE, f"message {index}: {short(written)}")
    return role


def _message(entry: dict[str, Any], role: Role, content: Any, index: int) -> Message:
    refuse_fields(entry, _UNREAD_FIELDS)
    if entry.get("weight") not in (None, 1):
        raise RowProblem(DropReason.UNSUPPORTED_FIELD, f"message {index}: weight {short(entry['weight'])}")
    name = _optional_text(entry, "name", index)
    if role != "assistant":
        refuse_fields(entry, ("tool_calls", *REASONING_FIELDS))
        if role == "tool":
            return Message(
                role, text_of(content, index), tool_call_id=_optional_text(entry, "tool_call_id", index), name=name
            )
        refuse_fields(entry, ("name", "tool_call_id"))
        return Message(role, text_of(content, index))
    refuse_fields(entry, ("name", "tool_call_id"))
    calls = _tool_calls(entry.get("tool_calls"), index)
    text = "" if content is None else text_of(content, index)
    if not text.strip() and not calls:
        raise RowProblem(DropReason.EMPTY_ASSISTANT, f"message {index}")
    return Message(role, text, _reasoning(entry, index), calls)


def refuse_fields(record: dict[str, Any], fields: tuple[str, ...]) -> None:
    for field in fields:
        if record.get(field):  # null and empty lists say nothing
            raise RowProblem(DropReason.UNSUPPORTED_FIELD, field)


def _optional_text(entry: dict[str, Any], field: str, index: int) -> str | None:
    value = entry.get(field)
    if value is None or isinstance(value, str):
        return value
    raise RowProblem(DropReason.BAD_MESSAGE, f"message {index}: {field} is {short(value)}")


def _reasoning(entry: dict[str, Any], index: int) -> str:
    given = {field: text_of(entry[field], index) for field in REASONING_FIELDS if entry.get(field)}
    if len(set(given.values())) > 1:  # servers write the same text under two names; different text is a question
        raise RowProblem(DropReason.AMBIGUOUS_ROW, f"message {index}: {' and '.join(given)} differ")
    return next((text for text in given.values() if text.strip()), "")


def _tool_calls(value: Any, index: int) -> tuple[dict[str, Any], ...]:
    if not value:
        return ()
    if not isinstance(value, list):
        raise RowProblem(DropReason.BAD_TOOL_CALL, f"message {index}: tool_calls is a {type(value).__name__}")
    return tuple(_tool_call(call, index) for call in value)


def _tool_call(call: Any, index: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise RowProblem(DropReason.BAD_TOOL_CALL, f"message {index}: not a call of a function")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RowProblem(DropReason.BAD_TOOL_CALL, f"message {index}: no function name")
    result = {"type": "function", "function": {"name": name, "arguments": _arguments(function.get("arguments"), index)}}
    return {"id": call["id"], **result} if isinstance(call.get("id"), str) else result


def _arguments(value: Any, index: int) -> dict[str, Any]:
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except RowProblem as problem:
            raise RowProblem(DropReason.BAD_TOOL_CALL, f"message {index}: arguments: {problem.detail}") from None
    if not isinstance(value, dict):
        raise RowProblem(DropReason.BAD_TOOL_CALL, f"message {index}: arguments are a {type(value).__name__}")
    return cast(dict[str, Any], value)


def text_of(content: Any, index: int) -> str:
    if isinstance(content, list):
        content = "".join(_part(part, index) for part in content)
    if not isinstance(content, str):
        raise RowProblem(DropReason.BAD_CONTENT, f"message {index}: {type(content).__name__}")
    return content


def _part(part: Any, index: int) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise RowProblem(DropReason.BAD_CONTENT, f"message {index}: a part is not an object with a type")
    if part["type"] != "text":
        raise RowProblem(DropReason.MEDIA_CONTENT, f"message {index}: {short(part['type'])}")
    if not isinstance(part.get("text"), str):
        raise RowProblem(DropReason.BAD_CONTENT, f"message {index}: a text part without text")
    return str(part["text"])
