"""Records as bytes, and back. What reads as a record is one that could have been written; all else raises WireError.

    length of the header (uint32) | header | array bytes

The header is JSON: {"wire": version, "record": name, "fields": {...}}. A field that is an array is there by its
length; its elements, little-endian, follow the header in the order of the fields. Bytes never choose what code runs:
they name a record out of a fixed table, and every field must have the type that the record declares.
"""

from __future__ import annotations

import json
import reprlib
import struct
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from draftmill.wire.records import DocumentSpan, Pack, Record

WIRE_VERSION = 1  # of all records together: raised when any of them changes

RECORDS: dict[str, type] = {kind.__name__: kind for kind in get_args(Record)}
_HEADER_LENGTH = struct.Struct("<I")
_ARRAYS = {NDArray[np.int32]: np.dtype("<i4"), NDArray[np.bool_]: np.dtype("?")}  # declared type: as written
_LARGEST = 2**63 - 1
_DEEPEST = 8  # of JSON values inside a field


class WireError(ValueError):
    """What was to be sent is no record, or what was received is none of ours."""


def encode(record: Record) -> bytes:
    name = type(record).__name__
    if RECORDS.get(name) is not type(record):
        raise WireError(f"{name} is not a record of the wire")
    arrays: list[bytes] = []
    plain = _fields_to_plain(record, name, arrays)
    header = json.dumps({"wire": WIRE_VERSION, "record": name, "fields": plain}, separators=(",", ":")).encode()
    return b"".join((_HEADER_LENGTH.pack(len(header)), header, *arrays))


def decode(data: bytes | bytearray | memoryview) -> Record:
    name, plain, arrays = _read_header(memoryview(data))
    record: Record = _fields_from_plain(RECORDS[name], plain, name, arrays)
    arrays.finish()
    return record


