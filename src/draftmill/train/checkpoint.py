"""Checkpoints on disk: written aside, synced, renamed, marker last. Readers only ever see complete ones.

checkpoints/step-120/
    drafter.safetensors     float32 masters, named as exported
    optimizer.safetensors   moments and step counters
    ledger.safetensors      fate of every document of the open epochs
    state.json              schema version, step, spec, config, position, counts
    COMPLETE                marker, written last: the files' sizes
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

SCHEMA_VERSION = 1
MARKER = "COMPLETE"
TENSOR_FILES = ("drafter", "optimizer", "ledger")
_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """All that a run needs to go on as if it had never stopped."""

    step: int
    drafter: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    ledger: dict[str, Tensor]
    state: dict[str, Any]  # JSON-able: spec, config, position, counts


def write_tensors(root: Path, step: int, drafter: dict[str, Tensor], optimizer: dict[str, Tensor]) -> None:
    """The drafter's half of checkpoint `step`, aside. It becomes a checkpoint by `seal` alone.

    Raises OSError when the disk is full, with nothing left behind, and ValueError on weights that are not finite: such
    a checkpoint would be worse than none.
    """
    _check_finite(drafter)
    root.mkdir(parents=True, exist_ok=True)
    with _writing(root, step, fresh=True) as aside:
        _save(aside, "drafter", drafter)
        _save(aside, "optimizer", optimizer)


def seal(root: Path, step: int, ledger: dict[str, Tensor], state: dict[str, Any], keep: int) -> Path:
    """The books' half of checkpoint `step`; then it appears, and all but the newest `keep` complete ones go.

    Raises OSError when the disk is full; what was there before stays valid.
    """
    folder = root / f"step-{step}"
    with _writing(root, step, fresh=False) as aside:
        _save(aside, "ledger", ledger)
        text = json.dumps({"schema_version": SCHEMA_VERSION, "step": step, **state}, indent=1, sort_keys=True)
        (aside / "state.json").write_text(text)
        _sync(aside / "state.json")
        sizes = {path.name: path.stat().st_size for path in sorted(aside.iterdir())}
        (aside / MARKER).write_text(json.dumps(sizes))
        _sync(aside / MARKER)
        _sync(aside)
        replaced = root / f".replaced-step-{step}"
        shutil.rmtree(replaced, ignore_errors=True)
        if folder.exists():  # the same step again, after a resume from before it
            folder.rename(replaced)
        aside.rename(folder)
        _sync(root)
        shutil.rmtree(replaced, ignore_errors=True)
    for old in complete_checkpoints(root)[0][:-keep]:
        shutil.rmtree(old)
    return folder


def save_checkpoint(root: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Both halves at once, for a drafter that keeps the books itself."""
    write_tensors(root, checkpoint.step, checkpoint.drafter, checkpoint.optimizer)
    return seal(root, checkpoint.step, checkpoint.ledger, checkpoint.state, keep)


def remove_unfinished(root: Path) -> None:
    """Drop what an interrupted writer left. Only for the process that owns the run."""
    for leftover in (*root.glob(".writing-*"), *root.glob(".replaced-*")):
        shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _writing(root: Path, step: int, fresh: bool) -> Iterator[Path]:
    """The folder that becomes checkpoint `step`; removed whole if anything goes wrong."""
    aside = root / f".writing-step-{step}"
    if fresh:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
    try:
        yield aside
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _save(folder: Path, name: str, tensors: dict[str, Tensor]) -> None:
    path = folder / f"{name}.safetensors"
    try:
        save_file({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, path)
    except SafetensorError as error:  # its own class for what the disk refuses
        raise OSError(errno.EIO, f"cannot be written ({error})", str(path)) from None
    _sync(path)


def complete_checkpoints(root: Path) -> tuple[list[Path], dict[Path, str]]:
    """Complete checkpoints in the order of their steps, and the folders passed over, each with the reason."""
    complete: list[tuple[int, Path]] = []
    skipped: dict[Path, str] = {}
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match is None:
            half = path.name.startswith((".writing-", ".replaced-"))
            skipped[path] = "half written or half removed" if half else "not a checkpoint's name"
        elif problem := _problem(path):
            skipped[path] = problem
        else:
            complete.append((int(match[1]), path))
    return [path for _, path in sorted(complete)], skipped


def load_checkpoint(folder: Path) -> Checkpoint:
    """Raises ValueError when `folder` is incomplete or of another schema version."""
    if problem := _problem(folder):
        raise ValueError(f"{folder} is no usable checkpoint: {problem}")
    state = json.loads((folder / "state.json").read_text())
    version = state.pop("schema_version")
    if version != SCHEMA_VERSION:
        raise ValueError(f"{folder} has checkpoint schema {version}, this version reads {SCHEMA_VERSION}")
    try:
        tensors = {name: load_file(folder / f"{name}.safetensors") for name in TENSOR_FILES}
    except SafetensorError as error:
        raise ValueError(f"{folder} is damaged: {error}") from None
    return Checkpoint(step=state.pop("step"), state=state, **tensors)


def _problem(folder: Path) -> str | None:
    try:
        sizes = json.loads((folder / MARKER).read_text())
    except FileNotFoundError:
        return f"its {MARKER} marker is missing"
    except (ValueError, OSError) as error:
        return f"its {MARKER} marker is unreadable ({error})"
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            return f"{name} is missing or not {size} bytes long"
    return None


def _check_finite(weights: dict[str, Tensor]) -> None:
    if bad := [name for name, tensor in weights.items() if not tensor.isfinite().all()]:
        raise ValueError(f"not saved: {len(bad)} tensors hold values that are not finite, first {bad[0]}")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
