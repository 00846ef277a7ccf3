"""A drafter on disk, wherever it is: a run folder, a checkpoint, or an exported folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftmill.config.spec import DrafterSpec
from draftmill.drafter.network import Drafter
from draftmill.export.zlab import load_drafter, read_provenance
from draftmill.train.checkpoint import complete_checkpoints, load_checkpoint


@dataclass(frozen=True, slots=True, eq=False)
class FoundDrafter:
    drafter: Drafter  # on the CPU, float32 parameters
    provenance: dict[str, Any]  # target, dataset, template and step it was trained with, as far as known
    path: Path  # what was loaded: the checkpoint inside a run folder, or `path` itself


def find_drafter(path: Path) -> FoundDrafter:
    """Raises ValueError where `path` is none of the three."""
    if (path / "checkpoints").is_dir():
        complete, _ = complete_checkpoints(path / "checkpoints")
        if not complete:
            raise ValueError(f"run folder {path} has no complete checkpoint yet")
        return _from_checkpoint(complete[-1])
    if (path / "state.json").exists():
        return _from_checkpoint(path)
    if (path / "config.json").exists():
        return FoundDrafter(load_drafter(path), read_provenance(path), path)
    raise ValueError(f"{path} is no run folder, no checkpoint and no exported drafter")


def _from_checkpoint(folder: Path) -> FoundDrafter:
    checkpoint = load_checkpoint(folder)
    drafter = Drafter(DrafterSpec.from_dict(checkpoint.state["spec"]))
    drafter.load_state_dict(checkpoint.drafter)
    return FoundDrafter(drafter, {"step": checkpoint.step, **checkpoint.state["provenance"]}, folder)
