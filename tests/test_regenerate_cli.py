"""What `draftmill regenerate` refuses before a model is loaded, what it says, and its exit codes."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from completion_server import CompletionServer
from draftmill.cli.main import main
from draftmill.target import server as server_module
from draftmill.target.completions import Retry
from draftmill.target.server import Server
from tiny_models import save_tiny, tiny_llama

ROWS = 40
SHORT = ("--max-new-tokens", "12")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("target"), tiny_llama())


@pytest.fixture
def prompts(tmp_path) -> Path:
    path = tmp_path / "p.jsonl"
    rows = [{"messages": [{"role": "user", "content": f"hello {number}"}]} for number in range(ROWS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["regenerate", *map(str, arguments)])
    return int(caught.value.code or 0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["p.jsonl", "--top-p", "0"], "top_p is 0.0: use a value above 0, up to 1"),
        (["p.jsonl", "--top-p", "1.5"], "top_p is 1.5"),
        (["p.jsonl", "--top-p", "nan"], "top_p is nan"),
        (["p.jsonl", "--temperature", "-1"], "--temperature"),
        (["p.jsonl", "--temperature", "inf"], "temperature is inf: use 0 for greedy"),
        (["p.jsonl", "--template-option", "thinking"], "write KEY=VALUE"),
        (["p.jsonl", "--template-option", "enable_thinking=false"], "enable_thinking is not read by the target's chat"),
        (["p.jsonl", "--template-option", "messages=[]"], "messages is reserved"),
        ([], "no prompts: name inputs, or give --self-prompt"),
        (["missing.jsonl"], "missing.jsonl does not exist"),
        (["p.jsonl", "--self-prompt", "3"], "not both"),
        (["--self-prompt", "0"], "--self-prompt"),
        (["p.jsonl", "--server", "localhost:8000"], "write it as http://HOST:PORT/v1"),
        (["p.jsonl", "--server", "http://host:port/v1"], "Invalid port: 'port'"),
        (["p.jsonl", "--server", "http://"], "write it as http://HOST:PORT/v1"),
        (["p.jsonl", "--server", "http://h/v1", "--api-key", "gehe\u00efm"], "api_key has characters"),
        (["p.jsonl", "--server", "http://h/v1", "--api-key", "secret\n"], "api_key has characters"),
        (["p.jsonl", "--model", "m"], "--model needs --server"),
        (["p.jsonl", "--concurrency", "4"], "--concurrency needs --server"),
        (["p.jsonl", "--max-failed-share", "0.5"], "--max-failed-share needs --server"),
        (["p.jsonl", "--server", "http://h/v1", "--batch-size", "4"], "--batch-size is the server's own matter"),
        (["p.jsonl", "--server", "http://h/v1", "--dtype", "float32"], "--dtype is the server's own matter"),
        (["p.jsonl", "--server", "http://h/v1", "--device", "cpu"], "--device is the server's own matter"),
        (["p.jsonl", "--server", "http://h/v1", "--attempts", "0"], "--attempts"),
    ],
)
def test_bad_usage_ends_with_2_before_a_model_is_loaded(
    arguments, said, folder, prompts, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "draftmill.target.model", None)  # importing it would fail
    monkeypatch.setattr(Server, "connect", lambda *_: pytest.fail("a server was asked"))
    monkeypatch.chdir(tmp_path)
    assert run(*arguments, "--target", folder, "--out", "out.jsonl") == 2
    told = " ".join(capsys.readouterr().err.split())
    assert said in told
    assert "secret" not in told and "gehe" not in told
    assert not (tmp_path / "out.jsonl").exists()


def test_a_key_in_the_environment_is_no_usage_of_a_server(folder, prompts, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    out = tmp_path / "out.jsonl"
    command = [prompts, "--target", folder, "--out", out, *SHORT, "--dtype", "float32"]
    assert run(*command, "--device", "cpu") == 0
    with CompletionServer() as server:
        server.api_key = "secret"
        served = [*command[:3], "--out", tmp_path / "served.jsonl", *SHORT, "--server", server.url]
        assert run(*served) == 0


def test_the_account_and_exit_codes_of_a_served_call(folder, prompts, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(server_module.ServerSettings, "__init__", _quick(server_module.ServerSettings.__init__))
    out = tmp_path / "out.jsonl"
    with CompletionServer(fault=lambda prompt, attempt: "500" if attempt == 0 else None) as server:
        command = [prompts, "--target", folder, "--out", out, *SHORT, "--server", server.url]
        server.fault = lambda prompt, attempt: "400" if sum(prompt) % 7 == 0 else "500" if attempt == 0 else None
        assert run(*command, "--max-failed-share", "1") == 0
        said = capsys.readouterr()
        refused = sum(sum(prompt) % 7 == 0 for prompt in server.attempts)
        assert f"{ROWS - refused} rows written to {out}, 0 were there already" in said.out
        assert f"{refused} refused: refused_by_server" in said.out
        assert f"failed attempts at the server: HTTP 500 {ROWS - refused}" in said.out
        assert f"row {ROWS}/{ROWS}" in said.err

        server.fault = lambda _prompt, _attempt: "500"
        out.unlink()
        assert run(*command) == 3
        said = capsys.readouterr()
        assert "stopped early: the server answers no more" in said.err
        assert f"{ROWS} of {ROWS} rows are left: the same command goes on with them" in said.err


def _quick(initialise):
    """Settings as given, but with short waits between attempts."""

    def wrapped(self, *arguments, **named):
        initialise(self, *arguments, **named)
        object.__setattr__(self, "retry", Retry(attempts=2, first_wait_s=0.01))

    return wrapped


def test_ctrl_c_keeps_what_is_done(folder, prompts, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    with CompletionServer(delay_s=0.02) as server:

        def interrupt(_prompt: list[int], _attempt: int) -> None:
            if len(server.requests) == 20:
                os.kill(os.getpid(), signal.SIGINT)

        server.fault = interrupt
        command = [prompts, "--target", folder, "--out", out, *SHORT, "--server", server.url, "--concurrency", "2"]
        assert run(*command) == 3
        assert f"interrupted: {out} keeps what is done" in capsys.readouterr().err
        done = len(out.read_text().splitlines())
        assert 10 < done < ROWS
        assert run(*command) == 0
    assert len({json.loads(line)["source"] for line in out.read_text().splitlines()}) == ROWS
    assert len(out.read_text().splitlines()) == ROWS


def test_prompts_of_the_targets_own_through_a_server(folder, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    letters = iter(range(10**6))

    def reply(prompt: list[int]) -> list[int]:
        number = next(letters)
        return [68 + number % 26, 68 + number // 26, 1]

    with CompletionServer(reply=reply) as server:
        assert run("--self-prompt", "12", "--target", folder, "--out", out, *SHORT, "--server", server.url) == 0
    said = capsys.readouterr().out
    assert f"12 prompts written to {out}.prompts.jsonl, 0 were there already" in said
    assert f"12 rows written to {out}, 0 were there already" in said
    asked = {row["messages"][0]["content"] for row in map(json.loads, out.read_text().splitlines())}
    assert len(asked) == 12
