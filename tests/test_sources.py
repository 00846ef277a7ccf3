"""Every kind of input source gives the rows that its lines or table hold, in order, in bounded memory."""

from __future__ import annotations

import gzip
import json
import pickle
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from draftmill.text.conversations import _conversation, read_conversations
from draftmill.text.refusals import Refused, RowError, Source
from draftmill.text.sources import check_source, read_raw, source_files, split_hub_name
from draftmill.text.tables import ROW_FIELDS, hub_batches
from text_helpers import run_python

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"x": {"type": "string"}}}}}
CALL = {"type": "function", "function": {"name": "look", "arguments": '{"x": null}'}}


def rows(count: int = 150) -> list[dict]:
    """More than two batches of a table; some rows lack what others have."""
    made = []
    for i in range(count):
        said = [{"role": "user", "content": f"q{i} é"}, {"role": "assistant", "content": f"a{i}" * (i % 7 + 1)}]
        if i % 3 == 0:
            said[1]["tool_calls"] = [CALL]
        made.append({"messages": said, "id": i, **({"tools": [TOOL]} if i % 5 == 0 else {})})
    if count > 4:
        made[4] = {"messages": [{"role": "critic", "content": "?"}], "id": 4}
    return made


def lines(made: list[dict]) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in made)


def plain(path: Path) -> Path:
    path.write_bytes(lines(rows()))
    return path


def gz(path: Path) -> Path:
    path.write_bytes(gzip.compress(lines(rows()[:70])) + gzip.compress(lines(rows()[70:])))  # two members
    return path


def zst(path: Path) -> Path:
    codec = pa.Codec("zstd")
    path.write_bytes(b"".join(codec.compress(lines(part), asbytes=True) for part in (rows()[:70], rows()[70:])))
    return path


def parquet_file(path: Path) -> Path:
    parquet.write_table(pa.Table.from_pylist(rows()), path, row_group_size=40)
    return path


def arrow_file(path: Path) -> Path:
    with pa.ipc.new_file(path, pa.Table.from_pylist(rows()).schema) as writer:
        writer.write_table(pa.Table.from_pylist(rows()), max_chunksize=100)
    return path


def arrow_stream(path: Path) -> Path:
    with pa.ipc.new_stream(path, pa.Table.from_pylist(rows()).schema) as writer:
        writer.write_table(pa.Table.from_pylist(rows()), max_chunksize=100)
    return path


def dataset_folder(path: Path) -> Path:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(rows()).save_to_disk(path, num_shards=3)
    return path


def dataset_of_json(path: Path) -> Path:
    """Tools and messages as columns of JSON, as newer sets keep them."""
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({name: datasets.List(datasets.Json()) for name in ("messages", "tools")})
    made = [{"messages": row["messages"], "tools": row.get("tools", [])} for row in rows()]
    datasets.DatasetDict(train=datasets.Dataset.from_list(made, features=features)).save_to_disk(path)
    return path


KINDS = [gz, zst, parquet_file, arrow_file, arrow_stream, dataset_folder, dataset_of_json]


def content(row) -> tuple:
    if isinstance(row, Refused):
        return row.source.line, row.reason, row.detail
    return row.source.line, row.messages, row.tools


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_all_kinds_give_the_rows_of_the_plain_file(tmp_path, make):
    expected = [content(row) for row in read_conversations(plain(tmp_path / "plain.jsonl"))]
    source = make(tmp_path / "source")  # the first bytes tell, not the name
    found = list(read_conversations(source))
    assert [content(row) for row in found] == expected
    assert sum(isinstance(row, Refused) for row in found) == 1
    offsets = [row.source.offset for row in found]
    assert offsets == sorted(offsets)
    assert offsets[-1] <= sum(Path(file).stat().st_size for file in source_files(source))
    assert {row.source.file for row in found} == {str(source)}


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_raw_rows_travel_between_processes(tmp_path, make):
    raws = list(read_raw(make(tmp_path / "source")))
    assert pickle.loads(pickle.dumps(raws)) == raws
    assert all(raw.size > 0 for raw in raws)


@pytest.mark.parametrize("make", [gz, zst], ids=lambda make: make.__name__)
def test_a_compressed_file_cut_short_is_named_by_line(tmp_path, make):
    """case 35: what is there is read, then one refusal says where the rest is lost"""
    whole = make(tmp_path / "whole").read_bytes()
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(whole * 20 + whole[:-3])
    found = list(read_conversations(cut))
    assert found[-1].reason == "cut_short"
    assert [row.source.line for row in found] == list(range(1, len(found) + 1))
    assert 10 * 150 < len(found) <= 21 * 150 + 1  # the last buffer before the cut may be lost with it
    assert {row.source.line % 150 for row in found[:-1] if isinstance(row, Refused)} == {5}  # the unknown role
    cut.write_bytes(make(tmp_path / "whole").read_bytes()[:12])
    with pytest.raises(RowError, match=r"cut\.jsonl:1: cut_short"):
        list(read_conversations(cut, strict=True))


