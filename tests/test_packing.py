"""Which documents share a pack, in which order, and does a restart see the same?"""

from __future__ import annotations

import json
import time
from fractions import Fraction
from math import ceil
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill.text.hashing import hash32, mix
from draftmill.text.packing import PackStream, anchor_count
from draftmill.text.rows import InMemoryRows, RowCounts, spans_of


def numbers(pack_tokens=64, anchor_rate=0.25, anchors_per_document=8, pack_window=8):
    return SimpleNamespace(
        pack_tokens=pack_tokens,
        anchor_rate=anchor_rate,
        anchors_per_document=anchors_per_document,
        pack_window=pack_window,
    )


def documents(masks: list[list[bool]]) -> InMemoryRows:
    """Row i holds the tokens 1000 i, 1000 i + 1, ..."""
    return InMemoryRows([(1000 * i + np.arange(len(mask)), np.array(mask, dtype=bool)) for i, mask in enumerate(masks)])


def replies(lengths: list[int], prompt: int = 1) -> InMemoryRows:
    return documents([[False] * prompt + [True] * (length - prompt) for length in lengths])


def take(stream: PackStream, count: int) -> list:
    return [next(stream) for _ in range(count)]


def epoch(stream: PackStream, number: int) -> list:
    return take(stream, stream.packs_in_epoch(number))


def contents(pack) -> tuple:
    spans = [(span.document, span.start, span.length, span.anchors) for span in pack.documents]
    return pack.seq, pack.epoch, spans, pack.token_ids.tolist(), pack.supervised.tolist()


def members(packs) -> list[int]:
    return [span.document for pack in packs for span in pack.documents]


def wanted_anchors(mask: list[bool], limit: int, rate: str, cap: int) -> int:
    """The rule of the design by a plain loop, with exact fractions."""
    mask = mask[:limit]
    eligible = sum(1 for a in range(len(mask) - 1) if mask[a] and mask[a + 1])
    return min(cap, ceil(Fraction(rate) * sum(mask)), eligible)


REPLY = st.builds(lambda prompt, reply: [False] * prompt + [True] * reply, st.integers(0, 30), st.integers(0, 40))
DENSE = st.builds(lambda length: [True] * length, st.integers(0, 12))  # so that anchors run out before tokens
MASKS = st.lists(REPLY | DENSE | st.lists(st.booleans(), max_size=40), min_size=1, max_size=40)


@settings(max_examples=120, deadline=None)
@given(
    masks=MASKS,
    pack_tokens=st.integers(2, 50),
    rate=st.sampled_from(["0.05", "0.1", "0.25", "0.3", "1"]),
    cap=st.integers(1, 12),
    window=st.integers(1, 50),
    seed=st.integers(0, 2**31 - 1),
)
def test_conservation_budgets_and_anchors(masks, pack_tokens, rate, cap, window, seed):
    """cases 8, 44, 68: every document with an anchor exactly once per epoch, both budgets, its own anchors"""
    anchors = [wanted_anchors(mask, pack_tokens, rate, cap) for mask in masks]
    rows, data = documents(masks), numbers(pack_tokens, float(rate), cap, window)
    if not any(anchors):
        with pytest.raises(ValueError, match=r"raise data\.pack_tokens"):
            PackStream(rows, data, seed)
        return
    stream = PackStream(rows, data, seed)
    assert [document for document, _ in stream.filtered] == [i for i, count in enumerate(anchors) if not count]
    for number in (0, 1):
        packs = epoch(stream, number)
        assert sorted(members(packs)) == [i for i, count in enumerate(anchors) if count]
        for pack in packs:
            assert pack.epoch == number
            assert pack.tokens <= pack_tokens
            assert pack.anchors <= ceil(Fraction(rate) * pack_tokens)
            for span in pack.documents:
                assert span.length == min(len(masks[span.document]), pack_tokens)
                assert span.anchors == anchors[span.document]
                cut = slice(span.start, span.start + span.length)
                assert pack.token_ids[cut].tolist() == [1000 * span.document + t for t in range(span.length)]
                assert pack.supervised[cut].tolist() == masks[span.document][:pack_tokens]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(3, 64), min_size=1, max_size=40),
    window=st.integers(1, 20),
    seed=st.integers(0, 1000),
    stop=st.integers(0, 60),
)
def test_resuming_anywhere_equals_the_straight_run(lengths, window, seed, stop):
    """case 68: over three epochs; the position survives JSON"""
    rows, data = replies(lengths), numbers(pack_window=window)
    straight = PackStream(rows, data, seed)
    packs = [pack for number in range(3) for pack in epoch(straight, number)]
    assert [pack.seq for pack in packs] == list(range(len(packs)))
    stop = min(stop, len(packs))
    interrupted = PackStream(rows, data, seed)
    take(interrupted, stop)
    for saved in (interrupted.position, straight.position_at(stop)):
        resumed = PackStream(rows, data, seed, position=json.loads(json.dumps(saved)))
        assert list(map(contents, take(resumed, len(packs) - stop))) == list(map(contents, packs[stop:]))


