"""Are the target's features the outputs of the layers named, row for row, packed or alone?"""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from draftmill.target.model import NonFiniteFeatures, Target
from draftmill.target.taps import check_layer_ids
from tiny_models import HIDDEN, LAYERS, VOCAB, frozen, tiny_llama, tiny_mistral, tiny_qwen3, tiny_tokenizer


def target_of(model, layer_ids=(1, 3)) -> Target:
    return Target(model, tiny_tokenizer(), layer_ids)


def random_ids(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(4, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


class StubLayer(nn.Module):
    """Adds a constant to the residual stream."""

    def __init__(self, amount: float) -> None:
        super().__init__()
        self.amount, self.calls = amount, 0

    def forward(self, hidden, **_kwargs):
        self.calls += 1
        return hidden + self.amount


class StubModel(nn.Module):
    """Every entry of a row starts as its token id; layer k adds 10^k. Float64 keeps the digits apart."""

    def __init__(self, layers: int = LAYERS, width: int = 2, vocab: int = 64) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, width, dtype=torch.float64)
        self.embed_tokens.weight.data.copy_(torch.arange(vocab)[:, None].expand(vocab, width))
        self.layers = nn.ModuleList(StubLayer(10.0**k) for k in range(layers))
        self.norm = nn.Identity()
        self.lm_head = nn.Linear(width, vocab, bias=False, dtype=torch.float64)
        text = SimpleNamespace(num_hidden_layers=layers, model_type="stub", hidden_size=width)
        self.config = SimpleNamespace(get_text_config=lambda decoder: text)
        self.generation_config = SimpleNamespace(eos_token_id=1)
        self.requires_grad_(False)

    def get_input_embeddings(self):
        return self.embed_tokens

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, position_ids, use_cache):
        assert use_cache is False
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen3, tiny_mistral])
def test_features_equal_the_models_own_hidden_states(build):
    """Case 12: every id works, the last one before the final norm; the columns are the ids' in order."""
    model = build()
    ids = random_ids(50)
    with torch.no_grad():
        states = model(input_ids=ids[None], use_cache=False, output_hidden_states=True).hidden_states
    features = target_of(model, range(LAYERS)).features(ids, [50]).split(HIDDEN, dim=-1)
    assert len(features) == LAYERS
    for layer in range(LAYERS - 1):
        assert torch.equal(features[layer], states[layer + 1][0])
    assert torch.equal(model.model.norm(features[-1]), states[-1][0])
    assert not torch.allclose(features[-1], states[-1][0])


@pytest.mark.parametrize("layer_ids", [(1, 3), (1, 5)])
def test_columns_equal_ids_including_the_last_layer(layer_ids):
    """Case 12: as many columns as ids, with id 5 of 6 layers taken by the hook."""
    model, ids = tiny_llama(), random_ids(20)
    every = target_of(model, range(LAYERS)).features(ids, [20]).split(HIDDEN, dim=-1)
    features = target_of(model, layer_ids).features(ids, [20])
    assert torch.equal(features, torch.cat([every[layer] for layer in layer_ids], dim=-1))


def test_ids_outside_the_model_are_refused_with_the_valid_range():
    """Case 12."""
    with pytest.raises(ValueError, match=r"\[6\].*0 to 5"):
        target_of(tiny_llama(), (1, 6))
    with pytest.raises(ValueError, match="0 to 5"):
        check_layer_ids((-1,), 6)
    with pytest.raises(ValueError, match=r"must rise.*use \[1, 3\]"):
        check_layer_ids((3, 1, 3), 6)
    with pytest.raises(ValueError, match="empty"):
        check_layer_ids((), 6)


def test_id_l_is_the_output_of_zero_based_layer_l():
    """Case 13: layer k adds 10^k, so id l holds the repunit of l + 1 digits."""
    features = target_of(StubModel(), (1, 3)).features(torch.zeros(4, dtype=torch.int64), [4])
    first, second = features.split(2, dim=-1)
    assert (first == 11).all()
    assert (second == 1111).all()


def test_off_by_one_ids_give_other_features():
    """Case 13: shifted ids cannot pass for the right ones."""
    model, ids = tiny_llama(), random_ids(20)
    right = target_of(model, (1, 3)).features(ids, [20])
    for shifted in ((2, 4), (0, 2)):
        assert not torch.allclose(target_of(model, shifted).features(ids, [20]), right, atol=1e-2)


