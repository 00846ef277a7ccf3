"""`prepare --explain`: what is shown is what training would use."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from chat_templates import target_of
from draftmill.cli.main import main
from draftmill.text.explain import MARKERS, explain_row
from draftmill.text.render import Renderer
from text_helpers import record, write_lines

OPEN, CLOSE = MARKERS


def renderer(name: str = "qwen3", **options) -> Renderer:
    tokenizer, stops = target_of(name)
    return Renderer(tokenizer, options, stop_ids=stops)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    thinking = [
        {"role": "user", "content": "q1"},
        {"role": "assistant", "content": "a1", "reasoning_content": "t1"},
        {"role": "user", "content": "q2"},
        {"role": "assistant", "content": "a2"},
    ]
    lines = [
        record("Hé \x1b[31mthere\x07\x9b", "Fine. \x1b[2J"),
        "",
        record("q", "a", finish="eos"),
        json.dumps({"messages": thinking}),
        json.dumps({"messages": thinking[:2], "tools": 3}),
    ]
    return write_lines(tmp_path / "data.jsonl", lines)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    tokenizer, _ = target_of("qwen3")
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.save_pretrained(tmp_path / "target")
    shape = {"model_type": "qwen3", "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    shape |= {"num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
    (tmp_path / "target" / "config.json").write_text(json.dumps(shape))
    return tmp_path / "target"


def test_supervised_text_stands_between_the_markers(data):
    shown = explain_row(data, 1, renderer(), None)
    head, text = shown.split("\n", 1)
    assert head.startswith(f"{data}:1: ")
    assert head.endswith("supervised")
    assert text == (
        "<|im_start|>user\nHé \u241b[31mthere\u2407\ufffd<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        f"{OPEN}Fine. \u241b[2J<|im_end|>{CLOSE}"
    )


def test_turns_that_are_rows_of_their_own_are_all_shown(data):
    shown = explain_row(data, 4, renderer(), None)
    assert shown.count(OPEN) == 2
    assert f"{OPEN}<think>\nt1\n</think>\n\na1<|im_end|>{CLOSE}" in shown
    assert "row 2 of 2" in shown


def test_a_dropped_row_says_its_reason(data):
    assert explain_row(data, 3, renderer(), None).startswith(f"dropped: {data}:3: unknown_finish")
    assert "bad_tools" in explain_row(data, 5, renderer(), None)
    thinks = renderer(enable_thinking=False)
    assert "dropped" in explain_row(data, 4, thinks, None)
    assert "prompt_not_extended" in explain_row(data, 4, thinks, None)
    cut = explain_row(data, 1, renderer(), 20)
    assert "cut after 20 tokens" in cut
    assert cut.splitlines()[-1].startswith("dropped: ")
    assert "truncated_away" in cut


def test_rows_that_are_not_there(data):
    with pytest.raises(ValueError, match="has 5 lines, there is no row 6"):
        explain_row(data, 6, renderer(), None)
    with pytest.raises(ValueError, match=r"data\.jsonl:2 is blank"):
        explain_row(data, 2, renderer(), None)


def run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return int(caught.value.code or 0)


def test_the_command_writes_nothing(data, target, capsys, tmp_path):
    assert run("prepare", data, "--target", target, "--explain", "1") == 0
    assert f"{OPEN}Fine." in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.jsonl", "target"]
    assert run("prepare", data, "--target", target) == 2
    assert "--out" in capsys.readouterr().err
    assert run("prepare", data, data, "--target", target, "--explain", "1") == 2
    assert run("prepare", tmp_path / "none.jsonl", "--target", target, "--explain", "1") == 2
    assert "does not exist" in capsys.readouterr().err
    assert run("prepare", "hub:none", "--target", target, "--explain", "1") == 2
    assert run("prepare", data, "--target", target, "--explain", "9") != 0
    assert "there is no row 9" in capsys.readouterr().err


def test_a_terminal_gets_colour(data, target):
    """In a real pseudo-terminal; the row's own escapes do not reach it."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "draftmill.cli.main", "prepare", str(data), "--target", str(target)]
    code = "import sys; from draftmill.cli.main import main; main(sys.argv[1:])"
    command[1:3] = ["-c", code]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm"}
    process = subprocess.Popen([*command, "--explain", "1"], stdout=theirs, stderr=subprocess.PIPE, env=environment)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 2**16):
            shown += part
    except OSError:  # a terminal without a writer
        pass
    os.close(ours)
    assert process.wait(60) == 0, process.stderr.read()
    assert b"\x1b[1;32mFine. \xe2\x90\x9b[2J<|im_end|>\x1b[0m" in shown
    assert shown.count(b"\x1b") == 2
