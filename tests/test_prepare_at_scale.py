"""Is a prepared dataset the same whatever the workers, kills and restarts, and does it grow without harm?"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from draftmill.text import chunks
from draftmill.text.chunks import MakeRows, in_chunks
from draftmill.text.dataset import PreparedDataset
from draftmill.text.pool import WorkerDied, ordered_map
from draftmill.text.prepare import PrepareOptions, prepare
from draftmill.text.refusals import RowError
from draftmill.text.sources import read_raw
from draftmill.text.summary import PrepareError, Summary
from text_helpers import CHATML, byte_tokenizer, record, write_lines

SPECIALS = ["<|im_start|>", "<|im_end|>", "<unused0>"]
BAD = ["{", '{"messages": []}', record("q", ""), record("q", "a").replace("assistant", "critic")]


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer(CHATML, SPECIALS)


@pytest.fixture
def small_chunks(monkeypatch):
    """A checkpoint every 16 chunks: 128 rows."""
    monkeypatch.setattr(chunks, "CHUNK_ROWS", 8)


def options(tokenizer, **changes) -> PrepareOptions:
    return PrepareOptions(stop_ids={tokenizer.convert_tokens_to_ids("<|im_end|>")}, **changes)


def mixed(count: int, tag: str = "") -> list[str]:
    """Rows of many lengths; every fiftieth is bad, and a blank line follows every ninetieth."""
    lines = []
    for i in range(count):
        lines.append(BAD[i % len(BAD)] if i % 50 == 49 else record(f"question {tag}{i}", "answer " * (i % 37 + 1)))
        if i % 90 == 89:
            lines.append("")
    return lines


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_the_dataset_does_not_depend_on_the_workers(tmp_path, tokenizer, small_chunks):
    data = write_lines(tmp_path / "a.jsonl", mixed(1000))
    more = write_lines(tmp_path / "b.jsonl", mixed(300, "b"))
    accounts, written = [], []
    for workers in (1, 2, 3):
        summary = prepare([data, more], tokenizer, tmp_path / f"out{workers}", options(tokenizer, workers=workers))
        accounts.append(summary.state())
        written.append(contents(tmp_path / f"out{workers}"))
    assert written[0] == written[1] == written[2]
    assert accounts[0] == accounts[1] == accounts[2]
    assert (accounts[0]["rows_in"], accounts[0]["kept"], accounts[0]["raws"]) == (1300, 1274, 1314)
    dataset = PreparedDataset.open(tmp_path / "out3")
    assert [dataset.source(i) for i in (0, 48, 49, 88, 89)] == [
        (str(data), line)
        for line in (1, 49, 51, 90, 92)  # line 50 is bad, 91 blank
    ]


def test_strict_mode_names_the_first_bad_row_of_the_input_with_many_workers(tmp_path, tokenizer, small_chunks):
    lines = mixed(49) + mixed(200) + BAD  # bad rows in several chunks that are worked on at the same time
    data = write_lines(tmp_path / "data.jsonl", lines)
    with pytest.raises(RowError, match=rf"data\.jsonl:{49 + 50}: "):
        prepare([data], tokenizer, tmp_path / "out", options(tokenizer, strict=True, workers=3))
    assert os.listdir(tmp_path) == ["data.jsonl"]


KILLED = """
import sys
from draftmill.text import chunks
from draftmill.text.prepare import PrepareOptions, prepare
from text_helpers import CHATML, byte_tokenizer

chunks.CHUNK_ROWS = 8
if __name__ == "__main__":
    tokenizer = byte_tokenizer(CHATML, ["<|im_start|>", "<|im_end|>", "<unused0>"])
    stop = {tokenizer.convert_tokens_to_ids("<|im_end|>")}
    prepare([sys.argv[1]], tokenizer, sys.argv[2], PrepareOptions(stop_ids=stop, workers=int(sys.argv[3])))
