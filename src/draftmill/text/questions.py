"""Conversations that end where the target is to answer: what is decoded in evaluation, and what is regenerated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from draftmill.text.conversations import Conversation, Tokenised, read_conversations
from draftmill.text.refusals import DropReason, Refused


def read_questions(path: str | Path) -> Iterator[Conversation | Refused]:
    """The rows of one input, each without a last assistant message: the target writes its own."""
    for row in read_conversations(path, need_reply=False):
        if isinstance(row, Tokenised):
            yield Refused(DropReason.NO_MESSAGES, row.source, "tokens have no prompt to answer")
        else:
            yield row if isinstance(row, Refused) else row.question
