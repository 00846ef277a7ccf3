"""The micro-step with fixed shapes: compiled, and on demand captured as one CUDA graph. Must equal `EagerStep`.

    wire pack, features --load--> buffers --anchors, blocks, masks, network, loss, gradients--> FlatGradients, sums

Everything after `load` reads and writes tensors that stay where they are. Weights are a flat copy in the compute dtype
that the optimizer writes anew with each update. Made and called by one thread, on one stream that is not the default.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from draftmill.config.schema import TrainConfig
from draftmill.drafter.anchors import draw_anchors
from draftmill.drafter.blocks import make_blocks
from draftmill.drafter.forward import block_loss, network, slot_hidden
from draftmill.drafter.network import Drafter
from draftmill.drafter.noise import add_noise
from draftmill.drafter.objective import LossSums, chunk_terms
from draftmill.drafter.pack import PackBuffers, PackShape
from draftmill.drafter.tiles import TILE
from draftmill.drafter.vocabulary import FrozenVocabulary
from draftmill.text.packing import anchor_count
from draftmill.train.gradients import FlatGradients, flat_order, views_of
from draftmill.wire import Pack

WARM_UP = 3  # calls before a capture: compilation, workspaces, autotuning


def fixed_shape(pack_tokens: int, anchor_rate: float, block_size: int) -> PackShape:
    """Sizes that every pack fits, rounded up so that context rows and block slots are whole tiles."""
    anchors = int(anchor_count(anchor_rate, pack_tokens))
    whole = TILE // math.gcd(TILE, block_size)
    return PackShape(
        rows=-(-pack_tokens // TILE) * TILE,
        anchors=max(-(-anchors // whole) * whole, 2 * whole),
        documents=min(anchors, pack_tokens // 2) + 2,
    )


class ComputeWeights:
    """The drafter in the compute dtype, for forward and backward: its parameters are views of `flat`."""

    def __init__(self, master: Drafter, dtype: torch.dtype) -> None:
        device = master.fc.weight.device
        self.drafter = Drafter(master.spec).to(device)
        parameters = flat_order(self.drafter)
        self.flat = torch.empty(sum(p.numel() for p in parameters.values()), dtype=dtype, device=device)
        self.parameters = list(parameters.values())
        for parameter, view in zip(self.parameters, views_of(self.flat, self.parameters), strict=True):
            parameter.data = view


class FixedStep:
    """`captured`: replay one graph per call, after the first call has warmed up and captured it."""

    def __init__(
        self,
        weights: ComputeWeights,
        vocabulary: FrozenVocabulary,
        train: TrainConfig,
        gamma: float,
        shape: PackShape,
        gradients: FlatGradients,
        captured: bool,
    ) -> None:
        self._weights, self._vocabulary, self._train, self._gamma = weights, vocabulary, train, gamma
        self._gradients, self._captured = gradients, captured
        self._graphs: dict[bool, tuple[torch.cuda.CUDAGraph, LossSums]] = {}  # by: first of its optimizer step
        dtype = getattr(torch, train.dtype)
        self._buffers = PackBuffers(shape, weights.drafter.spec.feature_size, dtype, weights.flat.device)
        self._network: Any = torch.compile(network, fullgraph=True, dynamic=False)
        self._terms: Any = torch.compile(chunk_terms, fullgraph=True, dynamic=False)
        self._warm = False

    def __call__(self, pack: Pack, features: Tensor) -> LossSums:
        """Features [T, F] of the pack, on any device; they may be overwritten once the device is past this call."""
        self._buffers.load(pack, features)
        first, self._gradients.stale = self._gradients.stale, False
        if not self._warm:
            self._warm_up()
        if not self._captured:
            with no_recompilation():
                return self._forward_backward(first)
        if first not in self._graphs:
            self._graphs[first] = self._capture(first)
        graph, sums = self._graphs[first]
        graph.replay()
        return sums

    def _warm_up(self) -> None:
        """Leaves the gradients as they are."""
        before = self._gradients.gradient.clone()
        for _ in range(WARM_UP):
            self._forward_backward(first=True)
        self._gradients.gradient.copy_(before)
        self._warm = True

    def _capture(self, first: bool) -> tuple[torch.cuda.CUDAGraph, LossSums]:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        pool = next((other.pool() for other, _ in self._graphs.values()), None)
        stream = torch.cuda.current_stream()
        with (
            no_recompilation(),
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            sums = self._forward_backward(first)
        return graph, sums

    def _forward_backward(self, first: bool) -> LossSums:
        spec, train, pack = self._weights.drafter.spec, self._train, self._buffers.pack()
        anchor = draw_anchors(pack, train.seed)
        blocks = make_blocks(pack, anchor, spec.block_size, spec.mask_token_id)
        features = add_noise(self._buffers.features, pack, train.noise, train.seed)
        hidden = slot_hidden(self._weights.drafter, self._vocabulary, pack, features, blocks, self._network)
        sums = block_loss(hidden, self._vocabulary, blocks, train.loss, self._gamma, self._terms)
        self._gradients.put(torch.autograd.grad(sums.numerator, self._weights.parameters), first)
        return LossSums(*(getattr(sums, field.name).detach() for field in fields(sums)))


@contextmanager
def no_recompilation() -> Iterator[None]:
    """Shapes are fixed: what would compile again is a fault, and torch names its cause."""
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
