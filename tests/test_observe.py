"""What a run writes about itself: rows that are always valid JSON, and a display that never stops the run."""

from __future__ import annotations

import io
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftmill.observe.console import Progress
from draftmill.observe.metrics import EventLog, JsonLines, MetricsLog, plain_row, read_rows


def steps(path: Path) -> list[int]:
    return [row["step"] for row in read_rows(path)]


def strict(line: str) -> object:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


# ---- Metrics ---------------------------------------------------------------------------------------------------


def test_a_row_is_on_disk_when_the_call_returns(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.row(1, loss=2.5, accuracy=np.float32(0.5), counts=np.array([1, 2]), path=tmp_path)
    (row,) = read_rows(log.path)
    assert row == {"step": 1, "loss": 2.5, "accuracy": 0.5, "counts": [1, 2], "path": str(tmp_path)}


def test_nonfinite_values_become_null_and_are_named() -> None:
    row = plain_row({"loss": math.nan, "slots": [0.5, -math.inf], "lr": 1e-3, "deep": {"x": np.float32("inf")}})
    assert row == {
        "loss": None,
        "slots": [0.5, None],
        "lr": 1e-3,
        "deep": {"x": None},
        "nonfinite": ["loss", "slots.1", "deep.x"],
    }


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.floats(width=32).map(np.float32)


@given(row=st.dictionaries(st.text(), VALUES | st.lists(VALUES) | st.dictionaries(st.text(), VALUES)))
def test_any_row_is_valid_json(row: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.unlink(missing_ok=True)
    with JsonLines(path) as log:
        log.write(row)
    (line,) = path.read_bytes().decode().removesuffix("\n").split("\n")
    strict(line)


def test_resume_drops_the_rows_past_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        for step in range(1, 8):
            log.row(step, loss=1.0)
    with MetricsLog(path) as log:
        log.truncate_after(4)
        log.row(5, loss=2.0)
    assert steps(path) == [1, 2, 3, 4, 5]


def test_truncating_at_the_ends(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.truncate_after(0)
        log.row(1)
        log.truncate_after(9)
        assert steps(log.path) == [1]
        log.truncate_after(0)
        assert steps(log.path) == []


@pytest.mark.parametrize("torn", [b'{"step": 3, "lo', b"x" * 200_000])
def test_a_half_line_of_a_killed_writer_is_cut(torn: bytes, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + torn)
    assert steps(path) == [1, 2]
    with MetricsLog(path) as log:
        log.row(3)
    assert steps(path) == [1, 2, 3]


def test_a_damaged_row_is_dropped_with_what_follows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\0\0\0\n{"step": 2}\n')
    with MetricsLog(path) as log:
        log.truncate_after(2)
    assert steps(path) == [1]


def test_a_failing_write_is_reported_once_and_leaves_no_half_line(tmp_path: Path) -> None:
    reports: list[str] = []
    log = MetricsLog(tmp_path / "metrics.jsonl", on_failure=reports.append)
    log.row(1)

    class FullDisk:
        """Takes a few bytes, then none: as a file does on a disk that fills up."""

        def __init__(self, file: io.FileIO) -> None:
            self.file, self.full = file, False

        def fileno(self) -> int:
            return self.file.fileno()

        def write(self, data: bytes) -> int:
            if self.full:
                raise OSError(28, "No space left on device")
            self.full = True
            return self.file.write(data[:5])

    real = log._file
    for step in (2, 3):
        log._file = FullDisk(real)  # type: ignore[assignment]
        log.row(step)
    log._file = real
    log.row(4)
    assert steps(log.path) == [1, 4]
    assert len(reports) == 1
    assert "No space left" in reports[0]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_writing_to_a_full_device_does_not_raise() -> None:
    reports: list[str] = []
    log = EventLog("/dev/full", on_failure=reports.append)
    log.event("started")
    log.event("ended")
    assert len(reports) == 1


def test_events_have_time_and_name(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        log.event("checkpoint", step=5)
    (row,) = read_rows(log.path)
    assert row["time"].endswith("Z")
    assert (row["event"], row["step"]) == ("checkpoint", 5)


def test_writing_after_close_does_not_raise(tmp_path: Path) -> None:
    reports: list[str] = []
    log = EventLog(tmp_path / "events.jsonl", on_failure=reports.append)
    log.close()
    log.event("late")
    assert len(reports) == 1


# ---- Console ---------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_heartbeat_lines_where_there_is_no_terminal() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress(100, start=10, stream=stream, heartbeat_seconds=5, clock=clock) as progress:
        for step in range(11, 31):
            clock.now += 1
            progress.update(step, tokens=(step - 10) * 1000, loss=3.14159, accuracy=0.25)
        progress.note("checkpoint step-30")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "step 11/100  loss 3.142  accuracy 0.25  1,000 tokens/s  ETA 1:29"
    assert lines[1].startswith("step 16/100 ")
    assert [line for line in lines if "checkpoint" in line] == ["checkpoint step-30"]
    assert lines[-1].startswith("step 30/100 ")  # the last state is always told
    assert len(lines) == 6


def test_rates_forget_the_slow_start() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress(1000, stream=stream, clock=clock) as progress:
        clock.now = 600.0  # a first step that compiled for ten minutes
        progress.update(1, tokens=10)
        for step in range(2, 102):
            clock.now += 1
            progress.update(step, tokens=step * 5)
    assert stream.getvalue().splitlines()[-1] == "step 101/1000  5.0 tokens/s  ETA 14:59"


def test_one_live_line_on_a_terminal() -> None:
    stream, clock = Terminal(), Clock()
    with Progress(2, stream=stream, clock=clock) as progress:
        clock.now = 1.0
        progress.update(1, loss=1.5)
        progress.note("a note")
        clock.now = 2.0
        progress.update(2, loss=float("nan"))
    text = stream.getvalue()
    assert "step 1/2" in text
    assert "a note" in text
    assert "step 2/2  loss nan" in text


def test_a_broken_console_does_not_stop_the_run() -> None:
    class Broken(io.StringIO):
        writes = 0

        def write(self, text: str) -> int:
            Broken.writes += 1
            raise BrokenPipeError

    with Progress(10, stream=Broken(), heartbeat_seconds=0) as progress:
        for step in range(10):
            progress.update(step)
        progress.note("still here")
    assert Broken.writes == 1


def test_a_closed_console_does_not_stop_the_run() -> None:
    stream = io.StringIO()
    with Progress(1, stream=stream) as progress:
        stream.close()
        progress.update(1)
