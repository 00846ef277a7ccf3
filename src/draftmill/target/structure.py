"""Where a Hugging Face model keeps its decoder layers, final norm, embedding and head. Found by structure.

The same for a plain causal model and for a text model nested in a vision wrapper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

NORM_NAMES = ("norm", "final_layernorm", "final_norm", "ln_f", "norm_f", "embedding_norm")


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    config: Any  # the text model's
    decoder: nn.Module  # embedding, layers and final norm; no head
    layers: nn.ModuleList
    norm: nn.Module
    embedding: Tensor  # [V, H]
    head: Tensor  # [V, H]


def find_structure(model: Any) -> Structure:
    config = model.config.get_text_config(decoder=True)
    name = type(model).__name__
    decoder, layers = _find_layers(model, config.num_hidden_layers, name)
    norms = [child for norm in NORM_NAMES if (child := getattr(decoder, norm, None)) is not None]
    if len(norms) != 1:
        raise ValueError(
            f"target {name}: found {len(norms)} final norms beside its layers under {NORM_NAMES}, need one: "
            "add its name to src/draftmill/target/structure.py"
        )
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"target {name} has no language-model head: use a causal language model")
    if getattr(head, "bias", None) is not None:
        raise ValueError(f"target {name} has a bias in its head, which no drafter format can carry: use another target")
    return Structure(config, decoder, layers, norms[0], model.get_input_embeddings().weight, head.weight)


def _find_layers(model: Any, num_layers: int, name: str) -> tuple[nn.Module, nn.ModuleList]:
    """The module that holds both the token embedding and the list of decoder layers."""
    embedding = model.get_input_embeddings()
    found = [
        (owner, child)
        for owner in model.modules()
        if any(child is embedding for child in owner.children())
        for child in owner.children()
        if isinstance(child, nn.ModuleList) and len(child) == num_layers
    ]
    if len(found) != 1:
        raise ValueError(
            f"target {name}: found {len(found)} lists of {num_layers} decoder layers beside its token embedding, "
            "need one: use a decoder-only language model"
        )
    return found[0]
