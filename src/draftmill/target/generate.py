"""Responses of the target to token prompts, many rows at a time: greedy, or sampled with temperature and top-p.

A row's K/V entries sit at its own positions (key index == position), so rows of any lengths share a batch without
padding in front of them. Finished rows leave the batch. What a row samples depends on (seed, its key) alone, up to
the rounding that batch shapes bring.

R rows still running, S tokens per row and step, K keys, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import DynamicCache

from draftmill.target.model import Target

Finish = Literal["stop", "length"]
KEEP_SHARE = 0.75  # rows are gathered anew once fewer than this share of the batch still runs


@dataclass(frozen=True, slots=True)
class Sampling:
    max_new_tokens: int
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}: use at least 1")
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}: use 0 for greedy, or a positive value")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: use a value above 0, up to 1")


@dataclass(frozen=True, slots=True)
class Response:
    token_ids: tuple[int, ...]  # the stop token included, where one was generated
    finish: Finish


class PositionCache(DynamicCache):
    """Keys and values at their positions in buffers of fixed length; `positions` says where the next ones go."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.positions = torch.empty(0)  # [R, S], set before each forward pass
        self.visible = 0  # keys given to the attention: one more than the last position of any row
        self.buffers: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> [R, G, length, D] each

    def place(self, positions: Tensor) -> None:
        self.positions = positions
        self.visible = int(positions.max()) + 1

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if layer_idx not in self.buffers:
            self.buffers[layer_idx] = (
                key_states.new_zeros(*key_states.shape[:2], self.length, key_states.shape[-1]),
                value_states.new_zeros(*value_states.shape[:2], self.length, value_states.shape[-1]),
            )
        keys, values = self.buffers[layer_idx]
        rows = torch.arange(len(keys), device=keys.device)[:, None]
        keys[rows, :, self.positions] = key_states.transpose(1, 2)
        values[rows, :, self.positions] = value_states.transpose(1, 2)
        return keys[:, :, : self.visible], values[:, :, : self.visible]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.visible if layer_idx in self.buffers else 0

    def keep(self, rows: Tensor) -> None:
        self.buffers = {layer: (keys[rows], values[rows]) for layer, (keys, values) in self.buffers.items()}


def generate(
    target: Target,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    row_keys: Sequence[str] | None = None,
    on_step: Callable[[int], None] | None = None,
) -> list[Response]:
    """One response per prompt, in the order of the prompts; all run as one batch.

    `row_keys` name the rows to the sampler (default: their indices). `on_step` is told the rows still running.
    """
    if not prompts:
        return []
    if empty := [index for index, prompt in enumerate(prompts) if not prompt]:
        raise ValueError(f"prompt {empty[0]} has no tokens")
    keys = list(row_keys) if row_keys is not None else [str(index) for index in range(len(prompts))]
    draws = _uniform_draws(sampling, keys, target.device)
    responses: list[list[int]] = [[] for _ in prompts]
    batch = _Batch(target, prompts, sampling.max_new_tokens)
    for step in range(sampling.max_new_tokens):
        logits = batch.next_logits()
        chosen = _choose(logits, sampling, draws[batch.rows, step] if draws is not None else None)
        tokens = chosen.tolist()
        for row, token in zip(batch.rows.tolist(), tokens, strict=True):
            if batch.running[row]:
                responses[row].append(token)
                batch.running[row] = token not in target.stop_ids
        batch.append(chosen)
        if on_step is not None:
            on_step(sum(batch.running))
        if not any(batch.running):
            break
    return [Response(tuple(ids), "stop" if ids[-1] in target.stop_ids else "length") for ids in responses]


class _Batch:
    """The rows still computed, their cache, and the tokens not yet fed."""

    def __init__(self, target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        self.target = target
        self.running = [True] * len(prompts)
        self.rows = torch.arange(len(prompts), device=target.device)  # [R] which prompt a row is
        self.cache = PositionCache(max(map(len, prompts)) + max_new_tokens)
        width = max(map(len, prompts))
        padded = [[*prompt, *[0] * (width - len(prompt))] for prompt in prompts]
        self.tokens = torch.tensor(padded, device=target.device)  # [R, S] to feed next
        self.positions = torch.arange(width, device=target.device).expand(len(prompts), -1)
        self.last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=target.device)  # [R] column in tokens
        self.lengths = self.last + 1  # [R] tokens fed or about to be

    def next_logits(self) -> Tensor:
        """[R, V] after each row's last token. Entries past a row's end are never seen and are written over later."""
        self.cache.place(self.positions)
        keys = torch.arange(self.cache.visible, device=self.target.device)
        mask = (keys <= self.positions[..., None])[:, None]  # [R, 1, S, K]
        return self.target.next_token_logits(self.tokens, self.positions, self.cache, mask, self.last)

    def append(self, chosen: Tensor) -> None:
        self.tokens, self.positions = chosen[:, None], self.lengths[:, None]
        self.last = torch.zeros_like(self.last)
        self.lengths = self.lengths + 1
        alive = torch.tensor([self.running[row] for row in self.rows.tolist()], device=self.rows.device)
        if 0 < int(alive.sum()) < KEEP_SHARE * len(alive):
            keep = alive.nonzero()[:, 0]
            self.cache.keep(keep)
            for name in ("rows", "tokens", "positions", "last", "lengths"):
                setattr(self, name, getattr(self, name)[keep])


def _choose(logits: Tensor, sampling: Sampling, draws: Tensor | None) -> Tensor:
    """[R, V] -> [R]: the best token, or the one where the row's draw falls among the nucleus."""
    if draws is None:
        return logits.argmax(-1)
    ranked, order = (logits.float() / sampling.temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)
    before = ranked.cumsum(-1) - ranked
    ranked = ranked.masked_fill(before >= sampling.top_p, 0.0)  # the first token always stays
    edges = ranked.cumsum(-1)
    index = torch.searchsorted(edges, (draws[:, None] * edges[:, -1:]).contiguous(), right=True)
    last = (ranked > 0).sum(-1, keepdim=True) - 1
    return order.gather(-1, index.minimum(last))[:, 0]


def _uniform_draws(sampling: Sampling, keys: Sequence[str], device: torch.device) -> Tensor | None:
    """[rows, max_new_tokens] in [0, 1), each row from (seed, key); None for greedy."""
    if sampling.temperature == 0:
        return None
    rows = []
    for key in keys:
        digest = hashlib.sha256(f"{sampling.seed}/{key}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        rows.append(torch.rand(sampling.max_new_tokens, generator=generator))
    return torch.stack(rows).to(device)
