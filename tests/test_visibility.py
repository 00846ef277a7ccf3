"""What a slot may see: against a table written by hand, against triple loops, and by perturbation."""

from dataclasses import replace

import pytest
import torch

from drafter_helpers import ALL_LAYOUTS, SPEC, make_documents, make_drafter, make_pack, make_vocabulary
from draftmill.drafter.blocks import make_blocks
from draftmill.drafter.forward import slot_hidden
from draftmill.drafter.pack import to_device
from draftmill.drafter.visibility import BlockLayout, LayerRule


def layout_of(lengths, anchors, block_size):
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    document_start = [max(s for s in starts if s <= a) for a in anchors]
    return BlockLayout.of(torch.tensor(anchors), torch.tensor(document_start), sum(lengths), block_size)


def test_visible_keys_equal_a_table_written_by_hand():
    """Documents of 4 and 5 tokens, blocks of 3 at rows 2, 5 and 6 (closer than a block), window 3.

    Columns: context rows 0123|45678, then the slots of the three blocks.
    """
    layout = layout_of([4, 5], [2, 5, 6], 3)
    full = """
        1100 00000 111 000 000
        1100 00000 111 000 000
        1100 00000 111 000 000
        0000 10000 000 111 000
        0000 10000 000 111 000
        0000 10000 000 111 000
        0000 11000 000 000 111
        0000 11000 000 000 111
        0000 11000 000 000 111
    """
    sliding_causal = """
        1100 00000 100 000 000
        0100 00000 110 000 000
        0000 00000 111 000 000
        0000 10000 000 100 000
        0000 10000 000 110 000
        0000 00000 000 111 000
        0000 11000 000 000 100
        0000 01000 000 000 110
        0000 00000 000 000 111
    """
    for text, rule in ((full, LayerRule(None, False, 3)), (sliding_causal, LayerRule(3, True, 3))):
        rows = [[bit == "1" for bit in row.replace(" ", "")] for row in text.strip().splitlines()]
        assert layout.dense_mask(rule).tolist() == rows


@pytest.mark.parametrize("window", [None, 4, 7, 100])
@pytest.mark.parametrize("causal", [False, True])
def test_visible_keys_equal_a_triple_loop(window, causal):
    """Several documents, anchors closer than a block, an anchor on a first and on a last token."""
    lengths, block_size = [9, 1, 14, 6], 4
    anchors = [0, 3, 4, 5, 8, 9, 10, 11, 22, 23, 24, 29]
    mask = layout_of(lengths, anchors, block_size).dense_mask(LayerRule(window, causal, block_size))
    starts = [0, 9, 10, 24, 30]
    for i, anchor in enumerate(anchors):
        document = next(d for d in range(4) if starts[d] <= anchor < starts[d + 1])
        for slot in range(block_size):
            for key in range(30 + len(anchors) * block_size):
                if key < 30:
                    expected = starts[document] <= key < anchor
                    if window is not None and key <= anchor + slot - window:
                        expected = False
                else:
                    expected = (key - 30) // block_size == i and (not causal or (key - 30) % block_size <= slot)
                assert bool(mask[i * block_size + slot, key]) == expected, (anchor, slot, key)


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_a_block_depends_only_on_features_before_its_anchor_and_on_its_own_slots(layout):
    """Case 1: noise from row 12 on changes the block at 13 alone; another block's slots change nothing."""
    spec = ALL_LAYOUTS[layout]
    drafter, vocabulary = make_drafter(spec), make_vocabulary(spec)
    document = (*make_documents([32], spec=spec)[0][:1], make_documents([8], prompt=0)[0][1].repeat(4))
    features = make_documents([32], spec=spec)[0][2]
    pack = to_device(make_pack([(document[0], document[1], features)], [4])[0], "cpu")
    anchors = torch.tensor([10, 11, 12, 13])

    def hidden(features, token=None):
        blocks = make_blocks(pack, anchors, spec.block_size, spec.mask_token_id)
        if token is not None:
            blocks.token_ids[2, 1:] = token  # the mask slots of the block at 12
        return slot_hidden(drafter, vocabulary, pack, features, blocks)

    with torch.no_grad():
        before = hidden(features)
        noisy = features.clone()
        noisy[12:] = torch.randn(20, features.shape[1], generator=torch.Generator().manual_seed(0))
        after = hidden(noisy)
        assert torch.equal(before[:3], after[:3])
        assert not torch.equal(before[3], after[3])
        swapped = hidden(features, token=17)
        assert torch.equal(before[[0, 1, 3]], swapped[[0, 1, 3]])
        assert not torch.equal(before[2], swapped[2])


def test_layers_use_their_own_window_and_causality():
    mixed = LayerRule.of(SPEC, 0), LayerRule.of(SPEC, 1)
    assert mixed == (LayerRule(6, True, 4), LayerRule(None, False, 4))
    flipped = replace(SPEC, causal_sliding=False, causal_full=True)
    assert (LayerRule.of(flipped, 0), LayerRule.of(flipped, 1)) == (LayerRule(6, False, 4), LayerRule(None, True, 4))
