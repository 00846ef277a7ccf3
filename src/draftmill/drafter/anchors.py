"""Which positions of a pack become anchors: a draw without replacement per document, new each epoch.

Each eligible position gets the hash of (seed, epoch, document, position); the document's lowest hashes win.
The draw of a document therefore depends on nothing else: not on its pack, its neighbours, its worker or a restart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftmill.drafter import counter_hash
from draftmill.drafter.pack import DevicePack


def draw_anchors(pack: DevicePack, seed: int) -> Tensor:
    """int64 [A] context rows in ascending order, A = `pack.anchors`. No host synchronisation.

    The plan grants a document at most as many anchors as it has eligible positions, so all that it grants are drawn.
    Where A is a fixed size above that, the places left over hold C, behind every row: inert anchors.
    """
    rows = torch.arange(len(pack.token_ids), device=pack.token_ids.device)
    draw = counter_hash.fold(
        counter_hash.ANCHOR, seed, pack.epoch, pack.document_id[pack.document], pack.positions, device=rows.device
    )
    # documents in order, inside each the eligible positions by hash, the rest behind them
    key = (pack.document << 33) | (~pack.eligible).long() << 32 | draw
    order = torch.argsort(key, stable=True)
    rank = torch.empty_like(order)
    rank[order] = rows - pack.document_start[pack.document[order]]
    drawn = (rank < pack.document_anchors[pack.document]) & pack.eligible
    place = torch.where(drawn, drawn.cumsum(0) - 1, pack.anchors)  # behind the anchors for rows that are none
    return rows.new_full((pack.anchors + 1,), len(rows)).scatter(0, place, rows)[: pack.anchors]
