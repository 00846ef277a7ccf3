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

import torch
from torch import Tensor

from draftmill.config.schema import TrainConfig
from draftmill.drafter.anchors import draw_anchors
from draftmill.drafter.attention import layer_masks, layer_rules
from draftmill.drafter.blocks import Blocks, make_blocks
from draftmill.drafter.forward import block_loss, network, predicting
from draftmill.drafter.network import Drafter, Rope
from draftmill.drafter.noise import add_noise
from draftmill.drafter.objective import LossSums, chunk_terms
from draftmill.drafter.pack import DevicePack, PackBuffers, PackShape
from draftmill.drafter.tiles import TILE, mask_tables
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
        self._prepare, self._network, self._terms = (
            torch.compile(part, fullgraph=True, dynamic=False) for part in (_prepare, network, chunk_terms)
        )
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
        drafter, vocabulary, train = self._weights.drafter, self._vocabulary, self._train
        pack = self._buffers.pack()
        blocks, slots, ropes, tables = self._prepare(drafter, vocabulary, pack, train.seed)
        features = add_noise(self._buffers.features, pack, train.noise, train.seed)
        masks = layer_masks(drafter.spec, blocks.layout, tables)
        hidden = self._network(drafter, features, slots.to(features.dtype), *ropes, masks)
        sums = block_loss(predicting(hidden, drafter.spec), vocabulary, blocks, train.loss, self._gamma, self._terms)
        self._gradients.put(torch.autograd.grad(sums.numerator, self._weights.parameters), first)
        return LossSums(*(getattr(sums, field.name).detach() for field in fields(sums)))


def _prepare(
    drafter: Drafter, vocabulary: FrozenVocabulary, pack: DevicePack, seed: int
) -> tuple[Blocks, Tensor, tuple[Rope, Rope], list[dict[str, Tensor]]]:
    """All that integers decide: blocks, embedded slots [Q, H], RoPE of context and slots, tables per kind of layer."""
    spec = drafter.spec
    blocks = make_blocks(pack, draw_anchors(pack, seed), spec.block_size, spec.mask_token_id)
    slots = vocabulary.embed(blocks.token_ids.reshape(-1))
    ropes = drafter.rope(pack.positions), drafter.rope(blocks.positions.reshape(-1))
    return blocks, slots, ropes, [mask_tables(blocks.layout, rule) for rule in layer_rules(spec)]


@contextmanager
def no_recompilation() -> Iterator[None]:
    """Shapes are fixed: what would compile again is a fault, and torch names its cause."""
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
