"""Records as bytes and back, and everything that is not a record."""

import json
import math
import struct
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill import wire
from draftmill.wire import (
    CheckpointWritten,
    CloseSlots,
    Deliver,
    DocumentDone,
    DocumentSpan,
    Failed,
    Filled,
    Finished,
    Freed,
    Lease,
    MetricRow,
    OpenSlots,
    Pack,
    Phase,
    Rejected,
    SlotsClosed,
    SlotsOffered,
    StepDone,
    Stop,
    WireError,
    decode,
    encode,
    without,
)


def make_pack(lengths=(3, 1, 2), seq=7, epoch=1, first=10):
    spans, end = [], 0
    for index, length in enumerate(lengths):
        spans.append(DocumentSpan(first + index, end, length, anchors=index + 1))
        end += length
    token_ids = np.arange(100, 100 + end, dtype=np.int32)
    return Pack(seq, epoch, tuple(spans), token_ids, token_ids % 2 == 0)


LAYOUT = {"count": 3, "capacity": 16, "feature_size": 8, "dtype": "bfloat16"}
RECORDS = [
    Lease(2**62, 1, 2, make_pack(), one_by_one=True),
    Lease(0, 0, 0, make_pack((1,))),
    OpenSlots(1, 2, LAYOUT),
    CloseSlots(1, 2),
    Filled(5),
    Rejected(5, (10, 12), "nonfinite_features"),
    DocumentDone(5, 0),
    SlotsClosed(0, 3),
    Deliver(1, make_pack()),
    Deliver(0, make_pack(())),  # no documents: what fills up the last step
    Deliver(0, None),
    SlotsOffered(2, LAYOUT),
    Freed(7, 1),
    StepDone(3, applied=False, finite=True),
    MetricRow(4, {"loss": 0.1, "slot_accuracy": [0.5, 1.0], "skipped": 0, "epoch": None, "x": {"y": [True]}}),
    CheckpointWritten(3),
    Finished(9, "SIGTERM", "ab" * 32),
    Phase("ready"),
    Failed("ValueError: ü \udcff", 'File "x"\n\0'),
    Stop("finished"),
]


