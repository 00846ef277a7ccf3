"""Does an exported drafter draft the same tokens, round by round, in the independent `dflash` package?

The drafters are trained with that package's own model, so nothing of ours decides what "right" is.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace

import dflash.model
import pytest
import torch

from decode_helpers import EOS, LAYOUTS, PROMPTS, SPEC, make_target, overfit
from drafter_helpers import make_documents, make_drafter, make_pack
from draftmill.drafter.attention import layer_masks
from draftmill.drafter.blocks import make_blocks
from draftmill.drafter.forward import network
from draftmill.drafter.pack import to_device
from draftmill.evaluate.acceptance import measure
from draftmill.evaluate.decode import draft_and_verify, plain_greedy
from draftmill.export import verify as verify_module
from draftmill.export.verify import verify_with_dflash
from draftmill.export.zlab import load_drafter, write_export

NEW = 24
UNSEEN = [[12, 13], [30, 2, 30, 2, 30, 2, 30, 2, 30], [1]]
ALL_PROMPTS = PROMPTS + UNSEEN
TRAINED = [("llama", layout) for layout in LAYOUTS] + [("qwen3", "mixed"), ("qwen3", "sliding both ways")]


@pytest.fixture(scope="module")
def targets():
    """One with a head of its own, one that ties it to the embedding (case 69)."""
    return {"llama": make_target("llama"), "qwen3": make_target("qwen3", tie_word_embeddings=True)}


@pytest.fixture(scope="module")
def exported(targets, tmp_path_factory):
    """(kind, layout) -> folder of a drafter that accepts some blocks whole, some in part, some not at all."""
    made = {}

    def get(kind, layout):
        if (kind, layout) not in made:
            weights = overfit(LAYOUTS[layout], targets[kind].model, PROMPTS, NEW, steps=60)
            folder = tmp_path_factory.mktemp("export") / f"{kind}-{layout.replace(' ', '-')}"
            made[kind, layout] = write_export(folder, LAYOUTS[layout], weights, dtype="float32")
        return made[kind, layout]

    return get


def decode(target, folder, prompts=ALL_PROMPTS, new_tokens=NEW, stop_ids=None):
    return draft_and_verify(target, load_drafter(folder), prompts, new_tokens, stop_ids=stop_ids)


@pytest.mark.parametrize(("kind", "layout"), TRAINED)
def test_trained_drafters_agree_round_by_round(targets, exported, kind, layout):
    """Cases 4, 13, 70, 74, 77: prompts of different lengths in one batch, acceptance of every length."""
    target, folder = targets[kind], exported(kind, layout)
    responses = decode(target, folder)
    report = verify_with_dflash(folder, target.model, ALL_PROMPTS, NEW, target.stop_ids, responses)
    assert report.mismatches == []
    assert report.compared == report.rounds == sum(len(response.rounds) for response in responses)
    assert report.draft_ties == report.target_ties == report.uncompared == 0
    assert [r.tokens for r in responses] == [r.tokens for r in plain_greedy(target, ALL_PROMPTS, NEW)]
    produced = {entry.produced for response in responses for entry in response.rounds}
    assert {1, 2, 4} <= produced, "the drafter must accept nothing, something and everything for this to be a proof"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_random_drafters_agree_token_by_token(targets, tmp_path, kind, layout):
    """Nothing is accepted, but every drafted token is compared. Case 77: the floor."""
    spec = LAYOUTS[layout]
    folder = write_export(tmp_path / "drafter", spec, make_drafter(spec, seed=3).state_dict(), dtype="float32")
    responses = decode(targets[kind], folder)
    report = verify_with_dflash(folder, targets[kind].model, ALL_PROMPTS, NEW, targets[kind].stop_ids, responses)
    assert report.match
    assert report.compared == report.rounds > 100
    assert measure(responses, spec.block_size).tau < 1.2


def test_targets_with_scaled_embeddings_and_capped_logits_agree(tmp_path):
    """The quirks reach the package through config.json; without the scale the drafts differ. Tied head: case 69."""
    target = make_target("gemma3", tie_word_embeddings=True, final_logit_softcapping=5.0, sliding_window=8)
    vocabulary = target.vocabulary()
    spec = replace(SPEC, embedding_scale=vocabulary.embedding_scale, logit_softcap=vocabulary.logit_softcap)
    assert (spec.embedding_scale, spec.logit_softcap) == (pytest.approx(32**0.5), 5.0)
    weights = make_drafter(spec, seed=3).state_dict()
    folder = write_export(tmp_path / "drafter", spec, weights, dtype="float32")
    responses = decode(target, folder)
    args = (target.model, ALL_PROMPTS, NEW, target.stop_ids, responses)
    assert verify_with_dflash(folder, *args).mismatches == []
    assert [r.tokens for r in responses] == [r.tokens for r in plain_greedy(target, ALL_PROMPTS, NEW)]
    plain = write_export(tmp_path / "plain", replace(spec, embedding_scale=1.0), weights, dtype="float32")
    assert not verify_with_dflash(plain, *args).match


@pytest.mark.parametrize("new_tokens", [1, 2, 3, 5, 6])
def test_last_rounds_are_cut_alike(targets, exported, new_tokens):
    """Blocks near the limit are shorter, and bidirectional slots must not see the ones that are cut off."""
    target = targets["llama"]
    for layout in ("full", "sliding both ways"):
        folder = exported("llama", layout)
        responses = decode(target, folder, new_tokens=new_tokens)
        assert verify_with_dflash(folder, target.model, ALL_PROMPTS, new_tokens, target.stop_ids, responses).match


def test_stop_tokens_inside_accepted_blocks_are_cut_alike(targets, exported):
    target, folder = targets["qwen3"], exported("qwen3", "mixed")
    free = plain_greedy(target, ALL_PROMPTS, NEW, stop_ids=frozenset())
    cut = 0
    for stop in {answer.tokens[place] for answer in free for place in (5, 6, 7)}:
        responses = decode(target, folder, stop_ids=frozenset({stop}))
        assert verify_with_dflash(folder, target.model, ALL_PROMPTS, NEW, [stop], responses).match
        cut += sum(r.rounds[-1].produced <= r.rounds[-1].accepted for r in responses if r.rounds and r.finish == "stop")
    assert cut > 0, "no stop token fell inside an accepted block"


def test_overfitted_drafter_accepts_whole_blocks(targets, tmp_path):
    """Case 4: the overfit gate, in our loop and in the package."""
    target = targets["qwen3"]
    weights = overfit(SPEC, target.model, PROMPTS[:2], NEW, steps=150)
    folder = write_export(tmp_path / "drafter", SPEC, weights, dtype="float32")
    responses = decode(target, folder, PROMPTS[:2])
    assert [[entry.produced for entry in r.rounds] for r in responses] == [[4, 4, 4, 4, 4, 3]] * 2
    assert verify_with_dflash(folder, target.model, PROMPTS[:2], NEW, target.stop_ids, responses).match


def test_bfloat16_export_agrees_when_both_read_the_file(targets, tmp_path):
    """The folder is the drafter: decoding with it, not with the masters, is what engines will do."""
    target = targets["llama"]
    folder = write_export(tmp_path / "drafter", SPEC, make_drafter(SPEC, seed=3).state_dict())
    responses = decode(target, folder)
    assert verify_with_dflash(folder, target.model, ALL_PROMPTS, NEW, target.stop_ids, responses).match


# ---- a wrong export is caught ----

FLIPS = {
    "layer ids off by one": (lambda c: c["dflash_config"].update(target_layer_ids=[2, 4]), "mixed"),
    "wrong RoPE base": (lambda c: (c.update(rope_theta=1e4), c["rope_parameters"].update(rope_theta=1e4)), "mixed"),
    "dropped window": (lambda c: c.update(layer_types=["full_attention"] * 2, is_causal=True), "sliding causal"),
    "other window": (lambda c: c.update(sliding_window=7), "mixed"),
    "sliding made bidirectional": (lambda c: c.update(is_causal=False), "sliding causal"),
    "sliding made causal": (lambda c: c.pop("is_causal"), "sliding both ways"),
    "full made causal": (lambda c: c.update(is_causal=True), "mixed"),
    "other mask token": (lambda c: c["dflash_config"].update(mask_token_id=0), "full"),
    "smaller block": (lambda c: c["dflash_config"].update(block_size=3), "full"),
}


@pytest.mark.parametrize("flip", FLIPS)
def test_a_flipped_field_makes_the_check_fail(targets, exported, tmp_path, flip):
    """Cases 13, 70, 74: the check would notice each of the silent faults."""
    change, layout = FLIPS[flip]
    target, folder = targets["llama"], exported("llama", layout)
    responses = decode(target, folder)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text(json.dumps(config))
    (broken / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    report = verify_with_dflash(broken, target.model, ALL_PROMPTS, NEW, target.stop_ids, responses)
    assert not report.match
    assert report.to_dict()["match"] is False


def test_a_tampered_token_is_a_mismatch_and_a_near_tie_is_not(targets, exported):
    target, folder = targets["llama"], exported("llama", "full")
    responses = decode(target, folder)
    package = dflash.model.DFlashDraftModel.from_pretrained(str(folder), dtype=torch.float32).eval()
    _, rounds, _ = verify_module._generate(dflash.model, package, target.model, PROMPTS[1], NEW, target.stop_ids)
    last = rounds[0].drafted[-1]

    def check(token, epsilon):
        first, *rest = responses[1].rounds
        tampered = replace(responses[1], rounds=(replace(first, drafted=(*first.drafted[:-1], token)), *rest))
        return verify_with_dflash(folder, target.model, PROMPTS[1:2], NEW, target.stop_ids, [tampered], epsilon=epsilon)

    assert not check(EOS, epsilon=1e9).match, "a token that is not the runner-up is never a tie"
    assert not check(last.second, epsilon=last.gap * 0.99).match
    report = check(last.second, epsilon=last.gap * 1.01)
    assert report.match
    assert report.draft_ties == 1


def test_the_package_is_left_as_it_was(targets, exported):
    clock, logits = dflash.model._cuda_time, dflash.model.DFlashDraftModel.compute_logits
    target, folder = targets["llama"], exported("llama", "full")
    responses = decode(target, folder, PROMPTS[:1])
    verify_with_dflash(folder, target.model, PROMPTS[:1], NEW, target.stop_ids, responses)
    assert dflash.model._cuda_time is clock
    assert clock is not time.perf_counter
    assert dflash.model.DFlashDraftModel.compute_logits is logits
    assert not target.model._forward_hooks


def test_a_missing_package_is_named(monkeypatch):
    def missing(name):
        raise ImportError("No module named 'dflash'")

    monkeypatch.setattr(verify_module.importlib, "import_module", missing)
    with pytest.raises(RuntimeError, match=r"pip install --no-deps dflash==0\.1\.0"):
        verify_with_dflash("x", None, [], 1, [], [])


# ---- training time equals serving time ----


@pytest.mark.parametrize("layout", [*LAYOUTS, "full causal"])
def test_training_slots_equal_the_packages_slots(tmp_path, layout):
    """Case 4: for the same prefix and anchor, hidden states in a training pack and in the package are equal."""
    spec = {**LAYOUTS, "full causal": replace(LAYOUTS["full"], causal_full=True)}[layout]
    drafter = make_drafter(spec, seed=4)
    folder = write_export(tmp_path / "drafter", spec, drafter.state_dict(), dtype="float32")
    package = dflash.model.DFlashDraftModel.from_pretrained(str(folder), dtype=torch.float32).eval()
    documents = make_documents([14, 23], spec=spec)
    pack, features = make_pack(documents, [2, 3])
    device_pack = to_device(pack, "cpu")
    anchor = torch.tensor([3, 5, 14 + 4, 14 + 6, 14 + 18])  # two of them closer than a block
    blocks = make_blocks(device_pack, anchor, spec.block_size, spec.mask_token_id)
    table = torch.randn(spec.vocab_size, spec.hidden_size, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        hidden = _training_hidden(drafter, device_pack, blocks, features, table[blocks.token_ids])
        for index, row in enumerate(anchor.tolist()):
            document, position = (0, row) if row < 14 else (1, row - 14)
            expected = package(
                position_ids=torch.arange(position + spec.block_size)[None],
                noise_embedding=table[blocks.token_ids[index]][None],
                target_hidden=documents[document][2][None, :position],
            )
            torch.testing.assert_close(hidden[index], expected[0], atol=1e-5, rtol=1e-5)


def _training_hidden(drafter, pack, blocks, features, slots):
    ropes = drafter.rope(pack.positions), drafter.rope(blocks.positions.flatten())
    masks = layer_masks(drafter.spec, blocks.layout)
    return network(drafter, features, slots.flatten(0, 1), *ropes, masks).unflatten(0, blocks.positions.shape)
