"""Do plain and drafted decoding answer as the target does, whatever shares the batch?"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from decode_helpers import EOS, LAYOUTS, PROMPTS, SPEC, make_target
from drafter_helpers import make_drafter
from draftmill.evaluate import verifier as verifier_module
from draftmill.evaluate.decode import draft_and_verify, matching_prefix, plain_greedy
from draftmill.evaluate.verifier import Verifier
from draftmill.target.cache import RaggedCache

NEW = 20


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def target(request):
    return make_target(request.param)


def generate(model, prompt, new_tokens, eos=EOS):
    ids = model.generate(
        torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False, eos_token_id=eos, pad_token_id=0
    )
    return tuple(ids[0, len(prompt) :].tolist())


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_plain_greedy_equals_hugging_face_generate(target, batch_size):
    answers = plain_greedy(target, PROMPTS, NEW, batch_size=batch_size)
    assert [answer.tokens for answer in answers] == [generate(target.model, prompt, NEW) for prompt in PROMPTS]
    assert [answer.prompt_tokens for answer in answers] == [len(prompt) for prompt in PROMPTS]
    for answer in answers:
        assert answer.finish == ("stop" if answer.tokens[-1] == EOS else "length")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_drafting_with_any_drafter_leaves_the_text_unchanged(target, layout):
    plain = plain_greedy(target, PROMPTS, NEW)
    drafted = draft_and_verify(target, make_drafter(LAYOUTS[layout]), PROMPTS, NEW)
    assert [answer.tokens for answer in drafted] == [answer.tokens for answer in plain]
    for answer in drafted:
        assert 1 + sum(entry.produced for entry in answer.rounds) == len(answer.tokens)
        start = answer.prompt_tokens
        for entry in answer.rounds:
            assert entry.start == start
            assert len(entry.drafted) == min(SPEC.block_size, answer.prompt_tokens + NEW - start) - 1
            start += entry.produced


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_do_not_depend_on_who_shares_the_batch(target, layout):
    drafter = make_drafter(LAYOUTS[layout])
    together = draft_and_verify(target, drafter, PROMPTS, NEW)
    alone = draft_and_verify(target, drafter, PROMPTS, NEW, batch_size=1)
    assert together == alone


def test_prompts_read_in_pieces_give_the_same(target, monkeypatch):
    drafter = make_drafter(SPEC)
    whole = draft_and_verify(target, drafter, PROMPTS, NEW)
    monkeypatch.setattr(verifier_module, "PREFILL_TOKENS", 9)  # two tokens of four rows at a time
    assert draft_and_verify(target, drafter, PROMPTS, NEW) == whole


def test_one_token_is_asked_for(target):
    answers = draft_and_verify(target, make_drafter(SPEC), PROMPTS, 1)
    assert [len(answer.tokens) for answer in answers] == [1] * len(PROMPTS)
    assert all(not answer.rounds for answer in answers)
    two = draft_and_verify(target, make_drafter(SPEC), PROMPTS, 2, stop_ids=frozenset())
    assert all(len(answer.rounds) == 1 and len(answer.rounds[0].drafted) == 1 for answer in two)


def test_a_stop_token_ends_the_text_and_is_part_of_it(target):
    free = plain_greedy(target, PROMPTS, NEW, stop_ids=frozenset())
    stop = free[1].tokens[7]
    expected = [
        answer.tokens[: answer.tokens.index(stop) + 1] if stop in answer.tokens else answer.tokens for answer in free
    ]
    for answers in (
        plain_greedy(target, PROMPTS, NEW, stop_ids=frozenset({stop})),
        draft_and_verify(target, make_drafter(SPEC), PROMPTS, NEW, stop_ids=frozenset({stop})),
    ):
        assert [answer.tokens for answer in answers] == expected
    at_once = draft_and_verify(target, make_drafter(SPEC), PROMPTS[:1], NEW, stop_ids=frozenset({free[0].tokens[0]}))
    assert at_once[0].tokens == free[0].tokens[:1]
    assert at_once[0].finish == "stop"
    assert at_once[0].rounds == ()


def test_a_prompt_token_equal_to_the_mask_token_is_a_token_like_others(target):
    prompts = [[3, SPEC.mask_token_id, 5, SPEC.mask_token_id]]
    drafted = draft_and_verify(target, make_drafter(SPEC), prompts, NEW)
    assert drafted[0].tokens == generate(target.model, prompts[0], NEW)


def test_progress_counts_every_prompt_and_token(target):
    seen = []
    answers = draft_and_verify(target, make_drafter(SPEC), PROMPTS, NEW, batch_size=2, on_progress=seen.append)
    assert seen[-1].done == seen[-1].prompts == len(PROMPTS)
    assert seen[-1].tokens == sum(len(answer.tokens) for answer in answers)
    assert seen[-1].rounds == sum(len(answer.rounds) for answer in answers)


def test_bfloat16_target_decodes(target):
    """The drafter follows the dtype of the features."""
    half = make_target("llama")
    half.model.to(torch.bfloat16)
    half = type(half)(half.model, half.tokenizer, half.layer_ids)
    answers = draft_and_verify(half, make_drafter(SPEC), PROMPTS, 8)
    assert all(len(answer.tokens) in range(1, 9) for answer in answers)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gpu_decodes_the_same_rounds(layout):
    """float32 without reduced-precision products; run with pytest -m gpu."""
    on_cpu = make_target("qwen3")
    expected = draft_and_verify(on_cpu, make_drafter(LAYOUTS[layout]), PROMPTS, NEW)
    on_gpu = type(on_cpu)(on_cpu.model.to("cuda"), on_cpu.tokenizer, on_cpu.layer_ids)
    assert draft_and_verify(on_gpu, make_drafter(LAYOUTS[layout]).to("cuda"), PROMPTS, NEW) == expected
    assert [a.tokens for a in plain_greedy(on_gpu, PROMPTS, NEW)] == [a.tokens for a in expected]


@pytest.mark.parametrize(
    ("prompts", "limit", "message"),
    [([[1], []], 4, "prompt 1 has no tokens"), ([[1]], 0, "max_new_tokens 0")],
)
def test_refusals_name_the_input(target, prompts, limit, message):
    with pytest.raises(ValueError, match=message):
        plain_greedy(target, prompts, limit)


def test_a_drafter_of_another_target_is_refused():
    with pytest.raises(ValueError, match=r"layer ids \(2, 4\), drafter's \(1, 3\)"):
        draft_and_verify(make_target(layer_ids=(2, 4)), make_drafter(SPEC), PROMPTS, 4)


def test_a_drafter_trained_with_other_embeddings_is_refused():
    drafter = make_drafter(replace(SPEC, embedding_scale=5.6))
    with pytest.raises(ValueError, match=r"target embedding_scale 1\.0, drafter's 5\.6"):
        draft_and_verify(make_target(), drafter, PROMPTS, 4)


def test_matching_prefix():
    assert matching_prefix([1, 2, 3], [1, 2, 3, 4]) == 3
    assert matching_prefix([1, 9, 3], [1, 2, 3, 4]) == 1
    assert matching_prefix([9], [1, 2]) == 0
    assert matching_prefix([], [1]) == 0


# ---- the cache ----


def step(target, cache, token_ids, starts):
    positions = torch.tensor(starts)[:, None] + torch.arange(token_ids.shape[1])
    cache.place(positions, starts)
    return target.forward(token_ids, positions, cache, cache.visible())


def test_stale_entries_are_invisible(target):
    """Whatever lies past a row's own position cannot reach it, however large."""
    results = []
    for garbage in (0.0, 1e3):
        verifier = Verifier(target, 40)
        verifier.prefill(PROMPTS)
        for layer in verifier.cache.layers:
            for row, prompt in enumerate(PROMPTS):
                layer.keys[row, :, len(prompt) :] = garbage
                layer.values[row, :, len(prompt) :] = garbage
        logits, _, _ = verifier.forward(torch.tensor([[1, 2]] * len(PROMPTS)), [len(prompt) for prompt in PROMPTS])
        results.append(logits)
    assert torch.equal(*results)


