"""Loss and gradients against plain float64 loops, and the sums' independence of packing and accumulation."""

import math

import numpy as np
import pytest
import torch

from drafter_helpers import ALL_LAYOUTS, SPEC, make_documents, make_drafter, make_pack, make_vocabulary
from draftmill.config.schema import LossConfig
from draftmill.drafter import objective
from draftmill.drafter.anchors import draw_anchors
from draftmill.drafter.blocks import make_blocks
from draftmill.drafter.forward import block_loss, slot_hidden
from draftmill.drafter.objective import slot_weights
from draftmill.drafter.pack import to_device
from draftmill.drafter.vocabulary import FrozenVocabulary
from plain_reference import PlainDocument, PlainDrafter, plain_loss

GAMMA = 2.5


def pack_loss(drafter, vocabulary, pack, features, loss, seed=3):
    """Numerator (with graph), denominator, and the anchors drawn."""
    device_pack = to_device(pack, "cpu")
    anchor = draw_anchors(device_pack, seed)
    blocks = make_blocks(device_pack, anchor, drafter.spec.block_size, drafter.spec.mask_token_id)
    hidden = slot_hidden(drafter, vocabulary, device_pack, features, blocks)
    return block_loss(hidden, vocabulary, blocks, loss, GAMMA), anchor


def gradients(drafter):
    taken = {name: parameter.grad.double().clone() for name, parameter in drafter.named_parameters()}
    drafter.zero_grad()
    return taken


