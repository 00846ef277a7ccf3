"""Is every input row accounted for, and is a dataset on disk whole, for the right target, or refused?"""

from __future__ import annotations

import json
import os

import numpy as np
import pyarrow as pa
import pytest

from draftmill.text.block import RowBlock
from draftmill.text.dataset import PreparedDataset
from draftmill.text.dataset_writer import DatasetWriter
from draftmill.text.identity import tokenizer_identity
from draftmill.text.packing import PackStream
from draftmill.text.prepare import PrepareError, PrepareOptions, Progress, prepare
from draftmill.text.refusals import RowError
from draftmill.text.render import TokenRow
from text_helpers import CHATML, byte_tokenizer, record, run_python, supervised_texts, write_lines

SPECIALS = ["<|im_start|>", "<|im_end|>", "<unused0>"]


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer(CHATML, SPECIALS)


def options(tokenizer, **changes) -> PrepareOptions:
    return PrepareOptions(stop_ids={tokenizer.convert_tokens_to_ids("<|im_end|>")}, **changes)


def good(count: int) -> list[str]:
    return [record(f"question {i}", f"answer {i}") for i in range(count)]


BAD = [  # case 33
    '{"messages": []}',
    '{"messages": [{"role": "system", "content": "s"}]}',
    '{"messages": [{"role": "assistant", "content": "a"}]}',
    '{"messages": [{"role": "user", "content": "q"}]}',
    '{"messages": null}',
    '{"id": 1}',
    record("q", ""),
    "{",
    record("q", "a").replace("assistant", "critic"),
]


def test_a_thousand_good_rows_survive_the_bad_ones(tmp_path, tokenizer):
    """case 33: each bad row has its reason and its line"""
    rows = good(1000)
    rows[500:500] = BAD
    data = write_lines(tmp_path / "data.jsonl", rows)
    seen: list[Progress] = []
    summary = prepare([data], tokenizer, tmp_path / "out", options(tokenizer), seen.append)
    assert (summary.rows_in, summary.kept, summary.rows_out) == (1009, 1000, 1000)
    assert {reason.value: count for reason, count in summary.dropped.items()} == {
        "no_messages": 3,
        "no_user_turn": 2,
        "no_assistant_turn": 1,
        "empty_assistant": 1,
        "malformed_json": 1,
        "unknown_role": 1,
    }
    table = summary.table()
    assert f"{data}:501" in table
    assert f"{data}:508" in table
    assert "1,000  kept" in table
    assert seen[-1].done_bytes == seen[-1].total_bytes == os.path.getsize(data)
    assert (seen[-1].kept, seen[-1].dropped) == (1000, 9)
    assert [step.done_bytes for step in seen] == sorted(step.done_bytes for step in seen)

    dataset = PreparedDataset.open(tmp_path / "out")
    assert len(dataset) == 1000
    assert dataset.source(499) == (str(data), 500)
    assert dataset.source(500) == (str(data), 510)
    assert dataset.manifest["counts"]["dropped"]["no_messages"] == 3
    token_ids, supervised = dataset.row(7)
    assert tokenizer.decode(token_ids) == (
        "<|im_start|>user\nquestion 7<|im_end|>\n<|im_start|>assistant\nanswer 7<|im_end|>"
    )
    assert supervised_texts(tokenizer, token_ids, supervised) == ["answer 7<|im_end|>"]
    assert token_ids.dtype == np.int32
    assert supervised.dtype == np.bool_


def test_too_large_a_share_of_bad_rows_ends_with_the_summary(tmp_path, tokenizer):
    """cases 33, 37"""
    data = write_lines(tmp_path / "data.jsonl", good(50) + BAD)
    with pytest.raises(PrepareError, match=r"(?s)unknown_role.*15\.3% of the input rows.*10\.0%.*--max-dropped-share"):
        prepare([data], tokenizer, tmp_path / "out", options(tokenizer))
    assert os.listdir(tmp_path) == ["data.jsonl"]
    summary = prepare([data], tokenizer, tmp_path / "out", options(tokenizer, max_dropped_share=0.2))
    assert summary.kept == 50


@pytest.mark.parametrize("lines", [[], BAD])
def test_nothing_left_is_an_error(tmp_path, tokenizer, lines):
    """cases 33, 34"""
    data = write_lines(tmp_path / "data.jsonl", lines)
    with pytest.raises(PrepareError, match="no row is left"):
        prepare([data], tokenizer, tmp_path / "out", options(tokenizer, max_dropped_share=1.0))
    assert not (tmp_path / "out").exists()


