"""Drafter folders in the z-lab layout, which the `dflash` package, vLLM, SGLang and llama.cpp's converter read.

    config.json         what the drafter computes, every field explicit (`layout.py`)
    model.safetensors   the trained tensors only; embedding and head are the target's
    draftmill.json      where it comes from: target, step, template, versions. No engine reads it
    README.md           the same for people

A folder appears complete or not at all, and only an earlier export is ever replaced.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import draftmill
from draftmill.config.spec import DrafterSpec
from draftmill.drafter.network import Drafter
from draftmill.export.card import model_card
from draftmill.export.layout import from_config, to_config
from draftmill.export.readers import DECISIVE, disagreements
from draftmill.export.tensors import check_tensors

CONFIG, WEIGHTS, PROVENANCE, CARD = "config.json", "model.safetensors", "draftmill.json", "README.md"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
PROVENANCE_FORMAT = 1


def write_export(
    folder: Path | str,
    spec: DrafterSpec,
    state_dict: Mapping[str, Tensor],
    *,
    dtype: str = "bfloat16",
    provenance: Mapping[str, Any] | None = None,
    token_ids: Mapping[str, int | list[int] | None] | None = None,
) -> Path:
    """Write the drafter; return the folder.

    `provenance`: JSON values, by custom `target` (its identity), `step`, `template`, `evaluation`. `token_ids`:
    the target's `bos`, `eos` and `pad`. Raises ValueError before anything is written where the spec cannot be
    said, the tensors are not the spec's, or the folder holds something else.
    """
    folder = Path(folder).absolute()
    _check_place(folder)
    if dtype not in DTYPES:
        raise ValueError(f"export dtype {dtype!r}: use one of {', '.join(DTYPES)}")
    check_tensors(spec, state_dict, "state dict")
    tensors = {name: tensor.detach().to("cpu", DTYPES[dtype]).contiguous() for name, tensor in state_dict.items()}
    check_tensors(spec, tensors, f"state dict in {dtype}")  # a value may leave the dtype's range
    config = to_config(spec, dtype=dtype, token_ids=token_ids)
    limits = disagreements(config, spec)
    if wrong := [f"{name}: {'; '.join(limits[name])}" for name in DECISIVE if name in limits]:
        raise ValueError(f"the layout cannot say what was trained: {' | '.join(wrong)}")
    record = {"format": PROVENANCE_FORMAT, "draftmill": draftmill.__version__, "dtype": dtype, **(provenance or {})}
    files = {
        CONFIG: _json(config),
        PROVENANCE: _json(record),
        CARD: model_card(folder.name, spec, record, limits),
    }
    _write_aside(folder, tensors, files)
    return folder


def read_export(folder: Path | str) -> tuple[DrafterSpec, dict[str, Tensor]]:
    """Spec and tensors, in their stored dtype. Raises ValueError naming what is missing or not understood."""
    folder = Path(folder)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} holds no {name}: give a drafter folder in the z-lab layout")
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"{CONFIG} holds no object")
        spec = from_config(config)
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        check_tensors(spec, tensors, WEIGHTS)
    except (ValueError, SafetensorError) as error:
        raise ValueError(f"{folder}: {error}") from None
    return spec, tensors


def read_provenance(folder: Path | str) -> dict[str, Any]:
    """What `write_export` recorded; empty for folders of other origin."""
    path = Path(folder) / PROVENANCE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def load_drafter(folder: Path | str, device: torch.device | str = "cpu") -> Drafter:
    """The exported drafter with float32 parameters holding exactly the stored values."""
    spec, tensors = read_export(folder)
    drafter = Drafter(spec)
    drafter.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, strict=True)
    return drafter.to(device).eval()


def _check_place(folder: Path) -> None:
    """Only a missing or empty folder, or one that holds an export and nothing else, is written to."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"export folder {folder} is a file: choose another name")
    names = {path.name for path in folder.iterdir()}
    if strange := sorted(names - {CONFIG, WEIGHTS, PROVENANCE, CARD}):
        raise ValueError(f"export folder {folder} holds {strange[0]}, which no export wrote: choose an empty folder")
    if names and PROVENANCE not in names:
        raise ValueError(f"export folder {folder} was not written by draftmill export: choose an empty folder")


def _write_aside(folder: Path, tensors: dict[str, Tensor], files: dict[str, str]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh, former = (folder.with_name(f".{folder.name}.{word}-{os.getpid()}") for word in ("new", "old"))
    try:
        fresh.mkdir()
        save_file(tensors, fresh / WEIGHTS, metadata={"format": "pt"})
        (fresh / WEIGHTS).chmod(0o644)
        for name, text in files.items():
            (fresh / name).write_text(text, encoding="utf-8")
        for name in (WEIGHTS, *files):
            _sync(fresh / name)
        _sync(fresh)
        if folder.exists():
            folder.rename(former)
        fresh.rename(folder)
        _sync(folder.parent)
    except BaseException:
        if former.exists() and not folder.exists():
            former.rename(folder)
        raise
    finally:
        for leftover in (fresh, former):
            shutil.rmtree(leftover, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