@pytest.mark.parametrize("packs", [True, False])
def test_every_row_keeps_its_token(packs):
    """Cases 2 and 15: token id == position in the pack == feature row, first and last row included."""
    target = target_of(StubModel(), (0, 2))
    target.packs = packs
    ids = torch.arange(40)
    features = target.features(ids, [7, 1, 20, 12])
    assert torch.equal(features[:, 0], ids + 1.0)
    assert torch.equal(features[:, -1], ids + 111.0)


@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen3, tiny_mistral])
def test_packed_equals_alone(build):
    """Cases 15 and 18 (attention targets): any lengths, any order, whatever the neighbours are."""
    target = target_of(build(), (1, 3, 5))
    documents = [random_ids(length, seed=length) for length in (37, 51, 1, 40, 2)]
    alone = [target.features(document, [len(document)]) for document in documents]
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3]):
        packed = target.features(torch.cat([documents[i] for i in order]), [len(documents[i]) for i in order])
        for rows, i in zip(packed.split([len(documents[i]) for i in order]), order, strict=True):
            torch.testing.assert_close(rows, alone[i], rtol=1e-5, atol=1e-5)
    assert target.check_packed_equals_alone() < 1e-5


def test_linear_attention_targets_run_unpacked(caplog):
    """Case 18: a hybrid target leaks state between packed documents, so it runs them alone and says so."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    config = Lfm2Config(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["conv", "conv", "conv", "full_attention"], initializer_range=0.08,
    )  # fmt: skip
    target = target_of(frozen(Lfm2ForCausalLM, config), (1, 3))
    with caplog.at_level(logging.WARNING):
        target.choose_packing()
    assert not target.packs
    assert "one by one" in caplog.text
    documents = [random_ids(length, seed=length) for length in (37, 51, 40)]
    alone = [target.features(document, [len(document)]) for document in documents]
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        features = target.features(torch.cat([documents[i] for i in order]), [len(documents[i]) for i in order])
        assert torch.equal(features, torch.cat([alone[i] for i in order]))


def test_a_packing_cache_is_told_apart_by_the_check():
    """The check sees the known fault: with a cache, restarting positions alone do not separate documents."""
    target = target_of(tiny_llama(), (1, 3))
    decoder = target._parts.decoder
    right = decoder.forward
    decoder.forward = lambda **kwargs: right(**{**kwargs, "use_cache": True})
    assert target.check_packed_equals_alone() > 0.1


def test_no_layer_runs_after_the_last_tapped_one():
    model = StubModel()
    target_of(model, (1, 3)).features(torch.arange(4), [4])
    assert [layer.calls for layer in model.layers] == [1, 1, 1, 1, 0, 0]


def test_hooks_never_outlive_a_pass():
    model = tiny_llama()
    target = target_of(model, (1, 3))
    target.features(random_ids(5), [5])
    with pytest.raises(IndexError):
        target.features(torch.full((5,), VOCAB + 1), [5])
    assert all(not layer._forward_hooks for layer in model.model.layers)


def test_features_may_enter_autograd():
    """Captured without gradient, but not as inference tensors."""
    features = target_of(tiny_llama()).features(random_ids(6), [6])
    assert not features.requires_grad
    assert not features.is_inference()
    weight = torch.ones(features.shape[-1], requires_grad=True)
    (features * weight).sum().backward()
    assert weight.grad is not None


def test_non_finite_features_name_their_documents():
    model = tiny_llama()
    model.model.embed_tokens.weight.data[7] = torch.inf
    ids = random_ids(12)
    ids[ids == 7] = 8
    ids[5] = 7
    with pytest.raises(NonFiniteFeatures, match=r"\[1\]") as caught:
        target_of(model).features(ids, [4, 4, 4])
    assert caught.value.documents == [1]


@pytest.mark.parametrize("lengths", [[3, 2], [3, 4], [6, 0], []])
def test_lengths_that_do_not_cover_the_tokens_are_an_error(lengths):
    """Case 16: never padded, never cut."""
    with pytest.raises(ValueError, match="cover"):
        target_of(tiny_llama()).features(random_ids(6), lengths)


def test_rows_that_a_layer_loses_are_an_error():
    """Case 16: a backend that returns fewer rows than tokens is caught."""
    model = StubModel()
    model.layers[0].forward = lambda hidden, **_: hidden[:, 1:]
    with pytest.raises(RuntimeError, match="no longer belong"):
        target_of(model).features(torch.arange(6), [6])