def test_position_of_what_is_not_yet_trained():
    """case 68: packs handed out but not trained are handed out again"""
    stream = PackStream(replies([20] * 64), numbers(), 3)
    packs = take(stream, 40)
    trained = 37
    resumed = PackStream(replies([20] * 64), numbers(), 3, position=stream.position_at(trained))
    assert list(map(contents, take(resumed, 3))) == list(map(contents, packs[37:]))
    with pytest.raises(ValueError, match="pack 41"):
        stream.position_at(41)


def test_order_is_a_function_of_seed_and_epoch():
    """case 68"""
    rows = replies([10] * 64)
    stream = PackStream(rows, numbers(), 5)
    packs = [epoch(stream, 0), epoch(stream, 1)]
    first, second = map(members, packs)
    again = PackStream(rows, numbers(), 5)
    assert members(epoch(again, 0)) == first
    assert first != second
    together = [{frozenset(members([pack])) for pack in of_epoch} for of_epoch in packs]
    assert together[0] != together[1]
    assert first != list(range(64))
    assert members(epoch(PackStream(rows, numbers(), 6), 0)) != first


def test_packs_leave_a_window_in_no_order_of_size():
    rows = replies([3 + i % 60 for i in range(400)])
    stream = PackStream(rows, numbers(pack_window=400), 0)
    sizes = [len(pack.documents) for pack in epoch(stream, 0)]
    assert sizes != sorted(sizes)
    assert sizes != sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"pack_tokens": 65}, r"data\.pack_tokens is 65.*has 64"),
        ({"anchor_rate": 0.5}, r"data\.anchor_rate"),
        ({"anchors_per_document": 4}, r"data\.anchors_per_document"),
        ({"pack_window": 9}, r"data\.pack_window"),
    ],
)
def test_resuming_with_another_setting_is_refused_by_name(change, name):
    """case 68"""
    rows = replies([10] * 20)
    saved = PackStream(rows, numbers(), 1).position
    with pytest.raises(ValueError, match=name):
        PackStream(rows, numbers(**change), 1, position=saved)


def test_resuming_with_another_seed_or_dataset_is_refused_by_name():
    rows = replies([10] * 20)
    saved = PackStream(rows, numbers(), 1).position
    with pytest.raises(ValueError, match=r"train\.seed is 2.*has 1"):
        PackStream(rows, numbers(), 2, position=saved)
    rows.fingerprint = "other"
    with pytest.raises(ValueError, match="dataset is other"):
        PackStream(rows, numbers(), 1, position=saved)


