"""Does the target write its own prompts from the very place where its template puts a user's words?"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from completion_server import EOS, LETTER_A, CompletionServer
from draftmill.target import self_prompt
from draftmill.target.answers import Sampling
from draftmill.target.completions import Retry
from draftmill.target.embedded import Embedded
from draftmill.target.model import Target
from draftmill.target.regenerate import regenerate
from draftmill.target.self_prompt import DRAWS_PER_PROMPT, user_prefix, write_prompts
from draftmill.target.server import Server, ServerSettings
from tiny_models import CHAT_TEMPLATE, save_tiny, tiny_llama, tiny_tokenizer

SYSTEM = "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}{% endif %}"
INSTRUCTION = "{{ bos_token }}{% for message in messages %}[INST] {{ message['content'] | trim }} [/INST]{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("target"), tiny_llama())


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def texts_of(path: Path) -> list[str]:
    for row in rows_of(path):
        assert [message["role"] for message in row["messages"]] == ["user"]
    return [row["messages"][0]["content"] for row in rows_of(path)]


# ---- The prefix ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHAT_TEMPLATE, "<|im_start|>user\n"),
        (SYSTEM + CHAT_TEMPLATE, "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"),
        (INSTRUCTION, "<|im_start|>[INST] "),
    ],
)
def test_the_prefix_is_what_the_template_puts_before_a_users_words(template, expected):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    ids = user_prefix(tokenizer)
    assert tokenizer.decode(ids) == expected
    for words in ("What is 2 + 2?", "\u00e9 <b>"):  # the rendering of any prompt goes on from there
        rendered = tokenizer.apply_chat_template([{"role": "user", "content": words}])["input_ids"]
        assert rendered[: len(ids)] == ids


def test_template_options_reach_the_prefix():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% if formal %}Sir: {% endif %}" + CHAT_TEMPLATE
    assert tokenizer.decode(user_prefix(tokenizer, {"formal": True})) == "Sir: <|im_start|>user\n"


def test_a_token_over_the_border_is_left_to_the_target():
    """As in vocabularies whose words begin with their space."""
    from tokenizers import Tokenizer, models
    from tokenizers.pre_tokenizers import Metaspace
    from transformers import PreTrainedTokenizerFast

    vocabulary = {
        piece: index for index, piece in enumerate(["<s>", "</s>", "[INST]", "\u2581Quetzal", "\u2581Mnemonic"])
    }
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    backend.pre_tokenizer = Metaspace(prepend_scheme="never")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = "{% for message in messages %}[INST] {{ message['content'] }}{% endfor %}"
    assert tokenizer("[INST] Quetzal")["input_ids"] == [2, 3]
    assert user_prefix(tokenizer) == [2]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for message in messages %}{{ message['content'] }}{{ message['content'] }}{% endfor %}", "2 times"),
        ("{% for message in messages %}{{ message['content'] | lower }}{% endfor %}", "0 times"),
        ("{% for message in messages %}{{ message['content'] }}{% endfor %}", "nothing fixed before"),
        ("{% for m in messages %}{{ m['content'] | length }}: {{ m['content'] }}{% endfor %}", "nothing fixed before"),
    ],
)
def test_templates_without_such_a_place_are_refused(template, said):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=said):
        user_prefix(tokenizer)


# ---- Prompts from the target in this process ----------------------------------------------------------------------


def talkative(seed: int = 0) -> Target:
    """Ends its turn with one of many tokens, so that random weights end it at all."""
    target = Target(tiny_llama(seed=seed), tiny_tokenizer(), (1,))
    target.stop_ids = frozenset({EOS, *range(100, 160)})
    return target


def test_prompts_are_new_and_answered(tmp_path):
    target = talkative()
    prompts, out = tmp_path / "out.jsonl.prompts.jsonl", tmp_path / "out.jsonl"
    report = write_prompts(Embedded(target, 16), prompts, 40, seed=3)
    texts = texts_of(prompts)
    assert (report.written, report.already_there, report.stopped_early) == (40, 0, None)
    assert len({" ".join(text.split()) for text in texts}) == len(texts) == 40
    assert all(text == text.strip() != "" for text in texts)
    answered = regenerate(Embedded(target, 16), [prompts], out, Sampling(8))
    assert answered.written + answered.refused.total() == 40
    assert {row["messages"][0]["content"] for row in rows_of(out)} <= set(texts)


def test_prompts_go_on_from_a_kill_as_in_a_straight_run(tmp_path):
    """The last line cut off, or all of the last round: the same prompts in the end."""
    straight, out = tmp_path / "straight.jsonl", tmp_path / "out.jsonl"
    write_prompts(Embedded(talkative(), 16), straight, 90)
    lines = straight.read_bytes().splitlines(keepends=True)
    for kept in (b"".join(lines[:30]) + lines[30][:-9], b"".join(lines[:31])):
        out.write_bytes(kept)
        (tmp_path / "out.jsonl.settings.json").write_text((tmp_path / "straight.jsonl.settings.json").read_text())
        report = write_prompts(Embedded(talkative(), 16), out, 90)
        assert report.already_there == kept.count(b"\n")
        assert out.read_bytes() == straight.read_bytes()
    assert write_prompts(Embedded(talkative(), 16), out, 90).written == 0
    assert write_prompts(Embedded(talkative(), 16), out, 95).written == 5  # more are wanted later
    assert out.read_bytes().startswith(straight.read_bytes())


def test_prompts_of_other_settings_are_not_mixed(tmp_path):
    write_prompts(Embedded(talkative(), 16), tmp_path / "p.jsonl", 2)
    with pytest.raises(ValueError, match="made with seed=0, now it is 1"):
        write_prompts(Embedded(talkative(), 16), tmp_path / "p.jsonl", 2, seed=1)


# ---- Prompts from a server: what becomes of each draw -------------------------------------------------------------


def serve(folder: Path, server: CompletionServer) -> Server:
    return Server.connect(ServerSettings(server.url, concurrency=4, retry=Retry(first_wait_s=0.01)), folder)


def spell(text: str) -> list[int]:
    return tiny_tokenizer()(text)["input_ids"]


def test_draws_that_are_no_prompt_are_counted(folder, tmp_path, monkeypatch):
    """Of eight draws two are prompts: one is empty, one unfinished, one holds a marker, three are told twice."""
    monkeypatch.setattr(self_prompt, "ROUND", 16)
    kinds = ["ab c", " ab\n c ", "ab  c", "", "unfinished", "a<|im_start|>b", "d", "d"]
    replies = [spell(kind) + ([] if kind == "unfinished" else [EOS]) for kind in kinds]
    taken: list[int] = []

    def reply(_prompt: list[int]) -> list[int]:
        taken.append(1)
        return replies[(len(taken) - 1) % len(replies)]

    with CompletionServer(reply=reply) as server:
        report = write_prompts(serve(folder, server), tmp_path / "p.jsonl", 2)
        assert sorted(" ".join(text.split()) for text in texts_of(tmp_path / "p.jsonl")) == ["ab c", "d"]
        assert (report.written, report.stopped_early) == (2, None)
        prefix = spell("<|im_start|>user\n")
        assert all(body["prompt"] == prefix and body["temperature"] == 1.0 for body in server.requests)
        assert len({body["seed"] for body in server.requests}) == len(server.requests)
        taken.clear()
        report = write_prompts(serve(folder, server), tmp_path / "few.jsonl", 3)
    draws = 16 * DRAWS_PER_PROMPT
    assert report.stopped_early == f"{draws} draws gave 2 prompts of 3: the target has few to give"
    eighth = draws // len(kinds)
    assert report.left_out == Counter(duplicate=5 * eighth - 2, empty=eighth, unfinished=eighth, special_token=eighth)


def test_a_server_that_goes_away_leaves_the_prompts_it_wrote(folder, tmp_path):
    letters = iter(range(10**6))
    out = tmp_path / "p.jsonl"

    def reply(_prompt: list[int]) -> list[int]:
        number = next(letters)
        return [LETTER_A + number % 26, LETTER_A + number // 26 % 26, EOS]

    with CompletionServer(reply=reply) as server:
        quick = Retry(attempts=2, first_wait_s=0.01)
        server.fault = lambda _prompt, attempt: "500" if attempt >= 20 else None
        answerer = Server.connect(ServerSettings(server.url, concurrency=4, retry=quick), folder)
        report = write_prompts(answerer, out, 50)
        assert report.stopped_early == "the server answers no more: 3 prompts in a row were given up"
        assert len(texts_of(out)) == report.written == 20
        server.fault = lambda _prompt, _attempt: None
        report = write_prompts(answerer, out, 50)
    assert (report.written, report.already_there, report.stopped_early) == (30, 20, None)
    assert len(set(texts_of(out))) == 50
