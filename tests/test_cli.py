"""The commands from outside: help that teaches, exit codes, and refusals before anything heavy is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import draftmill
from draftmill.cli.main import main
from draftmill.config.load import ConfigError, load_config

SOURCE = Path(__file__).parent.parent / "src"
COMMANDS = ["prepare", "regenerate", "train", "evaluate", "export", "init", "doctor"]
TARGET = {
    "num_hidden_layers": 12,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config file whose target is nothing but a config.json."""
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(TARGET))
    path = tmp_path / "config.yaml"
    sections = [f"target: {{path: {target}}}", f"data: {{path: {tmp_path}/data}}"]
    sections += ["train: {steps: 3}", f"run: {{dir: {tmp_path}/run}}"]
    path.write_text("\n".join(sections))
    return path


def run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return int(caught.value.code or 0)


def heavy_imports(*arguments: str | Path) -> tuple[int, str]:
    """Exit code, and which heavy packages the command imported, in a fresh process."""
    code = (
        "import sys; from draftmill.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: print('HEAVY', {'torch', 'transformers', 'pyarrow'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    return done.returncode, done.stdout.rpartition("HEAVY ")[2].strip()


# ---- Help ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["doctor", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    assert heavy_imports(*arguments) == (0, "set()")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command, "--help") == 0
    text = capsys.readouterr().out
    assert f"\n    draftmill {command}" in text  # on a line of its own, not flowed into a paragraph


def test_the_program_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    text = capsys.readouterr().out
    assert all(f"\n  {command} " in text for command in COMMANDS)
    assert run("--version") == 0
    assert capsys.readouterr().out == f"draftmill {draftmill.__version__}\n"


# ---- Bad usage and settings end with 2, before any model is loaded ---------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.loss_decay_gama=7"], "nearest setting is train.loss.gamma"),  # case 11: misspelt
        (["train.num_anchors=512"], "nearest setting is data.anchor_rate"),  # case 11: retired
        (["train.lr=fast"], "train.lr = fast: should be a number"),
        (["target.feature_layers=[1, 12]"], "12 layers have ids 0 to 11"),  # against the target's config.json
        (["drafter.block_size=12"], "set train.loss.gamma"),
        (["drafter.rope_scaling={rope_type: foo}"], "rope_type is 'foo'"),  # case 22
        (["target.path=/nowhere"], "target.path = /nowhere"),
    ],
)
def test_bad_settings(
    overrides: list[str], said: str, config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "draftmill.run.training", None)  # importing it would fail
    assert run("train", config, *overrides) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error
    assert "Traceback" not in error


def test_bad_settings_import_nothing_heavy(config: Path) -> None:
    assert heavy_imports("train", config, "train.loss_decay_gama=7") == (2, "set()")
    assert heavy_imports("train", config, "target.feature_layers=99") == (2, "set()")


