"""Do cached steps, batching and sampling give the responses the target itself would give?"""

from __future__ import annotations

import pytest
import torch

from draftmill.target.answers import Sampling
from draftmill.target.cache import RaggedCache
from draftmill.target.generate import _choose, generate
from draftmill.target.model import Target
from tiny_models import VOCAB, tiny_llama, tiny_mistral, tiny_qwen3, tiny_tokenizer


def mixed_qwen3():
    return tiny_qwen3(
        layer_types=["full_attention", "sliding_attention"] * 3, sliding_window=8, use_sliding_window=True
    )


BUILDS = [tiny_llama, tiny_qwen3, tiny_mistral, mixed_qwen3]


def target_of(model, layer_ids=(1, 3)) -> Target:
    return Target(model, tiny_tokenizer(), layer_ids)


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(4, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def step(target: Target, cache: RaggedCache, tokens: torch.Tensor, positions: torch.Tensor):
    cache.place(positions, positions[:, 0].tolist())
    return target.forward(tokens, positions, cache, cache.visible())


@pytest.mark.parametrize("build", BUILDS)
def test_cached_steps_equal_one_pass_over_the_text(build):
    """Logits and features, over ragged rows, blocks of tokens, windows, and entries that are written over."""
    target = target_of(build(), (1, 3, 5))
    rows = [prompt(30, 1), prompt(23, 2)]
    expected = []
    for row in rows:
        ids = torch.tensor(row)
        with torch.no_grad():
            logits = target.model(input_ids=ids[None], use_cache=False).logits[0]
        expected.append((logits, target.features(ids, [len(row)])))

    cache = RaggedCache(40)
    starts = torch.tensor([12, 5])  # the second row's prompt is shorter: padded behind, never seen
    tokens = torch.tensor([rows[0][:12], rows[1][:5] + [9] * 7])
    seen = [step(target, cache, tokens, torch.arange(12).expand(2, -1))]
    wrong = torch.full((2, 4), 11)  # rejected drafts: their entries must vanish
    step(target, cache, wrong, starts[:, None] + torch.arange(4))
    widths = [12]
    for width in (6, 1, 8, 3):
        positions = starts[:, None] + torch.arange(width)
        tokens = torch.stack([torch.tensor(row)[at] for row, at in zip(rows, positions, strict=True)])
        seen.append(step(target, cache, tokens, positions))
        widths.append(width)
        starts = starts + width
    for index, ends in enumerate((12, 5)):
        for kind in (0, 1):
            parts = [seen[0][kind][index, :ends], *(part[kind][index] for part in seen[1:])]
            torch.testing.assert_close(torch.cat(parts), expected[index][kind], rtol=1e-4, atol=1e-4)


def test_other_kinds_of_layers_are_refused_by_name():
    target = target_of(tiny_llama())
    target.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match=r"linear_attention.*serving engine"):
        target._masks(torch.ones(1, 1, 1, 1, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.int64))


@pytest.mark.parametrize("build", BUILDS)
def test_greedy_equals_the_models_own_generate(build):
    model = build()
    target = target_of(model)
    ids = prompt(11, 3)
    own = model.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False, pad_token_id=2)[0, 11:].tolist()
    (response,) = generate(target, [ids], Sampling(40))
    assert list(response.token_ids) == own
    assert response.finish == ("stop" if own[-1] in target.stop_ids else "length")


def test_rows_of_a_batch_answer_as_alone():
    target = target_of(tiny_llama())
    prompts = [prompt(length, length) for length in (3, 17, 9, 30, 1)]
    alone = [generate(target, [ids], Sampling(20))[0] for ids in prompts]
    assert generate(target, prompts, Sampling(20)) == alone


def test_a_row_ends_with_its_first_stop_token():
    """Rows end at different steps, leave the batch, and keep the stop token they generated."""
    target = target_of(tiny_llama())
    prompts = [prompt(length, length) for length in (4, 8, 12, 16, 20, 24)]
    free = [response.token_ids for response in generate(target, prompts, Sampling(24))]
    target.stop_ids = frozenset({free[0][3], free[1][7], free[2][0]})
    for response, ids in zip(generate(target, prompts, Sampling(24)), free, strict=True):
        stops = [index for index, token in enumerate(ids) if token in target.stop_ids]
        assert response.token_ids == (ids[: stops[0] + 1] if stops else ids)
        assert response.finish == ("stop" if stops else "length")
    assert generate(target, prompts[2:3], Sampling(1))[0].finish == "stop"


def test_samples_depend_on_seed_and_key_not_on_the_batch():
    target = target_of(tiny_llama())
    prompts = [prompt(length, length) for length in (5, 9, 13)]
    sampling = Sampling(16, temperature=1.0, seed=4)
    together = generate(target, prompts, sampling, row_keys=["a", "b", "c"])
    assert generate(target, prompts[1:2], sampling, row_keys=["b"]) == together[1:2]
    assert generate(target, prompts[1:2], sampling, row_keys=["c"]) != together[1:2]
    assert generate(target, prompts, Sampling(16, temperature=1.0, seed=5), row_keys=["a", "b", "c"]) != together


def test_draws_follow_temperature_and_nucleus():
    """Counts against the exact distribution, and nothing from outside the nucleus."""
    probabilities = torch.tensor([0.1, 0.5, 0.15, 0.25])
    draws = (torch.arange(1000) + 0.5) / 1000
    logits = probabilities.log().expand(1000, -1)
    counts = torch.bincount(_choose(logits, Sampling(1, temperature=1.0), draws), minlength=4) / 1000
    torch.testing.assert_close(counts, probabilities, atol=2e-3, rtol=0)
    warm = probabilities.sqrt() / probabilities.sqrt().sum()
    counts = torch.bincount(_choose(logits, Sampling(1, temperature=2.0), draws), minlength=4) / 1000
    torch.testing.assert_close(counts, warm, atol=2e-3, rtol=0)
    counts = torch.bincount(_choose(logits, Sampling(1, temperature=1.0, top_p=0.6), draws), minlength=4) / 1000
    torch.testing.assert_close(counts, torch.tensor([0, 2 / 3, 0, 1 / 3]), atol=2e-3, rtol=0)
    edges = _choose(logits[:2], Sampling(1, temperature=1.0, top_p=0.01), torch.tensor([0.0, 0.9999999]))
    assert edges.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("values", "name"),
    [({"max_new_tokens": 0}, "max_new_tokens"), ({"temperature": -1.0}, "temperature"), ({"top_p": 0.0}, "top_p")],
)
def test_impossible_sampling_is_refused(values, name):
    with pytest.raises(ValueError, match=name):
        Sampling(**{"max_new_tokens": 4, **values})


def test_no_prompts_and_empty_prompts():
    target = target_of(tiny_llama())
    assert generate(target, [], Sampling(4)) == []
    with pytest.raises(ValueError, match="prompt 1 has no tokens"):
        generate(target, [[5], []], Sampling(4))
