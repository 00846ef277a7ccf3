"""The memory behind slots. Made once, zeroed, addressed by number; only finite features enter.

    drafter  SharedSlots.create --fd--> SharedSlots.attach  target
             read <------- the same pages -------- write

Who may write or read a slot, and when, is not decided here (slots.pool). Shared memory has no name: it lives as long
as a process maps it or holds its descriptor, and no crash leaves any behind.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """`count` slots of [capacity, feature_size]. Both ends compute the same places from it."""

    count: int
    capacity: int  # C: tokens
    feature_size: int  # F
    dtype: str

    def __post_init__(self) -> None:
        sizes = (self.count, self.capacity, self.feature_size)
        if any(type(size) is not int or size < 1 for size in sizes) or self.dtype not in DTYPES:
            raise ValueError(f"{self} is no layout: sizes are at least 1, dtype is one of {', '.join(DTYPES)}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """From the fields of a record."""
        if values.keys() != {"count", "capacity", "feature_size", "dtype"}:
            raise ValueError(f"{dict(values)} is no layout of slots")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def slot_bytes(self) -> int:
        """What the features of a full slot take."""
        return self.capacity * self.feature_size * self.torch_dtype.itemsize

    @property
    def stride(self) -> int:
        """From one slot to the next, in bytes: whole pages."""
        return -(-self.slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def file_bytes(self) -> int:
        return self.count * self.stride


class SlotMemory(Protocol):
    def write(self, slot: int, features: Tensor) -> None:
        """Copy features [T, F], T <= C, into `slot`."""

    def read(self, slot: int, tokens: int) -> Tensor:
        """A view [tokens, F] of `slot`, valid until the slot is freed."""


class LocalSlots:
    """Slots of one process."""

    def __init__(self, layout: SlotLayout, device: torch.device) -> None:
        self._layout = layout
        shape = (layout.count, layout.capacity, layout.feature_size)
        self._slots = torch.zeros(shape, dtype=layout.torch_dtype, device=device)

    def write(self, slot: int, features: Tensor) -> None:
        _check_features(self._layout, slot, features)
        self._slots[slot, : len(features)].copy_(features)

    def read(self, slot: int, tokens: int) -> Tensor:
        _check_place(self._layout, slot, tokens)
        return self._slots[slot, :tokens]


class SharedSlots:
    """Slots in shared host memory, one file for all. Owns its descriptor `fd` and its mapping."""

    def __init__(self, layout: SlotLayout, fd: int) -> None:
        self.layout, self.fd = layout, fd
        self._map = mmap.mmap(fd, layout.file_bytes)
        # numpy between the mapping and torch: it keeps the mapping from being closed under a tensor
        everything = torch.from_numpy(np.frombuffer(self._map, dtype=np.uint8))
        self._slots = [
            everything[start : start + layout.slot_bytes]
            .view(layout.torch_dtype)
            .view(layout.capacity, layout.feature_size)
            for start in range(0, layout.file_bytes, layout.stride)
        ]

    @classmethod
    def create(cls, layout: SlotLayout) -> Self:
        """New, zeroed, all of it there from the start. Raises OSError where there is not enough memory."""
        fd = os.memfd_create("draftmill-slots", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, layout.file_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)  # an access can never fail for the file's size
            return cls(layout, fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, layout: SlotLayout, fd: int) -> Self:
        """Those that another process has made. Takes `fd` over, also when it raises ValueError for another memory."""
        try:
            size = os.fstat(fd).st_size
            if size != layout.file_bytes:
                raise ValueError(f"{layout} takes {layout.file_bytes} bytes, but the memory received has {size}")
            if not _sealed(fd):
                raise ValueError("the memory received is not sealed: its size could change under us")
            return cls(layout, fd)
        except BaseException:
            os.close(fd)
            raise

    def write(self, slot: int, features: Tensor) -> None:
        """Complete when it returns: the one copy between target and drafter."""
        self._check_open()
        _check_features(self.layout, slot, features)
        self._slots[slot][: len(features)].copy_(features)

    def read(self, slot: int, tokens: int) -> Tensor:
        self._check_open()
        _check_place(self.layout, slot, tokens)
        return self._slots[slot][:tokens]

    def close(self) -> None:
        """Unmap. Raises RuntimeError while a view that `read` gave is in use; the memory goes with the last of them."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        self._slots.clear()
        try:
            self._map.close()
        except BufferError:
            raise RuntimeError("slots are closed while a view of one is in use") from None

    def _check_open(self) -> None:
        if self.fd < 0:
            raise RuntimeError("these slots are closed")


def _check_place(layout: SlotLayout, slot: int, tokens: int) -> None:
    if not (0 <= slot < layout.count and 0 <= tokens <= layout.capacity):
        raise ValueError(f"slot {slot} with {tokens} tokens is outside {layout}")


def _check_features(layout: SlotLayout, slot: int, features: Tensor) -> None:
    if features.ndim != 2 or features.shape[1] != layout.feature_size or len(features) > layout.capacity:
        raise ValueError(
            f"features {tuple(features.shape)} do not fit a slot of [{layout.capacity}, {layout.feature_size}]"
        )
    if features.dtype is not layout.torch_dtype:
        raise ValueError(f"features in {features.dtype} do not fit slots of {layout.dtype}")
    _check_place(layout, slot, len(features))


def _sealed(fd: int) -> bool:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:  # not a memory file
        return False
