"""Conversations that end where the target is to answer: what is decoded in evaluation, and what is regenerated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from draftmill.text.conversations import Conversation, read_conversations
from draftmill.text.refusals import Refused


def read_questions(path: str | Path) -> Iterator[Conversation | Refused]:
    """The rows of one input, each without a last assistant message: the target writes its own."""
    for row in read_conversations(path, need_reply=False):
        yield row if isinstance(row, Refused) else row.question
