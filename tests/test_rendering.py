"""Are the token ids those of the target's own template, and is exactly the target's text supervised?"""

from __future__ import annotations

import numpy as np
import pytest

from draftmill.text.conversations import Conversation
from draftmill.text.messages import Message
from draftmill.text.refusals import Refused, Source
from draftmill.text.render import Renderer
from text_helpers import CHATML, THINKING, byte_tokenizer, family, plain, run_python, supervised_texts, talk

# family -> what the target generates for the reply "R", as its serving engine would see it
GENERATED = {
    "chatml": "R<|im_end|>",
    "llama3": "R<|eot_id|>",
    "gemma": "R<end_of_turn>",
    "channels": "<|channel|>final<|message|>R<|return|>",
}


def texts(tokenizer, rows) -> list[list[str]]:
    assert not isinstance(rows, Refused), rows
    return [supervised_texts(tokenizer, row.token_ids, row.supervised) for row in rows]


def reason(rows) -> str:
    assert isinstance(rows, Refused), rows
    return rows.reason.value


def full_ids(tokenizer, conversation, **options) -> list[int]:
    return tokenizer.apply_chat_template(plain(conversation), tokenize=True, **options)["input_ids"]


@pytest.mark.parametrize("name", GENERATED)
def test_each_template_family_supervises_the_reply_and_its_end(name):
    """cases 26, 28: ids are the template's own, the mask is as long, its text is the reply plus the end token"""
    tokenizer, end = family(name)
    conversation = talk("Question?", "R")
    (row,) = Renderer(tokenizer, stop_ids={end}).render(conversation)
    prompt = tokenizer.apply_chat_template(plain(conversation)[:1], add_generation_prompt=True)["input_ids"]
    assert row.token_ids.tolist() == full_ids(tokenizer, conversation)[: len(row.token_ids)]
    assert row.token_ids.dtype == np.int32
    assert row.token_ids[-1] == end
    assert row.spans == ((len(prompt), len(row.token_ids)),)
    assert texts(tokenizer, [row]) == [[GENERATED[name]]]


@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma"])
def test_turns_that_extend_one_another_share_a_row(name):
    """case 26"""
    tokenizer, end = family(name)
    conversation = talk("q1", "a one", "q2", "a two", "q3", "a three")
    (row,) = Renderer(tokenizer, stop_ids={end}).render(conversation)
    mark = GENERATED[name][1:]
    assert texts(tokenizer, [row]) == [["a one" + mark, "a two" + mark, "a three" + mark]]
    full = full_ids(tokenizer, conversation)
    assert row.token_ids.tolist() == full[: len(row.token_ids)]
    assert end not in full[len(row.token_ids) :]


def test_system_first_and_a_trailing_user_turn():
    """case 26: what follows the last reply is never used"""
    tokenizer, end = family("chatml")
    (row,) = Renderer(tokenizer, stop_ids={end}).render(talk("q", "a", "q2", system="Be kind."))
    assert tokenizer.decode(row.token_ids) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>"
    )


def test_last_turn_mode_supervises_the_last_reply_alone():
    """case 25"""
    tokenizer, end = family("chatml")
    conversation = talk("q1", "a1", "q2", "a2")
    (row,) = Renderer(tokenizer, stop_ids={end}, turns="last").render(conversation)
    assert texts(tokenizer, [row]) == [["a2<|im_end|>"]]
    assert row.token_ids.tolist() == full_ids(tokenizer, conversation)[: len(row.token_ids)]


@pytest.mark.parametrize("name", ["chatml", "llama3"])
def test_markers_typed_by_people_are_not_structure(name):
    """case 28: literal markers in user and assistant text; CRLF and trailing spaces"""
    tokenizer, end = family(name)
    mark = GENERATED[name][1:]
    markers = {
        "chatml": "<|im_start|>assistant\nfake<|im_end|>\n",
        "llama3": "<|start_header_id|>assistant<|end_header_id|>\n\nfake<|eot_id|>",
    }[name]
    user = "look: " + markers + "end"
    reply = "I write " + markers + "and go\r\non"
    (row,) = Renderer(tokenizer, stop_ids={end}).render(talk(user, reply))
    assert texts(tokenizer, [row]) == [[reply + mark]]


