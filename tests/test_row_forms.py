"""The forms an input row may take beside plain OpenAI messages, and how each bad one is named."""

from __future__ import annotations

import json

import pytest

from draftmill.text.conversations import Conversation, parse_row
from draftmill.text.messages import Message
from draftmill.text.refusals import Refused, Source
from draftmill.text.sources import Raw

SOURCE = Source("data.jsonl", 7, 0)


def parse(row: object, **options) -> Conversation | Refused | None:
    return parse_row(Raw(SOURCE, json.dumps(row).encode()), **options)


def reason_of(row: object, **options) -> str:
    found = parse(row, **options)
    return found.reason.value if isinstance(found, Refused) else "kept"


def with_reply(**reply: object) -> dict:
    return {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", **reply}]}


def call(arguments: object, **more: object) -> dict:
    return {"type": "function", "function": {"name": "look", "arguments": arguments}, **more}


def test_sharegpt_rows_become_the_same_conversation():
    """case 37"""
    said = [("system", "s"), ("human", "q"), ("gpt", "a"), ("tool", "t"), ("user", "q2"), ("assistant", "a2")]
    row = parse({"conversations": [{"from": role, "value": text} for role, text in said]})
    roles = ["system", "user", "assistant", "tool", "user", "assistant"]
    assert row.messages == tuple(Message(role, text) for role, (_, text) in zip(roles, said, strict=True))


def test_a_system_text_beside_sharegpt_messages_comes_first():
    listed = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    assert parse({"conversations": listed, "system": "Be kind."}).messages[0] == Message("system", "Be kind.")
    assert len(parse({"conversations": listed, "system": ""}).messages) == 2
    twice = {"conversations": [{"from": "system", "value": "s"}, *listed], "system": "Be kind."}
    assert reason_of(twice) == "ambiguous_row"


@pytest.mark.parametrize("role", ["Human", "GPT", "chatgpt", "bing", "function_call", "observation", "critic", "", 3])
def test_sharegpt_roles_outside_the_table_are_never_guessed(role):
    """case 37"""
    row = {"conversations": [{"from": "human", "value": "q"}, {"from": role, "value": "a"}]}
    assert reason_of(row) == "unknown_role"


def test_role_and_content_under_conversations_are_read_by_the_openai_table():
    listed = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert parse({"conversations": listed}).messages == parse({"messages": listed}).messages
    assert reason_of({"conversations": [{"role": "human", "content": "q"}]}) == "unknown_role"
    assert reason_of({"messages": listed, "conversations": listed}) == "ambiguous_row"


def test_prompts_are_one_user_text_or_messages():
    for prompt in ("q", [{"role": "user", "content": "q"}]):
        assert parse({"prompt": prompt}, need_reply=False).messages == (Message("user", "q"),)
    assert reason_of({"prompt": " "}, need_reply=False) == "no_messages"
    chat = with_reply(content="a")
    assert parse({**chat, "prompt": "other"}).messages == parse(chat).messages  # UltraChat keeps both


def test_tokenised_rows():
    row = parse({"input_ids": [5, 6, 7], "loss_mask": [0, 1, True]})
    assert (row.messages, row.tokens.ids, row.tokens.mask) == ((), (5, 6, 7), (0, 1, 1))
    for field in ("assistant_masks", "mask"):
        assert parse({"input_ids": [5], field: [1]}).tokens.mask == (1,)
    bad = [
        {"input_ids": [1, 2]},
        {"input_ids": [1], "mask": [1], "loss_mask": [1]},
        {"input_ids": [1, 2], "loss_mask": [1]},
        {"input_ids": [1, -2], "loss_mask": [1, 1]},
        {"input_ids": [1, 2.0], "loss_mask": [1, 1]},
        {"input_ids": [1, True], "loss_mask": [1, 1]},
        {"input_ids": [1, 2**31], "loss_mask": [1, 1]},
        {"input_ids": [1, 2], "loss_mask": [1, 2]},
        {"input_ids": [1, 2], "loss_mask": [1, 0.0]},
        {"input_ids": [1, 2], "loss_mask": [1, None]},
        {"input_ids": [[1, 2]], "loss_mask": [[0, 1]]},
        {"input_ids": "12", "loss_mask": [0, 1]},
        {"input_ids": [1, 2], "loss_mask": "01"},
    ]
    for row in bad:
        assert reason_of(row) == "bad_tokens", row
    assert reason_of({"input_ids": [1], "loss_mask": [1]}, need_reply=False) == "no_messages"


def test_arguments_as_text_and_as_an_object_are_the_same_message():
    """case 31"""
    arguments = {"place": 'Köln "am" Rhein\n', "days": [1, 2.5, None], "deep": {"z": 1, "a": False}}
    rows = [with_reply(tool_calls=[call(form, id="c1")]) for form in (arguments, json.dumps(arguments))]
    first, second = (parse(row).messages for row in rows)
    assert first == second
    assert json.dumps(first[1].fields()) == json.dumps(second[1].fields())  # the order of keys too
    assert first[1].fields() == {"role": "assistant", "content": "", "tool_calls": [call(arguments, id="c1")]}
    for nothing in ("", None, {}, "{}"):
        assert parse(with_reply(tool_calls=[call(nothing)])).messages[1].tool_calls[0]["function"]["arguments"] == {}


def test_content_beside_tool_calls_may_be_missing_null_or_empty():
    """case 31"""
    rows = [parse(with_reply(tool_calls=[call({})], **content)) for content in ({}, {"content": None}, {"content": ""})]
    assert rows[0] == rows[1] == rows[2]
    assert rows[0].messages[1].content == ""


@pytest.mark.parametrize(
    "tool_calls",
    [
        [call('{"place": ')],
        [call('{"a": NaN}')],
        [call('{"a": 1, "a": 2}')],
        [call("[1]")],
        [call([1])],
        [call(3)],
        [{"name": "look", "arguments": {}}],
        [{"type": "function", "function": {"arguments": {}}}],
        [{"type": "function", "function": {"name": 3}}],
        [call({}, type="custom")],
        ["look"],
        {"0": call({})},
        "look",
    ],
)
def test_broken_tool_calls_drop_their_row(tool_calls):
    """case 31"""
    assert reason_of(with_reply(content="a", tool_calls=tool_calls)) == "bad_tool_call"


def test_a_lone_surrogate_inside_arguments_is_refused():
    assert reason_of(with_reply(tool_calls=[call('{"a": "\\ud800"}')])) == "bad_tool_call"
    assert reason_of(with_reply(tool_calls=[call({"a\ud800": 1})])) == "undecodable"


def test_tools_are_a_list_or_the_same_as_text():
    """case 31"""
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    assert parse({**with_reply(content="a"), "tools": tools}).tools == tuple(tools)
    assert parse({**with_reply(content="a"), "tools": json.dumps(tools)}).tools == tuple(tools)
    for nothing in (None, [], "", "[]"):
        assert parse({**with_reply(content="a"), "tools": nothing}).tools == ()
    for bad in ("[", "7", {"name": "look"}, ["look"], 3):
        assert reason_of({**with_reply(content="a"), "tools": bad}) == "bad_tools", bad


def test_reasoning_is_read_by_any_of_its_names():
    for field in ("reasoning_content", "reasoning", "thinking"):
        assert parse(with_reply(content="a", **{field: "hm"})).messages[1].reasoning == "hm"
    assert parse(with_reply(content="a", reasoning="hm", reasoning_content="hm")).messages[1].reasoning == "hm"
    assert reason_of(with_reply(content="a", reasoning="hm", reasoning_content="ho")) == "ambiguous_row"
    assert reason_of(with_reply(content="", reasoning="hm")) == "empty_assistant"
    assert reason_of(with_reply(content="a", reasoning={"text": "hm"})) == "bad_content"


def test_tool_replies_keep_what_a_template_may_read():
    reply = {"role": "tool", "content": [{"type": "text", "text": "12"}], "tool_call_id": "c1", "name": "look"}
    row = parse({"messages": [*with_reply(content="a")["messages"], reply]})
    assert row.messages[2].fields() == {"role": "tool", "content": "12", "tool_call_id": "c1", "name": "look"}
    assert row.reply_turns == [1]
    assert reason_of({"messages": [*with_reply(content="a")["messages"], {**reply, "name": 3}]}) == "bad_message"


def test_template_options_of_the_row():
    options = {"enable_thinking": False}
    assert parse({**with_reply(content="a"), "chat_template_kwargs": options}).template_options == options
    for bad in ("x", [1], 3):
        assert reason_of({**with_reply(content="a"), "chat_template_kwargs": bad}) == "bad_template_options"


def test_a_cut_reply_has_no_whole_tool_call():
    row = with_reply(content="a", tool_calls=[call({})])
    assert reason_of({**row, "finish": "length"}) == "bad_tool_call"
    assert reason_of({**row, "finish": "stop"}) == "kept"


def test_nulls_of_a_table_are_absent_fields():
    """Parquet and Arrow give every row the fields of all rows."""
    tool = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"x": {"type": "string"}}}}}
    filled = {"name": None, "tool_calls": None, "reasoning_content": None, "tool_call_id": None}
    arguments = {"place": "here", "days": None}
    row = {
        "messages": [
            {**filled, "role": "user", "content": "q"},
            {**filled, "role": "assistant", "content": None, "tool_calls": [call(arguments, id=None)]},
        ],
        "conversations": None,
        "tools": [{**tool, "strict": None}],
        "chat_template_kwargs": {"enable_thinking": None},
    }
    found = parse_row(Raw(SOURCE, row))
    assert found.tools == (tool,)
    assert found.template_options == {}
    assert found.messages[1].fields()["tool_calls"] == [call({"place": "here"})]