def test_strict_mode_stops_at_the_first_bad_row(tmp_path, tokenizer):
    """case 35: whichever stage refuses it"""
    data = write_lines(tmp_path / "data.jsonl", [record("q", "a"), BAD[0], *good(3)])
    with pytest.raises(RowError, match=r"data\.jsonl:2: no_messages"):
        prepare([data], tokenizer, tmp_path / "out", options(tokenizer, strict=True))
    late = write_lines(tmp_path / "late.jsonl", [record("q", "a"), record("q", "a", response_ids=[5], finish="length")])
    with pytest.raises(RowError, match=r"late\.jsonl:2: response_ids_differ"):
        prepare([late], tokenizer, tmp_path / "out", options(tokenizer, strict=True))
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


def test_rows_whose_reply_is_cut_away_are_dropped_and_counted(tmp_path, tokenizer):
    """case 34"""
    long_prompt = record("p" * 600, "r" * 20)
    data = write_lines(tmp_path / "data.jsonl", [*good(99), long_prompt, record("q", "r" * 700)])
    summary = prepare([data], tokenizer, tmp_path / "out", options(tokenizer, max_length=512))
    assert dict(summary.dropped) == {"truncated_away": 1}
    assert (summary.kept, summary.truncated) == (100, 1)
    dataset = PreparedDataset.open(tmp_path / "out")
    assert dataset.lengths.max() == 512
    only = write_lines(tmp_path / "only.jsonl", [long_prompt] * 5)
    with pytest.raises(PrepareError, match=r"(?s)truncated_away.*only\.jsonl:1.*no row is left"):
        prepare([only], tokenizer, tmp_path / "none", options(tokenizer, max_length=512))


def test_a_tail_of_one_supervised_token_has_no_anchor(tmp_path, tokenizer):
    """case 34: two supervised tokens in a row are needed, and are enough"""
    prompt = len(
        tokenizer.apply_chat_template([{"role": "user", "content": "q"}], add_generation_prompt=True).input_ids
    )
    data = write_lines(tmp_path / "data.jsonl", [record("q", "reply")])
    with pytest.raises(PrepareError, match="truncated_away"):
        prepare([data], tokenizer, tmp_path / "one", options(tokenizer, max_length=prompt + 1))
    prepare([data], tokenizer, tmp_path / "two", options(tokenizer, max_length=prompt + 2))
    counts = PreparedDataset.open(tmp_path / "two").counts(10_000)
    assert [column.tolist() for column in counts] == [[prompt + 2], [2], [1]]


def test_manifest_says_what_the_rows_are(tmp_path, tokenizer):
    a = write_lines(tmp_path / "a.jsonl", good(3))
    b = write_lines(tmp_path / "b.jsonl", [record("q1", "a1", "q2", "a2")])
    given = options(tokenizer, turns="last", max_length=99, config_hash="c0ffee")
    prepare([a, b], tokenizer, tmp_path / "out", given)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    unused, end = tokenizer.convert_tokens_to_ids(["<unused0>", "<|im_end|>"])
    assert manifest["target"] == {"config_hash": "c0ffee", **tokenizer_identity(tokenizer)}
    assert manifest["mask_token"] == {"id": unused, "text": "<unused0>", "chosen_by": "reserved", "occurrences": 0}
    assert (manifest["turns"], manifest["max_length"], manifest["stop_ids"]) == ("last", 99, [end])
    assert (manifest["rows"], manifest["counts"]["kept"]) == (4, 4)
    assert manifest["supervised_tokens"] == 3 * len("answer 0") + len("a2") + 4
    assert [source["path"] for source in manifest["sources"]] == [str(a), str(b)]
    assert PreparedDataset.open(tmp_path / "out").source(3) == (str(b), 1)


def test_mask_token_rule_is_applied_to_the_data(tmp_path):
    """case 9"""
    bare = byte_tokenizer(CHATML, SPECIALS[:2])
    data = write_lines(tmp_path / "data.jsonl", good(2))
    with pytest.raises(ValueError, match=r"drafter\.mask_token_id"):
        prepare([data], bare, tmp_path / "out", options(bare))
    letter = bare.convert_tokens_to_ids("w")
    summary = prepare([data], bare, tmp_path / "out", options(bare, mask_token_id=letter))
    assert summary.mask_token.occurrences == 2  # "answer 0", "answer 1"
    assert "occurs 2 times" in summary.warnings[0]
    two = byte_tokenizer(CHATML, [*SPECIALS, "<unused1>"])
    typed = write_lines(tmp_path / "typed.jsonl", [record("what is <unused0>?", "a token")])
    assert prepare([typed], two, tmp_path / "two", options(two)).mask_token.text == "<unused1>"