def test_outer_whitespace_is_supervised_as_the_template_renders_it():
    """case 28: ChatML keeps it, Llama-3 and Gemma trim it"""
    reply = " a\r\nb \n"
    for name, kept in (("chatml", reply), ("llama3", "a\r\nb"), ("gemma", "a\r\nb")):
        tokenizer, end = family(name)
        rows = Renderer(tokenizer, stop_ids={end}).render(talk("q", reply))
        assert texts(tokenizer, rows) == [[kept + GENERATED[name][1:]]]


def test_text_outside_ascii_is_supervised_whole():
    tokenizer, end = family("chatml")
    rows = Renderer(tokenizer, stop_ids={end}).render(talk("é?", "naïve 你好 🙂"))
    assert texts(tokenizer, rows) == [["naïve 你好 🙂<|im_end|>"]]


def test_a_reply_that_names_the_template_header():
    tokenizer, end = family("channels")
    for reply in ("final", "return", "<|channel|>final<|message|>final"):
        rows = Renderer(tokenizer, stop_ids={end}).render(talk("q", reply))
        assert texts(tokenizer, rows)[0][0].endswith(reply + "<|return|>")


def test_the_end_is_the_first_stop_token_after_the_reply():
    """The template appends end-of-text after the end of turn: the target had stopped before it."""
    template = CHATML.replace("'<|im_end|>' + '\n' }}", "'<|im_end|>' + '\n' + '<|endoftext|>' }}")
    tokenizer = byte_tokenizer(template, ["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    stops = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    rows = Renderer(tokenizer, stop_ids=stops).render(talk("q", "a", "q", "b"))
    assert texts(tokenizer, rows) == [["a<|im_end|>", "b<|im_end|>"]]


def test_history_that_ends_otherwise_gives_one_row_per_turn():
    tokenizer, end = family("channels")
    rows = Renderer(tokenizer, stop_ids={end}).render(talk("q1", "a1", "q2", "a2"))
    header = "<|channel|>final<|message|>"
    assert texts(tokenizer, rows) == [[header + "a1<|return|>"], [header + "a2<|return|>"]]


def test_reasoning_is_trained_as_it_was_generated():
    """cases 24, 25: three turns with reasoning, which the template drops from the history"""
    tokenizer, end = family("thinking")
    replies = [f"<think>\nt{i}\n</think>\n\na{i}" for i in (1, 2, 3)]
    conversation = talk("q1", replies[0], "q2", replies[1], "q3", replies[2])
    rows = Renderer(tokenizer, stop_ids={end}).render(conversation)
    assert texts(tokenizer, rows) == [[reply + "<|im_end|>"] for reply in replies]
    history = tokenizer.decode(rows[2].token_ids)
    assert "t1" not in history
    assert "t2" not in history
    assert "a2<|im_end|>" in history
    for row, turn in zip(rows, (2, 4, 6), strict=True):
        prefix = Conversation(conversation.messages[:turn], conversation.source)
        assert row.token_ids.tolist() == full_ids(tokenizer, prefix)[: len(row.token_ids)]
    last = Renderer(tokenizer, stop_ids={end}, turns="last").render(conversation)
    assert texts(tokenizer, last) == [[replies[2] + "<|im_end|>"]]


def test_empty_think_block_of_the_prompt_is_not_supervised():
    """case 24: thinking off"""
    tokenizer, end = family("thinking")
    renderer = Renderer(tokenizer, {"enable_thinking": False}, stop_ids={end})
    conversation = talk("q1", "a1", "q2", "a2")
    rows = renderer.render(conversation)
    assert texts(tokenizer, rows) == [["a1<|im_end|>"], ["a2<|im_end|>"]]
    served = "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert tokenizer.decode(rows[0].token_ids) == served + "a1<|im_end|>"
    assert tokenizer.decode(renderer.prompt_ids(conversation, 1)) == served


def test_empty_think_block_of_the_completion_is_not_supervised():
    """case 24: thinking unset and a reply without reasoning; the template inserts the block, nobody generated it"""
    tokenizer, end = family("thinking")
    for reply in ("a1", "think", "\na1"):
        (row,) = Renderer(tokenizer, stop_ids={end}).render(talk("q1", reply))
        assert texts(tokenizer, [row]) == [[reply.strip() + "<|im_end|>"]]
        assert "<think>\n\n</think>\n\n" in tokenizer.decode(row.token_ids)


def test_an_empty_think_block_that_the_target_wrote_is_supervised():
    tokenizer, end = family("thinking")
    reply = "<think>\n\n</think>\n\na1"
    rows = Renderer(tokenizer, stop_ids={end}).render(talk("q1", reply))
    assert texts(tokenizer, rows) == [[reply + "<|im_end|>"]]


def test_a_token_over_the_border_of_the_inserted_block_is_refused():
    tokenizer = byte_tokenizer(THINKING, ["<|im_start|>", "<|im_end|>"], merges=[("Ċ", "a")])
    renderer = Renderer(tokenizer, stop_ids={tokenizer.convert_tokens_to_ids("<|im_end|>")})
    assert reason(renderer.render(talk("q1", "a1"))) == "border_inside_token"
    assert texts(tokenizer, renderer.render(talk("q1", "b1"))) == [["b1<|im_end|>"]]


def test_reasoning_rendered_with_thinking_off_is_refused():
    """case 24: the serving engine would have prompted otherwise"""
    tokenizer, end = family("thinking")
    renderer = Renderer(tokenizer, {"enable_thinking": False}, stop_ids={end})
    assert reason(renderer.render(talk("q", "<think>\nt\n</think>\n\na"))) == "prompt_not_extended"


def test_a_template_that_drops_part_of_the_reply_is_refused():
    """case 29: never train on less than the target wrote"""
    template = CHATML.replace("m['content']", "m['content'].split('</think>')[-1]")
    tokenizer = byte_tokenizer(template, ["<|im_start|>", "<|im_end|>"])
    renderer = Renderer(tokenizer, stop_ids={tokenizer.convert_tokens_to_ids("<|im_end|>")})
    assert reason(renderer.render(talk("q", "hm</think>a"))) == "content_altered"


def test_a_template_that_adds_text_after_the_reply_is_refused():
    template = CHATML.replace("m['content'] +", "m['content'] + ' (signed)' +")
    tokenizer = byte_tokenizer(template, ["<|im_start|>", "<|im_end|>"])
    renderer = Renderer(tokenizer, stop_ids={tokenizer.convert_tokens_to_ids("<|im_end|>")})
    assert reason(renderer.render(talk("q", "a"))) == "content_altered"


def test_a_token_over_the_border_of_the_prompt_is_refused():
    """case 28: the tokenizer merges the template's newline with the reply's leading space"""
    tokenizer = byte_tokenizer(CHATML, ["<|im_start|>", "<|im_end|>"], merges=[("Ċ", "Ġ")])
    renderer = Renderer(tokenizer, stop_ids={tokenizer.convert_tokens_to_ids("<|im_end|>")})
    assert reason(renderer.render(talk("q", " a"))) == "border_inside_token"
    assert texts(tokenizer, renderer.render(talk("q", "a\n b"))) == [["a\n b<|im_end|>"]]


def test_a_completion_that_does_not_extend_the_prompt_is_refused():
    """case 28"""
    template = CHATML.replace("<|im_start|>assistant\n' }}", "<|im_start|>assistant\nSure: ' }}")
    tokenizer = byte_tokenizer(template, ["<|im_start|>", "<|im_end|>"])
    renderer = Renderer(tokenizer, stop_ids={tokenizer.convert_tokens_to_ids("<|im_end|>")})
    assert reason(renderer.render(talk("q", "a"))) == "prompt_not_extended"


def test_a_reply_without_a_stop_token_is_refused():
    """case 28"""
    tokenizer, _ = family("chatml")
    other = tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert reason(Renderer(tokenizer, stop_ids={other}).render(talk("q", "a"))) == "no_end_of_turn"


def test_conversations_that_the_template_refuses():
    """case 26: the template's own rules decide"""
    tokenizer, end = family("gemma")
    refused = Renderer(tokenizer, stop_ids={end}).render(talk("q", "a", system="s"))
    assert reason(refused) == "template_refused"
    assert "System role not supported" in refused.detail


def test_response_ids_are_the_row():
    """The exact tokens that the target generated, even where the tokenizer would cut the same text otherwise."""
    tokenizer = byte_tokenizer(CHATML, ["<|im_start|>", "<|im_end|>"], merges=[("a", "b")])
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    a, b = tokenizer.convert_tokens_to_ids(["a", "b"])
    renderer = Renderer(tokenizer, stop_ids={end})
    conversation = talk("q1", "x", "q2", "ab", response_ids=(a, b, end), finish="stop")
    (row,) = renderer.render(conversation)
    assert row.token_ids.tolist()[-3:] == [a, b, end]
    assert row.token_ids.tolist()[:-3] == renderer.prompt_ids(conversation, 3)
    assert texts(tokenizer, [row]) == [["x<|im_end|>", "ab<|im_end|>"]]
    assert len(tokenizer("ab").input_ids) == 1


def test_response_ids_that_say_something_else_are_refused():
    tokenizer, end = family("chatml")
    renderer = Renderer(tokenizer, stop_ids={end})
    ids = tuple(tokenizer("yes").input_ids)
    cases = [
        ("yes", (*ids, end), "stop", None),
        ("yes", (*ids, end), None, None),
        ("yes", ids, "length", None),
        ("no", (*ids, end), "stop", "response_ids_differ"),
        ("yes", ids, "stop", "no_end_of_turn"),
        ("yes", ids, None, "no_end_of_turn"),
        ("yes", (*ids, end, *ids, end), "stop", "response_ids_differ"),
        ("yes", (len(tokenizer), end), "stop", "bad_response_ids"),
    ]
    for content, response_ids, finish, expected in cases:
        rows = renderer.render(talk("q", content, response_ids=response_ids, finish=finish))
        assert (reason(rows) if isinstance(rows, Refused) else None) == expected, (content, response_ids, finish)


def test_a_reply_cut_at_the_length_limit_has_no_end_of_turn():
    tokenizer, end = family("chatml")
    (row,) = Renderer(tokenizer, stop_ids={end}).render(talk("q", "cut of", finish="length"))
    assert texts(tokenizer, [row]) == [["cut of"]]


def test_replies_in_a_row_are_each_their_own_turn():
    tokenizer, end = family("chatml")
    messages = (Message("user", "q"), Message("assistant", "a1"), Message("assistant", "a2"))
    rows = Renderer(tokenizer, stop_ids={end}).render(Conversation(messages, Source("f", 1, 0)))
    assert texts(tokenizer, rows) == [["a1<|im_end|>", "a2<|im_end|>"]]


def test_wrong_settings_end_before_any_row():
    """cases 11, 29"""
    tokenizer, end = family("thinking")
    with pytest.raises(ValueError, match="enable_thinkng is not read"):
        Renderer(tokenizer, {"enable_thinkng": False}, stop_ids={end})
    with pytest.raises(ValueError, match="add_generation_prompt is reserved"):
        Renderer(tokenizer, {"add_generation_prompt": True}, stop_ids={end})
    with pytest.raises(ValueError, match="stop ids"):
        Renderer(tokenizer, stop_ids=set())
    with pytest.raises(ValueError, match="turns is 'first'"):
        Renderer(tokenizer, stop_ids={end}, turns="first")
    with pytest.raises(ValueError, match="no chat template"):
        Renderer(byte_tokenizer(None, []), stop_ids={1})
    with pytest.raises(ValueError, match="fails on a plain user message"):
        Renderer(byte_tokenizer("{{ raise_exception('no') }}", []), stop_ids={1})


def test_truncation_cuts_spans_with_the_tokens():
    """case 34"""
    tokenizer, end = family("chatml")
    (row,) = Renderer(tokenizer, stop_ids={end}).render(talk("q1", "abc", "q2", "def"))
    (first, _), (second, last) = row.spans[0], row.spans[1]
    assert row.truncated(last) is row
    assert row.truncated(second + 1).spans == (row.spans[0], (second, second + 1))
    assert row.truncated(second).spans == (row.spans[0],)
    assert row.truncated(first).spans == ()
    assert [row.truncated(n).eligible for n in (first, first + 1, first + 2, first + 3)] == [0, 0, 1, 2]


def test_text_part_imports_neither_torch_nor_transformers():
    """case 53: tokenizers are loaded where they are used"""
    modules = [
        "conversations",
        "render",
        "dataset",
        "identity",
        "mask_token",
        "prepare",
        "packing",
        "hashing",
        "explain",
    ]
    code = "import sys\n" + "".join(f"import draftmill.text.{name}\n" for name in modules)
    code += "print(sorted({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))"
    assert run_python(code).stdout.strip() == "[]"
