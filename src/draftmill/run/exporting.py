"""From a run to a folder that other engines load, and the proof that it drafts the same there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from draftmill.evaluate.decode import draft_and_verify
from draftmill.export.verify import OracleReport, verify_with_dflash
from draftmill.export.zlab import write_export
from draftmill.run.drafters import find_drafter
from draftmill.run.evaluation import EvaluationSettings, load_pair


def export_drafter(checkpoint: Path, out: Path, dtype: str) -> Path:
    """Write the drafter of a run folder (its newest checkpoint) or of a checkpoint to `out`."""
    found = find_drafter(checkpoint)
    return write_export(
        out,
        found.drafter.spec,
        found.drafter.state_dict(),
        dtype=dtype,
        provenance=found.provenance,
        token_ids=found.provenance.get("token_ids"),
    )


def verify_export(
    folder: Path,
    target: Path,
    prompts: Path,
    settings: EvaluationSettings,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> OracleReport:
    """Decode `prompts` with the export here and in the `dflash` package, and compare every round.

    `on_progress` is told (prompts done, prompts in all), first of our decoding and then of the package's. Always
    float32: in bfloat16 two correct implementations round differently and nothing could be concluded.
    """
    pair = load_pair(folder, target, prompts, replace(settings, dtype="float32"))
    tell = on_progress or (lambda done, prompts: None)
    count = len(pair.prompts)
    responses = draft_and_verify(
        pair.target, pair.found.drafter, pair.prompts, settings.max_new_tokens,
        batch_size=settings.batch_size, on_progress=lambda now: tell(now.done, count),
    )  # fmt: skip
    return verify_with_dflash(
        folder, pair.target.model, pair.prompts, settings.max_new_tokens, sorted(pair.target.stop_ids), responses,
        on_prompt=lambda done: tell(done, count),
    )  # fmt: skip