@pytest.mark.parametrize(
    "arguments",
    [
        ["train"],
        ["train", "missing.yaml"],
        ["train", "{config}", "--sideways"],
        ["triumph"],
        ["prepare", "{config}"],
        ["prepare", "{config}", "--target", "{target}", "--out", "d", "--turns", "some"],
        ["prepare", "{config}", "--target", "{target}", "--out", "d", "--template-option", "thinking"],
        ["regenerate", "{config}", "--target", "{config}", "--out", "o"],
        ["evaluate", "{target}", "--target", "{target}", "--prompts", "missing.jsonl"],
        ["evaluate", "{target}", "--target", "{target}", "--prompts", "{config}", "--json", "nowhere/x.json"],
        ["evaluate", "{target}", "--target", "{target}", "--prompts", "{config}", "--device", "gpu"],
        ["export", "{target}", "--out", "{target}"],
        ["export", "{target}", "--out", "new", "--verify"],
        ["export", "{target}", "--out", "new", "--prompts", "{config}"],
        ["init", "--target", "{target}", "--out", "{config}"],
    ],
)
def test_bad_usage(arguments: list[str], config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = {"config": str(config), "target": str(config.parent / "target")}
    assert run(*(argument.format(**places) for argument in arguments)) == 2
    assert "Usage: draftmill" in capsys.readouterr().err


# ---- What the work's end means ---------------------------------------------------------------------------------


def stub_training(monkeypatch: pytest.MonkeyPatch, end: Any) -> list[tuple[Any, bool]]:
    """Replaces the run by `end`: a reason to return, or an error to raise."""
    calls: list[tuple[Any, bool]] = []

    def run_training(config: Any, resume: bool = False) -> Any:
        calls.append((config, resume))
        if isinstance(end, Exception):
            raise end
        return SimpleNamespace(reason=end, step=2, steps=3, checkpoint="run/checkpoints/step-2")

    monkeypatch.setitem(sys.modules, "draftmill.run.training", SimpleNamespace(run_training=run_training))
    monkeypatch.setitem(sys.modules, "draftmill.train.loop", SimpleNamespace(FINISHED="finished"))
    return calls


def test_a_finished_run(config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    calls = stub_training(monkeypatch, "finished")
    assert run("train", config, "train.lr=3e-4", "drafter.layers=2") == 0
    ((used, resume),) = calls
    assert (used.train.lr, used.drafter.layers, resume) == (3e-4, 2, False)
    out = capsys.readouterr().out
    assert "  lr: 0.0003\n" in out  # case 11: the resolved settings are shown
    assert "finished at step 2 of 3" in out


def test_a_run_stopped_early(config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    calls = stub_training(monkeypatch, "SIGTERM")
    assert run("train", config, "drafter.rope_scaling={rope_type: default}", "--resume") == 3
    assert calls[0][1] is True
    out = capsys.readouterr().out
    assert f"go on with: draftmill train {config} 'drafter.rope_scaling={{rope_type: default}}' --resume" in out


def test_a_users_mistake_is_one_message(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub_training(monkeypatch, ConfigError("run.dir is taken"))
    assert run("train", config) == 2
    assert capsys.readouterr().err == "error: run.dir is taken\n"
    with pytest.raises(ConfigError):  # the traceback is Python's own
        main(["train", str(config), "--traceback"])
    stub_training(monkeypatch, FileNotFoundError(2, "No such file", "data/manifest.json"))
    assert run("train", config) == 1
    assert capsys.readouterr().err == "error: [Errno 2] No such file: 'data/manifest.json'\n"


def test_work_that_cannot_be_done_ends_with_1(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = config.parent / "target"
    empty = config.parent / "empty"
    empty.mkdir()
    assert run("evaluate", empty, "--target", target, "--prompts", config) == 1
    assert capsys.readouterr().err == f"error: {empty} is no run folder, no checkpoint and no exported drafter\n"


def test_unexpected_errors_keep_their_traceback(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (RuntimeError("bug"), KeyError("bug"), ValueError("raised by a library")):
        stub_training(monkeypatch, error)
        with pytest.raises(type(error)):
            main(["train", str(config)])


def test_dry_run_checks_and_leaves(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert heavy_imports("train", config, "--dry-run") == (0, "set()")
    assert run("train", config, "--dry-run", "target.feature_layers=[1, 12]") == 2


# ---- init and doctor -------------------------------------------------------------------------------------------


def test_init_writes_a_config_that_trains(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "config.yaml"
    assert heavy_imports("init", "--target", tmp_path / "target", "--out", out) == (0, "set()")
    assert load_config(out).target.path == tmp_path / "target"
    assert run("train", out, "--dry-run") == 0


def test_init_says_what_does_not_fit_the_target(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "target" / "config.json").write_text(json.dumps(TARGET | {"num_hidden_layers": 6}))
    out = tmp_path / "new.yaml"
    assert run("init", "--target", tmp_path / "target", "--out", out) == 2
    assert "target.feature_layers = 5" in capsys.readouterr().err
    assert out.exists()  # to be mended


def test_doctor_reports_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", "--json") == 0
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert {"python", "torch", "transformers", "threads", "memory", "shared memory", "disk"} <= set(checks)
    assert all(check["remedy"] for check in checks.values() if check["status"] != "ok")


def test_doctor_names_what_is_wrong_with_a_target(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (config.parent / "target" / "config.json").write_text(json.dumps(TARGET | {"vocab_size": None}))
    assert run("doctor", "--target", config.parent / "target") == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("failure")]
    assert len(lines) == 1
    assert "no vocab_size" in lines[0]
