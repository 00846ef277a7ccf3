"""Greedy decoding, plain and by draft-and-verify, batched over prompts of different lengths.

Draft-and-verify follows `dflash_generate` of the published inference code (dflash 0.1.0) step by step:

    prefill     the target's first own token becomes the first anchor; it is not a round
    each round  a block of min(B, tokens that still fit) slots: the anchor and masks
                context: features at positions strictly before the anchor
                accepted: the longest drafted prefix equal to the target's own choices
                produced: accepted + 1, at most what still fits, cut after a stop token
                the last token produced is the next anchor

Rows that have finished leave the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from draftmill.drafter.network import Drafter
from draftmill.evaluate.proposer import Proposer
from draftmill.evaluate.responses import Finish, OnProgress, Progress, Response, Round
from draftmill.evaluate.verifier import Verifier
from draftmill.target.model import Target

BATCH = 16  # rows decoded together unless told otherwise


@dataclass(slots=True)
class _Row:
    """One prompt being answered. `tokens[-1]` is the anchor."""

    index: int  # place among the caller's prompts
    prompt_tokens: int
    limit: int
    stop_ids: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def start(self) -> int:
        """Position of the last token."""
        return self.prompt_tokens + len(self.tokens) - 1

    @property
    def left(self) -> int:
        return self.limit - len(self.tokens)

    def append(self, tokens: list[int]) -> int:
        """Take tokens up to the limit and up to a stop token, inclusive. Returns how many."""
        taken = 0
        for token in tokens[: self.left]:
            self.tokens.append(token)
            taken += 1
            if token in self.stop_ids:
                self.finish = "stop"
                return taken
        if self.left == 0:
            self.finish = "length"
        return taken

    def response(self) -> Response:
        assert self.finish is not None
        return Response(self.prompt_tokens, tuple(self.tokens), self.finish, tuple(self.rounds))


@torch.no_grad()
def plain_greedy(
    target: Target,
    prompts: list[list[int]],
    max_new_tokens: int,
    *,
    stop_ids: frozenset[int] | None = None,
    batch_size: int = BATCH,
    on_progress: OnProgress | None = None,
) -> list[Response]:
    """The target's own greedy answers, one token per pass. `stop_ids` defaults to the target's."""
    counter = _Counter(len(prompts), on_progress)
    answers: dict[int, Response] = {}
    for rows, texts in _batches(target, prompts, max_new_tokens, stop_ids, batch_size):
        verifier = Verifier(target, max(map(len, texts)) + max_new_tokens)
        _first_tokens(rows, verifier.prefill(texts))
        while rows := _leave(rows, answers, counter, verifier.keep):
            anchors = torch.tensor([[row.tokens[-1]] for row in rows])
            logits, _, _ = verifier.forward(anchors, [row.start for row in rows])
            for row, token in zip(rows, logits[:, 0].argmax(dim=-1).tolist(), strict=True):
                row.append([token])
            counter.step(rows, [1] * len(rows))
    return [answers[index] for index in range(len(prompts))]


@torch.no_grad()
def draft_and_verify(
    target: Target,
    drafter: Drafter,
    prompts: list[list[int]],
    max_new_tokens: int,
    *,
    stop_ids: frozenset[int] | None = None,
    batch_size: int = BATCH,
    on_progress: OnProgress | None = None,
) -> list[Response]:
    """Answers by drafting and greedy verification, with every round recorded.

    The drafter computes in the target's dtype, whatever the dtype of its parameters.
    """
    _check_pair(target, drafter)
    vocabulary = target.vocabulary()
    block_size = drafter.spec.block_size
    counter = _Counter(len(prompts), on_progress)
    answers: dict[int, Response] = {}
    for rows, texts in _batches(target, prompts, max_new_tokens, stop_ids, batch_size):
        capacity = max(map(len, texts)) + max_new_tokens + block_size
        verifier = Verifier(target, capacity)
        proposer = Proposer(drafter, vocabulary, capacity)

        def keep(kept: list[int], verifier: Verifier = verifier, proposer: Proposer = proposer) -> None:
            verifier.keep(kept)
            proposer.keep(kept)

        _first_tokens(rows, verifier.prefill(texts, proposer.extend))
        while rows := _leave(rows, answers, counter, keep):
            produced = _round(rows, verifier, proposer, block_size)
            counter.step(rows, produced)
    return [answers[index] for index in range(len(prompts))]


def _round(rows: list[_Row], verifier: Verifier, proposer: Proposer, block_size: int) -> list[int]:
    """Draft, verify, keep, and let the context grow. Returns tokens produced per row."""
    anchors = [row.start for row in rows]
    sizes = [min(block_size, row.left + 1) for row in rows]
    drafts = proposer.logits([row.tokens[-1] for row in rows], anchors, sizes).argmax(dim=-1).cpu()
    block = torch.cat((torch.tensor([[row.tokens[-1]] for row in rows]), drafts), dim=1)
    logits, features, positions = verifier.forward(block, anchors)
    choices = logits.argmax(dim=-1).tolist()
    # rejected tokens' features enter too: they lie at or after the next anchor, so they stay invisible
    proposer.extend(features, positions, anchors)
    produced = []
    for row, anchor, size, drafted, chosen in zip(rows, anchors, sizes, drafts.tolist(), choices, strict=True):
        drafted = drafted[: size - 1]
        accepted = matching_prefix(drafted, chosen)
        produced.append(row.append([*drafted[:accepted], chosen[accepted]]))
        row.rounds.append(Round(anchor, tuple(drafted), accepted, produced[-1]))
    return produced


def matching_prefix(drafted: list[int], chosen: list[int]) -> int:
    """How many leading drafted tokens equal the target's choices."""
    for slot, token in enumerate(drafted):
        if token != chosen[slot]:
            return slot
    return len(drafted)


