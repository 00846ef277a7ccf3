"""Which target a dataset was rendered for: hashes of the tokenizer and of its chat template."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def tokenizer_identity(tokenizer: Any) -> dict[str, str]:
    """Two tokenizers with equal hashes turn every conversation into the same token ids."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    for per_call in ("truncation", "padding"):  # state of the last call, not of the tokenizer
        backend.pop(per_call, None)
    special = {name: str(value) for name, value in tokenizer.special_tokens_map.items()}
    return {
        "tokenizer_hash": _hash({"backend": backend, "special": special}),
        "chat_template_hash": _hash(tokenizer.chat_template),
    }


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True).encode()).hexdigest()