def grown(rows: InMemoryRows, lengths: list[int]) -> InMemoryRows:
    """`rows` and further ones, as `draftmill prepare --append` makes them: new rows last, the old state named."""
    bigger = replies(lengths)
    bigger.fingerprint = f"with {len(lengths)} rows"
    bigger.earlier = {**rows.earlier, len(rows): rows.fingerprint}
    return bigger


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(3, 64), min_size=3, max_size=60),
    sizes=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    stops=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    seed=st.integers(0, 1000),
)
def test_rows_that_a_dataset_gains_enter_at_the_next_epoch(lengths, sizes, stops, seed):
    """Two growths at any two places: each epoch holds the documents it began with, and restarts change nothing."""
    small, middle = sorted(1 + size % (len(lengths) - 2) for size in sizes)
    middle += small == middle
    datasets = [replies(lengths[:small])]
    datasets += [grown(datasets[0], lengths[:middle])]
    datasets += [grown(datasets[1], lengths)]

    stream = PackStream(datasets[0], numbers(), seed)
    packs, known = [], [len(datasets[0])]  # documents of each epoch so far
    for stop, larger in zip(stops, datasets[1:], strict=True):
        packs += take(stream, stop)
        reached = packs[-1].epoch if packs else 0
        known += [known[-1]] * (reached + 1 - len(known))
        known = [*known[: reached + 1], len(larger)]
        stream = PackStream(larger, numbers(), seed, json.loads(json.dumps(stream.position)))
    last = len(known)  # one more epoch after the last growth
    end = stream.end_of(last + 1)
    saved = stream.position
    rest = take(stream, end - len(packs))
    packs += rest
    known.append(known[-1])
    for number, documents in enumerate(known):
        assert sorted(members(pack for pack in packs if pack.epoch == number)) == list(range(documents))
    whole = PackStream(datasets[2], numbers(), seed)
    as_if_always_large = [members([pack]) for pack in take(whole, whole.end_of(last + 1)) if pack.epoch == last]
    assert [members([pack]) for pack in packs if pack.epoch == last] == as_if_always_large
    resumed = PackStream(datasets[2], numbers(), seed, json.loads(json.dumps(saved)))
    assert list(map(contents, take(resumed, len(rest)))) == list(map(contents, rest))


def test_a_dataset_that_is_not_the_old_one_grown_is_refused():
    rows = replies([10] * 20)
    saved = PackStream(rows, numbers(), 1).position
    other = grown(rows, [10] * 30)
    other.earlier = {20: "another dataset"}
    with pytest.raises(ValueError, match="dataset is with 30 rows"):
        PackStream(other, numbers(), 1, position=saved)


def test_changed_pack_tokens_change_the_packing():
    """case 68"""
    rows = replies([10] * 40)
    counts = {}
    for size in (20, 40):
        counts[size] = PackStream(rows, numbers(pack_tokens=size, anchors_per_document=1), 1).packs_in_epoch(0)
    assert counts == {20: 20, 40: 10}


def test_a_known_window_is_packed_by_hand():
    """Sizes 6 5 4 3 2 into packs of 10: the largest first, each into the fullest pack that holds it."""
    rows = replies([3, 6, 2, 5, 4], prompt=0)
    data = numbers(pack_tokens=10, anchor_rate=1.0, anchors_per_document=1, pack_window=5)
    packs = epoch(PackStream(rows, data, 0), 0)
    assert sorted([span.length for span in pack.documents] for pack in packs) == [[5, 3, 2], [6, 4]]


def test_the_anchor_budget_binds_by_hand():
    """Packs of 20 tokens and 5 anchors: two replies of 9 (3 anchors each) fit by tokens, yet not by anchors."""
    rows = replies([9, 9, 3, 3, 3, 3], prompt=0)
    packs = epoch(PackStream(rows, numbers(pack_tokens=20), 0), 0)
    assert [[span.length for span in pack.documents] for pack in packs] == [[9, 3, 3], [9, 3, 3]]
    assert [pack.anchors for pack in packs] == [5, 5]


def test_documents_longer_than_a_pack_are_cut_and_those_without_a_reply_are_filtered():
    """case 34"""
    masks = [[False] * 10 + [True] * 10, [True] * 30, [False] * 3 + [True] * 4, [False] * 7 + [True] * 5]
    stream = PackStream(documents(masks), numbers(pack_tokens=8), 0)
    assert stream.filtered == ((0, "no_anchor_within_pack_tokens"), (3, "no_anchor_within_pack_tokens"))
    packs = epoch(stream, 0)
    assert sorted((s.document, s.length, s.anchors) for p in packs for s in p.documents) == [(1, 8, 2), (2, 7, 1)]


