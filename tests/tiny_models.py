"""Tiny Hugging Face targets with random weights from a fixed seed, and a tokenizer to match.

6 decoder layers, hidden 64, vocabulary 512, float32. Weights are spread wider than the library's default, so that
layers change the residual stream enough for a wrong layer, row or mask to show.
"""

from __future__ import annotations

from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

torch.set_num_threads(1)  # tiny products gain nothing from threads, and lose much where cores are shared

LAYERS, HIDDEN, VOCAB = 6, 64, 512
BOS, EOS, PAD, UNUSED = 0, 1, 2, 3  # UNUSED: a reserved row that no text reaches, fit for the mask token
SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>", "<|pad|>", "<|reserved|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _shape(**overrides: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.08,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "tie_word_embeddings": True,
        **overrides,
    }


def frozen(model_class: Any, config: Any, seed: int = 0) -> Any:
    """A model of random weights, in eval mode, without gradients, its global random state left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
    return model.eval().requires_grad_(False)


def tiny_llama(tied: bool = True, seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    return frozen(LlamaForCausalLM, LlamaConfig(**_shape(tie_word_embeddings=tied, **overrides)), seed)


def tiny_qwen3(tied: bool = True, seed: int = 0, **overrides: Any) -> Qwen3ForCausalLM:
    return frozen(Qwen3ForCausalLM, Qwen3Config(**_shape(tie_word_embeddings=tied, **overrides)), seed)


def tiny_mistral(window: int = 8, seed: int = 0, **overrides: Any) -> MistralForCausalLM:
    """Sliding windows in every layer."""
    return frozen(MistralForCausalLM, MistralConfig(**_shape(sliding_window=window, **overrides)), seed)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level: 4 special tokens, the 256 bytes, then pairs of letters up to 512.

    Text is encoded byte by byte, so generated pairs decode to text that encodes to other ids, as real tokens may.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [first + second for first in ascii_lowercase for second in ascii_lowercase]
    tokens = [*SPECIAL_TOKENS, *alphabet, *pairs][:VOCAB]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=SPECIAL_TOKENS[BOS],
        eos_token=SPECIAL_TOKENS[EOS],
        pad_token=SPECIAL_TOKENS[PAD],
        additional_special_tokens=[SPECIAL_TOKENS[UNUSED]],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_tiny(folder: Path, model: Any, **options: Any) -> Path:
    """The model and the tiny tokenizer as a Hugging Face folder; `options` go to save_pretrained."""
    model.save_pretrained(folder, **options)
    tiny_tokenizer().save_pretrained(folder)
    return folder
