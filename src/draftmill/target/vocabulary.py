"""Embedding and head of a target without its layers: all that a drafter process needs of it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftmill.drafter.vocabulary import FrozenVocabulary
from draftmill.target.loading import DTYPES, load_frozen, model_class
from draftmill.target.quirks import Quirks, read_quirks
from draftmill.target.structure import find_structure

log = logging.getLogger(__name__)


def load_vocabulary(path: Path, dtype: str, device: torch.device) -> FrozenVocabulary:
    """The target's own two tensors, read from its files by the names that its model gives them.

    Where the files name them otherwise the whole target is loaded once and dropped.
    """
    names, config = _names(path)
    tensors = _read(path, names)
    if tensors is None:
        log.info("target %s: its files name embedding or head in their own way; loading all of it once", path)
        parts = find_structure(load_frozen(path, DTYPES[dtype], torch.device("cpu"))[0])
        tensors = {names[0]: parts.embedding.detach().clone(), names[1]: parts.head.detach().clone()}
    ready = {name: tensor.to(device, DTYPES[dtype]) for name, tensor in tensors.items()}
    quirks = read_quirks(config, DTYPES[dtype])
    return FrozenVocabulary(
        ready[names[0]],
        ready[names[1]],
        embedding_scale=quirks.embedding_scale,
        output_multiplier=quirks.output_multiplier,
        logit_softcap=quirks.logit_softcap,
    )


def target_quirks(path: Path, dtype: str) -> Quirks:
    """From the target's config alone; `Target.load` proves them on numbers."""
    return read_quirks(_names(path)[1], DTYPES[dtype])


def _names(path: Path) -> tuple[tuple[str, str], Any]:
    """Names of embedding and head, the same where tied, and the text model's config. No weights are read."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(path), local_files_only=True)
    with torch.device("meta"):
        model = model_class(path).from_config(config)
    model.tie_weights()
    parts = find_structure(model)
    by_tensor = {id(parameter): name for name, parameter in model.named_parameters()}
    return (by_tensor[id(parts.embedding)], by_tensor[id(parts.head)]), parts.config


def _read(path: Path, names: tuple[str, str]) -> dict[str, Tensor] | None:
    """The named tensors, None unless the files hold them all."""
    from safetensors import safe_open

    found: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            held = set(opened.keys())
            found |= {name: opened.get_tensor(name) for name in names if name in held}
    return found if set(names) <= set(found) else None
