"""Where a rendered reply starts and ends, in characters of the rendered text.

The end is found by rendering a second reply in the same place, of the same shape but with other last words: what the
two texts share at their end is the template's, whatever people or models typed. The start is the end of the prompt,
but for an empty think block that the template itself inserts there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from draftmill.text.messages import Message
from draftmill.text.refusals import DropReason, RowProblem

_EMPTY_THINK = re.compile(r"\s*<think>\s*</think>\s*")
_THINK_OPENED = re.compile(r"<think>\s*\Z")
_THINK_CLOSED = re.compile(r"\s*</think>\s*")


def start_of_reply(text: str, prompt_end: int, reply: Message) -> int:
    """First supervised character. A header at the prompt's end (a channel name, a leading space) is generated."""
    core = reply.content.strip()
    if reply.reasoning or (core and text.startswith((reply.content, core), prompt_end)):
        return prompt_end
    block = _EMPTY_THINK.match(text, prompt_end)
    if block is None and _THINK_OPENED.search(text, max(0, prompt_end - 64), prompt_end):
        if core.startswith("<think>") or "</think>" in core:
            return prompt_end  # the reply goes on thinking
        block = _THINK_CLOSED.match(text, prompt_end)
    return block.end() if block else prompt_end


def end_of_reply(text: str, begin: int, reply: Message, render: Callable[[Message], str]) -> int:
    """End of the reply's own text; `render` gives the whole text with another message in the reply's place."""
    if not reply.tool_calls and not reply.reasoning:
        for written in (reply.content, reply.content.strip()):
            if text.startswith(written, begin):
                return begin + len(written)
    other = render(_other_words(reply))
    shared = 0
    limit = min(len(text) - begin, len(other))
    while shared < limit and text[-1 - shared] == other[-1 - shared]:
        shared += 1
    return len(text) - shared


def _other_words(reply: Message) -> Message:
    """A reply that the template ends in the same way, and whose last own character differs."""
    if not reply.tool_calls:
        return replace(reply, content="y" if reply.content.rstrip().endswith("x") else "x")
    *calls, last = reply.tool_calls
    arguments = {} if last["function"]["arguments"] else {"x": "x"}
    return replace(reply, tool_calls=(*calls, {**last, "function": {**last["function"], "arguments": arguments}}))


def check_reply(text: str, reply: Message, index: int) -> None:
    """Raises `RowProblem` unless `text`, what was or would be generated, holds all that the message says, in order."""
    at = 0
    for name, piece in _pieces(reply):
        found = text.find(piece, at)
        if found < 0:
            raise RowProblem(DropReason.CONTENT_ALTERED, f"message {index}: {name}")
        at = found + (0 if name == "an argument" else len(piece))  # templates may order arguments


def _pieces(reply: Message) -> Iterator[tuple[str, str]]:
    yield "the reasoning", reply.reasoning.strip()
    yield "the content", reply.content.strip()
    for call in reply.tool_calls:
        function = call["function"]
        yield "a tool call's name", function["name"]
        for key in function["arguments"]:
            yield "an argument", json.dumps(key, ensure_ascii=False)[1:-1]