"""


def kill_midway(script: Path, data: Path, out: Path, workers: int, after: int) -> int:
    """SIGKILL once `after` input rows are safe; how many there are then. No worker is left."""
    journal = out.with_name(out.name + ".partial") / "journal.json"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script), str(data), str(out), str(workers)]
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    deadline = time.monotonic() + 60
    while not journal.exists() or json.loads(journal.read_text())["state"]["raws"] < after:
        assert process.poll() is None and time.monotonic() < deadline, "it ended before it could be killed"
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    while _alive(process.pid):
        assert time.monotonic() < deadline, "workers outlive their parent"
        time.sleep(0.05)
    return json.loads(journal.read_text())["state"]["raws"]


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_prepare_goes_on_where_it_was(tmp_path, tokenizer, small_chunks, monkeypatch, workers):
    """Two SIGKILLs, then the same command: finished rows are not rendered again, and the dataset is the same."""
    lines = mixed(6000)
    data = write_lines(tmp_path / "data.jsonl", lines)
    prepare([data], tokenizer, tmp_path / "whole", options(tokenizer, workers=1))
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    kill_midway(script, data, tmp_path / "out", workers, after=128)
    safe = kill_midway(script, data, tmp_path / "out", workers, after=1500)
    assert 1500 <= safe < len(lines)
    partial = tmp_path / "out.partial" / "rows-00000.arrow"
    with partial.open("ab") as torn:
        torn.write(b"half a record batch")

    rendered: list[int] = []
    one = MakeRows.__call__
    monkeypatch.setattr(MakeRows, "__call__", lambda work, chunk: rendered.append(len(chunk.raws)) or one(work, chunk))
    summary = prepare([data], tokenizer, tmp_path / "out", options(tokenizer, workers=1))
    assert sum(rendered) == len(lines) - safe
    assert summary.resumed_at > 0 and (summary.rows_in, summary.kept) == (6000, 5880)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert sorted(os.listdir(tmp_path)) == ["data.jsonl", "killed.py", "out", "whole"]


def test_an_attempt_with_other_settings_or_data_is_not_continued(tmp_path, tokenizer, small_chunks):
    data = write_lines(tmp_path / "data.jsonl", mixed(2000))
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    kill_midway(script, data, tmp_path / "out", 1, after=128)
    with data.open("a") as file:
        file.write(record("new", "row") + "\n")
    summary = prepare([data], tokenizer, tmp_path / "out", options(tokenizer, max_length=99, workers=1))
    assert (summary.resumed_at, summary.rows_in) == (0, 2001)
    assert re.search(r"not continued: .*max_length was 8192, is 99; input files was", summary.warnings[0])


def test_a_killed_worker_is_an_error_that_names_its_rows_and_the_rest_is_kept(tmp_path, tokenizer, small_chunks):
    """As the system kills for memory. The next attempt goes on, and nothing is lost or doubled."""
    data = write_lines(tmp_path / "data.jsonl", mixed(3000))
    prepare([data], tokenizer, tmp_path / "whole", options(tokenizer, workers=1))

    def kill_a_worker(progress) -> None:
        if progress.kept > 1000:
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            spawned = [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
            os.kill(spawned[0], signal.SIGKILL)

    with pytest.raises(WorkerDied, match=r"by SIGKILL .*data\.jsonl:\d+ to .*data\.jsonl:\d+.*give the same command"):
        prepare([data], tokenizer, tmp_path / "out", options(tokenizer, workers=2), kill_a_worker)
    summary = prepare([data], tokenizer, tmp_path / "out", options(tokenizer, workers=2))
    assert summary.resumed_at > 500
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_failure_inside_a_worker_names_the_item():
    with pytest.raises(RuntimeError, match=r"(?s)item -1 cannot be worked on.*math domain error"):
        list(ordered_map(_root, [4.0, 9.0, -1.0, 16.0], 2, lambda item: f"item {item:.0f}"))


def test_results_come_in_order_and_few_items_are_ahead():
    taken = []

    def items():
        for i in range(200):
            assert i - len(taken) <= 8 + 1
            yield i / 1000 if i % 7 == 0 else 0.0

    for result in ordered_map(_wait, items(), 2, str):
        taken.append(result)
    assert taken == [i / 1000 if i % 7 == 0 else 0.0 for i in range(200)]


def _root(number: float) -> float:
    import math

    return math.sqrt(number)


def _wait(seconds: float) -> float:
    time.sleep(seconds / 10)
    return seconds


def test_chunks_are_bounded_by_bytes(tmp_path):
    lines = [record("q", "x" * 300_000)] * 10 + [record("q", "a")] * 600
    data = write_lines(tmp_path / "data.jsonl", lines)
    sizes = [len(chunk.raws) for chunk in in_chunks(read_raw(data, 2**20))]
    assert sum(sizes) == 610
    assert sizes[:3] == [4, 4, 256]


def test_a_summary_survives_json():
    assert Summary.restored(json.loads(json.dumps(Summary().state()))).state() == Summary().state()


# Growing


def test_rows_are_appended_after_the_old_ones(tmp_path, tokenizer):
    first = write_lines(tmp_path / "a.jsonl", mixed(100))
    second = write_lines(tmp_path / "b.jsonl", mixed(60, "b"))
    prepare([first], tokenizer, tmp_path / "grown", options(tokenizer))
    before = PreparedDataset.open(tmp_path / "grown")
    old = contents(tmp_path / "grown")["rows-00000.arrow"]
    summary = prepare([second], tokenizer, tmp_path / "grown", options(tokenizer, append=True))
    assert (summary.rows_in, summary.kept, summary.rows_out) == (60, 59, 59)
    prepare([first, second], tokenizer, tmp_path / "once", options(tokenizer))
    grown, once = PreparedDataset.open(tmp_path / "grown"), PreparedDataset.open(tmp_path / "once")
    assert grown.fingerprint == once.fingerprint
    assert grown.earlier == {len(before): before.fingerprint}
    assert once.earlier == {}
    same = ("counts", "sources", "tokens", "supervised_tokens", "rows", "mask_token")
    assert [grown.manifest[name] for name in same] == [once.manifest[name] for name in same]
    assert [grown.source(i) for i in range(len(grown))] == [once.source(i) for i in range(len(once))]
    assert contents(tmp_path / "grown")["rows-00000.arrow"] == old
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "b.jsonl", "grown", "once"]


def test_what_may_not_be_appended_is_refused_by_name(tmp_path, tokenizer):
    first = write_lines(tmp_path / "a.jsonl", mixed(40))
    second = write_lines(tmp_path / "b.jsonl", mixed(40))
    bad = write_lines(tmp_path / "c.jsonl", BAD)
    with pytest.raises(ValueError, match="does not exist"):
        prepare([second], tokenizer, tmp_path / "d", options(tokenizer, append=True))
    prepare([first], tokenizer, tmp_path / "d", options(tokenizer))
    before = contents(tmp_path / "d")
    for changes, sources, message in (
        ({"max_length": 50}, [second], r"prepared with max_length 8192, but these rows have 50"),
        ({"turns": "last"}, [second], r"prepared with turns all"),
        ({"mask_token_id": 5}, [second], r"has mask token 258, but mask_token_id is 5"),
        ({}, [second, first], r"holds the rows of .*a\.jsonl already"),
        ({"overwrite": True}, [second], "choose one"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare(sources, tokenizer, tmp_path / "d", options(tokenizer, append=True, **changes))
    with pytest.raises(PrepareError, match="no row is left"):
        prepare([bad], tokenizer, tmp_path / "d", options(tokenizer, append=True))
    assert contents(tmp_path / "d") == before


def test_an_append_that_was_killed_goes_on(tmp_path, tokenizer, small_chunks):
    first = write_lines(tmp_path / "a.jsonl", mixed(500))
    second = write_lines(tmp_path / "b.jsonl", mixed(1000, "b"))
    for name in ("out", "whole"):
        prepare([first], tokenizer, tmp_path / name, options(tokenizer))

    class Killed(BaseException):
        pass

    def stop(progress) -> None:
        if progress.kept > 600:
            raise Killed

    append = options(tokenizer, append=True)
    prepare([second], tokenizer, tmp_path / "whole", append)
    with pytest.raises(Killed):
        prepare([second], tokenizer, tmp_path / "out", append, stop)
    assert len(PreparedDataset.open(tmp_path / "out")) == 490  # whole all the time
    assert prepare([second], tokenizer, tmp_path / "out", append).resumed_at > 400
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_an_append_is_not_continued_on_another_dataset(tmp_path, tokenizer, small_chunks):
    first = write_lines(tmp_path / "a.jsonl", mixed(100))
    other = write_lines(tmp_path / "other.jsonl", mixed(100, "other"))
    second = write_lines(tmp_path / "b.jsonl", mixed(500, "b"))
    for source, name in ((first, "out"), (other, "other")):
        prepare([source], tokenizer, tmp_path / name, options(tokenizer))

    class Killed(BaseException):
        pass

    def stop(progress) -> None:
        if progress.kept > 300:
            raise Killed

    append = options(tokenizer, append=True)
    with pytest.raises(Killed):
        prepare([second], tokenizer, tmp_path / "out", append, stop)
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "other").rename(tmp_path / "out")
    summary = prepare([second], tokenizer, tmp_path / "out", append)
    assert summary.resumed_at == 0 and "dataset was" in summary.warnings[0]
    prepare([second], tokenizer, tmp_path / "second", options(tokenizer))
    written, alone = PreparedDataset.open(tmp_path / "out"), PreparedDataset.open(tmp_path / "second")
    assert [written.row(98 + i)[0].tolist() for i in range(490)] == [alone.row(i)[0].tolist() for i in range(490)]
