"""Case 4, the overfit gate: a drafter that has learnt one conversation by heart drafts all of it, served.

Every stage is the real one: the target writes its reply, prepare renders it, a run trains on it, export writes it,
and both our decoding and the `dflash` package's accept full blocks.
"""

import json

import pytest

import tiny_models
from draftmill.config.load import load_config
from draftmill.run.evaluation import EvaluationSettings, evaluate_pair, load_pair
from draftmill.run.exporting import export_drafter, verify_export
from draftmill.run.training import run_training
from draftmill.target.answers import Sampling
from draftmill.target.embedded import Embedded
from draftmill.target.model import Target
from draftmill.target.regenerate import regenerate
from draftmill.text.prepare import PrepareOptions, prepare

NEW_TOKENS, BLOCK = 41, 4


VOCAB = 260  # every row of the embedding is a token of the tiny tokenizer


def settings_of(folder):
    settings = {
        "target.path": folder / "target", "target.dtype": "float32", "target.device": "cpu",
        "target.feature_layers": "[1, 3]", "drafter.layers": 2, "drafter.block_size": BLOCK,
        "data.path": folder / "data", "data.pack_tokens": 128, "data.anchor_rate": 1.0, "train.loss.gamma": 4,
        "train.steps": 200, "train.lr": 3e-3, "train.dtype": "float32", "run.dir": folder / "run",
        "run.device": "cpu", "run.threads": 1, "run.log_every": 50,
    }  # fmt: skip
    return load_config(None, [f"{name}={value}" for name, value in settings.items()])


def test_a_memorised_conversation_is_drafted_in_full_blocks(tmp_path):
    pytest.importorskip("dflash.model")
    target_folder = tiny_models.save_tiny(tmp_path / "target", tiny_models.tiny_llama(tied=False, vocab_size=VOCAB))
    prompts, chats = tmp_path / "prompts.jsonl", tmp_path / "chats.jsonl"
    prompts.write_text(json.dumps({"messages": [{"role": "user", "content": "oak ash elm"}]}) + "\n")
    target = Target.load(target_folder, "float32", "cpu", (1, 3))
    regenerate(Embedded(target), [prompts], chats, Sampling(NEW_TOKENS))
    options = PrepareOptions(stop_ids=target.stop_ids, vocab_size=VOCAB, mask_token_id=tiny_models.UNUSED)
    prepare([chats], tiny_models.tiny_tokenizer(), tmp_path / "data", options)

    run_training(settings_of(tmp_path))
    folder = export_drafter(tmp_path / "run", tmp_path / "drafter", "bfloat16")
    settings = EvaluationSettings(max_new_tokens=NEW_TOKENS, dtype="float32", device="cpu")
    report = evaluate_pair(load_pair(folder, target_folder, prompts, settings), settings)
    response = report.responses[0]
    assert len(response.tokens) == NEW_TOKENS and len(set(response.tokens)) > 3, "a reply that says something"
    assert [r.accepted for r in response.rounds] == [BLOCK - 1] * len(response.rounds)
    assert report.acceptance.tau == BLOCK
    assert report.lossless.identical == 1
    oracle = verify_export(folder, target_folder, prompts, settings)
    assert oracle.match and oracle.compared == len(response.rounds)
