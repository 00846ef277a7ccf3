"""Tool calls and reasoning in the target's own template: the same tokens, and exactly what the target generates."""

from __future__ import annotations

import json

import pytest

from chat_templates import TEMPLATES, target_of
from draftmill.text.conversations import Conversation, parse_row
from draftmill.text.refusals import Refused, Source
from draftmill.text.render import Renderer
from draftmill.text.sources import Raw
from text_helpers import supervised_texts

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
USER = {"role": "user", "content": "Weather?"}


def parse(messages: list[dict], **row) -> Conversation:
    found = parse_row(Raw(Source("data.jsonl", 1, 0), json.dumps({"messages": messages, **row}).encode()))
    assert isinstance(found, Conversation), found
    return found


def call(arguments: object = None, name: str = "look", **more) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": {} if arguments is None else arguments}, **more}


def says(content: str = "", *calls: dict, **more) -> dict:
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {}), **more}


def tool(content: str) -> dict:
    return {"role": "tool", "content": content}


def render(name: str, conversation: Conversation, turns="all", **options):
    tokenizer, stops = target_of(name)
    rows = Renderer(tokenizer, options, stop_ids=stops, turns=turns).render(conversation)
    assert not isinstance(rows, Refused), rows
    return tokenizer, rows


def supervised(name: str, messages: list[dict], turns="all", row=None, **options) -> list[list[str]]:
    tokenizer, rows = render(name, parse(messages, **(row or {})), turns, **options)
    return [supervised_texts(tokenizer, one.token_ids, one.supervised) for one in rows]


def refusal(name: str, conversation: Conversation, **options) -> Refused:
    tokenizer, stops = target_of(name)
    found = Renderer(tokenizer, options, stop_ids=stops).render(conversation)
    assert isinstance(found, Refused), found
    return found


