"""The DFlash drafter: block slots attend to projected target features and to their own block.

    context = hidden_norm(fc(features))            once, shared by all layers, never updated
    each layer: queries from block slots only; keys and values of [context ; block]
    output = norm(slots)                           then the target's frozen head

Parameters are float32 masters, named as in the published checkpoints; compute happens in the dtype of the
inputs, each weight cast where it is used. Source: DFlash, appendix A.3, and its published inference code.

S context positions, Q slots, H hidden size, N query heads, G key/value heads, D head width, n tapped layers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftmill.config.spec import DrafterSpec
from draftmill.drafter.rope import inverse_frequencies, rotate

Rope = tuple[Tensor, Tensor]
# (layer, keys [.., G, Q, D], values) of the block -> the keys and values its slots attend to
JoinContext = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
# (layer, queries [.., N, Q, D], keys [.., G, K, D], values) -> [.., N, Q, D]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Linear(nn.Module):
    """Bias-free product; the float32 master weight is cast to the input's dtype."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """Root-mean-square norm, statistics in float32, scaled in the input's dtype (as Qwen3 does)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * wide.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.q_proj = Linear(spec.hidden_size, spec.num_attention_heads * spec.head_dim)
        self.k_proj = Linear(spec.hidden_size, spec.num_key_value_heads * spec.head_dim)
        self.v_proj = Linear(spec.hidden_size, spec.num_key_value_heads * spec.head_dim)
        self.o_proj = Linear(spec.num_attention_heads * spec.head_dim, spec.hidden_size)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)

    def queries(self, x: Tensor, rope: Rope) -> Tensor:
        """[.., Q, H] -> [.., N, Q, D]"""
        return rotate(self.q_norm(self._heads(self.q_proj(x))).transpose(-3, -2), rope)

    def keys_values(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """[.., S, H] -> two of [.., G, S, D]. The same for context rows and for slots."""
        keys = rotate(self.k_norm(self._heads(self.k_proj(x))).transpose(-3, -2), rope)
        return keys, self._heads(self.v_proj(x)).transpose(-3, -2)

    def output(self, x: Tensor) -> Tensor:
        """[.., N, Q, D] -> [.., Q, H]"""
        return self.o_proj(x.transpose(-3, -2).flatten(-2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class MLP(nn.Module):
    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.gate_proj = Linear(spec.hidden_size, spec.intermediate_size)
        self.up_proj = Linear(spec.hidden_size, spec.intermediate_size)
        self.down_proj = Linear(spec.intermediate_size, spec.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A pre-norm Qwen3 decoder layer whose queries come from block slots only."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.self_attn = Attention(spec)
        self.mlp = MLP(spec)
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)


class Drafter(nn.Module):
    """The trained part: `fc`, `hidden_norm`, `layers`, `norm`. Embedding and head stay with the target."""

    inverse_frequencies: Tensor

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.spec = spec
        self.fc = Linear(spec.feature_size, spec.hidden_size)
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(spec) for _ in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self._exact_frequencies, self.rope_factor = inverse_frequencies(spec)
        self.register_buffer("inverse_frequencies", self._exact_frequencies.clone(), persistent=False)

    @torch.no_grad()
    def initialise(self, seed: int, std: float = 0.02) -> None:
        """Fresh weights: matrices N(0, std), norms one. The same on every device: drawn on the CPU, in name order."""
        generator = torch.Generator().manual_seed(seed)
        for _, parameter in sorted(self.named_parameters()):
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Drafter:
        """Moves and casts as any module does, except that RoPE's frequencies stay float32: bf16 ones are wrong."""
        super()._apply(fn, recurse)
        self.inverse_frequencies = self._exact_frequencies.to(self.inverse_frequencies.device)
        return self

    def project(self, features: Tensor) -> Tensor:
        """Target features [.., S, n * H] -> context [.., S, H]."""
        return self.hidden_norm(self.fc(features))

    def rope(self, positions: Tensor) -> Rope:
        """In-document positions int64 [.., S] -> cos, sin float32 [.., S, D]."""
        angles = positions.unsqueeze(-1).float() * self.inverse_frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self.rope_factor, angles.sin() * self.rope_factor

    def context_kv(self, layer: int, context: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Context [.., S, H] -> keys and values [.., G, S, D] of one layer (its input norm is not applied)."""
        return self.layers[layer].self_attn.keys_values(context, rope)

    def blocks(self, slots: Tensor, rope: Rope, join: JoinContext, attend: Attend) -> Tensor:
        """Embedded slots [.., Q, H] at positions given by `rope` -> hidden states [.., Q, H] for the head.

        `join` supplies the context's keys and values (concatenated when training, cached when decoding);
        `attend` applies the visibility rule of its layer.
        """
        x = slots
        for index, layer in enumerate(self.layers):
            inner = layer.input_layernorm(x)
            keys, values = join(index, *layer.self_attn.keys_values(inner, rope))
            attended = attend(index, layer.self_attn.queries(inner, rope), keys, values)
            x = x + layer.self_attn.output(attended)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x)