def test_anchor_counts_have_no_binary_dust():
    assert ceil(0.1 * 30) == 3
    assert ceil(0.07 * 100) == 8
    assert anchor_count(0.07, 100) == 7
    assert anchor_count(0.0625, 8192) == 512
    assert anchor_count(0.0625, np.array([0, 1, 16, 17])).tolist() == [0, 1, 1, 2]


def test_a_documents_anchors_do_not_depend_on_its_neighbours():
    """case 44: the last, nearly empty pack draws as densely as the others"""
    rows = replies([20] * 7)
    packs = epoch(PackStream(rows, numbers(pack_tokens=64), 0), 0)
    assert [len(pack.documents) for pack in packs].count(1) == 1
    assert {span.anchors for pack in packs for span in pack.documents} == {5}


def test_hash_equals_plain_integer_arithmetic():
    def scalar_mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x21F0AAAD % 2**32
        x ^= x >> 15
        x = x * 0x735A2D97 % 2**32
        return x ^ (x >> 15)

    values = [(1, 0, 0, 5), (3, 2**31 - 1, 7, 10**6), (2, 1, 1, 0), (4, 0, 2**32 - 1, 9)]
    for value in values:
        h = scalar_mix(value[0])
        for part in value[1:]:
            h = scalar_mix((h + part) % 2**32)
        assert hash32(*value).tolist() == [h]
    assert mix(np.array([1, 2**32 - 1], dtype=np.uint64)).tolist() == [scalar_mix(1), scalar_mix(2**32 - 1)]


def test_spans_of_a_mask():
    assert spans_of(np.array([], dtype=bool)).tolist() == []
    assert spans_of(np.array([1, 1, 0, 0, 1], dtype=bool)).tolist() == [0, 2, 4, 5]


class Lognormal:
    """A big dataset's counts, without its rows: replies are the last `reply` of each document."""

    fingerprint = "lognormal"
    earlier: ClassVar[dict[int, str]] = {}

    def __init__(self, count: int, reply: float) -> None:
        self.reply = reply
        draws = np.random.default_rng(0).lognormal(np.log(1100) - 0.8**2 / 2, 0.8, count)
        self.lengths = np.clip(draws, 8, 8192).astype(np.int32)

    def __len__(self) -> int:
        return len(self.lengths)

    def counts(self, limit: int) -> RowCounts:
        lengths = np.minimum(self.lengths.astype(np.int64), limit)
        supervised = lengths - (self.lengths * (1 - self.reply)).astype(np.int64)
        return RowCounts(lengths, supervised, supervised - 1)


@pytest.mark.parametrize(("reply", "anchors_bind"), [(0.8, False), (1.0, True)])
def test_padding_is_small_and_planning_is_fast_on_lognormal_lengths(reply, anchors_bind):
    rows = Lognormal(100_000, reply)
    data = numbers(pack_tokens=8192, anchor_rate=0.0625, anchors_per_document=512, pack_window=1024)
    started = time.perf_counter()
    stream = PackStream(rows, data, 0)
    packs = stream.packs_in_epoch(0)
    assert time.perf_counter() - started < 10  # about 0.1 s on one idle core; a million documents take 1 s
    assert stream.padding_share(0) == pytest.approx(1 - rows.lengths.sum() / (packs * 8192))
    assert stream.padding_share(0) < 0.01
    tokens_alone = PackStream(rows, numbers(8192, 0.0625, 1, 1024), 0).packs_in_epoch(0)
    assert (packs > tokens_alone) == anchors_bind


def test_small_windows_carry_their_emptiest_pack():
    """Short documents: 8 of them fill half a pack, and still the packs are full."""
    packs = epoch(PackStream(replies([4] * 256), numbers(pack_tokens=64, anchors_per_document=1), 0), 0)
    assert [pack.tokens for pack in packs].count(64) >= 15
    assert len(packs) == 16
