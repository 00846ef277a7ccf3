"""What a run is, decided before anything heavy is loaded: drafter, data, length, identity."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict, dataclass, replace
from typing import Any

from draftmill.config.load import ConfigError
from draftmill.config.resolve import decay_gamma, resolve_spec
from draftmill.config.schema import Config
from draftmill.config.spec import DrafterSpec
from draftmill.target.loading import config_hash, identity, load_tokenizer
from draftmill.target.vocabulary import target_quirks
from draftmill.text.dataset import PreparedDataset
from draftmill.text.identity import tokenizer_identity
from draftmill.text.packing import PackStream

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class RunPlan:
    config: Config
    dataset: PreparedDataset
    spec: DrafterSpec
    steps: int  # optimizer steps of the whole run
    end: int | None  # seq after the last pack; None where steps decide
    provenance: dict[str, Any]  # what the drafter comes from, for checkpoints and exports

    @property
    def packs_per_step(self) -> int:
        """Over all drafters."""
        return self.config.train.accumulation * self.config.pipeline.drafters

    @property
    def threads(self) -> int:
        """CPU threads per worker: `run.threads`, or the cores shared out evenly."""
        pipeline = self.config.pipeline
        workers = 1 if pipeline.mode == "inprocess" else pipeline.targets + pipeline.drafters
        return self.config.run.threads or max(1, len(os.sched_getaffinity(0)) // workers)

    def stream(self, position: dict[str, Any] | None = None) -> PackStream:
        return PackStream(self.dataset, self.config.data, self.config.train.seed, position)

    def resumed(self, position: dict[str, Any]) -> RunPlan:
        """The plan from `position` on: the dataset may have grown since, and epochs then hold more packs."""
        steps, end = _length(self.config, self.stream(position))
        if steps != self.steps:
            log.warning("the dataset has grown: the run is now %d optimizer steps long", steps)
        return replace(self, steps=steps, end=end)


def plan_run(config: Config) -> RunPlan:
    """Raises ConfigError for settings that cannot be used, ValueError for a dataset of another target."""
    try:
        dataset = PreparedDataset.open(config.data.path)
    except (ValueError, OSError) as error:
        raise ConfigError(f"data.path: {error}") from None
    spec = resolve_spec(config, dataset.manifest["mask_token"]["id"])
    check_step_mode(config)
    decay_gamma(config.train.loss, spec.block_size)  # refused here, not after the target is loaded
    tokenizer = load_tokenizer(config.target.path)
    try:
        dataset.check_target({"config_hash": config_hash(config.target.path), **tokenizer_identity(tokenizer)})
    except ValueError as error:
        raise ConfigError(f"data.path: {error}") from None
    check_mask_token(config, dataset, tokenizer)
    check_longest(config, dataset, spec)
    spec = replace(spec, **asdict(target_quirks(config.target.path, config.target.dtype)))
    stream = PackStream(dataset, config.data, config.train.seed)
    steps, end = _length(config, stream)
    log.info("packing: %.1f%% of an epoch's token places are padding", 100 * stream.padding_share(0))
    provenance = {
        "target": identity(config.target.path, config.target.dtype),
        "token_ids": {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")},
        "template_options": dataset.manifest["template_options"],
        "dataset": {"fingerprint": dataset.fingerprint, "rows": len(dataset)},
    }
    return RunPlan(config, dataset, spec, steps, end, provenance)


def check_step_mode(config: Config) -> None:
    """Without touching a device: `run.device` auto is settled by the drafter itself."""
    mode, device = config.train.step_mode, config.run.device
    if mode in ("compile", "graph") and device == "cpu":
        raise ConfigError(f"train.step_mode is {mode}, which needs a GPU, but run.device is {device}: set one to auto")


def check_mask_token(config: Config, dataset: PreparedDataset, tokenizer: Any) -> None:
    """`drafter.mask_token_id` obeys the rule by which `prepare` chose the dataset's."""
    chosen = config.drafter.mask_token_id
    if chosen is None or chosen == dataset.manifest["mask_token"]["id"]:
        return
    meant = {getattr(tokenizer, f"{name}_token_id"): name for name in ("pad", "bos", "eos")}
    meant |= dict.fromkeys(dataset.manifest["stop_ids"], "stop")
    if chosen in meant:
        raise ConfigError(
            f"drafter.mask_token_id {chosen} is the target's {meant[chosen]} token, which has a meaning of its own: "
            "choose a reserved token, or remove the setting to use the dataset's"
        )
    if count := dataset.occurrences(chosen):
        log.warning(
            "drafter.mask_token_id %d occurs %d times in the data: the drafter meets it as text, too", chosen, count
        )


def check_longest(config: Config, dataset: PreparedDataset, spec: DrafterSpec) -> None:
    """No document, cut to a pack, may pass the positions that the target knows."""
    longest = min(int(dataset.lengths.max()), config.data.pack_tokens)
    if longest > spec.max_position_embeddings:
        raise ConfigError(
            f"documents of up to {longest} tokens, but the target holds {spec.max_position_embeddings}: set "
            f"data.pack_tokens={spec.max_position_embeddings}, or prepare with --max-length"
        )


def _length(config: Config, stream: PackStream) -> tuple[int, int | None]:
    """Optimizer steps, and the seq after the last pack."""
    if config.train.steps is not None:
        return config.train.steps, None
    packs = stream.end_of(config.train.epochs or 0)
    return -(-packs // (config.train.accumulation * config.pipeline.drafters)), packs
