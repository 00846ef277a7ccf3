"""How JSONL bytes become conversations, and how each bad line is named."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from draftmill.text.conversations import Conversation, read_conversations
from draftmill.text.refusals import DropReason, Refused, RowError
from text_helpers import record

GOOD = b'{"messages":[{"role":"user","content":"q"},{"role":"assistant","content":"a"}]}'


def read(tmp_path, data: bytes, **options):
    path = tmp_path / "data.jsonl"
    path.write_bytes(data)
    return list(read_conversations(path, **options))


def reasons(rows) -> list[str]:
    return [row.reason.value if isinstance(row, Refused) else "kept" for row in rows]


def reason_of(tmp_path, row: object) -> str:
    text = row if isinstance(row, str) else json.dumps(row)
    return reasons(read(tmp_path, text.encode() + b"\n"))[0]


def user_then(*messages: object) -> dict:
    return {"messages": [{"role": "user", "content": "q"}, *messages]}


def test_malformed_lines_each_get_their_reason_and_place(tmp_path):
    """case 35"""
    lines = [
        (GOOD, "kept"),
        (b"", None),
        (b"   \t", None),
        (b"{", "malformed_json"),
        (GOOD + GOOD, "malformed_json"),
        (b"42", "not_an_object"),
        (b"[]", "not_an_object"),
        (b'"text"', "not_an_object"),
        (b"null", "not_an_object"),
        (b'{"messages":[],"score":NaN}', "nan_literal"),
        (b'{"messages":[],"score":-Infinity}', "nan_literal"),
        (b'{"messages":1,"messages":2}', "duplicate_key"),
        (b'{"messages":[{"role":"user","role":"user","content":"q"}]}', "duplicate_key"),
        (b'{"messages":[{"role":"user","content":"\xff"}]}', "undecodable"),
        (b'{"messages":[{"role":"user","content":"\\ud800"}]}', "undecodable"),
        (b'{"n":' + b"1" * 5000 + b"}", "malformed_json"),
        (b"[" * 100_000, "malformed_json"),
        (GOOD[:-1], "malformed_json"),
    ]
    data = b"\n".join(line for line, _ in lines)  # the last line is cut short and has no newline
    rows = read(tmp_path, data)
    assert reasons(rows) == [reason for _, reason in lines if reason]
    expected_lines = [i for i, (_, reason) in enumerate(lines, start=1) if reason]
    assert [row.source.line for row in rows] == expected_lines
    for row in rows:
        assert data[row.source.offset :].startswith(lines[row.source.line - 1][0])


def test_byte_order_mark_crlf_and_a_missing_last_newline_are_read(tmp_path):
    """case 35"""
    rows = read(tmp_path, b"\xef\xbb\xbf" + GOOD + b"\r\n" + b"\r\n" + GOOD)
    assert reasons(rows) == ["kept", "kept"]
    assert [row.source.line for row in rows] == [1, 3]
    assert rows[1].source.offset == 3 + len(GOOD) + 4


def test_line_limit_is_exact_and_the_next_line_is_intact(tmp_path):
    """case 35"""
    limit = len(GOOD)
    longer = GOOD.replace(b'"q"', b'"qq"')
    for end in (b"\n", b"\r\n"):
        rows = read(tmp_path, GOOD + end + longer + end + GOOD + end, max_line_bytes=limit)
        assert reasons(rows) == ["kept", "line_too_long", "kept"]
        assert rows[2].source.offset == len(GOOD + end + longer + end)
    assert reasons(read(tmp_path, GOOD + b"\n" + longer, max_line_bytes=limit)) == ["kept", "line_too_long"]


def test_memory_stays_bounded_on_a_huge_line(tmp_path):
    """case 35: 60 MB in one line"""
    path = tmp_path / "huge.jsonl"
    with path.open("wb") as file:
        for _ in range(60):
            file.write(b"x" * 10**6)
        file.write(b"\n" + GOOD + b"\n")
    tracemalloc.start()
    rows = list(read_conversations(path, max_line_bytes=2**20))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert reasons(rows) == ["line_too_long", "kept"]
    assert rows[1].source.line == 2
    assert peak < 8 * 2**20


def test_strict_mode_names_file_line_and_reason(tmp_path):
    """case 35"""
    with pytest.raises(RowError, match=r"data\.jsonl:3: malformed_json"):
        read(tmp_path, GOOD + b"\n\n{\n", strict=True)


def test_conversations_without_both_sides_are_refused(tmp_path):
    """case 33"""
    system = {"role": "system", "content": "s"}
    user = {"role": "user", "content": "q"}
    assistant = {"role": "assistant", "content": "a"}
    cases = [
        ({"messages": []}, "no_messages"),
        ({"messages": None}, "no_messages"),
        ({"conversations": []}, "no_messages"),
        ({"text": "q"}, "no_messages"),
        ({"messages": {"role": "user", "content": "q"}}, "no_messages"),
        ({"conversations": [{"from": "human", "value": "q"}]}, "no_assistant_turn"),
        ({"prompt": "q"}, "no_assistant_turn"),
        ({"messages": [system]}, "no_user_turn"),
        ({"messages": [assistant]}, "no_user_turn"),
        ({"messages": [user]}, "no_assistant_turn"),
        ({"messages": [assistant, user]}, "no_assistant_turn"),
        ({"messages": [user, {"role": "assistant", "content": ""}]}, "empty_assistant"),
        ({"messages": [user, {"role": "assistant", "content": " \n"}]}, "empty_assistant"),
        ({"messages": [user, {"role": "assistant", "content": None}]}, "empty_assistant"),
        ({"messages": [user, {"role": "assistant"}]}, "empty_assistant"),
        ({"messages": [{"role": "user"}, assistant]}, "bad_content"),
        ({"messages": [user, "a"]}, "bad_message"),
        ({"messages": [system, user, assistant]}, "kept"),
    ]
    for row, expected in cases:
        assert reason_of(tmp_path, row) == expected, row


def test_prompts_alone_are_read_where_replies_are_not_needed(tmp_path):
    rows = read(tmp_path, b'{"messages":[{"role":"user","content":"q"}]}', need_reply=False)
    assert reasons(rows) == ["kept"]
    assert rows[0].reply_turns == []


@pytest.mark.parametrize(
    "role", ["critic", "Assistant", "gpt", "human", "function", "Tool", "bot", "", 3, None, ["user"]]
)
def test_roles_outside_the_table_are_never_guessed(tmp_path, role):
    """case 37"""
    assert reason_of(tmp_path, user_then({"role": role, "content": "a"})) == "unknown_role"


def test_messages_with_from_and_value_keys_are_refused(tmp_path):
    """case 37"""
    assert reason_of(tmp_path, {"messages": [{"from": "human", "value": "q"}]}) == "bad_message"


def test_text_parts_equal_the_plain_string(tmp_path):
    """case 38"""
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b\n"}]
    row = user_then({"role": "assistant", "content": parts})
    (conversation,) = read(tmp_path, json.dumps(row).encode())
    assert conversation.messages[1].content == "a b\n"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ([{"type": "text", "text": "t"}, {"type": "image_url", "image_url": {"url": "x"}}], "media_content"),
        ([{"type": "image_url", "image_url": {"url": "x"}}], "media_content"),
        ([{"type": "input_audio", "input_audio": {}}], "media_content"),
        ([[{"type": "text", "text": "t"}]], "bad_content"),
        (["t"], "bad_content"),
        ([{"type": "text"}], "bad_content"),
        ([{"type": "text", "text": ["t"]}], "bad_content"),
        ({"text": "t"}, "bad_content"),
        (7, "bad_content"),
        (True, "bad_content"),
    ],
)
def test_content_that_is_not_text_never_becomes_text(tmp_path, content, expected):
    """case 38"""
    assert reason_of(tmp_path, user_then({"role": "assistant", "content": content})) == expected


def test_fields_that_would_change_the_rendering_and_are_not_read_are_refused(tmp_path):
    """case 31"""
    reply = {"role": "assistant", "content": "a"}
    for extra in ({"documents": [{"text": "d"}]}, {"functions": [{"name": "f"}]}):
        assert reason_of(tmp_path, {**user_then(reply), **extra}) == "unsupported_field"
    for extra in ({"function_call": {"name": "f"}}, {"audio": {"id": "1"}}, {"weight": 0}, {"name": "Bob"}):
        assert reason_of(tmp_path, user_then({**reply, **extra})) == "unsupported_field", extra
    for extra in ({"tool_calls": [{}]}, {"reasoning_content": "hm"}, {"name": "Bob"}, {"tool_call_id": "1"}):
        row = {"messages": [{"role": "user", "content": "q", **extra}, reply]}
        assert reason_of(tmp_path, row) == "unsupported_field", extra
    silent = user_then({**reply, "tool_calls": [], "weight": 1})
    assert reason_of(tmp_path, {**silent, "tools": None, "id": 5}) == "kept"


def test_response_ids_and_finish_are_checked(tmp_path):
    (row,) = read(tmp_path, record("q", "a", response_ids=[5, 6], finish="length").encode())
    assert isinstance(row, Conversation)
    assert (row.response_ids, row.finish) == ((5, 6), "length")
    for bad in ([], [1.0], [True], ["1"], [-1], [2**31], "12", 3):
        assert reason_of(tmp_path, record("q", "a", response_ids=bad)) == "bad_response_ids", bad
    for bad in ("eos", 3, ["stop"]):
        assert reason_of(tmp_path, record("q", "a", finish=bad)) == "unknown_finish", bad


def test_a_greeting_before_the_first_user_turn_is_context(tmp_path):
    messages = [{"role": r, "content": "x"} for r in ("system", "assistant", "user", "assistant", "user", "assistant")]
    (row,) = read(tmp_path, json.dumps({"messages": messages}).encode())
    assert row.reply_turns == [3, 5]


def test_every_reason_has_an_explanation():
    assert all(reason.explanation for reason in DropReason)


@settings(max_examples=150, deadline=None)
@given(
    lines=st.lists(
        st.one_of(
            st.binary(max_size=40),
            st.just(GOOD),
            st.builds(
                lambda at, byte: GOOD[:at] + byte + GOOD[at + 1 :], st.integers(0, len(GOOD)), st.binary(max_size=3)
            ),
        ),
        max_size=8,
    )
)
def test_any_bytes_give_one_outcome_per_line_that_is_not_blank(tmp_path_factory, lines):
    """case 35, fuzzed"""
    data = b"\n".join(lines)
    assume(not data.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd")))  # compressed files are refused whole
    rows = read(tmp_path_factory.mktemp("fuzz"), data)
    body = data.removeprefix(b"\xef\xbb\xbf")
    expected = [i for i, line in enumerate(body.split(b"\n"), start=1) if line.strip()]
    assert [row.source.line for row in rows] == expected
