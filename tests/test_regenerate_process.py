"""`draftmill regenerate` as a process: killed, or asking a server that dies, it loses and repeats no prompt."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from completion_server import reply_ids
from draftmill.cli.main import main
from draftmill.target.answers import Sampling
from draftmill.target.embedded import Embedded
from draftmill.target.model import Target
from draftmill.target.regenerate import regenerate
from tiny_models import save_tiny, tiny_llama

TESTS = Path(__file__).parent
ROWS = 60
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("target"), tiny_llama())


@pytest.fixture
def prompts(tmp_path) -> Path:
    path = tmp_path / "p.jsonl"
    texts = [f"{'x' * (number % 11)}{number}" for number in range(ROWS)]
    path.write_text("".join(json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n" for text in texts))
    return path


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(TESTS.parent / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "draftmill.cli", "regenerate", *map(str, arguments)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def go_on(*arguments: str | Path) -> int:
    """The same command, in this process."""
    with pytest.raises(SystemExit) as caught:
        main(["regenerate", *map(str, arguments)])
    return int(caught.value.code or 0)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


def wait_for_lines(path: Path, count: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"{path} never reached {count} lines"
        time.sleep(0.005)


@contextmanager
def served(tmp_path: Path, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """(process, url) of a server that may die."""
    file = tmp_path / "url"
    file.unlink(missing_ok=True)
    process = subprocess.Popen([sys.executable, str(TESTS / "completion_server.py"), str(file), *options])
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not file.exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        yield process, file.read_text()
    finally:
        process.kill()
        process.wait()


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_killed_call_and_a_dying_server_lose_and_repeat_no_prompt(folder, prompts, tmp_path, capsys):
    """Killed at a third; the server dies at two thirds; the third call ends it. All with the same command."""
    out = tmp_path / "out.jsonl"

    def command(url: str) -> list[str | Path]:
        sampling = ["--max-new-tokens", "12", "--temperature", "0.5"]
        return [
            prompts,
            "--target",
            folder,
            "--out",
            out,
            "--server",
            url,
            "--attempts",
            "2",
            "--concurrency",
            "4",
            *sampling,
        ]

    with served(tmp_path, "--delay", "0.1") as (_, url):
        call = start(*command(url))
        wait_for_lines(out, ROWS // 3, call)
        os.kill(call.pid, signal.SIGKILL)
        assert finish(call)[0] == -signal.SIGKILL
        first = len(rows_of(out)) if out.read_bytes().endswith(b"\n") else None
    with served(tmp_path, "--die-after", str(ROWS // 3)) as (server, url):
        code, said, err = finish(start(*command(url)))
        assert server.wait(timeout=PATIENCE_S) == 9
    second = len(rows_of(out))
    assert code == 3, said + err
    assert "the server answers no more" in err
    assert f"{ROWS - second} of {ROWS} rows are left: the same command goes on with them" in err
    assert "failed attempts at the server: connection" in said
    assert first is None or second - first <= ROWS // 3
    assert ROWS // 3 < second < ROWS
    with served(tmp_path) as (_, url):
        assert go_on(*command(url)) == 0
    said = capsys.readouterr().out
    assert f"{ROWS - second} rows written to {out}, {second} were there already" in said
    rows = rows_of(out)
    assert Counter(row["source"] for row in rows) == Counter(f"p.jsonl:{line}" for line in range(1, ROWS + 1))
    tokenizer = Target.load(folder, "float32", "cpu", (1,)).tokenizer
    for row in rows:
        ids = tokenizer.apply_chat_template(row["messages"][:-1], add_generation_prompt=True)["input_ids"]
        assert row["response_ids"] == reply_ids(ids)


def test_a_killed_embedded_call_ends_as_a_straight_one(folder, prompts, tmp_path):
    out, straight = tmp_path / "out.jsonl", tmp_path / "straight.jsonl"
    sampling = ["--max-new-tokens", "48", "--temperature", "1.0", "--seed", "4"]
    placing = ["--dtype", "float32", "--device", "cpu", "--batch-size", "4"]
    command = [prompts, "--target", folder, "--out", out, *sampling, *placing]
    call = start(*command)
    wait_for_lines(out, 12, call)
    os.kill(call.pid, signal.SIGKILL)
    assert finish(call)[0] == -signal.SIGKILL
    assert 12 <= out.read_bytes().count(b"\n") < ROWS
    assert go_on(*command) == 0
    target = Target.load(folder, "float32", "cpu", (1,))
    regenerate(Embedded(target, 4), [prompts], straight, Sampling(48, temperature=1.0, seed=4))
    assert sorted(out.read_text().splitlines()) == sorted(straight.read_text().splitlines())
