"""From anchors to blocks: what each slot embeds, where it stands, what it must predict, whether it counts.

A blocks, B slots, C context rows. Slot 0 embeds the anchor token and is never scored; slot k predicts the
token AT anchor + k.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftmill.drafter.pack import DevicePack
from draftmill.drafter.visibility import BlockLayout


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    layout: BlockLayout
    token_ids: Tensor  # int64 [A, B]: anchor token, then the mask token
    positions: Tensor  # int64 [A, B], inside the document
    labels: Tensor  # int64 [A, B - 1]: the tokens slots 1..B-1 predict
    counted: Tensor  # bool [A, B - 1]: all of anchor..anchor+k supervised, in one document


def make_blocks(pack: DevicePack, anchor: Tensor, block_size: int, mask_token_id: int) -> Blocks:
    """`anchor` int64 [A] context rows, ascending. One at C is inert: its block sees itself alone and counts nowhere."""
    last = len(pack.token_ids) - 1
    anchor_row = anchor.clamp(max=last)
    slot = torch.arange(block_size, device=anchor.device)
    row = anchor[:, None] + slot  # [A, B], may pass the pack's end
    inside = row <= last
    row = row.clamp(max=last)
    same_document = pack.document[row] == pack.document[anchor_row][:, None]
    supervised = pack.supervised[row] & same_document & inside
    # contiguous: the first unsupervised token ends the block's labels for good
    counted = supervised.to(torch.int8).cumprod(dim=1).bool()
    token_ids = torch.full_like(row, mask_token_id)
    token_ids[:, 0] = pack.token_ids[anchor_row]
    document_start = torch.where(anchor > last, anchor, pack.document_start[pack.document[anchor_row]])
    return Blocks(
        layout=BlockLayout.of(anchor, document_start, len(pack.token_ids), block_size),
        token_ids=token_ids,
        positions=(anchor - document_start)[:, None] + slot,
        labels=pack.token_ids[row[:, 1:]],
        counted=counted[:, 1:],
    )
