"""Does a server's answer to every prompt arrive exactly once, whatever fails on the way?"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path

import pytest

from completion_server import EOS, FAULTS, LETTER_A, CompletionServer, reply_ids
from draftmill.target import completions
from draftmill.target import server as server_module
from draftmill.target.answers import Prompt, Sampling
from draftmill.target.completions import GaveUp, PromptRefused, Retry, ServerUnusable
from draftmill.target.embedded import Embedded
from draftmill.target.model import Target
from draftmill.target.regenerate import RegenerateReport, regenerate
from draftmill.target.server import Breaker, Server, ServerSettings
from draftmill.text.conversations import read_conversations
from draftmill.text.render import Renderer
from tiny_models import CHAT_TEMPLATE, save_tiny, tiny_llama, tiny_tokenizer

QUICK = Retry(attempts=4, first_wait_s=0.01, longest_wait_s=0.02, timeout_s=30.0)
SAMPLING = Sampling(max_new_tokens=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("target"), tiny_llama())


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def write_prompts(path: Path, count: int, start: int = 0) -> Path:
    texts = [f"{'x' * (number % 7)}{number}" for number in range(start, start + count)]
    path.write_text("".join(json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n" for text in texts))
    return path


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def ids_of(tokenizer, messages, **options) -> list[int]:
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)["input_ids"]


def ask(
    folder: Path, server: CompletionServer, prompts: Path, out: Path, sampling: Sampling = SAMPLING, **settings
) -> tuple[RegenerateReport, Server]:
    given = ServerSettings(**{"url": server.url, "concurrency": 8, "retry": QUICK, **settings})
    answerer = Server.connect(given, folder)
    return regenerate(answerer, [prompts], out, sampling), answerer


def check_rows(out: Path, tokenizer, sources: set[str]) -> None:
    """Each source once, with the answer that the server gives to that very prompt."""
    rows = rows_of(out)
    assert Counter(row["source"] for row in rows) == Counter(sources)
    for row in rows:
        ids = reply_ids(ids_of(tokenizer, row["messages"][:-1]))
        assert row["response_ids"] == ids
        assert row["messages"][-1] == {"role": "assistant", "content": tokenizer.decode(ids[:-1])}
        assert row["finish"] == "stop"


# ---- What is sent, and what comes of it ------------------------------------------------------------------------


def test_answers_and_requests(folder, tokenizer, tmp_path):
    prompts, out = write_prompts(tmp_path / "p.jsonl", 20), tmp_path / "out.jsonl"
    with CompletionServer() as server:
        report, _ = ask(folder, server, prompts, out)
    check_rows(out, tokenizer, {f"p.jsonl:{line}" for line in range(1, 21)})
    assert (report.written, report.left, report.stopped_early) == (20, 0, None)
    assert report.response_tokens == sum(len(row["response_ids"]) for row in rows_of(out))
    sent = {tuple(body["prompt"]): body for body in server.requests}
    for row in rows_of(out):
        body = sent.pop(tuple(ids_of(tokenizer, row["messages"][:-1])))  # the very tokens that we render
        assert body["stop_token_ids"] == [EOS]
        assert (body["max_tokens"], body["temperature"], body["top_p"]) == (12, 0.0, 1.0)
        assert (body["top_k"], body["min_p"], body["repetition_penalty"]) == (-1, 0.0, 1.0)  # no server defaults
        assert "seed" not in body
    assert not sent


def test_a_server_and_the_embedded_target_write_the_same_rows(folder, tmp_path):
    prompts = write_prompts(tmp_path / "p.jsonl", 6)
    target = Target.load(folder, "float32", "cpu", (1,))
    embedded, served = tmp_path / "embedded.jsonl", tmp_path / "served.jsonl"
    regenerate(Embedded(target), [prompts], embedded, SAMPLING)
    by_key = {row["source"]: row["response_ids"] for row in rows_of(embedded)}
    replies = {
        tuple(ids_of(target.tokenizer, row["messages"][:-1])): by_key[row["source"]] for row in rows_of(embedded)
    }
    with CompletionServer(reply=lambda prompt: replies[tuple(prompt)]) as server:
        ask(folder, server, prompts, served)
    assert sorted(served.read_text().splitlines()) == sorted(embedded.read_text().splitlines())


def test_each_prompt_has_a_seed_of_its_own(folder, tmp_path):
    prompts = write_prompts(tmp_path / "p.jsonl", 8)
    seeds = []
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        with CompletionServer() as server:
            ask(folder, server, prompts, tmp_path / name, Sampling(12, temperature=0.7, top_p=0.9, seed=seed))
        assert {(body["temperature"], body["top_p"]) for body in server.requests} == {(0.7, 0.9)}
        seeds.append({tuple(body["prompt"]): body["seed"] for body in server.requests})
    first, again, other = seeds
    assert first == again
    assert len({*first.values(), *other.values()}) == 16
    assert all(0 <= seed < 2**31 for seed in first.values())


def test_requests_under_way_reach_the_concurrency_and_no_more(folder, tmp_path):
    with CompletionServer(delay_s=0.05) as server:
        ask(folder, server, write_prompts(tmp_path / "p.jsonl", 30), tmp_path / "out.jsonl", concurrency=6)
    assert server.most_under_way == 6


def test_a_server_that_tells_no_ids(folder, tokenizer, tmp_path):
    """Rows without ids are prepared from their text."""
    out = tmp_path / "out.jsonl"
    with CompletionServer() as server:
        server.tells_ids = False
        report, _ = ask(folder, server, write_prompts(tmp_path / "p.jsonl", 5), out)
    assert report.without_ids == report.written == 5
    assert all("response_ids" not in row for row in rows_of(out))
    renderer = Renderer(tokenizer, stop_ids=[EOS])
    for row, conversation in zip(rows_of(out), read_conversations(out, strict=True), strict=True):
        (rendered,) = renderer.render(conversation)
        assert rendered.token_ids[rendered.supervised].tolist() == reply_ids(ids_of(tokenizer, row["messages"][:-1]))


def test_prompts_beyond_the_target_or_the_server_are_refused(folder, tmp_path):
    lengths = {"target": 600, "server": 420, "neither": 20}
    prompts = tmp_path / "p.jsonl"
    rows = [{"messages": [{"role": "user", "content": "y" * length}]} for length in lengths.values()]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for told, refused in (({"max_model_len": 400}, 2), ({}, 1)):
        with CompletionServer() as server:
            server.models = [{"id": "tiny", **told}]
            report, _ = ask(folder, server, prompts, tmp_path / f"out-{refused}.jsonl")
        assert report.refused == {"prompt_too_long": refused}
        assert len(server.requests) == report.written == 3 - refused


# ---- Faults ----------------------------------------------------------------------------------------------------


def test_every_prompt_is_answered_once_through_all_faults(folder, tokenizer, tmp_path):
    """Every prompt fails once or twice, each in another way; the counts are those of the faults made."""
    made: Counter[str] = Counter()

    def fault(prompt: list[int], attempt: int) -> str | None:
        if attempt > sum(prompt) % 2:
            return None
        kind = FAULTS[(sum(prompt) // 2 + attempt) % len(FAULTS)]
        made[kind] += 1
        return kind

    prompts, out = write_prompts(tmp_path / "p.jsonl", 90), tmp_path / "out.jsonl"
    with CompletionServer(fault=fault) as server:
        server.slow_s = 4.0
        report, answerer = ask(folder, server, prompts, out, concurrency=16, retry=replace(QUICK, timeout_s=2.0))
    check_rows(out, tokenizer, {f"p.jsonl:{line}" for line in range(1, 91)})
    assert (report.written, report.left, report.stopped_early) == (90, 0, None)
    assert set(made) == set(FAULTS)
    assert answerer.failed_attempts == {
        "HTTP 500": made["500"],
        "HTTP 503": made["503"],
        "HTTP 429": made["429"],
        "timeout": made["slow"],
        "connection": made["reset"] + made["truncated"],
        "broken reply": made["broken"] + made["abort"] + made["not-an-object"],
    }
    assert server.attempts.total() == 90 + made.total()


def test_retry_after_holds_all_workers_back(folder, tmp_path):
    failed_at = []

    def fault(_prompt: list[int], _attempt: int) -> str | None:
        if failed_at:
            return None
        failed_at.append(time.monotonic())
        return "429"

    with CompletionServer(fault=fault, delay_s=0.05) as server:
        server.retry_after = "0.6"
        report, _ = ask(folder, server, write_prompts(tmp_path / "p.jsonl", 12), tmp_path / "out.jsonl", concurrency=2)
    assert report.written == 12
    later = [at - failed_at[0] for at in server.times if at > failed_at[0]]
    assert sum(wait < 0.3 for wait in later) <= 1  # the other worker's first request was on its way
    assert sum(wait >= 0.6 for wait in later) >= 11


def test_after_a_pause_workers_do_not_come_back_as_one():
    async def wake_times(pause_s: float, longer_s: float) -> list[float]:
        client = completions.Completions(None, None, frozenset(), Retry(first_wait_s=pause_s))
        began = time.monotonic()
        client._paused_until = began + pause_s

        async def worker() -> float:
            await client._pause()
            return time.monotonic() - began

        workers = [asyncio.create_task(worker()) for _ in range(20)]
        await asyncio.sleep(pause_s / 2)
        client._paused_until = began + longer_s  # told by another reply, while they wait
        return [await task for task in workers]

    times = asyncio.run(wake_times(0.2, 0.5))
    assert min(times) >= 0.5
    assert len({round(at, 2) for at in times}) >= 4


@pytest.mark.parametrize(
    ("value", "seconds"), [("3", 3), ("0.5", 0.5), ("-4", 0), ("1e9", completions.LONGEST_PAUSE_S)]
)
def test_retry_after_in_seconds(value, seconds):
    assert completions._retry_after_s(value) == seconds


def test_retry_after_as_a_date():
    assert completions._retry_after_s(formatdate(time.time() + 100, usegmt=True)) == pytest.approx(100, abs=5)
    assert completions._retry_after_s(formatdate(time.time() - 100, usegmt=True)) == 0


@pytest.mark.parametrize("value", [None, "soon", "nan"])
def test_a_retry_after_that_says_nothing(value):
    assert completions._retry_after_s(value) is None


def test_waits_double_up_to_a_limit_and_differ():
    retry = Retry(first_wait_s=1.0, longest_wait_s=10.0)
    for attempt, full in ((1, 1), (2, 2), (3, 4), (4, 8), (5, 10), (60, 10)):
        waits = {retry.wait_s(attempt) for _ in range(50)}
        assert full / 2 <= min(waits) < max(waits) <= full


def test_a_prompt_that_always_fails_is_left_for_later(folder, tokenizer, tmp_path):
    """The others are answered; the next call tries it again, and it alone."""
    prompts, out = write_prompts(tmp_path / "p.jsonl", 30), tmp_path / "out.jsonl"
    poison = ids_of(tokenizer, [{"role": "user", "content": "xxx10"}])
    with CompletionServer(fault=lambda prompt, _attempt: "500" if prompt == poison else None) as server:
        report, _ = ask(folder, server, prompts, out)
        assert server.attempts[tuple(poison)] == QUICK.attempts
        assert (report.written, report.left, report.stopped_early) == (29, 1, "1 prompts were given up")
        server.fault = lambda _prompt, _attempt: None
        server.requests.clear()
        report, _ = ask(folder, server, prompts, out)
    assert [body["prompt"] for body in server.requests] == [poison]
    assert (report.written, report.already_there, report.left) == (1, 29, 0)
    check_rows(out, tokenizer, {f"p.jsonl:{line}" for line in range(1, 31)})


def test_going_on_renders_only_what_is_left(folder, tmp_path, monkeypatch):
    """Rendering a million finished rows would keep the server idle for minutes."""
    prompts, out = write_prompts(tmp_path / "p.jsonl", 30), tmp_path / "out.jsonl"
    rendered: list[str] = []
    real = Renderer.prompt_ids

    def counted(self, conversation, *others):
        rendered.append(conversation.messages[0].content)
        return real(self, conversation, *others)

    monkeypatch.setattr(Renderer, "prompt_ids", counted)
    with CompletionServer() as server:
        assert ask(folder, server, prompts, out)[0].written == 30
        assert len(rendered) == len(set(rendered)) == 30
        rendered.clear()
        kept = out.read_text().splitlines(keepends=True)
        out.write_text("".join(kept[:27]))
        report, _ = ask(folder, server, prompts, out)
    assert (report.written, report.already_there, report.left) == (3, 27, 0)
    assert sorted(rendered) == sorted(json.loads(line)["messages"][0]["content"] for line in kept[27:])


def test_refused_prompts_are_counted_and_too_many_stop_the_call(folder, tmp_path):
    prompts = write_prompts(tmp_path / "p.jsonl", 60)
    with CompletionServer(fault=lambda prompt, _attempt: "400" if sum(prompt) % 5 == 0 else None) as server:
        report, _ = ask(folder, server, prompts, tmp_path / "a.jsonl", max_failed_share=0.5)
        refused = sum(sum(prompt) % 5 == 0 for prompt in server.attempts)
        assert report.refused == {"refused_by_server": refused} and refused > 6
        assert (report.written, report.left, report.stopped_early) == (60 - refused, 0, None)
        assert server.attempts.total() == 60  # a refusal is not asked again
        report, _ = ask(folder, server, prompts, tmp_path / "b.jsonl", max_failed_share=0.1)
    assert report.stopped_early is not None and "more than max_failed_share 0.1" in report.stopped_early
    assert 0 < report.left < 60 and report.written == len(rows_of(tmp_path / "b.jsonl"))


def test_a_server_that_fails_every_request_ends_the_call(folder, tmp_path):
    with CompletionServer(fault=lambda _prompt, _attempt: "500") as server:
        report, _ = ask(folder, server, write_prompts(tmp_path / "p.jsonl", 50), tmp_path / "out.jsonl", concurrency=4)
    assert report.stopped_early == "the server answers no more: 3 prompts in a row were given up"
    assert report.left == 50
    assert server.attempts.total() <= 7 * QUICK.attempts  # 3 prompts given up, 4 under way: not all 50


def test_the_breaker():
    gone, refused = GaveUp(), PromptRefused()
    good = completions.Answer((5, 1), "a", "stop", 2)
    breaker = Breaker(0.1)
    for end in [gone, gone, good, gone, gone, refused]:
        breaker.note(end)
        assert breaker.open_because is None
    for end in [gone, gone, gone]:
        breaker.note(end)
    assert "3 prompts in a row" in breaker.open_because
    breaker = Breaker(0.25)
    for _ in range(5):
        breaker.note(refused)
    for _ in range(14):
        breaker.note(good)
        assert breaker.open_because is None  # too few to tell
    breaker.note(good)
    assert breaker.open_because is None  # 5 of 20
    breaker.note(refused)
    assert "6 of 21 prompts failed" in breaker.open_because


def test_a_failing_disk_ends_the_call(folder, tmp_path, monkeypatch):
    """What was written before stays whole, and the error reaches the caller as it is."""
    from draftmill.target import answers

    prompts, out = write_prompts(tmp_path / "p.jsonl", 30), tmp_path / "out.jsonl"
    real, calls = answers.append_synced, []

    def append(file, lines):
        calls.append(lines)
        if len(calls) > 5:
            raise OSError(28, "No space left on device", str(out))
        real(file, lines)

    monkeypatch.setattr(answers, "append_synced", append)
    with CompletionServer() as server, pytest.raises(OSError, match="No space left"):
        ask(folder, server, prompts, out)
    assert len(calls) == 6
    assert len(rows_of(out)) == sum(map(len, calls[:5]))


class Scripted:
    """In place of `Completions`: what becomes of each prompt, after so many turns of the event loop."""

    def __init__(self, *ends: tuple[int, completions.Answer | Exception]) -> None:
        self.ends = list(ends)

    async def complete(self, prompt: Prompt, _sampling: Sampling) -> completions.Answer:
        turns, end = self.ends[int(prompt.key)]
        for _ in range(turns):
            await asyncio.sleep(0)
        if isinstance(end, Exception):
            raise end
        return end


def call(scripted: Scripted, on_answers) -> str | None:
    prompts = iter([Prompt(str(index), [5], []) for index in range(len(scripted.ends))])
    run = server_module._Call(
        scripted, prompts, SAMPLING, Breaker(0.1), on_answers, lambda *_: None, lambda *_: None
    )  # fmt: skip
    return asyncio.run(run.run(len(scripted.ends)))


GOOD = completions.Answer((5, 1), "a", "stop", 2)


def test_an_answer_that_is_there_when_the_breaker_opens_is_kept(monkeypatch):
    monkeypatch.setattr(server_module, "DOWN_AFTER", 1)
    handed = []
    assert "the server answers no more" in call(Scripted((1, GOOD), (0, GaveUp()), (9, GOOD)), handed.extend)
    assert [prompt.key for prompt, _ in handed] == ["0"]


def test_after_a_failed_write_nothing_more_is_written():
    """It might end in half a line."""
    calls = []

    def fail(answered) -> None:
        calls.append([prompt.key for prompt, _ in answered])
        raise OSError(28, "No space left on device", "out.jsonl")

    with pytest.raises(OSError, match="No space left"):
        call(Scripted((0, GOOD), (1, GOOD), (1, GOOD), (9, GOOD)), fail)
    assert calls == [["0"]] or calls == [["0", "1", "2"]]


# ---- Servers that cannot be used ---------------------------------------------------------------------------------


def test_nobody_listens(folder, tmp_path):
    with CompletionServer() as server:
        url = server.url
    with pytest.raises(ValueError, match=r"cannot be reached .* is it running"):
        Server.connect(ServerSettings(url, retry=QUICK), folder)


def test_a_server_on_this_machine_is_asked_without_the_proxy(folder, monkeypatch):
    with CompletionServer() as gone:
        monkeypatch.setenv("HTTP_PROXY", gone.url)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with CompletionServer() as server:
        assert Server.connect(ServerSettings(server.url, retry=QUICK), folder).model == "tiny"


def test_the_model_is_named_or_the_only_one(folder):
    with CompletionServer() as server:
        assert Server.connect(ServerSettings(server.url), folder).made_by()["server_model"] == "tiny"
        with pytest.raises(ValueError, match=r"serves \['tiny'\], asked for is big: name one of them with --model"):
            Server.connect(ServerSettings(server.url, "big"), folder)
        server.models.append({"id": "big"})
        with pytest.raises(ValueError, match=r"serves \['big', 'tiny'\], none was named"):
            Server.connect(ServerSettings(server.url), folder)
        assert Server.connect(ServerSettings(server.url, "big"), folder).model == "big"
        with pytest.raises(ServerUnusable, match="give --server as http://HOST:PORT/v1"):
            Server.connect(ServerSettings(server.url + "/v2"), folder)


def test_the_key(folder, tmp_path):
    with CompletionServer() as server:
        server.api_key = "secret"
        with pytest.raises(ServerUnusable, match=r"HTTP 401.*OPENAI_API_KEY"):
            Server.connect(ServerSettings(server.url), folder)
        report, _ = ask(folder, server, write_prompts(tmp_path / "p.jsonl", 2), tmp_path / "o.jsonl", api_key="secret")
    assert report.written == 2
    assert "secret" not in (tmp_path / "o.jsonl.settings.json").read_text()


def test_another_chat_template_is_refused(folder, tokenizer):
    options = {"enable_thinking": False}
    with CompletionServer() as server:
        server.render = lambda messages, given: ids_of(tokenizer, messages, **given)
        Server.connect(ServerSettings(server.url), folder, options)
        other = CHAT_TEMPLATE.replace("assistant\n", "assistant\n<think>\n")
        server.render = lambda messages, given: ids_of(tokenizer, messages, **given, chat_template=other)
        with pytest.raises(ServerUnusable, match=r"chat template differs .* give the --template-option"):
            Server.connect(ServerSettings(server.url), folder, options)


@pytest.mark.parametrize(
    ("choice", "usage", "said"),
    [
        ({"prompt_token_ids": [5, 6]}, {}, "read other prompt tokens than it was sent"),
        ({}, {"prompt_tokens": 3}, "tokens here, 3 there"),
        ({"token_ids": [LETTER_A, 600]}, {}, "answers with token 600, the target's tokenizer has 512"),
    ],
)
def test_another_prompt_or_model_behind_the_server(folder, tmp_path, choice, usage, said):
    with CompletionServer() as server:
        server.extra, server.extra_usage = choice, usage
        with pytest.raises(ServerUnusable, match=said):
            ask(folder, server, write_prompts(tmp_path / "p.jsonl", 3), tmp_path / "out.jsonl")
    assert server.attempts.total() <= 3


def test_rows_of_another_source_are_not_mixed_in(folder, tmp_path):
    prompts, out = write_prompts(tmp_path / "p.jsonl", 2), tmp_path / "out.jsonl"
    with CompletionServer() as server:
        ask(folder, server, prompts, out)
        with pytest.raises(ValueError, match="made with server_model=tiny, now it is None"):
            regenerate(Embedded(Target.load(folder, "float32", "cpu", (1,))), [prompts], out, SAMPLING)


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"url": "localhost:8000"}, "write it as http://"), ({"url": "http://h:p/v1"}, "Invalid port"),
     ({"concurrency": 0}, "concurrency is 0"),
     ({"max_failed_share": 1.5}, "max_failed_share is 1.5"), ({"retry": Retry(attempts=0)}, "attempts is 0"),
     ({"retry": Retry(timeout_s=0)}, "timeout is 0")],
)  # fmt: skip
def test_impossible_settings(changed, said):
    with pytest.raises(ValueError, match=said):
        replace(ServerSettings("http://h/v1"), **changed)


# ---- Replies in the forms that servers give them -----------------------------------------------------------------

A, B = LETTER_A, LETTER_A + 1


def reply(**choice) -> dict:
    return {"choices": [{"text": "ab", "finish_reason": "stop", **choice}], "usage": {"completion_tokens": 9}}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (reply(token_ids=[A, B, EOS]), ((A, B, EOS), "ab", "stop", 3)),
        (reply(token_ids=[A, B], stop_reason=EOS), ((A, B, EOS), "ab", "stop", 3)),  # the stop token left out
        (reply(token_ids=[A, B], matched_stop=EOS), ((A, B, EOS), "ab", "stop", 3)),
        (reply(token_ids=[A, B, EOS], stop_reason=EOS), ((A, B, EOS), "ab", "stop", 3)),
        (reply(token_ids=[A, B]), (None, "ab", "stop", 9)),  # which stop token is not told
        (reply(token_ids=[A, B], stop_reason="ab"), (None, "ab", "stop", 9)),
        (reply(token_ids=[A, B], finish_reason="length"), ((A, B), "ab", "length", 2)),
        (reply(token_ids=[A, EOS, B], finish_reason="length"), ((A, EOS), "a", "stop", 2)),  # it went on
        (reply(), (None, "ab", "stop", 9)),
        (reply(text="é", finish_reason="length"), (None, "é", "length", 9)),
    ],
)
def test_replies(tokenizer, data, expected):
    answer = completions.read_answer(data, Prompt("p", [5, 6], []), tokenizer, frozenset({EOS}))
    assert (answer.token_ids, answer.text, answer.finish, answer.tokens) == expected


@pytest.mark.parametrize(
    "data",
    [
        {}, {"choices": []}, {"choices": [{}]}, {"choices": ["a"]}, {"choices": {"0": {}}}, reply(text=None),
        reply(finish_reason=None), reply(finish_reason="abort"), reply(token_ids="ab"), reply(token_ids=[A, "b"]),
        reply(token_ids=[A, -1]), reply(token_ids=[True]), reply(text="\ud83d"),
    ],
)  # fmt: skip
def test_broken_replies_are_asked_again(tokenizer, data):
    with pytest.raises(completions._Again):
        completions.read_answer(data, Prompt("p", [5, 6], []), tokenizer, frozenset({EOS}))
