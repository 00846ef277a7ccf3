"""Does every prompt get exactly one answer by the target, whatever kills or restarts the run?"""

from __future__ import annotations

import json

import pytest

from draftmill.target import embedded as module
from draftmill.target.answers import AnswerFile, Sampling
from draftmill.target.embedded import Embedded
from draftmill.target.generate import Response, generate
from draftmill.target.model import Target
from draftmill.target.regenerate import RegenerateReport
from draftmill.target.regenerate import regenerate as regenerate_with
from draftmill.text.conversations import read_conversations
from draftmill.text.render import Renderer
from tiny_models import CHAT_TEMPLATE, EOS, tiny_llama, tiny_tokenizer

OPTIONS = {"max_new_tokens": 6}
BATCH_SIZE = 3


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_llama(), tiny_tokenizer(), (1,))


def regenerate(target: Target, prompts, out, *, progress=None, **sampling) -> RegenerateReport:
    return regenerate_with(Embedded(target, BATCH_SIZE), prompts, out, Sampling(**sampling), progress=progress)


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


def write(path, rows) -> None:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    write(path, [{"messages": [user("x" * length)]} for length in (9, 2, 5, 7, 1, 3, 8, 4)])
    return path


def rows_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_are_the_targets_own_tokens(target, prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    report = regenerate(target, [prompts], out, **OPTIONS)
    rows = rows_of(out)
    assert report.written == len(rows) == 8
    assert sorted(row["source"] for row in rows) == [f"prompts.jsonl:{line}" for line in range(1, 9)]
    for row in rows:
        ids = target.tokenizer.apply_chat_template(row["messages"][:-1], add_generation_prompt=True)["input_ids"]
        (answer,) = generate(target, [ids], Sampling(6))
        assert row["response_ids"] == list(answer.token_ids)
        assert row["finish"] == answer.finish
        body = answer.token_ids[:-1] if answer.finish == "stop" else answer.token_ids
        assert row["messages"][-1] == assistant(target.tokenizer.decode(body))
    assert report.response_tokens == sum(len(row["response_ids"]) for row in rows)


def test_the_rows_can_be_prepared_as_written(target, prompts, tmp_path):
    """The renderer takes the ids that were generated, so training sees exactly them."""
    out = tmp_path / "out.jsonl"
    regenerate(target, [prompts], out, **OPTIONS)
    renderer = Renderer(target.tokenizer, stop_ids=target.stop_ids)
    for row, conversation in zip(rows_of(out), read_conversations(out, strict=True), strict=True):
        (rendered,) = renderer.render(conversation)
        assert rendered.token_ids[rendered.supervised].tolist() == row["response_ids"]


def test_only_the_last_assistant_message_is_written_anew(target, tmp_path):
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    history = [user("a"), assistant("kept é"), user("b")]
    write(prompts, [{"messages": [*history, assistant("old")]}, {"messages": history}])
    regenerate(target, [prompts], out, **OPTIONS)
    first, second = rows_of(out)
    assert first["messages"][:-1] == second["messages"][:-1] == history
    assert first["messages"][-1] == second["messages"][-1] != assistant("old")
    assert "kept é".encode() in out.read_bytes()


def test_what_else_a_row_was_rendered_with_stays_beside_its_answer(target, tmp_path):
    """Its tools, calls and template options: `prepare` renders the same prompt again."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{{ mood }}" + CHAT_TEMPLATE
    )
    knowing = Target(tiny_llama(), tokenizer, (1,))
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    history = [user("a"), {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "b"}]
    rows = [{"messages": history, "tools": tools, "chat_template_kwargs": {"mood": "calm"}}, {"prompt": "c"}]
    write(prompts, rows)
    assert regenerate(knowing, [prompts], out, **OPTIONS).written == 2
    (plain,) = (row for row in rows_of(out) if row["source"] == "p.jsonl:2")
    assert plain.keys() == {"messages", "response_ids", "finish", "source"} and plain["messages"][0] == user("c")
    renderer = Renderer(tokenizer, stop_ids=knowing.stop_ids, turns="last")
    for row, conversation in zip(rows_of(out), read_conversations(out, strict=True), strict=True):
        *asked, _ = row["messages"]
        ids = tokenizer.apply_chat_template(
            asked, tools=row.get("tools"), add_generation_prompt=True, **row.get("chat_template_kwargs", {})
        )["input_ids"]
        (answer,) = generate(knowing, [ids], Sampling(6))
        assert row["response_ids"] == list(answer.token_ids)
        rendered = renderer.render(conversation)[-1]
        assert rendered.token_ids.tolist() == ids + row["response_ids"]
    assert regenerate(knowing, [prompts], out, **OPTIONS).already_there == 2
    write(prompts, [{**rows[0], "chat_template_kwargs": {"mood": "cross"}}, rows[1]])
    with pytest.raises(ValueError, match=r"another prompt for p\.jsonl:1"):
        regenerate(knowing, [prompts], out, **OPTIONS)


def test_bad_rows_are_refused_with_a_counted_reason(target, tmp_path):
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    good = {"messages": [user("a")]}
    write(prompts, [good, "{", "", {"messages": []}, {"messages": [user("y" * 600)]}, {"messages": [assistant("a")]}])
    calls: list[tuple[int, ...]] = []
    report = regenerate(target, [prompts], out, **OPTIONS, progress=lambda *counts: calls.append(counts))
    assert report.written == 1
    assert dict(report.refused) == {"malformed_json": 1, "no_messages": 1, "no_user_turn": 1, "prompt_too_long": 1}
    assert calls[-1][:2] == (5, 5)


def test_of_many_refused_rows_a_few_are_named_and_all_counted(target, tmp_path, caplog):
    prompts = tmp_path / "p.jsonl"
    write(prompts, [*["{"] * 50, {"messages": [user("a")]}])
    assert regenerate(target, [prompts], tmp_path / "out.jsonl", **OPTIONS).refused == {"malformed_json": 50}
    assert [record.getMessage().count("p.jsonl:") for record in caplog.records] == [1, 1, 1]


def test_an_empty_answer_is_refused_once(target, tmp_path, monkeypatch):
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    write(prompts, [{"messages": [user("a")]}])
    monkeypatch.setattr(module, "generate", lambda *_args, **_kwargs: [Response((EOS,), "stop")])
    assert dict(regenerate(target, [prompts], out, **OPTIONS).refused) == {"empty_response": 1}
    assert out.read_bytes() == b""
    assert [row["response_ids"] for row in rows_of(tmp_path / "out.jsonl.empty.jsonl")] == [[EOS]]
    monkeypatch.setattr(module, "generate", lambda *_args, **_kwargs: pytest.fail("generated again"))
    assert dict(regenerate(target, [prompts], out, **OPTIONS).refused) == {"empty_response": 1}


def test_progress_moves_within_a_batch(target, prompts, tmp_path):
    """After every step, rows and tokens only grow, up to what the report says."""
    calls: list[tuple[int, ...]] = []
    report = regenerate(target, [prompts], tmp_path / "out.jsonl", **OPTIONS, progress=lambda *now: calls.append(now))
    assert calls == sorted(calls)
    assert calls[-1] == (8, 8, report.response_tokens) and calls[-2][0] < 8
    assert len({tokens for _, _, tokens in calls}) >= 3 * OPTIONS["max_new_tokens"]  # three batches


def test_the_row_of_a_kept_empty_file_is_not_mixed_with_other_settings(target, tmp_path, monkeypatch):
    """Only rows of empty answers so far: they too were made somehow."""
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    write(prompts, [{"messages": [user("a")]}])
    monkeypatch.setattr(module, "generate", lambda *_args, **_kwargs: [Response((EOS,), "stop")])
    regenerate(target, [prompts], out, **OPTIONS)
    with pytest.raises(ValueError, match="made with seed=0, now it is 1"):
        regenerate(target, [prompts], out, **OPTIONS, seed=1)


class Killed(BaseException):
    """Stands for a kill: nothing in the program catches it."""


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_p": 0.9, "seed": 3}])
@pytest.mark.parametrize("cut", [0, 1, 40])
def test_a_killed_run_goes_on_and_ends_as_a_straight_one(target, prompts, tmp_path, monkeypatch, sampling, cut):
    """Killed in the second batch, its last written line cut by `cut` bytes: the end is the same file."""
    straight, out = tmp_path / "straight.jsonl", tmp_path / "out.jsonl"
    regenerate(target, [prompts], straight, **OPTIONS, **sampling)
    real, batches = module.generate, []

    def generate_until_killed(*args, **kwargs):
        batches.append(1)
        if len(batches) == 2:
            raise Killed
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(module, "generate", generate_until_killed)
        with pytest.raises(Killed):
            regenerate(target, [prompts], out, **OPTIONS, **sampling)
    out.write_bytes(out.read_bytes()[: -cut or None])
    report = regenerate(target, [prompts], out, **OPTIONS, **sampling)
    assert report.already_there == (3 if cut == 0 else 2)
    assert report.already_there + report.written == 8
    assert sorted(out.read_text().splitlines()) == sorted(straight.read_text().splitlines())


def test_a_finished_file_is_left_alone(target, prompts, tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"
    regenerate(target, [prompts], out, **OPTIONS)
    before = out.read_bytes()
    monkeypatch.setattr(module, "generate", lambda *_args, **_kwargs: pytest.fail("generated again"))
    report = regenerate(target, [prompts], out, **OPTIONS)
    assert (report.written, report.already_there) == (0, 8)
    assert out.read_bytes() == before


def test_new_prompts_are_added_to_a_finished_file(target, prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    regenerate(target, [prompts], out, **OPTIONS)
    before = out.read_bytes()
    with prompts.open("a") as file:
        file.write(json.dumps({"messages": [user("new")]}) + "\n")
    assert regenerate(target, [prompts], out, **OPTIONS).written == 1
    assert out.read_bytes().startswith(before)


def test_other_settings_or_prompts_are_not_mixed_in(target, prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    regenerate(target, [prompts], out, **OPTIONS)
    with pytest.raises(ValueError, match=r"made with max_new_tokens=6, now it is 7"):
        regenerate(target, [prompts], out, **OPTIONS | {"max_new_tokens": 7})
    with pytest.raises(ValueError, match=r"made with temperature=0\.0"):
        regenerate(target, [prompts], out, **OPTIONS, temperature=0.5)
    write(prompts, [{"messages": [user("other")]}])
    with pytest.raises(ValueError, match=r"another prompt for prompts\.jsonl:1"):
        regenerate(target, [prompts], out, **OPTIONS)


def test_a_file_of_unknown_make_is_not_continued(target, prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    regenerate(target, [prompts], out, **OPTIONS)
    (tmp_path / "out.jsonl.settings.json").unlink()
    with pytest.raises(ValueError, match=r"out\.jsonl\.settings\.json"):
        regenerate(target, [prompts], out, **OPTIONS)


def test_a_damaged_line_in_the_middle_stops_the_run(target, prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    regenerate(target, [prompts], out, **OPTIONS)
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join([lines[0], b"{}\n", *lines[2:]]))
    with pytest.raises(ValueError, match=r"out\.jsonl:2 is not a row"):
        regenerate(target, [prompts], out, **OPTIONS)


def test_two_writers_do_not_share_a_file(target, prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    with AnswerFile(out, {}), pytest.raises(ValueError, match="written by another process"):
        regenerate(target, [prompts], out, **OPTIONS)


def test_prompt_files_of_one_name_are_refused(target, prompts, tmp_path):
    other = tmp_path / "other" / prompts.name
    other.parent.mkdir()
    other.write_bytes(prompts.read_bytes())
    with pytest.raises(ValueError, match=r"share the name prompts\.jsonl"):
        regenerate(target, [prompts, other], tmp_path / "out.jsonl", **OPTIONS)


def test_batches_below_one_row_are_refused(target):
    with pytest.raises(ValueError, match="batch_size is 0"):
        Embedded(target, 0)
