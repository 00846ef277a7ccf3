"""Small tokenizers and chat templates written for the tests, and shorthands to read rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftmill.text.conversations import Conversation
from draftmill.text.messages import Message
from draftmill.text.refusals import Source

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ '<bos>' }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else 'user') + '\n' + m['content'] | trim }}"
    "{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# As Qwen3: refuses conversations without a user turn, drops reasoning before the last user turn, inserts an
# empty think block into the last reply, and into the prompt where thinking is off.
THINKING = (
    "{% set ns = namespace(last_user=-1) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}{% endfor %}"
    "{% if ns.last_user < 0 %}{{ raise_exception('No user query found in messages.') }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}"
    "{% set parts = m['content'].split('</think>') %}"
    "{% set thought = parts[0].replace('<think>', '').strip('\n') if parts | length > 1 else '' %}"
    "{% if loop.index0 > ns.last_user %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}"
    "{{ parts[-1].lstrip('\n') }}{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
# As gpt-oss: the target writes its channel header; the last reply ends otherwise than a reply in the history.
CHANNELS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m['content'] + ('<|return|>' if loop.last else '<|end|>') }}"
    "{% else %}{{ '<|start|>' + m['role'] + '<|message|>' + m['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)

FAMILIES: dict[str, tuple[str, list[str], str]] = {  # template, special tokens, end of turn
    "chatml": (CHATML, ["<|im_start|>", "<|im_end|>"], "<|im_end|>"),
    "llama3": (LLAMA3, ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], "<|eot_id|>"),
    "gemma": (GEMMA, ["<bos>", "<start_of_turn>", "<end_of_turn>"], "<end_of_turn>"),
    "thinking": (THINKING, ["<|im_start|>", "<|im_end|>"], "<|im_end|>"),
    "channels": (CHANNELS, ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"], "<|return|>"),
}


def byte_tokenizer(
    template: str | None, specials: Sequence[str], merges: Sequence[tuple[str, str]] = (), **named: str
) -> PreTrainedTokenizerFast:
    """One token per byte (ids 0-255), then the merges of byte-level symbols, then the special tokens."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: i for i, symbol in enumerate([*symbols, *(a + b for a, b in merges)])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in specials])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    tokenizer.chat_template = template
    return tokenizer


def family(name: str, **changes: Any) -> tuple[PreTrainedTokenizerFast, int]:
    """A tokenizer of one template family, and its end-of-turn id."""
    template, specials, end = FAMILIES[name]
    tokenizer = byte_tokenizer(template, specials, **changes)
    return tokenizer, tokenizer.convert_tokens_to_ids(end)


def talk(*contents: str, system: str | None = None, **record: Any) -> Conversation:
    """user, assistant, user, ... in turn."""
    messages = [Message("system", system)] if system is not None else []
    messages += [Message("user" if i % 2 == 0 else "assistant", text) for i, text in enumerate(contents)]
    return Conversation(tuple(messages), Source("talk.jsonl", 1, 0), **record)


def plain(conversation: Conversation) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in conversation.messages]


def supervised_texts(tokenizer: Any, token_ids: np.ndarray, supervised: np.ndarray) -> list[str]:
    """The text of each run of supervised tokens, found by walking the mask."""
    runs: list[list[int]] = []
    before = False
    for token, on in zip(token_ids.tolist(), supervised.tolist(), strict=True):
        if on and not before:
            runs.append([])
        if on:
            runs[-1].append(token)
        before = on
    return [tokenizer.decode(run) for run in runs]


def record(*contents: str, **more: Any) -> str:
    """A JSONL line with user, assistant, user, ... messages."""
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(contents)]
    return json.dumps({"messages": messages, **more})


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that finds the same packages as this one."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment)


def write_lines(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path
