"""Evaluation of a drafter on disk with its target: prompts rendered as in training, decoded for real."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftmill.evaluate.report import EvaluationReport, evaluate
from draftmill.evaluate.responses import OnProgress, Response
from draftmill.run.drafters import FoundDrafter, find_drafter
from draftmill.target.model import Target
from draftmill.text.questions import read_questions
from draftmill.text.refusals import Refused, RowProblem
from draftmill.text.render import Renderer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    max_new_tokens: int = 128
    limit: int | None = None  # only the first prompts
    batch_size: int = 8
    dtype: str = "bfloat16"  # compute dtype of target and drafter
    device: str = "auto"


@dataclass(frozen=True, slots=True, eq=False)
class LoadedPair:
    """A target and a drafter that reads its features, ready to decode."""

    target: Target
    found: FoundDrafter
    prompts: list[list[int]]
    refused: dict[str, int]  # prompts left out, by reason


def load_pair(drafter: Path, target: Path, prompts: Path, settings: EvaluationSettings) -> LoadedPair:
    """Raises ValueError where drafter and target do not belong together or no prompt is usable."""
    found = find_drafter(drafter)
    loaded = Target.load(target, settings.dtype, settings.device, found.drafter.spec.target_layer_ids)
    _warn_of_another_target(found.provenance, loaded)
    found.drafter.to(loaded.device).eval().requires_grad_(False)
    options = found.provenance.get("template_options") or {}
    ids, refused = read_prompts(prompts, loaded, options, settings.limit)
    return LoadedPair(loaded, found, ids, refused)


def evaluate_pair(
    pair: LoadedPair,
    settings: EvaluationSettings,
    *,
    plain: list[Response] | None = None,
    on_progress: OnProgress | None = None,
) -> EvaluationReport:
    return evaluate(
        pair.target,
        pair.found.drafter,
        pair.prompts,
        max_new_tokens=settings.max_new_tokens,
        batch_size=settings.batch_size,
        plain=plain,
        on_progress=on_progress,
    )


def read_prompts(
    path: Path, target: Target, template_options: dict[str, Any], limit: int | None
) -> tuple[list[list[int]], dict[str, int]]:
    """Token ids the target reads before it answers each row's last user turn, and rows left out by reason."""
    renderer = Renderer(target.tokenizer, template_options, stop_ids=target.stop_ids)
    prompts: list[list[int]] = []
    refused: dict[str, int] = {}
    for row in read_questions(path):
        if limit is not None and len(prompts) == limit:
            break
        if not isinstance(row, Refused):
            try:
                prompts.append(renderer.prompt_ids(row))
                continue
            except RowProblem as problem:
                row = problem.at(row.source)
        refused[str(row.reason)] = refused.get(str(row.reason), 0) + 1
        log.warning("%s", row)
    if not prompts:
        raise ValueError(f"{path} holds no usable prompt: {refused or 'the file is empty'}")
    return prompts, refused


def _warn_of_another_target(provenance: dict[str, Any], target: Target) -> None:
    trained = provenance.get("target") or {}
    given = target.identity()
    for key in ("name", "quantization", "weights"):
        if key in trained and trained[key] != given[key]:
            log.warning(
                "the drafter was trained for a target with %s %s, this one has %s: acceptance is of this pairing",
                key, trained[key], given[key],
            )  # fmt: skip
