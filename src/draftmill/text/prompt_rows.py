"""Conversations that end where the target is to answer: what is decoded, and what is regenerated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from draftmill.text.conversations import Conversation, read_conversations
from draftmill.text.refusals import Refused


def prompt_rows(path: str | Path) -> Iterator[Conversation | Refused]:
    """The rows of a file, each without a last assistant message: the target writes its own."""
    for row in read_conversations(path, need_reply=False):
        yield row if isinstance(row, Refused) else without_last_reply(row)


def without_last_reply(conversation: Conversation) -> Conversation:
    """All before the last message where that is the assistant's, all where it is not."""
    messages = conversation.messages
    if messages[-1].role == "assistant":
        messages = messages[:-1]
    return replace(conversation, messages=messages, response_ids=None, finish=None)
