"""The drafter step measured alone: random weights, random packs, no target. What `draftmill bench step` runs.

Times are the device's own (CUDA events), forward + backward and the update apart. Draft positions, not tokens, are a
drafter's work, so the anchor rate is part of every result.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftmill.config.schema import TrainConfig
from draftmill.config.spec import DrafterSpec
from draftmill.drafter.network import Drafter
from draftmill.drafter.vocabulary import FrozenVocabulary
from draftmill.train.fixed_step import ComputeWeights, FixedStep, fixed_shape
from draftmill.train.gradients import FlatGradients
from draftmill.train.optimizer import Optimizer
from draftmill.train.step import EagerStep
from draftmill.wire import DocumentSpan, Pack


@dataclass(frozen=True, slots=True)
class Shape:
    """A target's sizes, as its drafter has them."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int


SHAPES = {
    "qwen3-8b": Shape(4096, 12288, 32, 8, 128, 151_936),
    "qwen3.6-27b": Shape(5120, 17408, 32, 8, 128, 248_320),
    "smollm2-135m": Shape(576, 1536, 9, 3, 64, 49_152),
}


@dataclass(frozen=True, slots=True)
class Work:
    """One pack's work: `documents` equal ones, anchors shared out evenly."""

    shape: str
    tokens: int = 8192
    anchors: int = 512
    block_size: int = 16
    documents: int = 8
    layers: int = 5
    window: int = 2048


@dataclass(slots=True)
class Result:
    """Milliseconds as (median, least, most); bytes; counts."""

    work: Work
    mode: str
    step_ms: tuple[float, float, float]
    update_ms: tuple[float, float, float]
    host_ms: float  # of the calling thread, per micro-step and update
    parameters: int
    step_tflop: float
    peak_bytes: int
    first_call_seconds: float  # compilation and capture
    loss: float
    kernels: list[tuple[str, float, int]]  # name, ms per step, calls per step

    def row(self) -> dict[str, Any]:
        median = self.step_ms[0] / 1000
        return {
            **asdict(self.work), "mode": self.mode,
            "anchor_rate": self.work.anchors / self.work.tokens,
            "step_ms": [round(value, 3) for value in self.step_ms],
            "update_ms": [round(value, 3) for value in self.update_ms],
            "host_ms": round(self.host_ms, 3),
            "context_tokens_per_second": round(self.work.tokens / median),
            "draft_positions_per_second": round(self.work.anchors * (self.work.block_size - 1) / median),
            "tflop": round(self.step_tflop, 2), "tflop_per_second": round(self.step_tflop / median, 1),
            "parameters": self.parameters, "peak_gib": round(self.peak_bytes / 2**30, 2),
            "first_call_seconds": round(self.first_call_seconds, 1), "loss": round(self.loss, 4),
        }  # fmt: skip


def spec_of(work: Work) -> DrafterSpec:
    """All layers but the last slide; five features."""
    shape = SHAPES[work.shape]
    return DrafterSpec(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocabulary,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        rope_scaling=None,
        max_position_embeddings=40_960,
        layer_types=("sliding_attention",) * (work.layers - 1) + ("full_attention",),
        sliding_window=work.window,
        causal_full=False,
        causal_sliding=True,
        block_size=work.block_size,
        mask_token_id=shape.vocabulary - 1,
        target_layer_ids=(1, 9, 17, 25, 33),
        num_target_layers=36,
    )