def test_input_files_are_checked_first(tmp_path, tokenizer):
    data = write_lines(tmp_path / "data.jsonl", good(1))
    for sources, message in (
        ([], "no input files"),
        ([data, data], "named twice"),
        ([tmp_path / "no"], "does not exist"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare(sources, tokenizer, tmp_path / "out", options(tokenizer))


# On disk


def block(ids, spans, line) -> RowBlock:
    return RowBlock.of([(TokenRow(np.array(ids, dtype=np.int32), spans), 0, line)])


def write(folder, rows, batch=100, **more) -> PreparedDataset:
    """A record batch every `batch` rows."""
    with DatasetWriter(folder, **more) as writer:
        for i, (ids, spans) in enumerate(rows):
            writer.add(block(ids, spans, i + 1))
            if (i + 1) % batch == 0:
                writer.checkpoint({})
        writer.commit({"target": {"tokenizer_hash": "t1"}, "sources": [{"path": "x"}]})
    return PreparedDataset.open(folder)


ROWS = [([1, 2, 3], ((1, 3),)), ([4], ()), ([5, 6, 7, 8, 9], ((0, 2), (3, 5))), ([7, 7], ((0, 2),))]


def test_rows_come_back_as_written_over_batches(tmp_path):
    dataset = write(tmp_path / "d", ROWS, batch=3)
    assert dataset.lengths.tolist() == [3, 1, 5, 2]
    for i, (ids, spans) in enumerate(ROWS):
        token_ids, supervised = dataset.row(i)
        assert token_ids.tolist() == ids
        assert np.flatnonzero(supervised).tolist() == [t for start, end in spans for t in range(start, end)]
        assert dataset.spans(i).tolist() == [list(span) for span in spans]
    assert [column.tolist() for column in dataset.counts(100)] == [[3, 1, 5, 2], [2, 0, 4, 2], [1, 0, 2, 1]]
    assert [column.tolist() for column in dataset.counts(4)] == [[3, 1, 4, 2], [2, 0, 3, 2], [1, 0, 1, 1]]
    assert [column.tolist() for column in dataset.counts(1)] == [[1, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0]]
    with pytest.raises(IndexError):
        dataset.row(4)
    packed = next(PackStream(dataset, _Numbers, 0))
    assert sorted(span.document for span in packed.documents) == [0, 2, 3]


class _Numbers:
    pack_tokens, anchor_rate, anchors_per_document, pack_window = 16, 0.5, 8, 8


def test_fingerprint_is_of_the_content(tmp_path):
    first = write(tmp_path / "a", ROWS)
    assert write(tmp_path / "b", ROWS, batch=1).fingerprint == first.fingerprint
    assert write(tmp_path / "c", ROWS[::-1]).fingerprint != first.fingerprint
    other = [(ROWS[0][0], ((2, 3),)), *ROWS[1:]]
    assert write(tmp_path / "d", other).fingerprint != first.fingerprint


def test_reading_does_not_load_the_file(tmp_path):
    dataset = write(tmp_path / "d", [(list(range(1000)), ((0, 1000),))] * 3000)
    before = pa.total_allocated_bytes()
    reread = PreparedDataset.open(tmp_path / "d")
    ids, _ = reread.row(2999)
    assert ids[-1] == 999
    assert not ids.flags.owndata
    assert pa.total_allocated_bytes() - before < 2**16
    assert len(dataset) == 3000


def test_another_target_is_refused_with_both_hashes(tmp_path):
    dataset = write(tmp_path / "d", ROWS)
    dataset.check_target({"tokenizer_hash": "t1", "config_hash": None})
    with pytest.raises(ValueError, match=r"tokenizer_hash t1, but target\.path has t2"):
        dataset.check_target({"tokenizer_hash": "t2"})


def test_identity_sees_vocabulary_and_template_but_not_call_state(tokenizer):
    before = tokenizer_identity(tokenizer)
    tokenizer("some text", truncation=True, max_length=3)
    assert tokenizer_identity(tokenizer) == before
    template = tokenizer_identity(byte_tokenizer(CHATML + " ", SPECIALS))
    assert template["tokenizer_hash"] == before["tokenizer_hash"]
    assert template["chat_template_hash"] != before["chat_template_hash"]
    assert tokenizer_identity(byte_tokenizer(CHATML, [*SPECIALS, "<x>"]))["tokenizer_hash"] != before["tokenizer_hash"]
    named = byte_tokenizer(CHATML, SPECIALS, bos_token="<|im_start|>")  # templates may write the token by its name
    assert tokenizer_identity(named)["tokenizer_hash"] != before["tokenizer_hash"]


def test_half_written_folders_say_so(tmp_path):
    """case 48"""
    with pytest.raises(ValueError, match="does not exist"):
        PreparedDataset.open(tmp_path / "d")
    killed = (
        "import os, sys, numpy as np\n"
        "from draftmill.text.block import RowBlock\n"
        "from draftmill.text.dataset_writer import DatasetWriter\n"
        "from draftmill.text.render import TokenRow\n"
        "writer = DatasetWriter(sys.argv[1])\n"
        "writer.add(RowBlock.of([(TokenRow(np.arange(4, dtype=np.int32), ((0, 4),)), 0, 1)]))\n"
        "os._exit(9)\n"
    )
    assert run_python(killed, str(tmp_path / "d")).returncode == 9
    (tmp_path / "d.partial" / "rows-00001.arrow").write_bytes(b"half a file")
    with pytest.raises(ValueError, match="half-written"):
        PreparedDataset.open(tmp_path / "d")
    assert len(write(tmp_path / "d", ROWS)) == 4  # a later start cleans up
    assert os.listdir(tmp_path) == ["d"]
    assert sorted(os.listdir(tmp_path / "d")) == ["manifest.json", "rows-00000.arrow"]
    (tmp_path / "d" / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"no manifest\.json"):
        PreparedDataset.open(tmp_path / "d")


def test_two_writers_never_share_a_folder(tmp_path):
    """case 48"""
    with DatasetWriter(tmp_path / "d") as first:
        with pytest.raises(ValueError, match="another process is writing"):
            DatasetWriter(tmp_path / "d")
        first.add(block(range(4), ((0, 4),), 1))
        first.commit({})
    assert len(PreparedDataset.open(tmp_path / "d")) == 1


def test_existing_folders_are_kept_unless_told(tmp_path):
    write(tmp_path / "d", ROWS)
    with pytest.raises(ValueError, match="exists already"):
        write(tmp_path / "d", ROWS[:1])
    assert len(write(tmp_path / "d", ROWS[:1], overwrite=True)) == 1
    (tmp_path / "mine").mkdir()
    with pytest.raises(ValueError, match="not a prepared dataset"):
        write(tmp_path / "mine", ROWS, overwrite=True)


def test_damaged_files_are_refused(tmp_path):
    write(tmp_path / "d", ROWS)
    path, manifest = tmp_path / "d" / "rows-00000.arrow", tmp_path / "d" / "manifest.json"
    whole = manifest.read_text()
    manifest.write_text(whole.replace('"rows": 4', '"rows": 5'))
    with pytest.raises(ValueError, match="holds 4 rows, its manifest says 5"):
        PreparedDataset.open(tmp_path / "d")
    manifest.write_text(whole)
    size = path.stat().st_size
    os.truncate(path, size - 1)
    with pytest.raises(ValueError, match=rf"has {size - 1} bytes, its manifest says {size}"):
        PreparedDataset.open(tmp_path / "d")
    path.unlink()
    with pytest.raises(ValueError, match="is missing"):
        PreparedDataset.open(tmp_path / "d")
    manifest.write_text(whole.replace('"schema_version": 2', '"schema_version": 99'))
    with pytest.raises(ValueError, match="schema 99, this version reads 2"):
        PreparedDataset.open(tmp_path / "d")


def test_responses_made_with_other_template_options_are_refused(tmp_path, tokenizer):
    """Case 24: the ids follow another prompt than the one that would be put before them."""
    source = tmp_path / "chats.jsonl"
    source.write_text("\n".join(good(3)) + "\n")
    settings = tmp_path / "chats.jsonl.settings.json"
    settings.write_text(json.dumps({"template_options": {"enable_thinking": False}}))
    with pytest.raises(
        ValueError, match=r"written with template options \{'enable_thinking': False\}, but these are \{\}"
    ):
        prepare([source], tokenizer, tmp_path / "data", options(tokenizer))
    settings.write_text(json.dumps({"template_options": {}}))
    assert prepare([source], tokenizer, tmp_path / "data", options(tokenizer)).kept == 3
