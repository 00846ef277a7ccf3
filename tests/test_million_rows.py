"""A million conversations: bounded memory, a SIGKILL half-way, and every row right. Some twenty minutes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from draftmill.text.dataset import PreparedDataset
from test_prepare_at_scale import KILLED, SPECIALS, mixed
from text_helpers import CHATML, byte_tokenizer, write_lines

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "data.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("data_benchmark", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.soak
def test_a_million_rows(tmp_path, monkeypatch, benchmark):
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    script = tmp_path / "prepare.py"
    script.write_text(KILLED.replace("chunks.CHUNK_ROWS = 8", ""))
    peaks = {}
    for count in (100_000, 1_000_000):
        data = write_lines(tmp_path / f"{count}.jsonl", mixed(count))
        out = tmp_path / f"out-{count}"
        journal = tmp_path / f"out-{count}.partial" / "journal.json"
        command = [sys.executable, str(script), str(data), str(out), "2"]
        killed = benchmark.measured(command, kill_after=count // 2, journal=journal)
        safe = json.loads(journal.read_text())["state"]["raws"]
        finished = benchmark.measured(command)
        print(count, "killed:", killed, "safe:", safe, "finished:", finished)
        assert count // 2 <= safe < count
        assert finished["cpu_s"] < 1.5 * killed["cpu_s"]  # the second half alone was rendered
        peaks[count] = max(killed["peak_mb"], finished["peak_mb"])

        dataset = PreparedDataset.open(out)
        counts = dataset.manifest["counts"]
        assert (counts["rows_in"], counts["kept"]) == (count, count - count // 50)
        assert sum(counts["dropped"].values()) == count // 50
        lines = data.read_text().splitlines()
        good = [i + 1 for i, line in enumerate(lines) if "question" in line]
        assert len(dataset) == len(good)
        tokenizer = byte_tokenizer(CHATML, SPECIALS)
        for row in np.random.default_rng(0).integers(0, len(good), 3000).tolist():
            assert dataset.source(row) == (str(data), good[row])
            messages = json.loads(lines[good[row] - 1])["messages"]
            whole = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
            assert dataset.row(row)[0].tolist() == whole[:-1]  # but for the newline that the template adds
    assert peaks[1_000_000] < 1.1 * peaks[100_000]
