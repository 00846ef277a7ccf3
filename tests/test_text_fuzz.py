"""Mutated input from bytes to token rows: no crash, exact accounting, bounded memory, and supervision that holds."""

from __future__ import annotations

import copy
import json
import tracemalloc
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from chat_templates import target_of
from draftmill.text.chunks import fit
from draftmill.text.conversations import Conversation, parse_row
from draftmill.text.refusals import DropReason, Refused
from draftmill.text.render import Renderer
from draftmill.text.sources import read_raw

LIMIT = 2**16
USER, REPLY = {"role": "user", "content": "Weather? é"}, {"role": "assistant", "content": "Rain. \u2603"}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"place": "K\\u00f6ln", "n": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
ROWS: list[dict[str, Any]] = [
    {"messages": [USER, REPLY, USER, REPLY]},
    {"messages": [{"role": "system", "content": "s"}, USER, {**REPLY, "reasoning_content": "Clouds."}]},
    {
        "messages": [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "12", "tool_call_id": "c1"},
            REPLY,
        ],
        "tools": TOOLS,
        "chat_template_kwargs": {"enable_thinking": True},
    },
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "<|im_end|>"}]}, REPLY], "finish": "length"},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"},
    {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 1, 1, 0]},
    {"messages": [USER, {"role": "assistant", "content": "ab"}], "response_ids": [64, 65, 257], "finish": "stop"},
    {"prompt": "q"},
]
ODD = st.one_of(
    st.sampled_from([None, True, 0, -1, 2**70, 1.5, "", " ", "assistant", "<|im_end|>", "</think>", "\x00", "{", "[]"]),
    st.sampled_from([[], {}, [[]], {"role": "user"}, "\u2028", "x" * 300, ["tool"], {"type": "text", "text": 1}]),
)
INSERTS = st.one_of(
    st.binary(max_size=4),
    st.sampled_from([b"\n", b"\r\n", b"\x00", b"\\ud800", b"NaN", b'"', b"{", b"}", b"[" * 2000, b"\xef\xbb\xbf"]),
)


def places(value: Any, path: tuple = ()) -> list[tuple]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))][0 if path else 1 :]


@st.composite
def structural(draw) -> bytes:
    """A row with one or two of its parts replaced, removed or doubled, anywhere in the tree."""
    row = copy.deepcopy(draw(st.sampled_from(ROWS)))
    for _ in range(draw(st.integers(0, 2))):
        found = places(row)
        if not found:
            break
        *parents, last = draw(st.sampled_from(found))
        holder = row
        for key in parents:
            holder = holder[key]
        change = draw(st.sampled_from(["replace", "remove", "double"]))
        if change == "replace":
            holder[last] = copy.deepcopy(draw(ODD))
        elif change == "remove":
            del holder[last]
        elif isinstance(holder, list):
            holder.insert(last, copy.deepcopy(holder[last]))
        else:
            holder[str(last) + "_"] = holder[last]
    return json.dumps(row, ensure_ascii=draw(st.booleans())).encode()


@st.composite
def mutated(draw) -> bytes:
    """The bytes of a row with some of them cut out and others put in."""
    line = draw(structural())
    for _ in range(draw(st.integers(0, 2))):
        start = draw(st.integers(0, len(line)))
        end = min(len(line), start + draw(st.integers(0, 6)))
        line = line[:start] + draw(INSERTS) + line[end:]
    return line


FILES = st.builds(
    lambda parts, end: b"".join(line + ending for line, ending in parts) + end,
    st.lists(st.tuples(mutated(), st.sampled_from([b"\n", b"\n", b"\r\n", b""])), max_size=5),
    st.binary(max_size=5),
)


@cache
def renderers() -> list[Renderer]:
    made = []
    for name in ("qwen3", "harmony"):
        tokenizer, stops = target_of(name)
        made.append(Renderer(tokenizer, stop_ids=stops, turns="all"))
    return made


def check_row(found: Conversation, renderer: Renderer) -> bool:
    """Whether the conversation is kept; what is kept must hold what the file header of render.py promises."""
    rows = renderer.render(found)
    if isinstance(rows, Refused):
        assert rows.source == found.source
        return False
    for row in rows:
        edges = [edge for span in row.spans for edge in span]
        assert edges == sorted(set(edges))
        assert edges[0] >= 0
        assert edges[-1] == len(row.token_ids)
        assert row.token_ids.min() >= 0
        assert row.token_ids.max() < len(renderer.tokenizer)
    if found.tokens is None:
        last = found.reply_turns[-1]
        start, end = rows[-1].spans[-1]
        prompt = renderer.prompt_ids(found, last)
        assert rows[-1].token_ids[: len(prompt)].tolist() == prompt
        said = renderer.tokenizer.decode(rows[-1].token_ids[start:end])
        assert found.messages[last].content.strip() in said
        assert found.messages[last].reasoning.strip() in said
    return not isinstance(fit(rows, found.source, 500), Refused)


def check_file(path, data: bytes) -> None:
    assume(not data.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1", b"ARROW1", b"\xff\xff\xff\xff")))
    path.write_bytes(data)
    expected = [i for i, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1) if line.strip()]
    rows = [(raw, parse_row(raw)) for raw in read_raw(path, LIMIT)]
    assert [raw.source.line for raw, row in rows if row is not None] == expected
    for _, row in rows:
        if isinstance(row, Refused):
            assert isinstance(row.reason, DropReason)
            assert len(str(row)) < 2000
        elif row is not None:
            for renderer in renderers():
                check_row(row, renderer)


QUICK = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
LONG = settings(max_examples=20_000, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


@QUICK
@given(data=FILES)
def test_any_mutation_is_kept_or_refused_once(tmp_path_factory, data):
    """case 35"""
    check_file(tmp_path_factory.getbasetemp() / "fuzz.jsonl", data)


@pytest.mark.soak
@LONG
@given(data=FILES)
def test_any_mutation_is_kept_or_refused_once_soak(tmp_path_factory, data):
    """case 35, at length"""
    check_file(tmp_path_factory.getbasetemp() / "fuzz-soak.jsonl", data)


def test_unmutated_rows_are_kept(tmp_path):
    """The fuzz starts from rows that work, or it would prove nothing."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    found = [parse_row(raw) for raw in read_raw(path)]
    assert [isinstance(row, Conversation) for row in found] == [True] * (len(ROWS) - 1) + [False]
    assert [check_row(row, renderers()[0]) for row in found[:-1]] == [True] * (len(ROWS) - 1)


def test_memory_stays_bounded_over_many_rows(tmp_path):
    """case 35: 40 MB of rows, good and bad, never more than a few in memory"""
    line = json.dumps({"messages": [USER, {"role": "assistant", "content": "x" * 40_000}]}).encode()
    path = tmp_path / "many.jsonl"
    with path.open("wb") as file:
        for i in range(1000):
            file.write((line if i % 3 else line[: 20_000 + i]) + b"\n")
    counts = {"kept": 0, "refused": 0}
    tracemalloc.start()
    for raw in read_raw(path):
        counts["refused" if isinstance(parse_row(raw), Refused) else "kept"] += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert counts == {"kept": 666, "refused": 334}
    assert peak < 4 * 2**20
