"""Rotary tables of the drafter. Always float32: bf16 phases are wrong from a few hundred positions on."""

from __future__ import annotations

import torch
from torch import Tensor

from draftmill.config.spec import DrafterSpec

SCALED_TYPES = ("linear", "yarn", "llama3")  # length-independent: one table serves every context


def inverse_frequencies(spec: DrafterSpec) -> tuple[Tensor, float]:
    """Inverse frequencies float32 [D / 2] and the factor on cos and sin.

    Plain: theta^(-2i/D). Scaled types are computed by transformers, so that the drafter turns exactly as the
    engines that read the same fields. Raises ValueError on any other type.
    """
    if spec.rope_scaling is None or spec.rope_scaling.get("rope_type") == "default":
        exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
        return 1.0 / (spec.rope_theta**exponents), 1.0
    kind = spec.rope_scaling.get("rope_type")
    if kind not in SCALED_TYPES:
        raise ValueError(
            f"drafter.rope_scaling.rope_type is {kind!r}; known: default, {', '.join(SCALED_TYPES)}. "
            "Set drafter.rope_scaling to one of them"
        )
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = Qwen3Config(
        head_dim=spec.head_dim,
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_attention_heads,
        max_position_embeddings=spec.max_position_embeddings,
        rope_parameters={**spec.rope_scaling, "rope_theta": spec.rope_theta},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return frequencies.float(), float(factor)


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate heads x [.., N, S, D] by cos, sin float32 [.., S, D]: halves paired as in Llama and Qwen.

    Computed in the dtype of `x`, as the serving engines do; only the tables are float32.
    """
    cos, sin = (table.to(x.dtype).unsqueeze(-3) for table in rope)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
