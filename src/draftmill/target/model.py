"""`Target`: the frozen model, as the source of features, embedding, head and logits.

Always true of a loaded target: no parameter wants a gradient; its embedding and head are explained by
`embedding_scale`, `output_multiplier` and `logit_softcap` alone (proven on numbers at load); and `features` of a
document are the same packed anywhere as alone, or the target runs documents one by one.

T packed tokens, n tapped layers, H hidden size, R rows, S new tokens per row, K keys in the cache, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from draftmill.drafter.vocabulary import FrozenVocabulary
from draftmill.target.loading import DTYPES, identity, load_frozen, resolve_device, stop_ids_of
from draftmill.target.quirks import read_quirks, relative_error, require_explained
from draftmill.target.structure import find_structure
from draftmill.target.taps import check_layer_ids, tapped

log = logging.getLogger(__name__)

# Packed and alone differ by less than this, relative per row: the dtype's noise, far from a leak (0.1 and more).
PACKING_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}


class NonFiniteFeatures(ValueError):
    """`documents`: indices, in the order given, of those whose features are not finite."""

    def __init__(self, documents: list[int]) -> None:
        self.documents = documents
        super().__init__(
            f"features of document(s) {documents} of the pack are not finite: "
            "drop these documents, or set target.dtype=float32 if many are hit"
        )


class Target:
    """Use `Target.load`."""

    def __init__(self, model: Any, tokenizer: Any, layer_ids: Sequence[int], *, path: Path | None = None) -> None:
        self.model, self.tokenizer, self.path = model, tokenizer, path
        self._parts = find_structure(model)
        self.layers = self._parts.layers
        self.num_layers = len(self.layers)
        self.layer_ids = check_layer_ids(layer_ids, self.num_layers)
        self.vocab_size, self.hidden_size = self._parts.embedding.shape
        self.device, self.dtype = self._parts.embedding.device, self._parts.embedding.dtype
        self.config = self._parts.config  # of the text model
        self.quirks = read_quirks(self.config, self.dtype)
        self._vocabulary = FrozenVocabulary(
            self._parts.embedding.detach(),
            self._parts.head.detach(),
            embedding_scale=self.quirks.embedding_scale,
            output_multiplier=self.quirks.output_multiplier,
            logit_softcap=self.quirks.logit_softcap,
        )
        self.stop_ids = stop_ids_of(model, tokenizer)
        self.packs = True  # False: documents run one by one

    @classmethod
    def load(cls, path: str | Path, dtype: str, device: str, layer_ids: Sequence[int]) -> Self:
        """`dtype` bfloat16 or float32; `device` auto, cpu, cuda or cuda:N. Proves itself before it returns."""
        folder = Path(path)
        model, tokenizer = load_frozen(folder, DTYPES[dtype], resolve_device(device))
        target = cls(model, tokenizer, layer_ids, path=folder)
        target.check_head()
        target.choose_packing()
        return target

    def identity(self) -> dict[str, Any]:
        """What this target is, for manifests and exports (JSON values only)."""
        if self.path is None:
            return {"name": None, "model_type": self.config.model_type, "dtype": str(self.dtype).removeprefix("torch.")}
        return identity(self.path, str(self.dtype).removeprefix("torch."))

    def vocabulary(self) -> FrozenVocabulary:
        """The target's own embedding and head: same storage, never a copy."""
        return self._vocabulary

    @torch.no_grad()  # not inference_mode: its tensors may not enter the drafter's autograd
    def features(self, token_ids: Tensor, document_lengths: Sequence[int]) -> Tensor:
        """int64 [T] of whole documents end to end -> [T, n*H] in the target's dtype, tapped layers in id order.

        Runs no layer after the last tapped one. Raises NonFiniteFeatures.
        """
        lengths = list(document_lengths)
        if token_ids.dim() != 1 or sum(lengths) != len(token_ids) or min(lengths, default=0) < 1:
            raise ValueError(
                f"documents of lengths {lengths} must cover token_ids of shape {tuple(token_ids.shape)} exactly"
            )
        token_ids = token_ids.to(self.device)
        out = torch.empty(len(token_ids), len(self.layer_ids) * self.hidden_size, dtype=self.dtype, device=self.device)
        self._fill_documents(token_ids, [lengths] if self.packs else [[length] for length in lengths], out)
        if self.packs and len(lengths) > 1 and not torch.isfinite(out).all():
            # a masked neighbour's NaN still spreads (0 x NaN): alone, only the guilty stay
            self._fill_documents(token_ids, [[length] for length in lengths], out)
        if not torch.isfinite(out).all():
            finite = [bool(torch.isfinite(rows).all()) for rows in out.split(lengths)]
            raise NonFiniteFeatures([index for index, good in enumerate(finite) if not good])
        return out

    def _fill_documents(self, token_ids: Tensor, passes: list[list[int]], out: Tensor) -> None:
        """One forward pass per list of document lengths."""
        rows = [sum(lengths) for lengths in passes]
        for tokens, lengths, part in zip(token_ids.split(rows), passes, out.split(rows), strict=True):
            self._fill(tokens, lengths, part)

    def _fill(self, token_ids: Tensor, lengths: list[int], out: Tensor) -> None:
        """One forward pass over documents told apart by their restarting positions: only right without a cache."""
        positions = torch.cat([torch.arange(length, device=self.device) for length in lengths])
        with tapped(self.layers, self.layer_ids, out[None], stop=True):
            self._parts.decoder(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)

    @torch.no_grad()
    def forward(self, input_ids: Tensor, positions: Tensor, cache: Any, mask: Tensor) -> tuple[Tensor, Tensor]:
        """A cached step for decoding: (logits [R, S, V], features [R, S, n*H]), both in the target's dtype.

        input_ids, positions: int64 [R, S]. cache: a transformers `Cache` in which key index == position. mask:
        bool [R, 1, S, K], True where a query sees a key; K is the number of keys the cache returns in this step.
        """
        rows, steps = input_ids.shape
        shape = (rows, steps, len(self.layer_ids) * self.hidden_size)
        features = torch.empty(shape, dtype=self.dtype, device=self.device)
        with tapped(self.layers, self.layer_ids, features, stop=False):
            output = self.model(
                input_ids=input_ids,
                position_ids=positions,
                attention_mask=self._masks(mask, positions),
                past_key_values=cache,
                use_cache=True,
            )
        return output.logits, features

    @torch.no_grad()
    def next_token_logits(self, input_ids: Tensor, positions: Tensor, cache: Any, mask: Tensor, last: Tensor) -> Tensor:
        """As `forward`, but [R, V]: only the logits after column `last` [R] of each row, and no features."""
        hidden = self._parts.decoder(
            input_ids=input_ids,
            position_ids=positions,
            attention_mask=self._masks(mask, positions),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        rows = torch.arange(len(hidden), device=hidden.device)
        return self._vocabulary.logits(hidden[rows, last])

    def _masks(self, mask: Tensor, positions: Tensor) -> Any:
        """The mask as the model takes it: narrowed by the window for its sliding layers."""
        window: int = getattr(self.config, "sliding_window", None) or 0  # 0: the model has none
        default = "sliding_attention" if window else "full_attention"
        kinds = set(getattr(self.config, "layer_types", None) or [default])
        if unknown := kinds - {"full_attention", "sliding_attention"}:
            raise ValueError(
                f"target of type {self.config.model_type} has {sorted(unknown)} layers: Draftmill cannot decode with "
                "them; regenerate responses and evaluate with a serving engine"
            )
        if kinds == {"full_attention"}:
            return mask
        keys = torch.arange(mask.shape[-1], device=mask.device)
        windowed = mask & (keys > positions[:, None, :, None] - window)
        return windowed if kinds == {"sliding_attention"} else {"full_attention": mask, "sliding_attention": windowed}

    @torch.no_grad()
    def check_head(self) -> None:
        """Raises ValueError unless embedding, final norm and head, as training uses them, are the model's own."""
        ids = self._probe_ids(32)
        first_input, last_output = [], []
        hooks = [
            self.layers[0].register_forward_pre_hook(
                lambda _module, args, kwargs: first_input.append(args[0] if args else kwargs["hidden_states"]),
                with_kwargs=True,
            ),
            self.layers[-1].register_forward_hook(
                lambda _module, _args, out: last_output.append(out[0] if isinstance(out, tuple) else out)
            ),
        ]
        try:
            logits = self.model(input_ids=ids[None], use_cache=False).logits[0]
        finally:
            for hook in hooks:
                hook.remove()
        vocabulary, kind = self._vocabulary, self.config.model_type
        require_explained("embeddings", vocabulary.embed(ids), first_input[0][0], kind, self.quirks)
        normed = self._parts.norm(last_output[0][0])
        require_explained("logits", vocabulary.scale(F.linear(normed, vocabulary.head)), logits, kind, self.quirks)

    @torch.no_grad()
    def check_packed_equals_alone(self, lengths: Sequence[int] = (37, 51, 40)) -> float:
        """Largest relative row error between features of documents packed together and run alone."""
        ids = self._probe_ids(sum(lengths))
        size = len(self.layer_ids) * self.hidden_size
        packed, alone = (torch.empty(len(ids), size, dtype=self.dtype, device=self.device) for _ in range(2))
        self._fill_documents(ids, [list(lengths)], packed)
        self._fill_documents(ids, [[length] for length in lengths], alone)
        return relative_error(packed, alone)

    def choose_packing(self) -> None:
        """Runs documents one by one where packing changes their features, and says so."""
        error = self.check_packed_equals_alone()
        self.packs = error <= PACKING_TOLERANCE.get(self.dtype, 1e-3)
        if not self.packs:
            log.warning(
                "target %s: packed documents differ from the same run alone by %.2g: its layers carry state across "
                "documents. Documents run one by one, which is slower and right",
                self.config.model_type,
                error,
            )

    def _probe_ids(self, count: int) -> Tensor:
        """Fixed token ids spread over the vocabulary."""
        return (torch.arange(count, device=self.device) * 7919 + 13) % self.vocab_size
