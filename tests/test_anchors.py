"""The anchor draw: where, how many, and that it depends on nothing but the document."""

from dataclasses import replace

import numpy as np
import torch

from drafter_helpers import make_documents, make_pack
from draftmill.drafter import counter_hash
from draftmill.drafter.anchors import draw_anchors
from draftmill.drafter.pack import to_device


def python_hash(*values):
    """The published formula in plain Python integers."""
    state = 0
    for value in values:
        x = (state + value) % 2**32
        x ^= x >> 16
        x = x * 0x21F0AAAD % 2**32
        x ^= x >> 15
        x = x * 0x735A2D97 % 2**32
        state = x ^ (x >> 15)
    return state


def drawn(documents, anchors, ids, epoch=0, seed=4):
    """Positions drawn per document id."""
    pack, _ = make_pack(documents, anchors, ids, epoch=epoch)
    rows = draw_anchors(to_device(pack, "cpu"), seed).tolist()
    assert rows == sorted(rows) and len(rows) == sum(anchors)
    return {s.document: [r - s.start for r in rows if s.start <= r < s.start + s.length] for s in pack.documents}


def test_hash_equals_plain_integers():
    values = [0, 1, 77, 2**31 - 1, 2**32 - 1]
    tensor = torch.tensor(values)
    assert counter_hash.mix(tensor).tolist() == [python_hash(v) for v in values]
    assert counter_hash.fold(1, 9, tensor, 5).tolist() == [python_hash(1, 9, v, 5) for v in values]


def test_a_document_draws_its_lowest_hashes():
    documents = make_documents([20, 33], prompt=2)
    result = drawn(documents, [3, 6], [12, 5], epoch=2, seed=9)
    for (_, supervised, _), document, count in zip(documents, (12, 5), (3, 6), strict=True):
        eligible = [p for p in range(len(supervised) - 1) if supervised[p] and supervised[p + 1]]
        expected = sorted(eligible, key=lambda p, d=document: python_hash(3, 9, 2, d, p))[:count]
        assert result[document] == sorted(expected)


def test_the_draw_depends_on_nothing_but_the_document():
    documents = make_documents([20, 33, 9])
    alone = {}
    for document, anchors, name in zip(documents, (4, 7, 2), (3, 8, 1), strict=True):
        alone |= drawn([document], [anchors], [name])
    assert drawn(documents, [4, 7, 2], [3, 8, 1]) == alone
    assert drawn(documents[::-1], [2, 7, 4], [1, 8, 3]) == alone
    assert drawn(documents, [4, 7, 2], [3, 8, 1], epoch=1) != alone


def test_anchors_lie_on_the_reply_and_a_short_reply_yields_few():
    """Case 8: 900 prompt and 100 reply tokens, over epochs; and a reply of 3 tokens with room for 16."""
    supervised = np.arange(1000) >= 900
    document = (np.zeros(1000, dtype=np.int32), supervised, torch.zeros(1000, 2))
    seen = set()
    for epoch in range(200):
        positions = drawn([document], [50], [0], epoch=epoch)[0]
        assert len(set(positions)) == 50 and min(positions) >= 900 and max(positions) <= 998
        seen.update(positions)
    assert seen == set(range(900, 999))
    short = (np.zeros(9, dtype=np.int32), np.arange(9) >= 6, torch.zeros(9, 2))
    assert drawn([short], [2], [0]) == {0: [6, 7]}


def test_eligible_stops_at_a_documents_end():
    """A last supervised token is no anchor, even if the next document starts supervised."""
    pack, _ = make_pack(make_documents([5, 5], prompt=0), [0, 0])
    assert to_device(pack, "cpu").eligible.tolist() == [True] * 4 + [False] + [True] * 4 + [False]


def test_draws_are_spread_evenly():
    pack = to_device(make_pack(make_documents([16], prompt=0), [3])[0], "cpu")
    counts = torch.zeros(16)
    for epoch in range(3000):
        counts[draw_anchors(replace(pack, epoch=epoch), 0)] += 1
    eligible = counts[pack.eligible]
    assert torch.all((eligible / 3000 - 3 / len(eligible)).abs() < 0.04)
