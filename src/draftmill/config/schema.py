"""Every setting of a run: its unit, its default, and why a value is refused.

Frozen and strict: an unknown key is an error. `None` means "derived from the target"; `resolve.py`
turns the settings plus the target's own config into a `DrafterSpec` that holds no `None`s.
No torch is imported here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

LayerType = Literal["full", "sliding"]

# A setting marked so may differ between a run and its resumption: it never reaches the trained weights.
FREE_ON_RESUME: dict[str, Any] = {"free_on_resume": True}


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True, use_attribute_docstrings=True
    )


class TargetConfig(Section):
    path: Path
    """Hugging Face folder of the frozen target (config.json, safetensors, tokenizer)."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute dtype of the target, as it will be served."""

    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$", json_schema_extra=FREE_ON_RESUME)] = "auto"
    """auto (a GPU where there is one), cpu, cuda or cuda:N."""

    feature_layers: tuple[int, ...] | Annotated[int, Field(ge=1)] = 5
    """Layer ids to tap (id l = output of 0-based decoder layer l), or how many to spread evenly."""


class CausalConfig(Section):
    full: bool = False
    """Whether a slot of a full-attention layer sees only slots up to itself."""

    sliding: bool = True
    """Whether a slot of a sliding-window layer sees only slots up to itself."""


class DrafterConfig(Section):
    layers: Annotated[int, Field(ge=1)] = 5
    """Decoder layers of the drafter."""

    block_size: Annotated[int, Field(ge=2)] = 16
    """Slots per block: the anchor plus block_size - 1 drafted tokens."""

    layer_types: tuple[LayerType, ...] | None = None
    """One of full / sliding per layer; None is full everywhere."""

    sliding_window: Annotated[int, Field(ge=1)] | None = None
    """Window W of sliding layers in tokens, the query itself counted."""

    causal: CausalConfig = CausalConfig()
    """Whether slots of a block see later slots, per layer type. Served exactly as trained."""

    mask_token_id: Annotated[int, Field(ge=0)] | None = None
    """Token of the slots to predict. None takes the dataset's: see `draftmill prepare --help`."""

    intermediate_size: Annotated[int, Field(ge=1)] | None = None
    """Width of the MLP; None is the target's."""

    num_attention_heads: Annotated[int, Field(ge=1)] | None = None
    """Query heads; None is the target's."""

    num_key_value_heads: Annotated[int, Field(ge=1)] | None = None
    """Key and value heads; None is the target's."""

    head_dim: Annotated[int, Field(ge=2, multiple_of=2)] | None = None
    """Width of a head; None is the target's."""

    rope_theta: Annotated[float, Field(gt=0)] | None = None
    """RoPE base; None is the target's."""

    rope_scaling: dict[str, Any] | None = None
    """RoPE scaling (rope_type default, linear, yarn or llama3); None is the target's."""

    @model_validator(mode="after")
    def _consistent(self) -> DrafterConfig:
        types = self.layer_types or ("full",) * self.layers
        if len(types) != self.layers:
            raise ValueError(
                f"drafter.layer_types names {len(types)} layers, drafter.layers is {self.layers}: make them equal"
            )
        sliding = "sliding" in types
        if sliding and self.sliding_window is None:
            raise ValueError("drafter.layer_types has sliding layers: set drafter.sliding_window")
        if not sliding and self.sliding_window is not None:
            raise ValueError(
                f"drafter.sliding_window is {self.sliding_window}, but no layer in drafter.layer_types is sliding: "
                "remove it or name the sliding layers"
            )
        if self.sliding_window is not None and self.sliding_window < self.block_size:
            raise ValueError(
                f"drafter.sliding_window {self.sliding_window} is smaller than drafter.block_size {self.block_size}: "
                "serving engines disagree there; use a window of at least one block"
            )
        if sliding and "full" in types and self.causal.full and not self.causal.sliding:
            raise ValueError(
                "drafter.causal full=true with sliding=false over mixed layers can be said by no export layout: "
                "use the same value for both, or full=false with sliding=true"
            )
        return self


class DataConfig(Section):
    path: Path
    """Prepared dataset folder, written by `draftmill prepare`."""

    pack_tokens: Annotated[int, Field(ge=2)] = 8192
    """C: tokens per pack. Longer documents are cut to their first C tokens."""

    anchor_rate: Annotated[float, Field(gt=0, le=1)] = 0.0625
    """Anchors drawn per supervised token. A pack has room for ceil(anchor_rate x pack_tokens)."""

    anchors_per_document: Annotated[int, Field(ge=1)] = 512
    """Most anchors one document draws in an epoch."""

    pack_window: Annotated[int, Field(ge=1)] = 1024
    """Documents looked at together when filling packs; larger pads less and shuffles less finely."""


class LossConfig(Section):
    kind: Literal["decay", "dpace"] = "decay"
    """decay: slot weight exp(-(k-1)/gamma). dpace: weights from the drafter's own survival (arXiv 2605.18810)."""

    gamma: Annotated[float, Field(gt=0)] | None = None
    """Decay length in slots; None is 7, 5 or 4 for block size 16, 10 or 8."""

    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
    """D-PACE smoothing: q~ = (1 - alpha) q + alpha."""


class NoiseConfig(Section):
    kind: Literal["none", "uniform", "gaussian"] = "none"
    """Noise added to the features in the drafter."""

    scale: Annotated[float, Field(ge=0)] = 0.0
    """Half width of the uniform, or standard deviation of the Gaussian, in feature units."""