def _read_header(data: memoryview) -> tuple[str, Any, _ArrayReader]:
    start = _HEADER_LENGTH.size
    if len(data) < start:
        raise WireError(f"a record of {len(data)} bytes has no header")
    (length,) = _HEADER_LENGTH.unpack_from(data)
    if length > len(data) - start:
        raise WireError(f"a header of {length} bytes, but only {len(data) - start} follow its length")
    try:
        header = json.loads(str(data[start : start + length], "ascii"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise WireError(f"the header is not readable: {error}") from None
    version = header.get("wire") if isinstance(header, dict) else None
    if type(version) is not int or version != WIRE_VERSION:
        raise WireError(
            f"wire version {reprlib.repr(version)}, but this process speaks {WIRE_VERSION}: "
            "run one release of draftmill on both ends"
        )
    if header.keys() != {"wire", "record", "fields"}:
        raise WireError(f"a header of {reprlib.repr(sorted(header))}, expected wire, record and fields")
    name = header["record"]
    if not isinstance(name, str) or name not in RECORDS:
        raise WireError(f"unknown record {reprlib.repr(name)}")
    return name, header["fields"], _ArrayReader(data[start + length :])


class _ArrayReader:
    """The bytes after the header, from front to back."""

    def __init__(self, data: memoryview) -> None:
        self._left = data

    def take(self, count: int, dtype: np.dtype[Any], where: str) -> NDArray[Any]:
        size = count * dtype.itemsize
        if size > len(self._left):
            raise WireError(f"{where}: {count} elements take {size} bytes, but {len(self._left)} are left")
        part, self._left = self._left[:size], self._left[size:]
        if dtype == np.bool_ and (np.frombuffer(part, np.uint8) > 1).any():
            raise WireError(f"{where}: bytes that are neither 0 nor 1")
        return np.frombuffer(part, dtype).astype(dtype.newbyteorder("="))  # a copy: aligned, writable, its own

    def finish(self) -> None:
        if len(self._left):
            raise WireError(f"{len(self._left)} bytes after the record's end")


def _declared(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


# The declared types of the fields, in order: of records, and of what they are made of.
_TYPES: dict[Any, dict[str, Any]] = {kind: _declared(kind) for kind in (*RECORDS.values(), Pack, DocumentSpan)}


def _fields_to_plain(record: Any, where: str, arrays: list[bytes]) -> dict[str, Any]:
    return {
        name: _to_plain(kind, getattr(record, name), f"{where}.{name}", arrays)
        for name, kind in _TYPES[type(record)].items()
    }


def _fields_from_plain(kind: Any, plain: Any, where: str, arrays: _ArrayReader) -> Any:
    types = _TYPES[kind]
    if not isinstance(plain, dict):
        raise _wrong(where, "fields", plain)
    if plain.keys() != types.keys():
        missing, strange = sorted(types.keys() - plain.keys()), sorted(plain.keys() - types.keys())
        raise WireError(f"{where}: missing fields {missing}, unknown fields {reprlib.repr(strange)}")
    values = {name: _from_plain(types[name], plain[name], f"{where}.{name}", arrays) for name in types}
    try:
        return kind(**values)
    except ValueError as error:
        raise WireError(f"{where}: {error}") from None


def _to_plain(kind: Any, value: Any, where: str, arrays: list[bytes]) -> Any:
    if kind in _ARRAYS:
        if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype != _ARRAYS[kind].newbyteorder("="):
            raise _wrong(where, f"an array [n] of {_ARRAYS[kind]}", value)
        arrays.append(value.astype(_ARRAYS[kind], copy=False).tobytes())
        return len(value)
    if get_origin(kind) is UnionType:
        return None if value is None else _to_plain(_not_none(kind), value, where, arrays)
    if get_origin(kind) is tuple:
        if not isinstance(value, tuple):
            raise _wrong(where, "a tuple", value)
        return [_to_plain(get_args(kind)[0], item, where, arrays) for item in value]
    if kind in _TYPES:
        if type(value) is not kind:
            raise _wrong(where, kind.__name__, value)
        return _fields_to_plain(value, where, arrays)
    return _checked(kind, value, where)


def _from_plain(kind: Any, plain: Any, where: str, arrays: _ArrayReader) -> Any:
    if kind in _ARRAYS:
        return arrays.take(_checked(int, plain, where), _ARRAYS[kind], where)
    if get_origin(kind) is UnionType:
        return None if plain is None else _from_plain(_not_none(kind), plain, where, arrays)
    if get_origin(kind) is tuple:
        if not isinstance(plain, list):
            raise _wrong(where, "a list", plain)
        return tuple(_from_plain(get_args(kind)[0], item, where, arrays) for item in plain)
    if kind in _TYPES:
        return _fields_from_plain(kind, plain, where, arrays)
    return _checked(kind, plain, where)


def _checked(kind: Any, value: Any, where: str) -> Any:
    """A value that JSON holds as it is."""
    if kind is int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _LARGEST:
            raise _wrong(where, "a whole number of at least 0", value)
    elif get_origin(kind) is dict:
        if not isinstance(value, dict):
            raise _wrong(where, "values by name", value)
        _check_json(value, where, _DEEPEST)
    elif not isinstance(value, kind):
        raise _wrong(where, kind.__name__, value)
    return value


def _check_json(value: Any, where: str, depth: int) -> None:
    """Raises WireError unless JSON gives back the same value."""
    if isinstance(value, dict | list) and depth == 0:
        raise WireError(f"{where}: nested too deep")
    if isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                raise _wrong(where, "names that are text", name)
            _check_json(item, f"{where}.{name}", depth - 1)
    elif isinstance(value, list):
        for item in value:
            _check_json(item, where, depth - 1)
    elif isinstance(value, int):
        if abs(value) > _LARGEST:
            raise _wrong(where, "a number of 64 bits", value)
    elif not isinstance(value, float | str | None):
        raise _wrong(where, "a JSON value", value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object in which every name occurs once."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _not_none(kind: Any) -> Any:
    return next(part for part in get_args(kind) if part is not NoneType)


def _wrong(where: str, expected: str, value: Any) -> WireError:
    if isinstance(value, int) and abs(value) > _LARGEST:
        value = "one of more than 63 bits"
    return WireError(f"{where}: expected {expected}, got {type(value).__name__} {reprlib.repr(value)}")
