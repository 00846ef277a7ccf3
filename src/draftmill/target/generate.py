"""Responses of the target to token prompts, many rows at a time: greedy, or sampled with temperature and top-p.

Rows of any lengths share a batch without padding in front of them; finished rows leave it. What a row samples depends
on (seed, its key) alone, up to the rounding that batch shapes bring.

R rows still computed, S tokens per row and step, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftmill.target.answers import Finish, Sampling
from draftmill.target.cache import RaggedCache
from draftmill.target.model import Target

OnStep = Callable[[int, int], None]  # (rows still running, tokens generated so far in all rows)
KEEP_SHARE = 0.75  # rows are gathered anew once fewer than this share of the batch still runs


@dataclass(frozen=True, slots=True)
class Response:
    token_ids: tuple[int, ...]  # the stop token included, where one was generated
    finish: Finish


def generate(
    target: Target,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    row_keys: Sequence[str] | None = None,
    on_step: OnStep | None = None,
) -> list[Response]:
    """One response per prompt, in the order of the prompts; all run as one batch.

    `row_keys` name the rows to the sampler (default: their indices).
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
        for row, token in zip(batch.rows, tokens, strict=True):
            if batch.running[row]:
                responses[row].append(token)
                batch.running[row] = token not in target.stop_ids
        batch.append(chosen)
        if on_step is not None:
            on_step(sum(batch.running), sum(map(len, responses)))
        if not any(batch.running):
            break
    return [Response(tuple(ids), "stop" if ids[-1] in target.stop_ids else "length") for ids in responses]


class _Batch:
    """The rows still computed, their cache, and the tokens not yet fed."""

    def __init__(self, target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        self.target = target
        self.running = [True] * len(prompts)
        self.rows = list(range(len(prompts)))  # [R] which prompt a row is
        width = max(map(len, prompts))
        self.cache = RaggedCache(width + max_new_tokens)
        padded = [[*prompt, *[0] * (width - len(prompt))] for prompt in prompts]
        self.tokens = torch.tensor(padded, device=target.device)  # [R, S] to feed next
        self.starts = [0] * len(prompts)  # [R] positions of the first of them
        self.lengths = [len(prompt) for prompt in prompts]  # [R] tokens fed or about to be

    def next_logits(self) -> Tensor:
        """[R, V] after each row's last token. Entries past a row's end are never seen and are written over later."""
        device = self.target.device
        starts = torch.tensor(self.starts, device=device)
        positions = starts[:, None] + torch.arange(self.tokens.shape[1], device=device)
        self.cache.place(positions, self.starts)
        last = torch.tensor(self.lengths, device=device) - 1 - starts  # [R] columns of `tokens`
        return self.target.next_token_logits(self.tokens, positions, self.cache, self.cache.visible(), last)

    def append(self, chosen: Tensor) -> None:
        """int64 [R]: the next token of each row. Rows that have ended leave once they are many."""
        alive = [index for index, row in enumerate(self.rows) if self.running[row]]
        if 0 < len(alive) < KEEP_SHARE * len(self.rows):
            self.cache.keep(alive)
            chosen = chosen[torch.tensor(alive, device=chosen.device)]
            self.rows, self.lengths = [self.rows[i] for i in alive], [self.lengths[i] for i in alive]
        self.tokens, self.starts = chosen[:, None], self.lengths
        self.lengths = [length + 1 for length in self.lengths]


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
