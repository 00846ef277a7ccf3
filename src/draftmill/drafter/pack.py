"""A pack on the drafter's device: tokens, documents and supervision as tensors.

Two ways there: `to_device` makes tensors of the pack's own sizes; `PackBuffers` fills tensors of fixed sizes, in place,
for steps that are compiled or captured once. C context rows (tokens of the pack), D documents.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftmill.wire import Pack


@dataclass(frozen=True, slots=True, eq=False)
class DevicePack:
    epoch: int | Tensor  # int64 [] where shapes are fixed
    anchors: int  # places for anchors: all drawn, or with fixed sizes the first `Pack.anchors` of them
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


@dataclass(frozen=True, slots=True)
class PackShape:
    """Sizes that every pack of a run fits."""

    rows: int  # C
    anchors: int  # A
    documents: int  # D, of them the last one is for rows behind the pack's tokens


class PackBuffers:
    """One pack in tensors of fixed sizes and addresses, filled again and again.

    Rows behind the pack's tokens belong to a last, empty document: unsupervised, without anchors, seen by nobody. Their
    features are what an earlier pack left there.
    """

    STAGES = 2  # host buffers: the next pack is written while the device still copies the one before

    def __init__(self, shape: PackShape, feature_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        rows, documents = shape.rows, shape.documents
        sizes = [1, documents, documents, documents, rows, rows, rows]
        cuda = device.type == "cuda"
        self._stages = [torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=cuda) for _ in range(self.STAGES)]
        self._copied = [torch.cuda.Event() if cuda else None for _ in self._stages]
        self._next = 0
        self._all = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self._sizes = sizes
        self.features = torch.zeros(rows, feature_size, dtype=dtype, device=device)  # [C, F]

    def load(self, pack: Pack, features: Tensor) -> None:
        """Copies `pack` and its features [T, F] in. Waits only where the device is `STAGES` packs behind.

        Raises ValueError for a pack that does not fit the fixed sizes.
        """
        spans, shape = pack.documents, self.shape
        if pack.tokens > shape.rows or pack.anchors > shape.anchors or len(spans) >= shape.documents:
            raise ValueError(
                f"pack {pack.seq} has {pack.tokens} tokens, {pack.anchors} anchors, {len(spans)} documents: {shape}"
            )
        stage, copied = self._stages[self._next], self._copied[self._next]
        self._next = (self._next + 1) % self.STAGES
        if copied is not None:
            copied.synchronize()
        epoch, ids, starts, anchors, tokens, document, supervised = torch.split(stage, self._sizes)
        last = shape.documents - 1
        epoch.fill_(pack.epoch)
        for target, values in (
            (ids, [span.document for span in spans]),
            (starts, [span.start for span in spans]),
            (anchors, [span.anchors for span in spans]),
        ):
            target.numpy()[: len(spans)] = values
        anchors.numpy()[len(spans) :] = 0
        starts.numpy()[last] = pack.tokens
        document.numpy()[: pack.tokens] = np.repeat(np.arange(len(spans)), [span.length for span in spans])
        document.numpy()[pack.tokens :] = last
        tokens.numpy()[: pack.tokens] = pack.token_ids
        supervised.numpy()[: pack.tokens] = pack.supervised
        supervised.numpy()[pack.tokens :] = 0
        self._all.copy_(stage, non_blocking=True)
        if copied is not None:
            copied.record()
        self.features[: pack.tokens].copy_(features, non_blocking=True)

    def pack(self) -> DevicePack:
        """What was loaded last, in views of the buffers; `supervised` is computed anew by each call."""
        epoch, ids, starts, anchors, tokens, document, supervised = torch.split(self._all, self._sizes)
        return DevicePack(epoch[0], self.shape.anchors, tokens, supervised.bool(), document, ids, starts, anchors)
