"""A pack on the drafter's device: tokens, documents and supervision as tensors, made once per slot.

C context rows (tokens of the pack), D documents.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftmill.wire import Pack


@dataclass(frozen=True, slots=True, eq=False)
class DevicePack:
    epoch: int
    anchors: int  # anchors drawn in this pack, known from the plan: no device read is needed
    token_ids: Tensor  # int64 [C]
    supervised: Tensor  # bool [C]
    document: Tensor  # int64 [C], the document's place in the pack, 0..D-1
    document_id: Tensor  # int64 [D], row of the prepared dataset
    document_start: Tensor  # int64 [D], first context row
    document_anchors: Tensor  # int64 [D], anchors each document draws

    @property
    def positions(self) -> Tensor:
        """int64 [C], position inside the document."""
        rows = torch.arange(len(self.token_ids), device=self.token_ids.device)
        return rows - self.document_start[self.document]

    @property
    def eligible(self) -> Tensor:
        """bool [C]: the token and its successor are supervised and of one document."""
        successor = self.supervised[1:] & (self.document[1:] == self.document[:-1])
        return self.supervised & torch.cat((successor, successor.new_zeros(1)))


def to_device(pack: Pack, device: torch.device | str) -> DevicePack:
    """One host-to-device copy per field; nothing is read back."""
    spans = pack.documents
    lengths = np.array([span.length for span in spans], dtype=np.int64)

    def move(values: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        return tensor.pin_memory().to(device, non_blocking=True) if "cuda" in str(device) else tensor

    return DevicePack(
        epoch=pack.epoch,
        anchors=pack.anchors,
        token_ids=move(pack.token_ids.astype(np.int64)),
        supervised=move(pack.supervised),
        document=move(np.repeat(np.arange(len(spans)), lengths)),
        document_id=move(np.array([span.document for span in spans], dtype=np.int64)),
        document_start=move(np.array([span.start for span in spans], dtype=np.int64)),
        document_anchors=move(np.array([span.anchors for span in spans], dtype=np.int64)),
    )
