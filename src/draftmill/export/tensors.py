"""The tensors of an exported drafter: their names and shapes, as every reader expects them.

No `model.` prefix; no embedding and no head (engines take the target's). 3 + 11 per layer.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from draftmill.config.spec import DrafterSpec

WRAPPERS = ("_orig_mod.", "module.", "model.")  # torch.compile, DDP, Hugging Face


def tensor_shapes(spec: DrafterSpec) -> dict[str, tuple[int, ...]]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries = spec.num_attention_heads * spec.head_dim
    keys = spec.num_key_value_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(spec.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(spec.num_layers):
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "self_attn.q_norm": (spec.head_dim,),
            "self_attn.k_norm": (spec.head_dim,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        shapes |= {f"layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def check_tensors(spec: DrafterSpec, tensors: Mapping[str, Tensor], where: str) -> None:
    """Raises ValueError unless exactly the spec's tensors are there, in shape and finite."""
    wrapped = sorted({prefix for name in tensors for prefix in WRAPPERS if name.startswith(prefix)})
    if wrapped:
        raise ValueError(
            f"{where}: tensor names start with {', '.join(wrapped)}: give the state dict of the bare drafter "
            "(unwrap it from torch.compile, DDP or the model that holds it)"
        )
    shapes = tensor_shapes(spec)
    if missing := sorted(set(shapes) - set(tensors)):
        raise ValueError(f"{where}: {len(missing)} tensors are missing: {_some(missing)}")
    if extra := sorted(set(tensors) - set(shapes)):
        raise ValueError(
            f"{where}: {len(extra)} tensors do not belong to the drafter: {_some(extra)}. "
            "Embedding, head and optimizer state stay out"
        )
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise ValueError(f"{where}: {name} has shape {tuple(tensors[name].shape)}, its config says {shape}")
        if not torch.isfinite(tensors[name]).all():
            raise ValueError(f"{where}: {name} has values that are not finite: take an earlier checkpoint")


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", .." if len(names) > 4 else "")