def plain(value):
    """A value that can be compared: packs are not equal to one another, arrays are many values."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tolist()
    if hasattr(value, "__dataclass_fields__"):
        return type(value), [plain(getattr(value, field.name)) for field in fields(value)]
    return [plain(item) for item in value] if isinstance(value, tuple) else (type(value), repr(value))


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_every_record_comes_back_as_it_was(record):
    assert plain(decode(encode(record))) == plain(record)
    assert encode(decode(encode(record))) == encode(record)


def test_all_records_are_tried():
    assert {type(record) for record in RECORDS} == set(wire.RECORDS.values())


def test_numbers_that_json_has_no_words_for_come_back():
    values = decode(encode(MetricRow(1, {"loss": math.nan, "norm": math.inf, "x": 0.1 + 0.2}))).values
    assert math.isnan(values["loss"]) and values["norm"] == math.inf and values["x"] == 0.1 + 0.2


def test_a_pack_received_owns_arrays_that_can_be_written():
    """torch takes them without a copy, and warns about those it could not write."""
    data = bytearray(encode(Lease(1, 0, 0, make_pack())))
    pack = decode(data).pack
    data[:] = bytes(len(data))
    assert pack.token_ids.tolist() == make_pack().token_ids.tolist()
    for array in (pack.token_ids, pack.supervised):
        assert array.flags.writeable and array.flags.aligned and array.flags.c_contiguous


def test_array_elements_are_little_endian_behind_the_header():
    data = encode(Deliver(0, make_pack((2,))))
    assert data.endswith(struct.pack("<ii??", 100, 101, True, False))


@pytest.mark.parametrize(
    "record",
    [
        Filled("5"),
        Filled(True),
        Filled(-1),
        Filled(2**63),
        Filled(10**5000),
        Filled(np.int64(5)),
        Rejected(5, [10], "a list"),
        Rejected(5, (1.0,), "no row"),
        Phase(None),
        StepDone(1, 1, True),
        Deliver(0, "pack"),
        Lease(0, 0, 0, None),
        Lease(0, 0, 0, Filled(0)),
        OpenSlots(0, 0, [1]),
        MetricRow(1, {"loss": np.float32(1)}),
        MetricRow(1, {"loss": (1, 2)}),
        MetricRow(1, {1: 2}),
        MetricRow(1, {"x": 10**5000}),
        make_pack(),
        DocumentSpan(0, 0, 1, 1),
        "Filled",
        None,
    ],
    ids=lambda record: type(record).__name__,
)
def test_what_is_no_record_is_refused_where_it_is_sent(record):
    with pytest.raises(WireError):
        encode(record)


def test_values_without_end_are_refused():
    values = {}
    values["again"] = values
    with pytest.raises(WireError, match="too deep"):
        encode(MetricRow(1, values))


def framed(header, arrays=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<I", len(text)) + text + arrays


def header_of(record, /, **changed):
    data = encode(record)
    (length,) = struct.unpack_from("<I", data)
    return json.loads(data[4 : 4 + length]) | changed, data[4 + length :]


def changed_fields(record, change):
    header, arrays = header_of(record)
    change(header["fields"])
    return framed(header, arrays)


LEASE = Lease(1, 0, 0, make_pack())
FOREIGN = {
    "nothing": b"",
    "half a length": b"\1\0",
    "a header longer than all": struct.pack("<I", 100) + b"{}",
    "no JSON": framed(b"\x80\x04\x95pickled"),
    "no object": framed([1]),
    "deep": framed(b"[" * 100_000),
    "a huge number": framed(b'{"wire":' + b"1" * 5000 + b"}"),
    "a name twice": framed(b'{"wire":1,"record":"Filled","record":"Filled","fields":{"lease":1}}'),
    "another version": framed(header_of(Filled(1), wire=wire.WIRE_VERSION + 1)[0]),
    "a true version": framed(header_of(Filled(1), wire=True)[0]),
    "no version": framed({"record": "Filled", "fields": {"lease": 1}}),
    "more in the header": framed(header_of(Filled(1), x=1)[0]),
    "unknown record": framed(header_of(Filled(1), record="Popen")[0]),
    "a record that is none": framed(header_of(Filled(1), record=["Filled"])[0]),
    "fields that are none": framed(header_of(Filled(1), fields=[1])[0]),
    "missing field": changed_fields(Freed(1, 2), lambda f: f.pop("slot")),
    "missing field with a default": changed_fields(LEASE, lambda f: f.pop("one_by_one")),
    "extra field": changed_fields(Freed(1, 2), lambda f: f.update(x=1)),
    "wrong type": changed_fields(Freed(1, 2), lambda f: f.update(slot="2")),
    "fraction": changed_fields(Freed(1, 2), lambda f: f.update(slot=2.0)),
    "negative": changed_fields(Freed(1, 2), lambda f: f.update(slot=-2)),
    "no truth": changed_fields(StepDone(1, True, True), lambda f: f.update(finite=1)),
    "documents that are none": changed_fields(LEASE, lambda f: f["pack"].update(documents={})),
    "a document with less": changed_fields(LEASE, lambda f: f["pack"]["documents"][0].pop("anchors")),
    "documents with a gap": changed_fields(LEASE, lambda f: f["pack"]["documents"][1].update(start=4)),
    "documents beyond the tokens": changed_fields(LEASE, lambda f: f["pack"]["documents"][2].update(length=3)),
    "fewer tokens than documents": changed_fields(LEASE, lambda f: f["pack"].update(token_ids=5)),
    "more tokens than bytes": changed_fields(LEASE, lambda f: f["pack"].update(token_ids=2**60)),
    "no pack": changed_fields(LEASE, lambda f: f.update(pack=None)),
    "bytes left over": encode(LEASE) + b"\0",
    "arrays without need": encode(Filled(1)) + b"\0\0\0\0",
    "neither true nor false": encode(LEASE)[:-1] + b"\2",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_not_ours_is_refused_where_it_is_read(name):
    with pytest.raises(WireError):
        decode(FOREIGN[name])


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_no_part_of_a_record_is_a_record(record):
    data = encode(record)
    for length in range(len(data)):
        with pytest.raises(WireError):
            decode(data[:length])


def decode_or_refuse(data):
    """WireError or a record that can be sent on; anything else is an error of this test."""
    try:
        record = decode(data)
    except WireError:
        return None
    assert plain(decode(encode(record))) == plain(record)
    return record


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_a_record(data):
    decode_or_refuse(data)
    decode_or_refuse(framed(data))


@settings(max_examples=500)
@given(st.data())
def test_damaged_records_are_refused_or_a_record(data):
    damaged = bytearray(encode(data.draw(st.sampled_from(RECORDS))))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(damaged) - 1))
        action = data.draw(st.sampled_from(("change", "remove", "insert")))
        if action == "change":
            damaged[position] = data.draw(st.integers(0, 255))
        elif action == "remove" and len(damaged) > 1:
            del damaged[position : position + data.draw(st.integers(1, 8))]
            damaged = damaged or bytearray(b"\0")
        else:
            damaged[position:position] = data.draw(st.binary(max_size=8))
    decode_or_refuse(bytes(damaged))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=500)
@given(st.data())
def test_fields_of_any_value_are_refused_or_a_record(data):
    header, arrays = header_of(data.draw(st.sampled_from(RECORDS)))
    part = header["fields"]
    if isinstance(part.get("pack"), dict) and data.draw(st.booleans()):
        part = part["pack"]
    part[data.draw(st.sampled_from(sorted(part)) | st.text(max_size=4))] = data.draw(json_values)
    decode_or_refuse(framed(header, arrays))


def test_without_lays_what_is_left_end_to_end():
    pack = make_pack((3, 1, 2))
    left = without(pack, {11})
    assert (left.seq, left.epoch) == (pack.seq, pack.epoch)
    assert left.documents == (DocumentSpan(10, 0, 3, 1), DocumentSpan(12, 3, 2, 3))
    assert left.token_ids.tolist() == [100, 101, 102, 104, 105]
    assert left.supervised.tolist() == [True, False, True, True, False]
    assert without(left, (10, 12)) is None
    assert plain(without(pack, ())) == plain(pack)
    with pytest.raises(ValueError, match=r"\[3\] are not in pack 7"):
        without(pack, {3, 10})


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": np.zeros(5, np.int32)},
        {"token_ids": np.zeros(6, np.int64)},
        {"supervised": np.zeros(6, np.uint8)},
        {"documents": (DocumentSpan(1, 1, 5, 1),)},
        {"documents": (DocumentSpan(1, 0, 6, 1), DocumentSpan(2, 6, 0, 1))},
    ],
)
def test_packs_that_contradict_themselves_are_refused(change):
    with pytest.raises(ValueError, match="pack 7"):
        replace(make_pack(), **change)