def test_a_table_broken_inside_is_named_by_row(tmp_path):
    """case 35"""
    path = parquet_file(tmp_path / "a.parquet")
    data = bytearray(path.read_bytes())
    start = parquet.ParquetFile(path).metadata.row_group(2).column(0).data_page_offset
    data[start : start + 40] = b"\xff" * 40
    path.write_bytes(data)
    found = list(read_conversations(path))
    assert found[-1].reason == "cut_short"
    assert 40 <= len(found) <= 81
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(bytes(data[:-20]))
    with pytest.raises(ValueError, match=r"cut\.parquet is not a whole Parquet file"):
        read_raw(cut).__next__()
    cut.write_bytes(b"ARROW1\0\0 nothing more")
    with pytest.raises(ValueError, match="is not a whole Arrow file"):
        read_raw(cut).__next__()


def test_columns_without_a_row_form_end_at_once(tmp_path):
    parquet.write_table(pa.table({"dialog": ["a"], "tools": ["[]"]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="columns dialog, tools, but a row needs one of messages, conversations"):
        list(read_conversations(tmp_path / "a.parquet"))


def test_rows_over_the_limit_are_refused_and_the_next_are_intact(tmp_path):
    """case 35"""
    made = rows(10)
    made[6]["messages"][1]["content"] = "x" * 50_000
    parquet.write_table(pa.Table.from_pylist(made), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_bytes(lines(made))
    for name in ("a.parquet", "a.jsonl"):
        found = list(read_conversations(tmp_path / name, max_line_bytes=20_000))
        assert [i for i, row in enumerate(found) if isinstance(row, Refused)] == [4, 6], name
        assert found[6].reason == "line_too_long"


def test_a_bomb_of_one_line_stays_bounded(tmp_path):
    """case 35: 200 MB of one line in a small compressed file"""
    good = json.dumps(rows(1)[0]).encode() + b"\n"
    block = b"x" * 10**7
    with gzip.open(tmp_path / "a.gz", "wb", compresslevel=1) as file:
        for _ in range(20):
            file.write(block)
        file.write(b"\n" + good)
    tracemalloc.start()
    found = list(read_conversations(tmp_path / "a.gz", max_line_bytes=2**20))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [getattr(row, "reason", None) for row in found] == ["line_too_long", None]
    assert peak < 8 * 2**20


def test_sources_that_are_not_there_or_not_readable(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        check_source(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="save_to_disk wrote"):
        check_source(tmp_path)
    (tmp_path / "a.json").write_text('\n [{"messages": []}]')
    with pytest.raises(ValueError, match="is one JSON array"):
        list(read_raw(tmp_path / "a.json"))
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_list(rows(3))
    datasets.DatasetDict(train=one, test=one).save_to_disk(tmp_path / "both")
    with pytest.raises(ValueError, match="several splits"):
        list(read_raw(tmp_path / "both"))
    assert len(list(read_raw(tmp_path / "both" / "test"))) == 3
    (tmp_path / "both" / "test" / "state.json").write_text("{")
    with pytest.raises(ValueError, match="not a whole dataset folder"):
        list(read_raw(tmp_path / "both" / "test"))


def test_hub_names():
    assert split_hub_name("hub:a/b") == ("a/b", None, None, None)
    assert split_hub_name("hub:a/b/c@1f:train") == ("a/b", "c", "1f", "train")
    for bad in ("hub:", "hub:a", "hub:a/", "hub:a/b/c/d", "hub:/a/b"):
        with pytest.raises(ValueError, match="does not name a dataset"):
            check_source(bad)
    assert source_files("hub:a/b") == []


def test_a_dataset_of_the_hub_is_streamed(tmp_path, monkeypatch):
    """A folder of Parquet files in the hub's layout stands in for the hub; the library does the rest."""
    pytest.importorskip("datasets")
    (tmp_path / "own" / "set" / "data").mkdir(parents=True)
    parquet.write_table(pa.Table.from_pylist(rows()), tmp_path / "own/set/data/train-00000-of-00001.parquet")
    monkeypatch.chdir(tmp_path)
    expected = [content(row) for row in read_conversations(plain(tmp_path / "plain.jsonl"))]
    for name in ("hub:own/set", "hub:own/set:train"):
        assert [content(row) for row in read_conversations(name)] == expected
    parquet.write_table(pa.Table.from_pylist(rows()), tmp_path / "own/set/data/test-00000-of-00001.parquet")
    with pytest.raises(ValueError, match=r"several splits: add one of them: t\w+, t\w+"):
        hub_batches("hub:own/set")


def test_no_network_is_said_clearly():
    pytest.importorskip("datasets")
    code = (
        "import os; os.environ.update(HF_HUB_OFFLINE='1', HF_DATASETS_OFFLINE='1')\n"
        "from draftmill.text.sources import read_raw\n"
        "try:\n    list(read_raw('hub:nobody/nothing-of-the-kind:train'))\n"
        "except ValueError as error:\n    print(error)"
    )
    out = run_python(code).stdout
    assert "hub:nobody/nothing-of-the-kind:train cannot be read from the hub" in out
    assert "check the name and the network" in out


def test_the_columns_read_are_all_that_a_row_may_say():
    class Asked(dict):
        def get(self, key, default=None):
            asked.add(key)
            return super().get(key, default)

        def __getitem__(self, key):
            asked.add(key)
            return super().__getitem__(key)

    asked: set[str] = set()
    said = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    for row in ({"conversations": said}, {"prompt": "q"}, {"input_ids": [1], "mask": [1]}):
        _conversation(Asked(row), Source("f", 1, 0), "prompt" not in row)
    assert asked == set(ROW_FIELDS)
