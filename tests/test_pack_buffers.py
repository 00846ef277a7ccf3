"""A pack in buffers of fixed sizes is the same pack: anchors, loss and gradients, whatever was in them before."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter_helpers import ALL_LAYOUTS, make_documents, make_drafter, make_pack, make_vocabulary
from draftmill.config.schema import LossConfig, NoiseConfig
from draftmill.drafter.anchors import draw_anchors
from draftmill.drafter.blocks import make_blocks
from draftmill.drafter.forward import block_loss, slot_hidden
from draftmill.drafter.noise import add_noise
from draftmill.drafter.objective import LossSums
from draftmill.drafter.pack import PackBuffers, PackShape, to_device
from draftmill.train.fixed_step import fixed_shape

SHAPE = PackShape(rows=160, anchors=40, documents=6)
NOISE = NoiseConfig(kind="uniform", scale=0.3)


def step(drafter, pack, features):
    spec = drafter.spec
    drafter.zero_grad()
    blocks = make_blocks(pack, draw_anchors(pack, 3), spec.block_size, spec.mask_token_id)
    hidden = slot_hidden(drafter, make_vocabulary(spec), pack, add_noise(features, pack, NOISE, 3), blocks)
    sums = block_loss(hidden, make_vocabulary(spec), blocks, LossConfig(kind="dpace"), 4.0)
    sums.numerator.backward()
    return sums, [p.grad.clone() for p in drafter.parameters()]


@st.composite
def packs(draw):
    lengths = draw(st.lists(st.integers(8, 50), min_size=1, max_size=4).filter(lambda found: sum(found) <= 160))
    documents = make_documents(lengths, seed=draw(st.integers(0, 999)))
    eligible = [int((d[1][1:] & d[1][:-1]).sum()) for d in documents]
    anchors = [draw(st.integers(0, min(count, 10))) for count in eligible]
    anchors[0] = max(anchors[0], 1)
    return make_pack(
        documents, anchors, ids=draw(st.permutations(range(50)))[: len(lengths)], epoch=draw(st.integers(0, 9))
    )


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(ALL_LAYOUTS)), st.lists(packs(), min_size=2, max_size=3))
def test_fixed_sizes_change_nothing(layout, given_packs):
    drafter = make_drafter(ALL_LAYOUTS[layout])
    buffers = PackBuffers(SHAPE, drafter.spec.feature_size, torch.float32, torch.device("cpu"))
    for pack, features in given_packs:
        buffers.load(pack, features)
        exact, fixed = to_device(pack, "cpu"), buffers.pack()
        anchors = draw_anchors(fixed, 3)
        assert anchors[: pack.anchors].tolist() == draw_anchors(exact, 3).tolist()
        assert anchors[pack.anchors :].tolist() == [160] * (40 - pack.anchors)
        (sums, gradients), (theirs, other) = step(drafter, exact, features), step(drafter, fixed, buffers.features)
        for name in LossSums.__dataclass_fields__:
            torch.testing.assert_close(getattr(theirs, name), getattr(sums, name), rtol=1e-5, atol=1e-5)
        for a, b in zip(gradients, other, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


def test_a_pack_that_does_not_fit_is_refused():
    buffers = PackBuffers(SHAPE, 32, torch.float32, torch.device("cpu"))
    pack, features = make_pack(make_documents([100, 61]), [1, 1])
    with pytest.raises(ValueError, match="161 tokens, 2 anchors, 2 documents"):
        buffers.load(pack, features)
    pack, features = make_pack(make_documents([9] * 6), [1] * 6)
    with pytest.raises(ValueError, match="6 documents"):
        buffers.load(pack, features)


@pytest.mark.parametrize(
    ("tokens", "rate", "block"), [(8192, 1 / 16, 16), (2048, 0.03125, 16), (100, 0.3, 10), (5, 0.9, 4)]
)
def test_fixed_shapes_are_whole_tiles_and_hold_every_pack(tokens, rate, block):
    shape = fixed_shape(tokens, rate, block)
    assert shape.rows % 128 == 0 and shape.rows >= tokens
    assert shape.anchors * block % 128 == 0 and shape.anchors >= np.ceil(round(rate * tokens, 9))
    assert shape.documents > min(np.ceil(rate * tokens), tokens // 2)  # each document has two tokens and an anchor