@pytest.mark.parametrize("kind", ["decay", "dpace"])
@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_loss_and_gradients_equal_plain_float64_loops(layout, kind):
    """Cases 5, 6: two packed documents, blocks that run over a turn's, a document's and the pack's end."""
    spec = ALL_LAYOUTS[layout]
    drafter, vocabulary = make_drafter(spec), make_vocabulary(spec)
    documents = make_documents([9, 18], spec=spec)
    pack, features = make_pack(documents, [4, 7])
    sums, anchor = pack_loss(drafter, vocabulary, pack, features, LossConfig(kind=kind))
    sums.numerator.backward()

    weights = {n: p.detach().double().requires_grad_() for n, p in drafter.named_parameters()}
    plain = PlainDrafter(weights, spec, vocabulary.embedding.double(), vocabulary.head.double())
    by_document = []
    for (token_ids, supervised, rows), start in zip(documents, (0, 9), strict=True):
        inside = [int(a) - start for a in anchor if start <= a < start + len(token_ids)]
        by_document.append((PlainDocument(token_ids.tolist(), supervised.tolist(), rows.double()), inside))
    numerator, denominator = plain_loss(plain, by_document, kind, GAMMA)
    numerator.backward()

    assert float(sums.denominator) == pytest.approx(denominator, rel=1e-5)
    assert float(sums.numerator.detach()) == pytest.approx(float(numerator.detach()), rel=1e-5)
    for name, gradient in gradients(drafter).items():
        torch.testing.assert_close(gradient, weights[name].grad, rtol=2e-4, atol=2e-5, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("kind", ["decay", "dpace"])
def test_packed_equals_alone_and_any_accumulation_equals_one_batch(kind):
    """Cases 6, 41, 44: every way to lay out the same documents gives the same sums and gradients."""
    drafter, vocabulary = make_drafter(), make_vocabulary()
    documents = make_documents([12, 30, 7, 21])
    anchors, ids = [5, 9, 2, 8], [11, 3, 40, 7]

    def total(groups):
        numerator = denominator = 0.0
        for group in groups:
            pack, features = make_pack(
                [documents[i] for i in group], [anchors[i] for i in group], [ids[i] for i in group]
            )
            sums, _ = pack_loss(drafter, vocabulary, pack, features, LossConfig(kind=kind))
            sums.numerator.backward()
            numerator, denominator = numerator + float(sums.numerator.detach()), denominator + float(sums.denominator)
        return numerator, denominator, gradients(drafter)

    reference = total([[0, 1, 2, 3]])
    for groups in ([[0], [1], [2], [3]], [[3, 1], [2, 0]], [[2, 0, 3], [1]], [[3, 2, 1, 0]]):
        numerator, denominator, gradient = total(groups)
        assert numerator == pytest.approx(reference[0], rel=1e-5)
        assert denominator == pytest.approx(reference[1], rel=1e-5)
        for name, value in gradient.items():
            torch.testing.assert_close(value, reference[2][name], rtol=1e-4, atol=1e-5)


def stub_hidden(vocabulary, blocks, shift):
    """Hidden states whose logits are one large peak at the label `shift` slots on."""
    labels = blocks.labels.roll(shift, dims=1)
    return 200.0 * torch.nn.functional.one_hot(labels, vocabulary.embedding.shape[1]).float()


def test_a_stub_that_emits_the_right_tokens_has_loss_zero_and_a_shifted_one_does_not():
    identity = torch.eye(SPEC.vocab_size)
    vocabulary = FrozenVocabulary(identity, identity)
    pack = to_device(make_pack(make_documents([24]), [8])[0], "cpu")
    blocks = make_blocks(pack, draw_anchors(pack, 0), 4, 39)
    right = block_loss(stub_hidden(vocabulary, blocks, 0), vocabulary, blocks, LossConfig(), GAMMA)
    assert float(right.numerator / right.denominator) < 1e-6
    assert torch.equal(right.hits, right.counted) and torch.equal(right.survived, right.counted)
    shifted = block_loss(stub_hidden(vocabulary, blocks, 1), vocabulary, blocks, LossConfig(), GAMMA)
    assert float(shifted.numerator / shifted.denominator) > 10
    assert float(shifted.hits.sum()) < 0.3 * float(shifted.counted.sum())


def test_slots_that_predict_unsupervised_tokens_never_count():
    """Case 5: reply at 8..39, block at 37: slots 1 and 2 count, slot 3 (token 40) does not; slot 0 has no row."""
    ((token_ids, _, features),) = make_documents([48], prompt=0)
    supervised = (np.arange(48) >= 8) & (np.arange(48) < 40)
    pack = to_device(make_pack([(token_ids, supervised, features)], [1])[0], "cpu")
    blocks = make_blocks(pack, torch.tensor([37]), 4, 39)
    assert blocks.counted.tolist() == [[True, True, False]]
    assert blocks.labels[0, :2].tolist() == token_ids[38:40].tolist()
    assert blocks.token_ids.tolist() == [[token_ids[37], 39, 39, 39]]
    assert blocks.positions.tolist() == [[37, 38, 39, 40]]


def test_labels_stop_at_the_documents_end_even_if_the_next_one_starts_supervised():
    """Case 6: the next document begins with a supervised token; the last block passes the pack's end."""
    documents = make_documents([10, 10], prompt=0)
    pack = to_device(make_pack(documents, [1, 1])[0], "cpu")
    blocks = make_blocks(pack, torch.tensor([8, 18]), 8, 39)
    assert blocks.counted.tolist() == [[True] + [False] * 6] * 2


def test_labels_are_contiguous():
    """A block that runs over a turn's end is not scored on the next reply."""
    ((token_ids, supervised, features),) = make_documents([24], prompt=0)
    assert not supervised[12:15].any() and supervised[15]
    pack = to_device(make_pack([(token_ids, supervised, features)], [1])[0], "cpu")
    blocks = make_blocks(pack, torch.tensor([9]), 8, 39)
    assert blocks.counted.tolist() == [[True, True, False, False, False, False, False]]


def test_decay_weights_are_the_papers():
    weights = slot_weights(torch.zeros(1, 4), torch.tensor([[True, True, True, False]]), LossConfig(), 4.0)
    assert weights[0].tolist() == pytest.approx([1.0, math.exp(-1 / 4), math.exp(-2 / 4), 0.0])


def test_dpace_weights_by_hand():
    """q = 1/2, 1/4, alpha = 1/2: s = 3/4, 5/8; prefixes 3/4, 15/32; weights 3/4 + 15/32 and 15/32."""
    cross_entropy = torch.tensor([[math.log(2), math.log(4), 5.0]])
    counted = torch.tensor([[True, True, False]])
    weights = slot_weights(cross_entropy, counted, LossConfig(kind="dpace"), 4.0)
    assert weights[0].tolist() == pytest.approx([3 / 4 + 15 / 32, 15 / 32, 0.0])


@pytest.mark.parametrize("quirks", [{}, {"output_multiplier": 0.3}, {"logit_softcap": 2.0, "output_multiplier": 1.7}])
def test_frozen_head_gradient_equals_autograd(monkeypatch, quirks):
    """Chunked and hand-derived against autograd through the whole logits."""
    vocabulary = make_vocabulary(**quirks)
    monkeypatch.setattr(objective, "LOGITS_AT_ONCE", 3 * SPEC.vocab_size)  # 11 rows in 4 chunks
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(11, SPEC.hidden_size, generator=generator, requires_grad=True)
    labels = torch.randint(0, SPEC.vocab_size, (11,), generator=generator)
    weight = torch.rand(11, generator=generator)
    cross_entropy, hit = objective.FrozenHeadCrossEntropy.apply(hidden, vocabulary, labels, objective.chunk_terms)
    (weight * cross_entropy).sum().backward()
    ours, hidden.grad = hidden.grad, None

    raw = hidden @ vocabulary.head.T * quirks.get("output_multiplier", 1.0)
    cap = quirks.get("logit_softcap")
    logits = raw if cap is None else cap * torch.tanh(raw / cap)
    reference = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    (weight * reference).sum().backward()
    torch.testing.assert_close(cross_entropy, reference)
    torch.testing.assert_close(ours, hidden.grad)
    assert torch.equal(hit, logits.argmax(1) == labels)
