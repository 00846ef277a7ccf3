"""Which token stands in the slots to predict.

An explicit id, else the tokenizer's own mask token, else a row that the tokenizer names as reserved and
that never occurs in the data; never pad, end-of-text or a stop token. Where none of these exists the
choice is the user's: an error names the setting and lists candidates, nothing is taken silently.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

# <|reserved_special_token_0|>, <|reserved_12|>, <unused7>, <unused_7>, [unused1], <|unused_3|>
_RESERVED = re.compile(r"(<\|?|\[)(reserved|unused)[a-z_]*\d+(\|?>|\])", re.IGNORECASE)
_SHOWN = 8


class ChosenBy(StrEnum):
    EXPLICIT = "explicit"
    TOKENIZER = "tokenizer"
    RESERVED = "reserved"


@dataclass(frozen=True, slots=True)
class MaskToken:
    id: int
    text: str
    chosen_by: ChosenBy
    occurrences: int  # in the data, where it should be 0

    @property
    def warning(self) -> str | None:
        if not self.occurrences:
            return None
        return (
            f"the mask token {self.id} {self.text!r} occurs {self.occurrences} times in the data, where it cannot be "
            "told from a slot to predict: a token that never occurs is better"
        )


def choose_mask_token(
    tokenizer: Any,
    occurrences: np.ndarray | None = None,
    *,
    explicit: int | None = None,
    stop_ids: Collection[int] = (),
    vocab_size: int | None = None,
) -> MaskToken:
    """`occurrences` [V]: how often each id is in the data; None before the data are read.

    `vocab_size`: rows of the target's embedding, which may exceed the tokenizer's length.
    """
    forbidden = _forbidden(tokenizer, stop_ids)
    size = len(tokenizer) if vocab_size is None else vocab_size
    if explicit is not None:
        if not 0 <= explicit < size:
            raise ValueError(f"drafter.mask_token_id is {explicit}, the target's vocabulary has {size} rows: lower it")
        if explicit in forbidden:
            raise ValueError(
                f"drafter.mask_token_id {explicit} is the target's {forbidden[explicit]} token, which has a meaning "
                "in the data: choose another. " + _candidates_text(tokenizer, occurrences, forbidden)
            )
        return _chosen(tokenizer, explicit, ChosenBy.EXPLICIT, occurrences)
    own = tokenizer.mask_token_id
    if own is not None and own not in forbidden and own < size:
        return _chosen(tokenizer, own, ChosenBy.TOKENIZER, occurrences)
    reserved = sorted(i for text, i in tokenizer.get_vocab().items() if _RESERVED.fullmatch(text) and i < size)
    for token in reserved:
        if token not in forbidden and not _count(occurrences, token):
            return _chosen(tokenizer, token, ChosenBy.RESERVED, occurrences)
    raise ValueError(
        "the target's tokenizer has no mask token and no unused reserved token: set drafter.mask_token_id "
        "(`draftmill prepare --mask-token-id`). " + _candidates_text(tokenizer, occurrences, forbidden)
    )


def mask_candidates(tokenizer: Any, occurrences: np.ndarray | None, stop_ids: Collection[int]) -> list[int]:
    """Special tokens without a role in the template or the data."""
    return _candidates(tokenizer, occurrences, _forbidden(tokenizer, stop_ids))


def _forbidden(tokenizer: Any, stop_ids: Collection[int]) -> dict[int, str]:
    named = {int(i): "stop" for i in stop_ids}
    for name, token in (("pad", tokenizer.pad_token_id), ("end-of-text", tokenizer.eos_token_id)):
        if token is not None:
            named[token] = name
    return named


def _candidates(tokenizer: Any, occurrences: np.ndarray | None, forbidden: dict[int, str]) -> list[int]:
    used = {*forbidden, tokenizer.bos_token_id, tokenizer.unk_token_id}
    special = (i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
    return sorted(i for i in special if i not in used and not _count(occurrences, i))


def _candidates_text(tokenizer: Any, occurrences: np.ndarray | None, forbidden: dict[int, str]) -> str:
    found = _candidates(tokenizer, occurrences, forbidden)
    if not found:
        return "No special token is free: any token that never occurs in the data will do"
    listed = ", ".join(f"{i} {tokenizer.convert_ids_to_tokens(i)}" for i in found[:_SHOWN])
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    known = "Special tokens" if occurrences is None else "Special tokens that never occur in the data"
    return f"{known}: {listed}{more}"


def _chosen(tokenizer: Any, token: int, by: ChosenBy, occurrences: np.ndarray | None) -> MaskToken:
    text = tokenizer.convert_ids_to_tokens(token) if token < len(tokenizer) else None
    return MaskToken(token, text or f"<row {token}>", by, _count(occurrences, token))


def _count(occurrences: np.ndarray | None, token: int) -> int:
    return int(occurrences[token]) if occurrences is not None and token < len(occurrences) else 0
