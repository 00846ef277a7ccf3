"""Are embedding, norm and head the target's own, and is a target that does more to them refused?"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftmill.target.loading import load_tokenizer
from draftmill.target.model import Target
from tiny_models import HIDDEN, LAYERS, VOCAB, _shape, frozen, save_tiny, tiny_llama, tiny_qwen3, tiny_tokenizer


def load(folder) -> Target:
    return Target.load(folder, "float32", "cpu", (1, 3))


def rewrite_tensors(folder, change) -> None:
    path = folder / "model.safetensors"
    tensors = change(load_file(path))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def own_logits(target: Target, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return target.model(input_ids=ids[None], use_cache=False).logits[0]


def logits_from_last_layer(target: Target, ids: torch.Tensor) -> torch.Tensor:
    last = Target(target.model, target.tokenizer, (LAYERS - 1,)).features(ids, [len(ids)])
    return target.vocabulary().logits(target.model.get_decoder().norm(last))


@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen3])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "200KB"}])
def test_last_layer_through_norm_and_head_gives_the_models_logits(tmp_path, build, tied, shards):
    """Case 69: tied and untied, one file and shards; embedding and head are shared, not copied."""
    target = load(save_tiny(tmp_path, build(tied), **shards))
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == bool(shards)
    ids = torch.arange(32) * 5 % VOCAB
    torch.testing.assert_close(logits_from_last_layer(target, ids), own_logits(target, ids))
    vocabulary = target.vocabulary()
    assert vocabulary.embedding.data_ptr() == target.model.get_input_embeddings().weight.data_ptr()
    assert (vocabulary.head.data_ptr() == vocabulary.embedding.data_ptr()) == tied
    assert not any(parameter.requires_grad for parameter in target.model.parameters())


def test_a_missing_head_is_an_error_not_an_initialisation(tmp_path):
    """Case 69: an untied config without a head tensor."""
    save_tiny(tmp_path, tiny_llama(tied=False))
    rewrite_tensors(tmp_path, lambda tensors: {k: v for k, v in tensors.items() if k != "lm_head.weight"})
    with pytest.raises(ValueError, match=r"lack 1 tensors.*lm_head\.weight"):
        load(tmp_path)


def test_an_embedding_under_a_foreign_name_is_an_error(tmp_path):
    """Case 69: backbone.embeddings.weight is not the embedding of this model class."""
    save_tiny(tmp_path, tiny_llama())
    foreign = {"model.embed_tokens.weight": "backbone.embeddings.weight"}
    rewrite_tensors(tmp_path, lambda tensors: {foreign.get(k, k): v for k, v in tensors.items()})
    with pytest.raises(ValueError, match=r"embed_tokens\.weight"):
        load(tmp_path)


def test_tied_with_both_tensors_in_the_file(tmp_path):
    """Case 69."""
    save_tiny(tmp_path, tiny_llama())
    rewrite_tensors(tmp_path, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    target = load(tmp_path)
    assert torch.equal(target.vocabulary().head, target.vocabulary().embedding)


def test_text_model_nested_in_a_vision_wrapper(tmp_path):
    """Case 69: layers, embedding and head are found inside; the vision tower of as many layers is not taken."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    config = LlavaConfig(text_config=LlamaConfig(**_shape()), vision_config=vision, image_token_id=500)
    target = load(save_tiny(tmp_path, frozen(LlavaForConditionalGeneration, config)))
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (LAYERS, HIDDEN, VOCAB)
    ids = torch.arange(4, 24)
    text = target.model.model.language_model
    with torch.no_grad():
        states = text(input_ids=ids[None], use_cache=False, output_hidden_states=True).hidden_states
    assert torch.equal(target.features(ids, [20]), torch.cat([states[2][0], states[4][0]], dim=-1))
    torch.testing.assert_close(logits_from_last_layer(target, ids), own_logits(target, ids))


