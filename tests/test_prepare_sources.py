"""`prepare` over every kind of source: one dataset, one account, in any number of processes."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from chat_templates import target_of
from draftmill.text.dataset import PreparedDataset
from draftmill.text.prepare import PrepareOptions, prepare
from draftmill.text.sources import read_raw

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"place": {"type": "string"}}}}}


def call(**arguments: object) -> dict:
    return {"type": "function", "function": {"name": "look", "arguments": json.dumps(arguments)}}


def rows() -> list[dict]:
    """Plain, with tools, with reasoning, with options of their own; one bad; some fields only here and there."""
    made: list[dict] = []
    for i in range(400):
        asked = {"role": "user", "content": f"question {i}"}
        answer = {"role": "assistant", "content": f"answer {i} " * (i % 5 + 1)}
        row: dict = {"messages": [asked, answer, asked, answer]}
        if i % 4 == 1:
            calls = [call(place=f"K\u00f6ln {i}", days=None)] * (i % 3 + 1)
            reply = {"role": "tool", "content": "12", "name": "look"}
            row = {"messages": [asked, {"role": "assistant", "tool_calls": calls}, reply, answer], "tools": [TOOL]}
        elif i % 4 == 2:
            row = {"messages": [asked, {**answer, "reasoning_content": f"thought {i}"}]}
        elif i % 4 == 3:
            row = {"messages": [asked, answer], "chat_template_kwargs": {"enable_thinking": i % 8 == 3}}
        made.append(row)
    made[42] = {"messages": [{"role": "oracle", "content": "?"}]}
    made[43] = {"messages": [{"role": "user", "content": "alone"}]}
    return made


def table_rows(text: bool) -> list[dict]:
    """Every row with every column; tools as JSON text or as structs."""
    made = [{"tools": None, "chat_template_kwargs": None, **row} for row in rows()]
    return [{**row, "tools": json.dumps(row["tools"])} if text and row["tools"] else row for row in made]


def write(kind: str, path: Path) -> Path:
    lines = "".join(json.dumps(row) + "\n" for row in rows()).encode()
    if kind == "gzip":
        path.write_bytes(gzip.compress(lines))
    elif kind == "zstd":
        path.write_bytes(pa.Codec("zstd").compress(lines, asbytes=True))
    elif kind == "parquet":
        parquet.write_table(pa.Table.from_pylist(table_rows(text=True)), path, row_group_size=128)
    elif kind == "arrow":
        table = pa.Table.from_pylist(table_rows(text=False))
        with pa.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table)
    elif kind == "folder":
        pytest.importorskip("datasets").Dataset.from_list(table_rows(text=True)).save_to_disk(path, num_shards=2)
    else:
        path.write_bytes(lines)
    return path


def prepared(kind: str, folder: Path, workers: int):
    tokenizer, stops = target_of("qwen3")
    mask = tokenizer.convert_tokens_to_ids("<|im_start|>")
    options = PrepareOptions(stop_ids=stops, mask_token_id=mask, workers=workers)
    shown = []
    summary = prepare([write(kind, folder / "source")], tokenizer, folder / "data", options, shown.append)
    return PreparedDataset.open(folder / "data"), summary, shown


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return prepared("lines", tmp_path_factory.mktemp("lines"), 1)


@pytest.mark.parametrize("kind", ["gzip", "zstd", "parquet", "arrow", "folder"])
def test_the_dataset_does_not_depend_on_the_kind_of_source(tmp_path, expected, kind):
    dataset, summary, shown = prepared(kind, tmp_path, 2 if kind == "parquet" else 1)  # processes start slowly
    assert dataset.fingerprint == expected[0].fingerprint
    assert len(dataset) == len(expected[0])
    assert dataset.manifest["counts"] == expected[0].manifest["counts"]
    assert dataset.manifest["counts"]["dropped"] == {"no_assistant_turn": 1, "unknown_role": 1}
    assert (summary.rows_in, summary.kept) == (400, 398)
    assert [example.rsplit("source:")[1][:2] for examples in summary.examples.values() for example in examples] == [
        "43",
        "44",
    ]
    assert all(0 <= now.done_bytes <= now.total_bytes for now in shown)
    assert shown[-1].done_bytes == shown[-1].total_bytes > 0


def test_columns_of_structs_are_warned_of(tmp_path, caplog):
    logging.getLogger("draftmill").addHandler(caplog.handler)  # the command line's logging does not propagate
    for name, made in (("text", table_rows(text=True)), ("structs", table_rows(text=False))):
        parquet.write_table(pa.Table.from_pylist(made), tmp_path / name)
        list(read_raw(tmp_path / name))
    said = {record.getMessage() for record in caplog.records}  # twice where it propagates
    assert len(said) == 1
    assert "structs keeps tools as columns of structs" in said.pop()
    said = [{"role": "user"}, {"tool_calls": [{"function": {"name": "look", "arguments": {"place": "here"}}}]}]
    parquet.write_table(pa.Table.from_pylist([{"messages": said}]), tmp_path / "arguments")
    list(read_raw(tmp_path / "arguments"))
    assert "arguments keeps messages: arguments as columns" in caplog.records[-1].getMessage()
    logging.getLogger("draftmill").removeHandler(caplog.handler)


def test_the_mask_token_and_its_occurrences_are_in_the_manifest(expected):
    """case 9 c: the template's own marker is a bad choice, taken because it is explicit, and counted"""
    dataset, summary, _ = expected
    ids = [token for i in range(len(dataset)) for token in dataset.row(i)[0].tolist()]
    mask = dataset.manifest["mask_token"]
    assert mask["chosen_by"] == "explicit"
    assert mask["occurrences"] == ids.count(mask["id"]) > 0
    assert any("mask token" in warning for warning in summary.warnings)


def test_tokenised_rows_come_through_as_they_are(tmp_path):
    made = [{"input_ids": [i % 200, 5, 6, 7, 8], "loss_mask": [0, 0, 1, 1, 0]} for i in range(20)]
    made[3] = {"input_ids": [1, 2, 10**6], "loss_mask": [0, 1, 1]}
    made[4] = {"input_ids": [1, 2, 3], "loss_mask": [0, 0, 1]}
    parquet.write_table(pa.Table.from_pylist(made), tmp_path / "a.parquet")
    tokenizer, stops = target_of("qwen3")
    options = PrepareOptions(stop_ids=stops, mask_token_id=250, vocab_size=300)
    summary = prepare([tmp_path / "a.parquet"], tokenizer, tmp_path / "data", options)
    assert summary.dropped == {"bad_tokens": 1, "no_anchor": 1}
    dataset = PreparedDataset.open(tmp_path / "data")
    ids, supervised = dataset.row(0)
    assert (ids.tolist(), supervised.tolist()) == ([0, 5, 6, 7], [False, False, True, True])
