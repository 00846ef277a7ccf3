"""Tiny targets for decoding, and drafters trained to be accepted by them, with code that shares nothing with ours."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from dflash.model import DFlashDraftModel
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from draftmill.config.spec import DrafterSpec
from draftmill.target.model import Target

VOCABULARY, HIDDEN, LAYERS = 61, 32, 6
EOS = 60
SPEC = DrafterSpec(
    hidden_size=HIDDEN,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=VOCABULARY,
    rms_norm_eps=1e-6,
    rope_theta=5000.0,
    rope_scaling=None,
    max_position_embeddings=512,
    layer_types=("sliding_attention", "full_attention"),
    sliding_window=6,
    causal_full=False,
    causal_sliding=True,
    block_size=4,
    mask_token_id=59,
    target_layer_ids=(1, 3),
    num_target_layers=LAYERS,
)
LAYOUTS = {
    "full": replace(SPEC, layer_types=("full_attention",) * 2, sliding_window=None),
    "sliding causal": replace(SPEC, layer_types=("sliding_attention",) * 2),
    "sliding both ways": replace(SPEC, layer_types=("sliding_attention",) * 2, causal_sliding=False),
    "mixed": SPEC,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
EXPORTABLE = {
    **LAYOUTS,
    "full causal": replace(LAYOUTS["full"], causal_full=True),
    "mixed, all causal": replace(SPEC, causal_full=True),
    "mixed, none causal": replace(SPEC, causal_sliding=False),
    "yarn": replace(SPEC, rope_scaling=YARN),
    "llama3": replace(SPEC, rope_scaling=LLAMA3),
    "linear": replace(SPEC, rope_scaling={"rope_type": "linear", "factor": 2.0}),
    "quirks": replace(SPEC, embedding_scale=5.65625, output_multiplier=0.196, logit_softcap=30.0),
}
PROMPTS = [[7, 3, 11], [5], [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53], [9, 8, 7, 6, 5, 4, 3]]


def make_target(kind: str = "llama", seed: int = 0, layer_ids: tuple[int, ...] = (1, 3), **overrides) -> Target:
    torch.manual_seed(seed)
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.25,  # wide, so that greedy texts do not repeat one token
        "eos_token_id": EOS,
        "bos_token_id": None,
        "pad_token_id": None,
        **overrides,
    }
    config, cls = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),  # scaled embeddings, soft-capped logits, sliding layers
    }[kind]
    model = cls(config(**shape)).eval().requires_grad_(False)
    return Target(model, SimpleNamespace(eos_token_id=EOS), layer_ids)


def published_config(spec: DrafterSpec) -> Qwen3Config:
    """The drafter's config as published checkpoints write it, by hand: nothing of our exporter."""
    causal = {spec.causal(layer) for layer in range(spec.num_layers)}
    sliding = "sliding_attention" in spec.layer_types
    config = Qwen3Config(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_attention_heads,
        num_key_value_heads=spec.num_key_value_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab_size,
        rms_norm_eps=spec.rms_norm_eps,
        max_position_embeddings=spec.max_position_embeddings,
        rope_theta=spec.rope_theta,
        layer_types=list(spec.layer_types),
        use_sliding_window=sliding,
        sliding_window=spec.sliding_window,
    )
    config.num_target_layers = spec.num_target_layers
    config.dflash_config = {
        "mask_token_id": spec.mask_token_id,
        "target_layer_ids": list(spec.target_layer_ids),
        "block_size": spec.block_size,
    }
    if len(causal) == 1:
        config.is_causal = causal.pop()
    return config


def overfit(spec: DrafterSpec, model, prompts: list[list[int]], new_tokens: int, steps: int = 200, seed: int = 1):
    """State dict of the dflash package's own model, trained on the target's greedy answers.

    Every anchor is a batch row of its own with its own copy of the context: plain, slow and without packing.
    """
    torch.manual_seed(seed)
    drafter = DFlashDraftModel(published_config(spec))
    rows = _training_rows(spec, model, prompts, new_tokens)
    embedded = F.embedding(rows.slots, model.get_input_embeddings().weight)
    optimizer = torch.optim.Adam(drafter.parameters(), lr=6e-3)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 6e-3 * (1 - step / steps)
        hidden = embedded
        context = drafter.hidden_norm(drafter.fc(rows.context))
        rope = drafter.rotary_emb(hidden, rows.positions)
        for layer, mask in zip(drafter.layers, rows.masks, strict=True):
            hidden = layer(hidden_states=hidden, target_hidden=context, attention_mask=mask, position_embeddings=rope)
        logits = model.lm_head(drafter.norm(hidden)[:, 1:])
        loss = F.cross_entropy(logits.transpose(1, 2), rows.labels, ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in drafter.state_dict().items()}


def _training_rows(spec: DrafterSpec, model, prompts, new_tokens: int) -> SimpleNamespace:
    texts = []
    for prompt in prompts:
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        states = model(ids, output_hidden_states=True).hidden_states
        texts.append((len(prompt), ids[0], torch.cat([states[layer + 1][0] for layer in spec.target_layer_ids], -1)))
    longest, block = max(len(ids) for _, ids, _ in texts), spec.block_size
    context, slots, labels, positions = [], [], [], []
    masks: list[list[torch.Tensor]] = [[] for _ in spec.layer_types]
    for prompt_tokens, ids, features in texts:
        for anchor in range(prompt_tokens, len(ids) - 1):
            context.append(F.pad(features, (0, 0, 0, longest - len(ids))))
            slots.append(torch.tensor([int(ids[anchor])] + [spec.mask_token_id] * (block - 1)))
            following = ids[anchor + 1 : anchor + block].tolist()
            labels.append(torch.tensor(following + [-100] * (block - 1 - len(following))))
            positions.append(torch.cat([torch.arange(longest), torch.arange(anchor, anchor + block)]))
            for layer, kind in enumerate(spec.layer_types):
                masks[layer].append(_mask(spec, kind, anchor, longest))
    return SimpleNamespace(
        context=torch.stack(context),
        slots=torch.stack(slots),
        labels=torch.stack(labels),
        positions=torch.stack(positions),
        masks=[torch.stack(rows)[:, None] for rows in masks],
    )


def _mask(spec: DrafterSpec, kind: str, anchor: int, context: int) -> torch.Tensor:
    """One block's visible keys, cell by cell."""
    mask = torch.zeros(spec.block_size, context + spec.block_size, dtype=torch.bool)
    for k in range(spec.block_size):
        for c in range(min(anchor, context)):
            mask[k, c] = kind == "full_attention" or (anchor + k) - c < spec.sliding_window
        for j in range(spec.block_size):
            causal = spec.causal_sliding if kind == "sliding_attention" else spec.causal_full
            mask[k, context + j] = j <= k or not causal
    return mask
