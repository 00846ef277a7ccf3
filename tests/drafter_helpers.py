"""Small drafters, vocabularies and packs for tests. Everything from fixed seeds."""

from dataclasses import replace

import numpy as np
import torch

from draftmill.config.spec import DrafterSpec
from draftmill.drafter.network import Drafter
from draftmill.drafter.vocabulary import FrozenVocabulary
from draftmill.wire import DocumentSpan, Pack

SPEC = DrafterSpec(
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    vocab_size=40,
    rms_norm_eps=1e-6,
    rope_theta=1000.0,
    rope_scaling=None,
    max_position_embeddings=512,
    layer_types=("sliding_attention", "full_attention"),
    sliding_window=6,
    causal_full=False,
    causal_sliding=True,
    block_size=4,
    mask_token_id=39,
    target_layer_ids=(1, 3),
    num_target_layers=6,
)
ALL_LAYOUTS = {
    "full": replace(SPEC, layer_types=("full_attention",) * 2, sliding_window=None),
    "full causal": replace(SPEC, layer_types=("full_attention",) * 2, sliding_window=None, causal_full=True),
    "sliding causal": replace(SPEC, layer_types=("sliding_attention",) * 2),
    "sliding both ways": replace(SPEC, layer_types=("sliding_attention",) * 2, causal_sliding=False),
    "mixed": SPEC,
}


def make_drafter(spec: DrafterSpec = SPEC, seed: int = 0, std: float = 0.3) -> Drafter:
    drafter = Drafter(spec)
    drafter.initialise(seed, std=std)
    with torch.no_grad():  # norms away from one, so that a forgotten norm weight shows
        generator = torch.Generator().manual_seed(seed + 1)
        for _, parameter in sorted(drafter.named_parameters()):
            if parameter.ndim == 1:
                parameter.copy_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
    return drafter


def make_vocabulary(spec: DrafterSpec = SPEC, seed: int = 5, **quirks) -> FrozenVocabulary:
    generator = torch.Generator().manual_seed(seed)
    return FrozenVocabulary(
        torch.randn(spec.vocab_size, spec.hidden_size, generator=generator),
        torch.randn(spec.vocab_size, spec.hidden_size, generator=generator) * 0.5,
        **quirks,
    )


def make_documents(lengths, seed=7, spec=SPEC, prompt=3):
    """[(token_ids, supervised, features)] with the first `prompt` tokens unsupervised and a gap in the middle."""
    rng = np.random.default_rng(seed)
    documents = []
    for length in lengths:
        supervised = np.arange(length) >= prompt
        if length > 16:
            supervised[length // 2 : length // 2 + 3] = False  # a user turn between two replies
        token_ids = rng.integers(0, spec.vocab_size - 1, length).astype(np.int32)
        features = torch.from_numpy(rng.standard_normal((length, spec.feature_size)).astype(np.float32))
        documents.append((token_ids, supervised, features))
    return documents


def make_pack(documents, anchors, ids=None, seq=0, epoch=0):
    """Pack (and stacked features) of documents laid end to end; `anchors` per document."""
    spans, start = [], 0
    for index, (token_ids, _, _) in enumerate(documents):
        document = index if ids is None else ids[index]
        spans.append(DocumentSpan(document, start, len(token_ids), anchors[index]))
        start += len(token_ids)
    pack = Pack(
        seq,
        epoch,
        tuple(spans),
        np.concatenate([d[0] for d in documents]),
        np.concatenate([d[1] for d in documents]),
    )
    return pack, torch.cat([d[2] for d in documents])