class TrainConfig(Section):
    steps: Annotated[int, Field(ge=1)] | None = None
    """Optimizer steps. Set either this or epochs."""

    epochs: Annotated[int, Field(ge=1)] | None = None
    """Passes over the dataset. Set either this or steps."""

    accumulation: Annotated[int, Field(ge=1)] = 1
    """Packs per optimizer step and drafter."""

    lr: Annotated[float, Field(gt=0)] = 6e-4
    """Peak learning rate."""

    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Last learning rate over the peak."""

    schedule: Literal["cosine", "wsd"] = "cosine"
    """cosine to the end, or warm-up, stable, linear decay."""

    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.04
    """Share of all steps with rising learning rate."""

    decay_ratio: Annotated[float, Field(gt=0, le=1)] = 0.2
    """wsd only: share of all steps with falling learning rate."""

    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """AdamW moment decays."""

    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW epsilon."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay of matrices; norms are never decayed."""

    clip: Annotated[float, Field(gt=0)] = 1.0
    """Largest gradient norm of an optimizer step."""

    step_mode: Literal["auto", "eager", "compile", "graph"] = "auto"
    """How a step runs. auto: on a GPU the fastest of graph, compile and eager that equals eager on the first packs,
    chosen once for the run; on a CPU eager. graph: the step as one CUDA graph. compile: compiled, with fixed shapes."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute dtype of the drafter. Master weights and moments are float32 always."""

    loss: LossConfig = LossConfig()
    noise: NoiseConfig = NoiseConfig()

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Of the drafter's first weights, the document order, the anchors and the noise."""

    time_limit_minutes: Annotated[float | None, Field(gt=0, json_schema_extra=FREE_ON_RESUME)] = None
    """Stop cleanly, with a checkpoint, after this long; a later start goes on from there."""

    @model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(
                f"set one of train.steps ({self.steps}) and train.epochs ({self.epochs}), and the other to null"
            )
        if self.noise.kind != "none" and self.noise.scale == 0:
            raise ValueError(f"train.noise.kind is {self.noise.kind}, but train.noise.scale is 0: set a scale")
        if self.schedule == "wsd" and self.warmup_ratio + self.decay_ratio > 1:
            raise ValueError(
                f"train.warmup_ratio {self.warmup_ratio} + train.decay_ratio {self.decay_ratio} exceed 1: lower one"
            )
        return self


class PipelineConfig(Section):
    mode: Annotated[Literal["processes", "inprocess"], Field(json_schema_extra=FREE_ON_RESUME)] = "processes"
    """processes: targets and drafters side by side. inprocess: one of each, taking turns; the same weights."""

    targets: Annotated[int, Field(ge=1, json_schema_extra=FREE_ON_RESUME)] = 1
    """Target workers."""

    drafters: Annotated[int, Field(ge=1)] = 1
    """Drafter workers: each trains on its share of the packs, all take the same steps."""

    slots: Annotated[int, Field(ge=1, json_schema_extra=FREE_ON_RESUME)] = 4
    """Packs per drafter in work or waiting to be trained on. This bounds memory: a slot holds pack_tokens features."""

    target_restarts: Annotated[int, Field(ge=0, json_schema_extra=FREE_ON_RESUME)] = 5
    """How often each target worker is started again after it died."""

    drafter_restarts: Annotated[int, Field(ge=0, json_schema_extra=FREE_ON_RESUME)] = 3
    """How often the drafters are started again, from the newest checkpoint, after one was killed."""

    start_timeout_seconds: Annotated[float, Field(gt=0, json_schema_extra=FREE_ON_RESUME)] = 600.0
    """Longest start-up phase of a worker, such as loading weights."""

    lease_timeout_seconds: Annotated[float, Field(gt=0, json_schema_extra=FREE_ON_RESUME)] = 300.0
    """Longest work of a target on one pack; a target over it is taken for hung and replaced."""

    step_timeout_seconds: Annotated[float, Field(gt=0, json_schema_extra=FREE_ON_RESUME)] = 600.0
    """Longest work of a drafter on one pack; a drafter over it is taken for hung."""

    stop_seconds: Annotated[float, Field(ge=0, json_schema_extra=FREE_ON_RESUME)] = 20.0
    """How long workers may take to leave at the end before they are killed."""


class RunConfig(Section):
    dir: Annotated[Path, Field(json_schema_extra=FREE_ON_RESUME)]
    """Run folder: config, manifest, metrics, events, checkpoints."""

    threads: Annotated[int, Field(ge=1)] | None = None
    """CPU threads per worker. None shares the cores out evenly; CPU sums depend on it in their last bits."""

    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$", json_schema_extra=FREE_ON_RESUME)] = "auto"
    """Where the drafter trains: auto (a GPU where there is one), cpu, cuda or cuda:N."""

    log_every: Annotated[int, Field(ge=1, json_schema_extra=FREE_ON_RESUME)] = 10
    """Steps between metric rows."""

    checkpoint_every: Annotated[int, Field(ge=1, json_schema_extra=FREE_ON_RESUME)] = 500
    """Steps between checkpoints; the last step is always kept."""

    keep_checkpoints: Annotated[int, Field(ge=1, json_schema_extra=FREE_ON_RESUME)] = 2
    """Newest complete checkpoints kept."""


class Config(Section):
    """A training run. `draftmill init` writes one with comments."""

    target: TargetConfig
    drafter: DrafterConfig = DrafterConfig()
    data: DataConfig
    train: TrainConfig
    pipeline: PipelineConfig = PipelineConfig()
    run: RunConfig