def random_pack(work: Work, seed: int) -> Pack:
    """The first eighth of each document is its prompt."""
    draw = np.random.default_rng(seed)
    length = work.tokens // work.documents
    share = work.anchors // work.documents
    spans = tuple(
        DocumentSpan(seed * work.documents + i, i * length, length, share) for i in range(work.documents)
    )  # fmt: skip
    token_ids = draw.integers(0, SHAPES[work.shape].vocabulary - 1, length * work.documents).astype(np.int32)
    supervised = np.tile(np.arange(length) > length // 8, work.documents)
    return Pack(seed, 0, spans, token_ids, supervised)


def matrix_tflop(work: Work) -> float:
    """Of all matrix products of forward and backward, without attention scores.

    2 x rows x inputs x outputs each; a trained product costs as much again for its weights, and again for its input,
    which the features of `fc` do not need. The frozen head runs forward and towards its input.
    """
    s = SHAPES[work.shape]
    context, slots = work.tokens, work.anchors * work.block_size
    scored = work.anchors * (work.block_size - 1)
    keys_values = 2 * s.kv_heads * s.head_dim
    per_layer = slots * s.hidden * (2 * s.heads * s.head_dim + keys_values + 3 * s.intermediate)
    per_layer += context * s.hidden * keys_values
    total = 2 * 5 * context * s.hidden * s.hidden + 3 * work.layers * per_layer + 2 * scored * s.hidden * s.vocabulary
    return 2 * total / 1e12


class Bench:
    """A drafter with random weights and a few packs on the device."""

    def __init__(self, work: Work, mode: str, train: TrainConfig, packs: int = 3) -> None:
        self.work, self.mode = work, mode
        if not torch.cuda.is_available():
            raise ValueError("the step is measured on a GPU, and torch sees none here")
        torch.cuda.set_stream(torch.cuda.Stream())
        spec = spec_of(work)
        dtype = getattr(torch, train.dtype)
        with torch.device("cuda"):
            drafter = Drafter(spec)
            torch.manual_seed(0)
            for parameter in drafter.parameters():
                torch.nn.init.normal_(parameter, std=0.02) if parameter.ndim > 1 else torch.nn.init.ones_(parameter)
            embedding, head = (torch.randn(spec.vocab_size, spec.hidden_size, dtype=dtype) * 0.02 for _ in range(2))
            features = [torch.randn(work.tokens, spec.feature_size, dtype=dtype) for _ in range(packs)]
        self.parameters = sum(parameter.numel() for parameter in drafter.parameters())
        self.packs = [(random_pack(work, seed), features[seed]) for seed in range(packs)]
        self.drafter, self.vocabulary, gamma = drafter, FrozenVocabulary(embedding, head), 7.0
        gradients = FlatGradients(drafter, spec.block_size - 1)
        self.step: Callable[[Pack, Tensor], Any]
        if mode == "eager":
            self.optimizer = Optimizer(drafter, gradients, train)
            self.step = EagerStep(drafter, self.vocabulary, train, gamma, gradients)
        else:
            weights = ComputeWeights(drafter, dtype)
            self.optimizer = Optimizer(drafter, gradients, train, weights.flat)
            shape = fixed_shape(work.tokens, work.anchors / work.tokens, work.block_size)
            self.step = FixedStep(weights, self.vocabulary, train, gamma, shape, gradients, mode == "graph")
        self.gradients = gradients

    def run(self, repeats: int, kernels: bool) -> Result:
        started = time.perf_counter()
        self.gradients.stale = True
        sums = self.step(*self.packs[0])
        loss = float(sums.numerator / sums.denominator)
        if isinstance(self.step, FixedStep) and self.mode == "graph":
            self.optimizer.capture()
        for pack in self.packs:
            self._once(pack)
        torch.cuda.synchronize()
        first_calls = time.perf_counter() - started
        torch.cuda.reset_peak_memory_stats()
        host = [self._host_ms(self.packs[number % len(self.packs)]) for number in range(repeats)]
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(3)] for _ in range(repeats)]
        for number, three in enumerate(marks):  # one behind the other, as in training: the device never waits
            self._once(self.packs[number % len(self.packs)], three)
        torch.cuda.synchronize()
        steps = [three[0].elapsed_time(three[1]) for three in marks[2:]]
        updates = [three[1].elapsed_time(three[2]) for three in marks[2:]]
        return Result(
            self.work, self.mode, _spread(steps), _spread(updates), statistics.median(host), self.parameters,
            matrix_tflop(self.work), torch.cuda.max_memory_allocated(), first_calls, loss,
            self._kernels() if kernels else [],
        )  # fmt: skip

    def _host_ms(self, pack: tuple[Pack, Tensor]) -> float:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        self._once(pack)
        return 1000 * (time.perf_counter() - begun)

    def _once(self, pack: tuple[Pack, Tensor], marks: Sequence[torch.cuda.Event] = ()) -> None:
        """A micro-step that begins an optimizer step, and its update. `marks`: before, between, behind."""
        _mark(marks, 0)
        sums = self.step(*pack)
        _mark(marks, 1)
        self.optimizer.update(sums.numerator, sums.denominator, 1e-6)
        _mark(marks, 2)

    def _kernels(self, rounds: int = 3) -> list[tuple[str, float, int]]:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(rounds):
                self._once(self.packs[0])
            torch.cuda.synchronize()
        rows = [(e.key, e.device_time_total / 1000 / rounds, e.count // rounds) for e in profiler.key_averages()]
        return sorted(rows, key=lambda row: -row[1])


def _mark(marks: Sequence[torch.cuda.Event], place: int) -> None:
    if marks:
        marks[place].record()


def _spread(values: list[float]) -> tuple[float, float, float]:
    return statistics.median(values), min(values), max(values)
