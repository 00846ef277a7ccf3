"""P3, case 4: an exported drafter in the `dflash` package computes the slot logits that training scored.

Training's side: one packed forward over all anchors of two documents. The package's side: the prefix's features
from the target's own `hidden_states`, one block at a time. Each fault that hides in such a pair is planted once.
"""

import json
from dataclasses import replace

import pytest
import torch

import tiny_models
from drafter_helpers import make_drafter
from draftmill.config.spec import DrafterSpec
from draftmill.drafter.blocks import make_blocks
from draftmill.drafter.forward import slot_hidden
from draftmill.drafter.pack import to_device
from draftmill.export.zlab import write_export
from draftmill.target.model import Target
from draftmill.wire import DocumentSpan, Pack

dflash = pytest.importorskip("dflash.model")

LAYER_IDS, BLOCK = (1, 3), 4
SPEC = DrafterSpec(
    hidden_size=tiny_models.HIDDEN,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=tiny_models.VOCAB,
    rms_norm_eps=1e-6,
    rope_theta=10_000.0,
    rope_scaling=None,
    max_position_embeddings=512,
    layer_types=("sliding_attention", "full_attention"),
    sliding_window=6,
    causal_full=False,
    causal_sliding=True,
    block_size=BLOCK,
    mask_token_id=tiny_models.UNUSED,
    target_layer_ids=LAYER_IDS,
    num_target_layers=tiny_models.LAYERS,
)
LAYOUTS = {
    "full": replace(SPEC, layer_types=("full_attention",) * 2, sliding_window=None),
    "sliding causal": replace(SPEC, layer_types=("sliding_attention",) * 2),
    "sliding both ways": replace(SPEC, layer_types=("sliding_attention",) * 2, causal_sliding=False),
    "full causal": replace(SPEC, layer_types=("full_attention",) * 2, sliding_window=None, causal_full=True),
    "mixed": SPEC,
    "yarn": replace(SPEC, rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}),
}
LENGTHS, ANCHORS = (23, 31), ((1, 9, 10, 19), (5, 17, 26))


@pytest.fixture(scope="module")
def target():
    return Target(tiny_models.tiny_llama(), tiny_models.tiny_tokenizer(), LAYER_IDS)


@pytest.fixture(scope="module")
def token_ids():
    return torch.randint(4, tiny_models.VOCAB, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))


def trained_logits(target, token_ids, drafter):
    """[anchors, B - 1, V] as the training step computes them, both documents in one pack."""
    supervised = torch.ones(len(token_ids), dtype=torch.bool).numpy()
    spans = (DocumentSpan(0, 0, LENGTHS[0], 4), DocumentSpan(1, LENGTHS[0], LENGTHS[1], 3))
    pack = to_device(Pack(0, 0, spans, token_ids.int().numpy(), supervised), "cpu")
    anchor = torch.tensor([*ANCHORS[0], *(LENGTHS[0] + a for a in ANCHORS[1])])
    blocks = make_blocks(pack, anchor, BLOCK, drafter.spec.mask_token_id)
    features = target.features(token_ids, list(LENGTHS))
    with torch.no_grad():
        return target.vocabulary().logits(slot_hidden(drafter, target.vocabulary(), pack, features, blocks))


def served_logits(target, token_ids, folder):
    """The same, block by block, by the package from the folder, with the target's own hidden states."""
    model = dflash.DFlashDraftModel.from_pretrained(str(folder), dtype=torch.float32).eval()
    logits = []
    with torch.no_grad():
        for ids, anchors in zip(token_ids.split(list(LENGTHS)), ANCHORS, strict=True):
            states = target.model(ids[None], output_hidden_states=True).hidden_states
            features = dflash.extract_context_feature(states, model.target_layer_ids)
            for anchor in anchors:
                block = torch.tensor([[int(ids[anchor])] + [model.mask_token_id] * (BLOCK - 1)])
                hidden = model(
                    target_hidden=features[:, :anchor],
                    noise_embedding=dflash._raw_input_embeddings(target.model, block),
                    position_ids=torch.arange(anchor + BLOCK)[None],
                )
                logits.append(model.compute_logits(hidden[:, 1:], target.model.lm_head)[0])
    return torch.stack(logits)


def exported(folder, spec, edit=None):
    drafter = make_drafter(spec, std=0.15)
    write_export(folder, spec, drafter.state_dict(), dtype="float32")
    if edit is not None:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        edit(config)
        path.write_text(json.dumps(config))
    return drafter


def worst_difference(target, token_ids, folder, drafter):
    trained, served = trained_logits(target, token_ids, drafter), served_logits(target, token_ids, folder)
    assert trained.std() > 0.1  # logits that say something
    return float((trained - served).abs().max() / trained.std())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_served_slot_logits_equal_the_trained_ones(target, token_ids, tmp_path, layout):
    drafter = exported(tmp_path / "drafter", LAYOUTS[layout])
    assert worst_difference(target, token_ids, tmp_path / "drafter", drafter) < 1e-4


def shift_layer_ids(config):
    config["dflash_config"]["target_layer_ids"] = [i + 1 for i in config["dflash_config"]["target_layer_ids"]]


def change_rope_base(config):
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 1_000_000.0


def drop_window(config):
    config.update(layer_types=["full_attention"] * 2, sliding_window=None, use_sliding_window=False, is_causal=False)


def flip_causality(config):
    config["is_causal"] = config["dflash_config"]["causal"] = True


@pytest.mark.parametrize(
    ("layout", "edit"),
    [
        ("full", shift_layer_ids),
        ("full", change_rope_base),
        ("sliding both ways", drop_window),
        ("full", flip_causality),
        ("mixed", flip_causality),
    ],
)
def test_planted_faults_are_seen(target, token_ids, tmp_path, layout, edit):
    """Cases 13, 22, 74: without this, the equality above could hold for the wrong reason."""
    drafter = exported(tmp_path / "drafter", LAYOUTS[layout], edit)
    assert worst_difference(target, token_ids, tmp_path / "drafter", drafter) > 1e-2
