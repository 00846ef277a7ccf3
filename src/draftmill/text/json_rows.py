"""JSON as input rows may hold it: strict UTF-8, no duplicate keys, no NaN, no lone surrogates."""

from __future__ import annotations

import json
import reprlib
from typing import Any, NoReturn

from draftmill.text.refusals import DropReason, RowProblem

_SHORT = reprlib.Repr()  # bounded in time and depth, as rows may hold anything
_SHORT.maxstring = _SHORT.maxother = 40
_SHORT.maxlevel = 2


def parse_line(line: bytes) -> dict[str, Any]:
    """One JSONL line; raises `RowProblem`."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowProblem(DropReason.UNDECODABLE, f"byte {error.start} of the line") from None
    value = parse_json(text)
    if not isinstance(value, dict):
        raise RowProblem(DropReason.NOT_AN_OBJECT, f"it is a {type(value).__name__}")
    return value


def parse_json(text: str) -> Any:
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise RowProblem(DropReason.MALFORMED_JSON, f"{error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
        raise RowProblem(DropReason.MALFORMED_JSON, type(error).__name__) from None
    if "\\u" in text:  # only an escape can bring a lone surrogate
        _refuse_surrogates(value)
    return value


def _refuse_surrogates(value: Any) -> None:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending += [*item, *item.values()]
        elif isinstance(item, list):
            pending += item
        elif isinstance(item, str) and not item.isascii():
            try:
                item.encode("utf-8")
            except UnicodeEncodeError:
                raise RowProblem(DropReason.UNDECODABLE, f"{short(item)} holds a lone surrogate") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise RowProblem(DropReason.DUPLICATE_KEY, short(twice))
    return result


def _no_constant(literal: str) -> NoReturn:
    raise RowProblem(DropReason.NAN_LITERAL, literal)


def short(value: Any) -> str:
    return _SHORT.repr(value)
