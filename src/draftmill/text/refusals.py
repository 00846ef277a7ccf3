"""Why an input row is dropped: the one list of reasons, each with a line of explanation.

Every input row ends as kept or as exactly one `Refused`. Blank lines are not rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class DropReason(StrEnum):
    LINE_TOO_LONG = "line_too_long"
    CUT_SHORT = "cut_short"
    UNDECODABLE = "undecodable"
    MALFORMED_JSON = "malformed_json"
    NAN_LITERAL = "nan_literal"
    DUPLICATE_KEY = "duplicate_key"
    NOT_AN_OBJECT = "not_an_object"
    NO_MESSAGES = "no_messages"
    AMBIGUOUS_ROW = "ambiguous_row"
    BAD_MESSAGE = "bad_message"
    UNKNOWN_ROLE = "unknown_role"
    UNSUPPORTED_FIELD = "unsupported_field"
    MEDIA_CONTENT = "media_content"
    BAD_CONTENT = "bad_content"
    BAD_TOOL_CALL = "bad_tool_call"
    BAD_TOOLS = "bad_tools"
    BAD_TEMPLATE_OPTIONS = "bad_template_options"
    BAD_TOKENS = "bad_tokens"
    EMPTY_ASSISTANT = "empty_assistant"
    NO_USER_TURN = "no_user_turn"
    NO_ASSISTANT_TURN = "no_assistant_turn"
    BAD_RESPONSE_IDS = "bad_response_ids"
    UNKNOWN_FINISH = "unknown_finish"
    TEMPLATE_IGNORES = "template_ignores"
    TEMPLATE_REFUSED = "template_refused"
    PROMPT_NOT_EXTENDED = "prompt_not_extended"
    BORDER_INSIDE_TOKEN = "border_inside_token"
    CONTENT_ALTERED = "content_altered"
    NO_END_OF_TURN = "no_end_of_turn"
    RESPONSE_IDS_DIFFER = "response_ids_differ"
    NO_ANCHOR = "no_anchor"
    TRUNCATED_AWAY = "truncated_away"

    @property
    def explanation(self) -> str:
        return _EXPLANATIONS[self]


_EXPLANATIONS = {
    DropReason.LINE_TOO_LONG: "the line is longer than the limit and was skipped unread",
    DropReason.CUT_SHORT: "the compressed file ends or breaks here: this row and all after it are lost",
    DropReason.UNDECODABLE: "the bytes are not UTF-8, or the text holds a lone surrogate",
    DropReason.MALFORMED_JSON: "the line is not one JSON value",
    DropReason.NAN_LITERAL: "the line holds NaN or Infinity, which JSON does not have",
    DropReason.DUPLICATE_KEY: "an object names the same key twice, so its meaning is open",
    DropReason.NOT_AN_OBJECT: "the line is JSON, but not an object",
    DropReason.NO_MESSAGES: "no `messages`, `conversations`, `prompt` or `input_ids` with something in it",
    DropReason.AMBIGUOUS_ROW: "the row says the same thing in two places",
    DropReason.BAD_MESSAGE: "a message is not an object with a role",
    DropReason.UNKNOWN_ROLE: "a role is not in the table of docs/data.md; roles are never guessed",
    DropReason.UNSUPPORTED_FIELD: "the row uses a field that would change the rendering and is not read",
    DropReason.MEDIA_CONTENT: "a message holds an image, audio or another part that is not text",
    DropReason.BAD_CONTENT: "content is neither a string nor a list of text parts",
    DropReason.BAD_TOOL_CALL: "a tool call has no function name, or its arguments are not a JSON object",
    DropReason.BAD_TOOLS: "`tools` is not a list of objects",
    DropReason.BAD_TEMPLATE_OPTIONS: "`chat_template_kwargs` is not an object of options that may be set",
    DropReason.BAD_TOKENS: "`input_ids` and their mask are not ids of the vocabulary with one 0 or 1 each",
    DropReason.EMPTY_ASSISTANT: "an assistant message has no text and no tool call",
    DropReason.NO_USER_TURN: "no user message",
    DropReason.NO_ASSISTANT_TURN: "no assistant message after a user message, so nothing to learn from",
    DropReason.BAD_RESPONSE_IDS: "`response_ids` is not a list of token ids of the last assistant message",
    DropReason.UNKNOWN_FINISH: "`finish` is neither stop nor length",
    DropReason.TEMPLATE_IGNORES: "the chat template does not read something that the row gives it",
    DropReason.TEMPLATE_REFUSED: "the chat template raised an error on this conversation",
    DropReason.PROMPT_NOT_EXTENDED: "the rendered reply does not continue the rendered prompt",
    DropReason.BORDER_INSIDE_TOKEN: "a token spans the border between the prompt and the reply",
    DropReason.CONTENT_ALTERED: "the template does not reproduce the assistant's text",
    DropReason.NO_END_OF_TURN: "no stop token ends the reply",
    DropReason.RESPONSE_IDS_DIFFER: "`response_ids` do not decode to the assistant's text",
    DropReason.NO_ANCHOR: "fewer than two supervised tokens in a row, so no anchor fits",
    DropReason.TRUNCATED_AWAY: "no anchor is left within the first max_length tokens",
}


@dataclass(frozen=True, slots=True)
class Source:
    """Where a row came from."""

    file: str
    line: int  # 1-based, blank lines counted; of a table, the row
    offset: int  # bytes of the file before it; of a compressed file or a table, about how many

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Refused:
    """An input row that ends here, with its one reason."""

    reason: DropReason
    source: Source
    detail: str = ""

    def __str__(self) -> str:
        text = f"{self.source}: {self.reason}: {self.reason.explanation}"
        return f"{text} ({self.detail})" if self.detail else text


class RowError(ValueError):
    """Strict mode: the first refused row, by file and line."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(f"{refused}. Repair the row, or leave strict mode to skip and count such rows")
        self.refused = refused


class RowProblem(Exception):
    """Raised deep inside a stage; the stage turns it into a `Refused` with the row's source."""

    def __init__(self, reason: DropReason, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def at(self, source: Source) -> Refused:
        return Refused(self.reason, source, self.detail)
