"""Is a GGUF file converted exactly, once, and never half?"""

from __future__ import annotations

import json
import sys
import types

import pytest
import torch

from draftmill.target import gguf as converter
from draftmill.target.gguf import convert_gguf, find_packaged_gguf
from draftmill.target.model import Target
from tiny_models import CHAT_TEMPLATE, EOS, LAYERS, SPECIAL_TOKENS, tiny_llama

HEADS, KV_HEADS = 4, 2


def rotary_halves_interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp keeps the two halves of a rotary pair side by side."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def write_gguf(path, model, splitting: str = "smollm") -> None:
    gguf = pytest.importorskip("gguf")
    from tokenizers import pre_tokenizers

    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ĠĠ"]
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL_TOKENS) + [1] * (len(tokens) - len(SPECIAL_TOKENS)))
    writer.add_tokenizer_pre(splitting)
    writer.add_token_merges(["h e", "Ġ Ġ"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(EOS)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    names = {
        "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    weights = model.state_dict()
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"].numpy())
    for layer in range(LAYERS):
        for ours, theirs in names.items():
            weight = weights[f"model.layers.{layer}.{ours}.weight"]
            if theirs in ("attn_q", "attn_k"):
                weight = rotary_halves_interleaved(weight, HEADS if theirs == "attn_q" else KV_HEADS)
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """(the model written as GGUF, the GGUF file, the converted folder)"""
    pytest.importorskip("accelerate")
    base = tmp_path_factory.mktemp("gguf")
    model = tiny_llama(vocab_size=262)
    source = base / "tiny.gguf"
    write_gguf(source, model)
    return model, source, convert_gguf(source, base / "cache")


def test_the_folder_is_a_plain_model_with_the_files_weights(converted):
    """Case 76: what is stored, in bfloat16, is the target; nothing marks it as quantised any more."""
    model, source, folder = converted
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    target = Target.load(folder, "float32", "cpu", (1, 3))
    stored = target.model.state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(stored[name], weight.bfloat16().float()), name
    assert target.identity()["converted_from"]["file"] == source.name


def test_tokens_and_template_are_the_files(converted):
    _, _, folder = converted
    target = Target.load(folder, "bfloat16", "cpu", (1, 3))
    tokenizer = target.tokenizer
    assert target.stop_ids == {EOS}
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.bos_token == "<|im_start|>"
    assert tokenizer.chat_template == CHAT_TEMPLATE
    text = "<|im_start|>user\nhello,  café\r\n<|im_end|>"
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=False) == text
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == EOS


def test_text_is_split_as_the_file_says(converted):
    """Digits stand alone, so the two blanks before one are merged; GPT-2's way would tie the second to the digit."""
    _, _, folder = converted
    tokenizer = Target.load(folder, "bfloat16", "cpu", (1, 3)).tokenizer
    assert tokenizer.tokenize("  12") == ["ĠĠ", "1", "2"]


def test_an_unknown_way_of_splitting_is_warned_about(converted, tmp_path, caplog):
    model, _, _ = converted
    write_gguf(tmp_path / "odd.gguf", model, splitting="odd-bpe")
    convert_gguf(tmp_path / "odd.gguf", tmp_path / "cache")
    assert "splits text the 'odd-bpe' way" in caplog.text


def test_it_is_converted_once(converted, monkeypatch):
    _, source, folder = converted
    monkeypatch.setattr(converter, "_convert", lambda *_: pytest.fail("converted again"))
    assert convert_gguf(source, folder.parent) == folder


def test_another_file_of_the_same_name_gets_its_own_folder(converted, monkeypatch, tmp_path):
    _, source, folder = converted
    other = tmp_path / source.name
    other.write_bytes(source.read_bytes() + b"\0")
    monkeypatch.setattr(converter, "_convert", lambda _source, aside: (aside / "config.json").write_text("{}"))
    assert convert_gguf(other, folder.parent) != folder


def test_a_failed_conversion_leaves_nothing(converted, monkeypatch, tmp_path):
    _, source, _ = converted

    def fail(_source, aside):
        (aside / "config.json").write_text("{}")
        raise RuntimeError("disk full")

    monkeypatch.setattr(converter, "_convert", fail)
    with pytest.raises(RuntimeError, match="disk full"):
        convert_gguf(source, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_two_converters_at_once_agree(converted, monkeypatch, tmp_path):
    _, source, _ = converted

    def lose_the_race(_source, aside):
        (aside / "config.json").write_text("ours")
        winner = aside.parent / aside.name[1:].rpartition(".")[0]
        winner.mkdir()
        (winner / "config.json").write_text("theirs")

    monkeypatch.setattr(converter, "_convert", lose_the_race)
    folder = convert_gguf(source, tmp_path / "cache")
    assert (folder / "config.json").read_text() == "theirs"
    assert list((tmp_path / "cache").iterdir()) == [folder]


def test_a_packaged_file_is_found_without_importing_the_package(tmp_path, monkeypatch):
    package = tmp_path / "tiny_gguf_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('must not run')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="holds 0 GGUF files"):
        find_packaged_gguf("tiny_gguf_package")
    (package / "model.gguf").touch()
    assert find_packaged_gguf("tiny_gguf_package") == package / "model.gguf"
    with pytest.raises(ValueError, match="pip install no-such-package-here"):
        find_packaged_gguf("no_such_package_here")


def test_missing_file_and_missing_readers_are_named(converted, monkeypatch, tmp_path):
    _, source, _ = converted
    with pytest.raises(ValueError, match=r"none\.gguf does not exist"):
        convert_gguf(tmp_path / "none.gguf", tmp_path)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    assert isinstance(sys.modules["gguf"], types.ModuleType)
    with pytest.raises(ValueError, match="pip install accelerate gguf"):
        convert_gguf(source, tmp_path / "cache")
