"""Every kind of input gives the same rows: JSONL plain and compressed, Parquet, Arrow, a saved dataset."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftmill.text.conversations import Conversation, read_conversations
from draftmill.text.refusals import Refused, RowError
from draftmill.text.sources import read_raw
from text_helpers import record, run_python

LINES = [record(f"question {i} é", f"answer {i} 🙂") for i in range(700)]
ROWS = [json.loads(line) for line in LINES]


def contents(path):
    rows = list(read_conversations(path))
    assert all(isinstance(row, Conversation) for row in rows), [row for row in rows if isinstance(row, Refused)][:1]
    assert [row.source.line for row in rows] == list(range(1, len(rows) + 1))
    return [[message.plain for message in row.messages] for row in rows]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    path = tmp_path_factory.mktemp("plain") / "rows.jsonl"
    path.write_text("\n".join(LINES))
    return contents(path)


def zstd(data):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("compress", [gzip.compress, zstd])
def test_compressed_lines_are_read_whatever_the_files_name(tmp_path, expected, compress):
    path = tmp_path / "rows.data"
    path.write_bytes(compress("\n".join(LINES).encode()))
    assert contents(path) == expected


@pytest.mark.parametrize("compress", [gzip.compress, zstd])
def test_a_compressed_file_that_is_cut_short_ends_in_one_refused_row(tmp_path, expected, compress):
    """case 35"""
    path = tmp_path / "cut.jsonl.gz"
    whole = compress("\n".join(record(f"q {i * 7919 % 1000}", f"a {i * 104729 % 1000}") for i in range(5000)).encode())
    path.write_bytes(whole[: len(whole) // 2])
    *rows, last = read_conversations(path)
    assert isinstance(last, Refused) and last.reason == "file_damaged"
    assert last.source.line == len(rows) + 1 and all(isinstance(row, Conversation) for row in rows)
    with pytest.raises(RowError, match="file_damaged"):
        list(read_conversations(path, strict=True))


def test_columnar_files(tmp_path, expected):
    table = pa.Table.from_pylist(ROWS)
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=90)
    with pa.ipc.new_file(tmp_path / "rows.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=300)
    with pa.ipc.new_stream(tmp_path / "stream.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=300)
    for name in ("rows.parquet", "rows.arrow", "stream.arrow"):
        assert contents(tmp_path / name) == expected, name


def test_a_damaged_columnar_file_is_one_message(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS[:10]), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"rows\.parquet is damaged"):
        list(read_conversations(path))


def test_rows_with_other_keys_in_columns_say_nothing_by_null(tmp_path, expected):
    """A columnar file has a value for every key in every row; null is the same as absent."""
    rows = [{**row, "tools": None, "chat_template_kwargs": None, "response_ids": None} for row in ROWS]
    rows[0] = {**rows[0], "chat_template_kwargs": {"enable_thinking": False}}
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert contents(tmp_path / "rows.parquet") == expected
    first, second, *_ = read_conversations(tmp_path / "rows.parquet")
    assert first.template_options == {"enable_thinking": False} and second.template_options == {}


def test_a_dataset_that_the_datasets_library_saved(tmp_path, expected):
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset.from_list(ROWS)
    saved.select(range(700)).save_to_disk(tmp_path / "saved")
    assert contents(tmp_path / "saved") == expected
    datasets.DatasetDict({"train": saved}).save_to_disk(tmp_path / "splits")
    with pytest.raises(ValueError, match=r"several splits \(train\): give the folder of one"):
        list(read_raw(tmp_path / "splits"))
    assert contents(tmp_path / "splits" / "train") == expected


def test_inputs_that_are_none_say_what_can_be_given(tmp_path):
    with pytest.raises(ValueError, match="does not exist: give a JSONL, Parquet or Arrow file"):
        list(read_raw(tmp_path / "no.jsonl"))
    code = (
        "import sys; sys.modules['datasets'] = None\n"
        "from draftmill.text.sources import read_raw\n"
        "try: list(read_raw('hub:owner/name'))\n"
        "except ValueError as error: print(error)\n"
    )
    assert "pip install 'draftmill[datasets]'" in run_python(code).stdout


def test_memory_stays_bounded_on_compressed_input(tmp_path):
    """80 MB of lines out of a small file, and one line of 60 MB."""
    path = tmp_path / "big.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(20):
            file.write(b"".join(record("q" * 1000, "a" * 3000).encode() + b"\n" for _ in range(1000)))
        file.write(b'{"messages": "' + b"x" * 60_000_000 + b'"}\n')
    code = (
        "import resource, sys\n"
        "from draftmill.text.conversations import read_conversations\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "rows = [str(getattr(row, 'reason', 'kept')) for row in read_conversations(sys.argv[1])]\n"
        "print(rows.count('kept'), rows[-1], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    kept, last, grown = run_python(code, str(path)).stdout.split()
    assert (kept, last) == ("20000", "line_too_long")
    assert int(grown) < 60_000  # KiB
