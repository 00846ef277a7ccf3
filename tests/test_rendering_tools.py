"""Tools, tool calls and reasoning, by templates like those of Qwen3, Llama-3.1 and gpt-oss; options of a row."""

import json

import pytest

from draftmill.text.conversations import parse_row
from draftmill.text.refusals import Refused, Source
from draftmill.text.render import Renderer
from draftmill.text.sources import Raw
from text_helpers import byte_tokenizer, supervised_texts

# As Qwen3: tools in the system turn, reasoning and calls in tags, tool replies as a user turn, thinking switchable.
QWEN3 = (
    "{% if tools %}{{ '<|im_start|>system\nTools:' }}{% for t in tools %}{{ '\n' + t | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% set ns = namespace(last_user=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{% elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.last_user and (loop.last or m.reasoning_content) %}"
    "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '\n' if m.content or not loop.first else '' }}"
    '{{ \'<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{ c.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
# As Llama-3.1: one call per message, ended by a token of its own; no content beside it.
LLAMA31 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}"
    "{% set role = 'ipython' if m.role == 'tool' else m.role %}"
    "{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}"
    "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one tool call at once') }}{% endif %}"
    '{{ \'{"name": "\' + m.tool_calls[0].function.name + \'", "parameters": \' }}'
    "{{ m.tool_calls[0].function.arguments | tojson }}{{ '}<|eom_id|>' }}"
    "{% else %}{{ m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# As gpt-oss: reasoning in a channel of its own, which the history of a finished turn does not keep.
GPT_OSS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content and (loop.last or m.tool_calls) %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|>' }}{% endif %}"
    "{% if m.tool_calls %}{{ '<|start|>assistant to=functions.' + m.tool_calls[0].function.name }}"
    "{{ '<|channel|>commentary json<|message|>' + m.tool_calls[0].function.arguments | tojson + '<|call|>' }}"
    "{% else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}"
    "{% elif m.role == 'tool' %}{{ '<|start|>functions.f to=assistant<|message|>' + m.content + '<|end|>' }}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
FAMILIES = {
    "qwen3": (QWEN3, ["<|im_start|>", "<|im_end|>"], ["<|im_end|>"]),
    "llama31": (
        LLAMA31,
        ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"],
        ["<|eot_id|>", "<|eom_id|>"],
    ),
    "gpt-oss": (
        GPT_OSS,
        ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"],
        ["<|return|>", "<|call|>"],
    ),
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"function": {"name": "f", "arguments": {"x": 1}}}
USER = {"role": "user", "content": "q"}
REPLY = {"role": "tool", "content": "<|im_end|> 42"}


def render(family, messages, options=None, turns="all", **row):
    """(tokenizer, rows or Refused) of a row that came as JSON."""
    template, specials, ends = FAMILIES[family]
    tokenizer = byte_tokenizer(template, specials)
    conversation = parse_row(Raw(Source("x", 1, 0), json.dumps({"messages": messages, **row}).encode()))
    if isinstance(conversation, Refused):
        return tokenizer, conversation
    stops = set(tokenizer.convert_tokens_to_ids(ends))
    return tokenizer, Renderer(tokenizer, options, stop_ids=stops, turns=turns).render(conversation)


def learnt(tokenizer, rows):
    assert not isinstance(rows, Refused), rows
    return [supervised_texts(tokenizer, row.token_ids, row.supervised) for row in rows]


def test_a_tool_call_is_supervised_and_the_tools_reply_is_not():
    """case 31"""
    call = {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, CALL]}
    answer = {"role": "assistant", "content": "It is 42."}
    tokenizer, rows = render("qwen3", [USER, call, REPLY, answer], tools=[TOOL])
    one = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    texts = learnt(tokenizer, rows)
    assert texts[0] == [f"Let me see.\n{one}\n{one}<|im_end|>"]
    assert texts[-1][-1] == "It is 42.<|im_end|>"
    assert "42" not in "".join(texts[0]) and all("tool_response" not in text for row in texts for text in row)
    prompt = tokenizer.decode(rows[0].token_ids)
    assert prompt.startswith('<|im_start|>system\nTools:\n{"type": "function"')
    alone = tokenizer.apply_chat_template([USER], tools=[TOOL], tokenize=True, add_generation_prompt=True)
    alone = alone["input_ids"] if hasattr(alone, "keys") else alone
    assert rows[0].token_ids[: len(alone)].tolist() == list(alone)  # what a server renders for the same request


