"""flex_attention's tiles against the dense rule, for every (query tile, key tile)."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention

from drafter_helpers import SPEC
from draftmill.drafter.tiles import TILE, block_mask, padded, tile_tables
from draftmill.drafter.visibility import BlockLayout, LayerRule


@st.composite
def layouts(draw):
    lengths = draw(st.lists(st.integers(1, 400), min_size=1, max_size=4))
    total = sum(lengths)
    anchors = sorted(draw(st.sets(st.integers(0, total - 1), min_size=1, max_size=40)))
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    block_size = draw(st.sampled_from([4, 7, 10, 16]))
    start = [max(s for s in starts if s <= a) for a in anchors]
    inert = [total] * draw(st.integers(0, 20))  # places left over where sizes are fixed
    layout = BlockLayout.of(torch.tensor(anchors + inert), torch.tensor(start + inert), total, block_size)
    window = draw(st.sampled_from([None, block_size, 60, 300]))
    return layout, LayerRule(window, draw(st.booleans()), block_size)


@settings(max_examples=120, deadline=None)
@given(layouts())
def test_tiles_equal_the_dense_rule(case):
    """A tile is skipped only if nothing in it is visible, taken whole only if all of it is; and is found whole
    wherever it lies inside the context."""
    layout, rule = case
    mask = layout.dense_mask(rule)
    some, every = tile_tables(layout, rule)
    assert list(some.shape) == [padded(size) // TILE for size in mask.shape]
    assert not (some & every).any()
    for i in range(some.shape[0]):
        for j in range(some.shape[1]):
            tile = mask[i * TILE : (i + 1) * TILE, j * TILE : (j + 1) * TILE]
            assert bool(some[i, j] | every[i, j]) >= bool(tile.any()), "a visible pair would be skipped"
            whole = tile.all() and tile.shape[1] == TILE and len(tile) > 0  # padded keys are never visible
            assert not every[i, j] or bool(whole), "an invisible pair would be seen"
            if (j + 1) * TILE <= layout.context_rows and whole:
                assert every[i, j]


@settings(max_examples=60, deadline=None)
@given(layouts())
def test_tables_of_forward_and_backward_list_the_same_tiles(case):
    """Row by row what `tile_tables` says, chosen tiles first; contiguous, as the kernels take for granted."""
    tables = dict(zip(("", "full_"), tile_tables(*case), strict=True))
    mask = block_mask(*case)
    for kind, table in tables.items():
        for side, wanted in (("kv", table), ("q", table.T)):
            count = getattr(mask, f"{kind}{side}_num_blocks")
            order = getattr(mask, f"{kind}{side}_indices")
            assert count.is_contiguous() and order.is_contiguous() and order.dtype == count.dtype == torch.int32
            for row, found, number in zip(wanted, order[0, 0], count[0, 0].tolist(), strict=True):
                assert found[:number].tolist() == row.nonzero().flatten().tolist()


def test_flex_attention_with_these_tiles_equals_dense_attention():
    """Case 59, forward: lengths that are no multiple of a tile, an anchor without any context."""
    torch.manual_seed(0)
    anchors = [0, 17, 40, 128, 129, 200, 255, 256, 300, 301, 349]
    layout = BlockLayout.of(torch.tensor(anchors), torch.tensor([0] * 3 + [128] * 8), 350, 16)
    for rule in (LayerRule(None, False, 16), LayerRule(32, True, 16)):
        mask = layout.dense_mask(rule)
        q = torch.randn(1, 4, mask.shape[0], SPEC.head_dim)
        k, v = torch.randn(2, 1, 2, mask.shape[1], SPEC.head_dim)
        whole = [torch.nn.functional.pad(x, (0, 0, 0, padded(x.shape[-2]) - x.shape[-2]), value=9.0) for x in (q, k, v)]
        flex = flex_attention(*whole, block_mask=block_mask(layout, rule), enable_gqa=True)
        assert not flex[..., mask.shape[0] :, :].any()  # padded queries see nothing
        flex = flex[..., : mask.shape[0], :]
        dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        torch.testing.assert_close(flex, dense, rtol=1e-5, atol=1e-5)


def test_mask_memory_grows_with_tiles_and_not_with_heads():
    """Case 57: 512 anchors of 16 slots over 4k and 16k tokens; one table for all heads, nothing dense."""
    sizes = {}
    for rows in (4096, 16384):
        anchor = torch.linspace(0, rows - 2, 512).long()
        layout = BlockLayout.of(anchor, torch.zeros_like(anchor), rows, 16)
        mask = block_mask(layout, LayerRule(None, False, 16))
        tables = [value for value in vars(mask).values() if isinstance(value, torch.Tensor)]
        tiles = (512 * 16 // TILE) * ((rows + 512 * 16) // TILE)
        assert all(table.shape[:2] == (1, 1) and table.numel() <= tiles for table in tables)
        sizes[rows] = sum(table.numel() * table.element_size() for table in tables)
    assert sizes[16384] < 2.5 * sizes[4096] < 2.5 * 300_000  # bytes; the dense mask of 16k alone has 201 million