def _first_tokens(rows: list[_Row], logits: torch.Tensor) -> None:
    for row, token in zip(rows, logits.argmax(dim=-1).tolist(), strict=True):
        row.append([token])


def _batches(
    target: Target, prompts: list[list[int]], max_new_tokens: int, stop_ids: frozenset[int] | None, batch_size: int
) -> Iterator[tuple[list[_Row], list[list[int]]]]:
    """Rows in batches of similar length, so that little is padded."""
    if max_new_tokens < 1 or batch_size < 1:
        raise ValueError(f"max_new_tokens {max_new_tokens} and batch_size {batch_size} must be at least 1")
    if empty := [index for index, prompt in enumerate(prompts) if not prompt]:
        raise ValueError(f"prompt {empty[0]} has no tokens: a prompt needs at least one")
    stops = target.stop_ids if stop_ids is None else stop_ids
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for first in range(0, len(order), batch_size):
        chosen = order[first : first + batch_size]
        texts = [list(prompts[index]) for index in chosen]
        yield [_Row(index, len(prompts[index]), max_new_tokens, stops) for index in chosen], texts


def _leave(
    rows: list[_Row], answers: dict[int, Response], counter: _Counter, keep: Callable[[list[int]], None]
) -> list[_Row]:
    """Move finished rows to `answers`; shrink the caches to the rows that stay."""
    staying = [place for place, row in enumerate(rows) if row.finish is None]
    for row in rows:
        if row.finish is not None:
            answers[row.index] = row.response()
    if len(staying) < len(rows):
        counter.finished(len(rows) - len(staying))
        if staying:
            keep(staying)
    return [rows[place] for place in staying]


class _Counter:
    """Counts for the caller's progress line."""

    def __init__(self, prompts: int, on_progress: OnProgress | None) -> None:
        self.prompts, self.on_progress = prompts, on_progress
        self.done = self.tokens = self.rounds = 0

    def step(self, rows: list[_Row], produced: list[int]) -> None:
        self.rounds += len(rows)
        self.tokens += sum(produced)
        self._tell()

    def finished(self, rows: int) -> None:
        self.done += rows
        self.tokens += rows  # the prefill's token of each
        self._tell()

    def _tell(self) -> None:
        if self.on_progress is not None:
            self.on_progress(Progress(self.done, self.prompts, self.tokens, self.rounds))


def _check_pair(target: Target, drafter: Drafter) -> None:
    """A drafter reads exactly the features it was trained on; anything else would only accept little."""
    spec = drafter.spec
    pairs = (
        ("layer ids", tuple(target.layer_ids), spec.target_layer_ids),
        ("number of layers", target.num_layers, spec.num_target_layers),
        ("hidden size", target.hidden_size, spec.hidden_size),
    )
    for name, have, want in pairs:
        if have != want:
            raise ValueError(
                f"target {name} {have}, drafter's {want}: load the target that the drafter was trained for"
            )
    vocabulary = target.vocabulary()
    for name in ("embedding_scale", "output_multiplier", "logit_softcap"):
        scale, trained = float(getattr(vocabulary, name) or 0), float(getattr(spec, name) or 0)
        if not math.isclose(scale, trained, rel_tol=1e-2):  # a scale may be rounded to the target's dtype
            raise ValueError(f"target {name} {scale}, drafter's {trained}: load the target it was trained for")
    if (device := next(drafter.parameters()).device) != torch.device(target.device):
        raise ValueError(f"the drafter is on {device}, the target on {target.device}: move one to the other")