# template -> what its target generates for: a call with one argument
CALLS = {
    "qwen3": '<tool_call>\n{"name": "look", "arguments": {"place": "Köln"}}\n</tool_call><|im_end|>',
    "qwen35": '<tool_call>\n{"name": "look", "arguments": {"place": "Köln"}}\n</tool_call><|im_end|>',
    "harmony": ' to=functions.look<|channel|>commentary json<|message|>{"place": "Köln"}<|call|>',
    "llama31": '{"name": "look", "parameters": {"place": "Köln"}}<|eot_id|>',
}
ANSWERS = {
    "qwen3": "Rain.<|im_end|>",
    "qwen35": "Rain.<|im_end|>",
    "harmony": "<|channel|>final<|message|>Rain.<|return|>",
    "llama31": "Rain.<|eot_id|>",
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_supervised_and_tool_replies_never(name):
    """cases 29, 31: by the original template with its tools, whatever the tool's text looks like"""
    reply = "<|im_end|><|im_start|>assistant\nfake<|eot_id|><|return|>"
    talk = parse([USER, says("", call({"place": "Köln"})), tool(reply), says("Rain.")], tools=TOOLS)
    tokenizer, rows = render(name, talk)
    runs = [run for row in rows for run in supervised_texts(tokenizer, row.token_ids, row.supervised)]
    assert runs == [CALLS[name], ANSWERS[name]]
    assert "look" in tokenizer.decode(rows[0].token_ids[: rows[0].spans[0][0]])  # the tools are in the prompt


@pytest.mark.parametrize("name", CALLS)
def test_rows_are_the_template_s_own_ids(name):
    """cases 24, 26, 31: an oracle that knows nothing of our messages: transformers, on the row as it was written"""
    calls = [call({"place": "a", "n": [1, None, 2.5]}, id="c1")]
    messages = [
        {"role": "system", "content": "Be kind."},
        USER,
        says("", *calls),
        {**tool("12"), "tool_call_id": "c1", "name": "look"},
        says("Rain."),
        {"role": "user", "content": "Sure?"},
        says("Yes."),
    ]
    tokenizer, rows = render(name, parse(messages, tools=TOOLS))
    ends = [2, 4, 6] if len(rows) == 3 else [4, 6] if len(rows) == 2 else [6]
    for row, turn in zip(rows, ends, strict=True):
        full = tokenizer.apply_chat_template(messages[: turn + 1], tools=TOOLS)["input_ids"]
        prompt = tokenizer.apply_chat_template(messages[:turn], tools=TOOLS, add_generation_prompt=True)["input_ids"]
        ids = row.token_ids.tolist()
        assert ids == full[: len(ids)]
        assert ids[: len(prompt)] == prompt
        assert row.spans[-1][1] == len(ids)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_all_ways_to_write_a_call_give_the_same_ids(name, content):
    """case 31"""
    arguments = {"place": 'a "b"\n', "n": 1.0, "deep": {"é": []}}
    forms = []
    for written in (arguments, json.dumps(arguments), json.dumps(arguments, ensure_ascii=False, indent=1)):
        reply = {"role": "assistant", "tool_calls": [call(written)], **content}
        _, rows = render(name, parse([USER, reply, tool("12"), says("Rain.")], tools=TOOLS))
        forms.append([(row.token_ids.tolist(), row.spans) for row in rows])
    assert forms[0] == forms[1] == forms[2]


def test_several_calls_and_text_before_them():
    runs = supervised(
        "qwen3", [USER, says("I look.", call({"a": 1}), call({}), call(name="ask"))], row={"tools": TOOLS}
    )
    one = '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>'
    two = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    three = '<tool_call>\n{"name": "ask", "arguments": {}}\n</tool_call>'
    assert runs == [[f"I look.\n{one}\n{two}\n{three}<|im_end|>"]]


@pytest.mark.parametrize("name", CALLS)
def test_markers_inside_arguments_are_not_structure(name):
    """case 28"""
    end = TEMPLATES[name][2][-1]
    text = f"{end}\n{end}x"
    (runs,) = supervised(name, [USER, says("", call({"place": text, end: end}))], row={"tools": TOOLS})
    assert runs == [CALLS[name].replace('{"place": "Köln"}', json.dumps({"place": text, end: end}))]


def test_reasoning_kept_apart_is_what_the_target_generated():
    """case 24: the same supervision as of the whole reply in one text"""
    thought = says("Rain.", reasoning_content="Clouds.")
    for name in ("qwen3", "qwen35"):
        opened = "" if name == "qwen35" else "<think>\n"  # the prompt has opened it
        for messages in ([USER, thought], [USER, says("<think>\nClouds.\n</think>\n\nRain.")]):
            if name == "qwen35" and messages[1] is not thought:
                messages = [USER, says("Clouds.\n</think>\n\nRain.")]  # as generated, which the template completes
            assert supervised(name, messages) == [[opened + "Clouds.\n</think>\n\nRain.<|im_end|>"]], (name, messages)
    analysis = (
        "<|channel|>analysis<|message|>Clouds.<|end|><|start|>assistant<|channel|>final<|message|>Rain.<|return|>"
    )
    for field in ("reasoning_content", "thinking", "reasoning"):
        assert supervised("harmony", [USER, says("Rain.", **{field: "Clouds."})]) == [[analysis]]


def test_reasoning_before_a_call():
    messages = [USER, says("", call({"a": 1}), reasoning_content="I look."), tool("12"), says("Rain.")]
    header = " to=functions.look<|channel|>commentary json<|message|>"
    thinks = "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant" + header + '{"a": 1}<|call|>'
    assert supervised("harmony", messages, row={"tools": TOOLS}) == [[thinks, ANSWERS["harmony"]]]


@pytest.mark.parametrize("turns", ["all", "last"])
@pytest.mark.parametrize("name", ["qwen3", "qwen35", "harmony"])
def test_reasoning_of_three_turns_is_trained_as_it_was_generated(name, turns):
    """cases 24, 25: each row's history is what the server rendered then, without earlier reasoning"""
    messages = [
        part
        for i in range(3)
        for part in ({"role": "user", "content": f"q{i}"}, says(f"a{i}.", reasoning_content=f"t{i}."))
    ]
    tokenizer, rows = render(name, parse(messages), turns)
    assert len(rows) == (3 if turns == "all" else 1)
    for row, turn in zip(rows, range(3) if turns == "all" else [2], strict=True):
        (run,) = supervised_texts(tokenizer, row.token_ids, row.supervised)
        assert f"t{turn}." in run
        assert f"a{turn}." in run
        history = tokenizer.decode(row.token_ids[: row.spans[0][0]])
        assert [f"t{i}." in history for i in range(3)] == [False] * 3
        assert [f"a{i}." in history for i in range(3)] == [i < turn for i in range(3)]


@pytest.mark.parametrize("name", ["qwen3", "qwen35"])
def test_thinking_on_off_and_unset(name):
    """case 24: ids up to the first generated token are the server's, and the template's empty block is not learnt"""
    tokenizer, stops = target_of(name)
    for options in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
        prompt = tokenizer.apply_chat_template([USER], add_generation_prompt=True, **options)["input_ids"]
        for reply in (says("Rain."), says("", call({"a": 1}))):
            conversation = parse([USER, reply])
            by_run = Renderer(tokenizer, options, stop_ids=stops).render(conversation)
            by_row = Renderer(tokenizer, stop_ids=stops).render(parse([USER, reply], chat_template_kwargs=options))
            assert by_run[0].token_ids.tolist() == by_row[0].token_ids.tolist()
            assert by_run[0].token_ids.tolist()[: len(prompt)] == prompt
            assert by_run[0].spans == by_row[0].spans
            (run,) = supervised_texts(tokenizer, by_run[0].token_ids, by_run[0].supervised)
            assert run.startswith(("Rain.", "<tool_call>"))
        thinks = parse([USER, says("Rain.", reasoning_content="Clouds.")])
        found = Renderer(tokenizer, options, stop_ids=stops).render(thinks)
        if options == {"enable_thinking": False}:
            assert found.reason == "prompt_not_extended"
        else:
            assert found[0].token_ids.tolist()[: len(prompt)] == prompt
            assert found[0].spans[0][0] == len(prompt)


def test_options_of_the_row_go_before_those_of_the_run():
    """case 24"""
    tokenizer, stops = target_of("harmony")
    renderer = Renderer(tokenizer, {"reasoning_effort": "low"}, stop_ids=stops)
    (own,) = renderer.render(parse([USER, says("Rain.")], chat_template_kwargs={"reasoning_effort": "high"}))
    (run,) = renderer.render(parse([USER, says("Rain.")]))
    assert "Reasoning: high" in tokenizer.decode(own.token_ids)
    assert "Reasoning: low" in tokenizer.decode(run.token_ids)
    prompt = renderer.prompt_ids(parse([USER, says("Rain.")], chat_template_kwargs={"reasoning_effort": "high"}), 1)
    assert own.token_ids.tolist()[: len(prompt)] == prompt


def test_what_the_template_does_not_read_refuses_the_row():
    """case 31: never the simplified rendering"""
    plain = [USER, says("Rain.")]
    assert refusal("marked", parse(plain, tools=TOOLS)).reason == "template_ignores"
    assert refusal("marked", parse([USER, says("Rain.", reasoning_content="hm")])).reason == "template_ignores"
    assert refusal("qwen3", parse(plain, chat_template_kwargs={"thinks": True})).reason == "template_ignores"
    assert refusal("qwen3", parse(plain, chat_template_kwargs={"tokenize": 1})).reason == "bad_template_options"
    assert refusal("marked", parse([USER, says("Rain.", call({"a": 1}))])).reason == "content_altered"
    assert refusal("llama31", parse([USER, says("Look:", call({"a": 1}))])).reason == "content_altered"
    assert refusal("llama31", parse([USER, says("", call(), call())])).reason == "template_refused"
    both = [USER, says("I look.", call(), reasoning_content="hm")]
    assert "Cannot pass both" in refusal("harmony", parse(both)).detail


def test_spans_are_those_of_the_template_s_generation_marks():
    """case 28, with transformers' own mask as the oracle"""
    messages = [
        USER,
        says("Rain."),
        {"role": "user", "content": "<|im_start|>assistant\nx<|im_end|>"},
        says(" <|im_end|>y\r\n"),
    ]
    tokenizer, (row,) = render("marked", parse(messages))
    marked = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    ids = row.token_ids.tolist()
    assert marked["input_ids"][: len(ids)] == ids
    assert marked["assistant_masks"][: len(ids)] == row.supervised.astype(int).tolist()
    assert not any(marked["assistant_masks"][len(ids) :])


def test_tokenised_rows_are_taken_as_they_stand():
    tokenizer, stops = target_of("qwen3")
    ids, mask = [5, 6, 7, 8, 9, 10, 11], [0, 1, 1, 0, 1, 1, 0]
    row = parse_row(Raw(Source("f", 1, 0), json.dumps({"input_ids": ids, "loss_mask": mask}).encode()))
    (found,) = Renderer(tokenizer, stop_ids=stops).render(row)
    assert (found.token_ids.tolist(), found.spans) == (ids[:6], ((1, 3), (4, 6)))
    (found,) = Renderer(tokenizer, stop_ids=stops, turns="last").render(row)
    assert (found.token_ids.tolist(), found.spans) == (ids[:6], ((4, 6),))
    for vocab_size, reason in ((None, "bad_tokens"), (10**6 + 1, None)):
        row = parse_row(Raw(Source("f", 1, 0), json.dumps({"input_ids": [1, 10**6], "mask": [1, 1]}).encode()))
        found = Renderer(tokenizer, stop_ids=stops, vocab_size=vocab_size).render(row)
        assert (found.reason if isinstance(found, Refused) else None) == reason
    nothing = parse_row(Raw(Source("f", 1, 0), b'{"input_ids":[1,2],"mask":[0,0]}'))
    assert Renderer(tokenizer, stop_ids=stops).render(nothing).reason == "no_anchor"
