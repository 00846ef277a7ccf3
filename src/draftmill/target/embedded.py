"""`Embedded`: the target in this process answers prompts, in batches of prompts of like length.

Batches are a function of all prompts and the batch size alone, finished prompts included, so an interrupted run that
goes on computes the same batches, and the same answers, as a straight one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from draftmill.target.answers import Answer, IsWanted, OnAnswers, OnProgress, OnRefusal, Prompt, Sampling
from draftmill.target.generate import Response, generate
from draftmill.target.model import Target

SORTED_BATCHES = 16  # prompts of this many batches are sorted by length together, so that those of a batch are alike


class Embedded:
    """An `Answerer`. See there for what its methods promise."""

    def __init__(self, target: Target, batch_size: int = 64) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: use at least 1")
        self.target, self.batch_size = target, batch_size
        self.tokenizer, self.stop_ids = target.tokenizer, target.stop_ids
        self.context_length: int | None = getattr(target.config, "max_position_embeddings", None)

    def made_by(self) -> dict[str, Any]:
        return {"target": {key: value for key, value in self.target.identity().items() if key != "name"}}

    def answer(
        self,
        prompts: Iterable[Prompt],
        is_wanted: IsWanted,
        sampling: Sampling,
        on_answers: OnAnswers,
        on_refusal: OnRefusal,
        on_progress: OnProgress | None = None,
    ) -> None:
        show = on_progress or (lambda _ended, _tokens: None)
        generated = 0
        for batch in self._batches(prompts):
            wanted = [is_wanted(prompt) for prompt in batch]
            if any(wanted):
                responses = self._generate(batch, sampling, sum(wanted), generated, show)
                generated += sum(len(response.token_ids) for response in responses)
                pairs = zip(batch, responses, wanted, strict=True)
                on_answers(
                    [
                        (prompt, Answer.from_ids(response.token_ids, self.tokenizer, self.stop_ids))
                        for prompt, response, want in pairs
                        if want
                    ]
                )
            show(0, generated)

    def _generate(
        self, batch: list[Prompt], sampling: Sampling, wanted: int, generated: int, show: OnProgress
    ) -> list[Response]:
        """The whole batch, though perhaps only some of it is wanted: fewer rows would round otherwise."""

        def on_step(running: int, tokens: int) -> None:
            show(max(0, wanted - running), generated + tokens)

        ids, keys = [prompt.token_ids for prompt in batch], [prompt.key for prompt in batch]
        return generate(self.target, ids, sampling, row_keys=keys, on_step=on_step)

    def _batches(self, prompts: Iterable[Prompt]) -> Iterator[list[Prompt]]:
        """Shortest prompts first within a window."""
        prompts = iter(prompts)
        while window := list(islice(prompts, SORTED_BATCHES * self.batch_size)):
            window.sort(key=lambda prompt: len(prompt.token_ids))
            yield from (window[i : i + self.batch_size] for i in range(0, len(window), self.batch_size))