def test_rejected_entries_are_overwritten(target):
    cache = RaggedCache()
    step(target, cache, torch.tensor([[1, 2, 3]]), [0])
    step(target, cache, torch.tensor([[50, 51, 52]]), [3])  # rejected
    retried, _ = step(target, cache, torch.tensor([[4, 5]]), [3])
    whole = target.model(torch.tensor([[1, 2, 3, 4, 5]])).logits
    torch.testing.assert_close(retried, whole[:, 3:], atol=1e-5, rtol=1e-5)


def test_growing_and_reserved_caches_are_equal(target):
    logits = []
    for capacity in (0, 64):
        cache = RaggedCache(capacity)
        pieces = [
            step(target, cache, torch.tensor([[token, token + 1]] * 2), [2 * i] * 2)[0]
            for i, token in enumerate(range(9))
        ]
        logits.append(torch.cat(pieces, dim=1))
    assert torch.equal(*logits)


def test_kept_rows_go_on_in_the_order_given(target):
    cache = RaggedCache()
    step(target, cache, torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]]), [0] * 3)
    cache.keep([2, 0])
    logits, _ = step(target, cache, torch.tensor([[10], [11]]), [3, 3])
    for row, text in enumerate(([7, 8, 9, 10], [1, 2, 3, 11])):
        torch.testing.assert_close(
            logits[row, 0], target.model(torch.tensor([text])).logits[0, -1], atol=1e-5, rtol=1e-5
        )


def test_equal_rows_need_no_mask_of_ours(target):
    """Hugging Face's own causal mask over our cache, as over its own."""
    ours, theirs = RaggedCache(), DynamicCache(config=target.model.config)
    for start, ids in ((0, [[1, 2, 3]]), (3, [[4, 5]])):
        ours.place(start + torch.arange(len(ids[0]))[None], [start])
        results = [target.model(torch.tensor(ids), past_key_values=cache, use_cache=True) for cache in (ours, theirs)]
        torch.testing.assert_close(results[0].logits, results[1].logits, atol=1e-5, rtol=1e-5)


def test_rows_of_different_lengths_cannot_do_without(target):
    cache = RaggedCache()
    step(target, cache, torch.tensor([[1, 2, 3]] * 2), [0, 0])
    cache.place(torch.tensor([[2], [3]]), [2, 3])
    with pytest.raises(ValueError, match="pass position_ids and the 4D mask"):
        target.model(torch.tensor([[1], [1]]), past_key_values=cache, use_cache=True)


def test_forgetting_to_place_is_an_error(target):
    cache = RaggedCache()
    step(target, cache, torch.tensor([[1, 2, 3]]), [0])
    with pytest.raises(ValueError, match="call place"):
        target.forward(torch.tensor([[1]]), torch.tensor([[3]]), cache, torch.ones(1, 1, 1, 4, dtype=torch.bool))
