"""`draftmill prepare --explain`: one line as it will be learnt, or why it will not be."""

import json

import pytest
from typer.testing import CliRunner

from draftmill.cli.main import app
from run_helpers import prepared
from text_helpers import record, write_lines


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("explain")
    target, _ = prepared(folder)
    lines = [
        record("ash", "birch elm", "oak", "fir"),
        "",
        json.dumps({"messages": [{"role": "critic", "content": "x"}]}),
    ]
    return target, write_lines(folder / "rows.jsonl", lines), folder


def explain(place, *arguments):
    target, rows, _ = place
    result = CliRunner().invoke(app, ["prepare", str(rows), "--target", str(target), *arguments])
    return result.exit_code, result.output, result.exception


def test_what_is_learnt_is_set_apart(place):
    code, output, _ = explain(place, "--explain", "1")
    assert code == 0
    assert output.count("««") == output.count("»»") == 3  # two replies, and the legend
    assert "««birch elm" in output and "««fir" in output and "««ash" not in output
    assert "row 1 of 1" in output


def test_turns_and_length_are_as_prepare_would_take_them(place):
    _, output, _ = explain(place, "--explain", "1", "--turns", "last")
    assert "««birch" not in output and "««fir" in output


def test_bad_and_blank_lines_say_so(place):
    assert "rows.jsonl:2 is a blank line" in explain(place, "--explain", "2")[1]
    code, output, _ = explain(place, "--explain", "3")
    assert code == 0 and "dropped:" in output and "unknown_role" in output and "'critic'" in output
    assert "has 3 lines, --explain asks for line 9" in str(explain(place, "--explain", "9")[2])


def test_a_dataset_or_a_look_and_not_both(place):
    _, _, folder = place
    assert explain(place)[0] == 2
    assert explain(place, "--explain", "1", "--out", str(folder / "d"))[0] == 2
    assert not (folder / "d").exists()
