"""What a target does to its embeddings and logits beside the plain product, and the proof that this is all.

Values are read from the model's own config by field name, then checked on numbers: the input of layer 0 must be
`embedding[id] * scale`, and `norm(output of the last layer)` through the head must give the model's own logits. A
model that does anything else is refused by name, known to this file or not: a drafter trained for it would be
conditioned on inputs, or scored with logits, that the target never uses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# field of the model's config -> multiplier of the logits
LOGIT_MULTIPLIERS: dict[str, Callable[[float], float]] = {
    "logits_scaling": lambda value: 1.0 / value,  # Granite divides
    "logit_scale": float,  # Cohere
    "lm_head_multiplier": float,  # Falcon-H1
}
LOGIT_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap")  # Gemma 2 and later, RecurrentGemma
EMBEDDING_MULTIPLIERS = ("embedding_multiplier", "scale_emb")  # Granite and Falcon-H1, MiniCPM


@dataclass(frozen=True, slots=True)
class Quirks:
    embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    logit_softcap: float | None = None


def read_quirks(config: Any, dtype: torch.dtype) -> Quirks:
    """`config`: the text model's own config."""
    scale = 1.0
    if "gemma" in config.model_type:  # rounded to the compute dtype, as the model does it
        scale = float(torch.tensor(config.hidden_size**0.5, dtype=dtype))
    for name in EMBEDDING_MULTIPLIERS:
        if (value := getattr(config, name, None)) is not None:
            scale = float(value)
    multiplier = 1.0
    for name, meaning in LOGIT_MULTIPLIERS.items():
        if (value := getattr(config, name, None)) is not None:
            multiplier = meaning(value)
    caps = [value for name in LOGIT_SOFTCAPS if (value := getattr(config, name, None))]
    return Quirks(scale, multiplier, float(caps[0]) if caps else None)


def relative_error(value: Tensor, reference: Tensor) -> float:
    """Largest row error, relative to the norm of its reference row; both [.., W]. Not finite is infinite."""
    value, reference = value.float(), reference.float()
    error = (value - reference).norm(dim=-1) / reference.norm(dim=-1).clamp_min(1e-12)
    return float(torch.nan_to_num(error, nan=torch.inf).max())


def require_explained(what: str, value: Tensor, reference: Tensor, model_type: str, quirks: Quirks) -> None:
    """Raises ValueError naming the model type unless `value` equals `reference` within the dtype's noise."""
    tolerance = 1e-3 if reference.dtype == torch.float32 else 2e-2
    error = relative_error(value, reference)
    if error > tolerance:
        raise ValueError(
            f"target of type {model_type}: {what} differ from the model's own by {error:.2g} (allowed {tolerance:.2g}) "
            f"with {quirks}. The model scales, shifts or caps something that Draftmill does not know: "
            "use another target, or teach src/draftmill/target/quirks.py the config field that says so"
        )