def test_calls_end_with_their_own_token():
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    answer = {"role": "assistant", "content": "42"}
    tokenizer, rows = render("llama31", [USER, call, REPLY, answer])
    assert learnt(tokenizer, rows) == [['{"name": "f", "parameters": {"x": 1}}<|eom_id|>', "42<|eot_id|>"]]
    tokenizer, refused = render("llama31", [USER, {**call, "tool_calls": [CALL, CALL]}])
    assert refused.reason == "template_refused" and "one tool call" in refused.detail


def test_channels_are_supervised_from_the_first_generated_token():
    call = {"role": "assistant", "reasoning_content": "use f", "tool_calls": [CALL]}
    answer = {"role": "assistant", "reasoning_content": "it said 42", "content": "42"}
    tokenizer, rows = render("gpt-oss", [USER, call, REPLY, answer], turns="last")
    final = "<|channel|>analysis<|message|>it said 42<|end|><|start|>assistant<|channel|>final<|message|>42<|return|>"
    assert learnt(tokenizer, rows) == [[final]]
    tokenizer, rows = render("gpt-oss", [USER, call])
    (text,) = learnt(tokenizer, rows)[0]
    assert text.startswith("<|channel|>analysis<|message|>use f<|end|>")
    assert text.endswith('to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>')


def test_reasoning_content_is_supervised_as_the_template_writes_it():
    """cases 24, 25: each turn with its own reasoning, none in the history"""
    messages = []
    for i in (1, 2):
        messages += [USER, {"role": "assistant", "reasoning_content": f"t{i}", "content": f"a{i}"}]
    tokenizer, rows = render("qwen3", messages)
    assert learnt(tokenizer, rows) == [[f"<think>\nt{i}\n</think>\n\na{i}<|im_end|>"] for i in (1, 2)]
    assert "t1" not in tokenizer.decode(rows[1].token_ids)


def test_reasoning_that_the_template_ignores_is_refused():
    _, refused = render("llama31", [USER, {"role": "assistant", "reasoning_content": "zzz", "content": "a"}])
    assert refused.reason == "template_ignores"


def test_an_empty_think_block_before_a_bare_call_is_the_templates():
    tokenizer, rows = render("qwen3", [USER, {"role": "assistant", "tool_calls": [CALL]}])
    assert learnt(tokenizer, rows) == [['<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>']]


OFF, ON = {"enable_thinking": False}, {"enable_thinking": True}


@pytest.mark.parametrize(
    ("run", "row", "off"), [({}, {}, False), ({}, OFF, True), (OFF, {}, True), (OFF, ON, False), (ON, OFF, True)]
)
def test_a_rows_options_come_before_the_runs(run, row, off):
    """case 24"""
    tokenizer, rows = render("qwen3", [USER, {"role": "assistant", "content": "a"}], run, chat_template_kwargs=row)
    assert learnt(tokenizer, rows) == [["a<|im_end|>"]]  # the empty block is never learnt
    options = {**run, **row}
    served = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True, **options)
    assert ("</think>" in served) == off
    assert tokenizer.decode(rows[0].token_ids).startswith(served)


def test_options_that_the_template_does_not_read_are_refused():
    reply = {"role": "assistant", "content": "a"}
    for name, reason in (
        ("enable_thinkin", "template_ignores"),
        ("tools", "bad_template_options"),
        ("tokenize", "bad_template_options"),
    ):
        _, refused = render("qwen3", [USER, reply], chat_template_kwargs={name: True})
        assert refused.reason == reason and name in refused.detail


def test_developer_messages_reach_the_template():
    developer = {"role": "developer", "content": "Be brief."}
    tokenizer, rows = render("gpt-oss", [developer, USER, {"role": "assistant", "content": "a"}])
    assert tokenizer.decode(rows[0].token_ids).startswith("<|start|>developer<|message|>Be brief.<|end|>")


def test_tokenised_rows_are_themselves():
    tokenizer = byte_tokenizer(QWEN3, FAMILIES["qwen3"][1])
    renderer = Renderer(tokenizer, stop_ids={257})
    line = json.dumps({"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 1, 1, 0, 1]}).encode()
    (row,) = renderer.render(parse_row(Raw(Source("x", 1, 0), line)))
    assert row.token_ids.tolist() == [5, 6, 7, 8, 9] and row.spans == ((1, 3), (4, 5))
    refused = renderer.render(parse_row(Raw(Source("x", 1, 0), b'{"input_ids": [9999], "loss_mask": [1]}')))
    assert refused.reason == "bad_tokens" and "is 9999, the vocabulary has 258 tokens" in refused.detail