def quirky(name: str):
    import transformers

    options = {
        "Gemma2": {"final_logit_softcapping": 3.0, "sliding_window": 8},
        "Granite": {"embedding_multiplier": 12.0, "logits_scaling": 8.0},
        "Cohere": {"logit_scale": 0.25},
    }[name]
    config = getattr(transformers, f"{name}Config")(**_shape(**options))
    return frozen(getattr(transformers, f"{name}ForCausalLM"), config)


@pytest.mark.parametrize(
    ("name", "embedding_scale", "multiplier", "softcap"),
    [("Gemma2", 8.0, 1.0, 3.0), ("Granite", 12.0, 0.125, None), ("Cohere", 1.0, 0.25, None)],
)
def test_known_quirks_are_applied_as_the_target_does(name, embedding_scale, multiplier, softcap):
    target = Target(quirky(name), tiny_tokenizer(), (1, 3))
    target.check_head()
    vocabulary = target.vocabulary()
    assert vocabulary.embedding_scale == embedding_scale
    assert vocabulary.output_multiplier == multiplier
    assert vocabulary.logit_softcap == softcap
    ids = torch.arange(4, 24)
    torch.testing.assert_close(logits_from_last_layer(target, ids), own_logits(target, ids))


def test_unexplained_scaling_is_refused_by_name():
    model = tiny_llama()
    model.model.embed_tokens.register_forward_hook(lambda _module, _args, rows: rows * 3.0)
    with pytest.raises(ValueError, match=r"type llama: embeddings differ .*quirks\.py"):
        Target(model, tiny_tokenizer(), (1, 3)).check_head()
    model = tiny_llama()
    model.lm_head.register_forward_hook(lambda _module, _args, logits: logits.tanh())
    with pytest.raises(ValueError, match="type llama: logits differ"):
        Target(model, tiny_tokenizer(), (1, 3)).check_head()


def test_a_target_without_language_model_parts_is_refused():
    model = tiny_llama()
    model.model.final = model.model.norm
    del model.model.norm
    with pytest.raises(ValueError, match="found 0 final norms"):
        Target(model, tiny_tokenizer(), (1, 3))


def test_identity_records_dtype_and_quantisation(tmp_path):
    """Case 76: what was captured from is on record."""
    target = Target.load(save_tiny(tmp_path, tiny_llama()), "bfloat16", "cpu", (1, 3))
    assert target.dtype == torch.bfloat16
    assert target.vocabulary().embedding.dtype == torch.bfloat16
    identity = target.identity()
    assert identity["dtype"] == "bfloat16"
    assert identity["quantization"] is None
    other = Target.load(save_tiny(tmp_path / "other", tiny_llama(seed=1)), "bfloat16", "cpu", (1, 3)).identity()
    assert identity["weights"].keys() == other["weights"].keys() == {"model.safetensors"}
    assert identity["weights"] != other["weights"]


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        load(tmp_path)


def test_a_gpu_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"target\.device is cuda:0"):
        Target.load(save_tiny(tmp_path, tiny_llama()), "float32", "cuda:0", (1, 3))


def test_stop_ids_join_generation_config_and_tokenizer():
    model = tiny_llama()
    model.generation_config.eos_token_id = [1, 9]
    assert Target(model, tiny_tokenizer(), (1,)).stop_ids == {1, 9}
    model.generation_config.eos_token_id = None
    assert Target(model, tiny_tokenizer(), (1,)).stop_ids == {1}


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_depends_on_what_shares_a_call_is_refused(tmp_path, kind):
    """Case 22, P2: packed features of such a target would depend on the longest document of the pack."""
    extra = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64}
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0, **(extra if kind == "longrope" else {})}
    save_tiny(tmp_path, tiny_llama(rope_parameters=rope))
    with pytest.raises(ValueError, match=f"rope_type {kind} depends on the longest text"):
        Target.load(tmp_path, "float32", "cpu", (1, 3))


def test_damaged_files_are_one_message(tmp_path):
    folder = save_tiny(tmp_path, tiny_llama())
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"target\.path .*: its weights cannot be read"):
        Target.load(folder, "float32", "cpu", (1, 3))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ValueError, match=r"target\.path .*: its tokenizer cannot be read"):
        load_tokenizer(folder)
