"""`DrafterSpec`: a drafter's architecture, every field known. Stored in checkpoints, exported exactly.

Built once, by `resolve.py` from settings and target, or by `export` from a folder on disk. The network,
the checkpoint and the exporter read only this, so nothing can change between training and serving.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

AttentionType = Literal["full_attention", "sliding_attention"]


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    hidden_size: int  # equal to the target's: embedding and head are the target's own
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None  # with "rope_type"; None is plain RoPE
    max_position_embeddings: int
    layer_types: tuple[AttentionType, ...]  # one per drafter layer, in Hugging Face's words
    sliding_window: int | None  # tokens, the query itself counted
    causal_full: bool  # slots of a block see only slots up to themselves, in full layers
    causal_sliding: bool  # the same in sliding layers
    block_size: int  # slots per block, the anchor included
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # id l = output of 0-based target layer l, before the final norm
    num_target_layers: int
    embedding_scale: float = 1.0  # the target multiplies its embeddings by this
    output_multiplier: float = 1.0  # the target multiplies its logits by this
    logit_softcap: float | None = None  # the target bounds its logits: cap * tanh(logits / cap)

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @property
    def feature_size(self) -> int:
        """Width of a feature row: the tapped layers' outputs, concatenated in id order."""
        return len(self.target_layer_ids) * self.hidden_size

    def window(self, layer: int) -> int | None:
        """Window of `layer` in tokens, None where it sees the whole context."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def causal(self, layer: int) -> bool:
        return self.causal_sliding if self.layer_types[layer] == "sliding_attention" else self.causal_full

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DrafterSpec:
        """Inverse of `to_dict` after a trip through JSON. Raises ValueError on missing or unknown fields."""
        known = {field.name for field in fields(cls)}
        if unknown := set(values) - known:
            raise ValueError(f"drafter spec has unknown fields {sorted(unknown)}: written by a newer version?")
        restored: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        try:
            return cls(**restored)
        except TypeError as error:
            raise ValueError(f"drafter spec is incomplete: {error}") from None
