"""Are the acceptance numbers those a person would count, and is a changed text always noticed?"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from decode_helpers import PROMPTS, SPEC, make_target
from drafter_helpers import make_drafter
from draftmill.evaluate.acceptance import bootstrap_interval, measure
from draftmill.evaluate.decode import draft_and_verify, plain_greedy
from draftmill.evaluate.lossless import compare_with_plain, first_difference
from draftmill.evaluate.report import evaluate
from draftmill.evaluate.responses import Response, Round


def response(*rounds: tuple[int, int, int], finish="length") -> Response:
    """Rounds as (drafted, accepted, produced)."""
    entries, start = [], 10
    for drafted, accepted, produced in rounds:
        entries.append(Round(start, (0,) * drafted, accepted, produced))
        start += produced
    return Response(10, (0,) * (start - 9), finish, tuple(entries))


# block size 4; the second response stops inside an accepted block, the third at its bonus token
COUNTED = [
    response((3, 3, 4), (3, 0, 1), (3, 1, 2), (1, 1, 1)),  # the last round is cut by the limit
    response((3, 2, 3), (3, 3, 2), finish="stop"),  # slot 2 was the stop token
    response((3, 1, 2), finish="stop"),
]


def test_tau_is_the_mean_of_means_and_pooled_the_mean_of_rounds():
    found = measure(COUNTED, block_size=4)
    assert found.tau == pytest.approx((8 / 4 + 5 / 2 + 2 / 1) / 3)
    assert found.pooled == pytest.approx((8 + 5 + 2) / 7)
    assert (found.responses, found.rounds, found.tokens) == (3, 7, 15)
    assert found.histogram == (0, 2, 3, 1, 1)


def test_slots_are_counted_where_the_text_had_room_for_them():
    """By hand. Rounds as (accepted of scored): 3/3, 0/3, 1/3, 1/1, 2/3, 2/2 (cut at the stop), 1/2 (stop)."""
    found = measure(COUNTED, block_size=4)
    assert found.slot_scored == (7, 6, 4)
    assert found.slot_accepted == (pytest.approx(6 / 7), pytest.approx(3 / 6), pytest.approx(1 / 4))
    # slot 2 reached after an accepted slot 1: 3/3, 1/3, 2/3, 2/2, 1/2; slot 3 after slot 2: 3/3, 2/3
    assert found.slot_conditional == (pytest.approx(6 / 7), pytest.approx(3 / 5), pytest.approx(1 / 2))
    assert found.full_blocks == pytest.approx(1 / 4)


def test_responses_without_a_round_are_counted_and_excluded():
    empty = [Response(3, (1,), "stop"), Response(3, (1,), "stop"), Response(3, (1,), "length")]
    found = measure(COUNTED + empty, block_size=4)
    assert found.tau == measure(COUNTED, block_size=4).tau
    assert found.excluded == {"stopped at the first token": 2, "only one token was asked for": 1}
    nothing = measure(empty, block_size=4)
    assert (nothing.tau, nothing.tau_interval, nothing.pooled, nothing.full_blocks) == (None, None, None, None)
    assert nothing.slot_accepted == (None, None, None)


def test_bootstrap_equals_every_resample_written_out():
    values = np.array([1.0, 1.5, 1.7, 2.6, 3.1])
    everything = [np.mean(chosen) for chosen in itertools.product(values, repeat=5)]
    expected = np.quantile(everything, [0.025, 0.975])
    assert bootstrap_interval(values, np.ones(5)) == pytest.approx(expected, abs=0.05)
    sums, counts = np.array([3.0, 10.0, 4.0, 9.0]), np.array([3.0, 4.0, 2.0, 8.0])
    pairs = list(itertools.product(range(4), repeat=4))
    expected = np.quantile([sums[list(p)].sum() / counts[list(p)].sum() for p in pairs], [0.025, 0.975])
    assert bootstrap_interval(sums, counts) == pytest.approx(expected, abs=0.06)


def test_bootstrap_is_repeatable_and_does_not_depend_on_its_pieces(monkeypatch):
    values = np.random.default_rng(3).random(50)
    assert bootstrap_interval(values, np.ones(50)) == bootstrap_interval(values, np.ones(50))
    assert bootstrap_interval(values, np.ones(50), seed=1) != bootstrap_interval(values, np.ones(50))
    assert bootstrap_interval(np.array([1.25]), np.ones(1)) == (1.25, 1.25)
    low, high = bootstrap_interval(values, np.ones(50))
    spread = 1.96 * values.std() / np.sqrt(50)  # the normal approximation
    assert (low, high) == pytest.approx((values.mean() - spread, values.mean() + spread), abs=0.01)


# ---- lossless ----


@pytest.fixture(scope="module")
def target():
    return make_target("qwen3")


@pytest.fixture(scope="module")
def plain(target):
    return plain_greedy(target, PROMPTS, 12)


def test_equal_texts_are_identical(target, plain):
    drafted = draft_and_verify(target, make_drafter(SPEC), PROMPTS, 12)
    found = compare_with_plain(target, PROMPTS, plain, drafted)
    assert (found.identical, found.ties, found.violated, found.epsilon) == (len(PROMPTS), 0, 0, 0.0)
    assert found.holds


def test_a_difference_is_a_tie_only_within_epsilon(target, plain):
    """The gap comes from a forward pass without cache, written here."""
    tokens = plain[1].tokens
    logits = target.model(torch.tensor([[*PROMPTS[1], *tokens[:5]]])).logits[0, -1]
    best, second = logits.topk(2).indices.tolist()
    assert best == tokens[5]
    gap = float(logits[best] - logits[second])
    changed = [*plain]
    changed[1] = replace(plain[1], tokens=(*tokens[:5], second, *tokens[6:]))
    for epsilon, verdict in ((gap * 1.01, "tie"), (gap * 0.99, "violated"), (None, "violated")):
        found = compare_with_plain(target, PROMPTS, plain, changed, epsilon=epsilon)
        assert found.identical == len(PROMPTS) - 1
        (difference,) = found.differences
        assert (difference.prompt, difference.position, difference.plain, difference.drafted) == (1, 5, best, second)
        assert difference.gap == pytest.approx(gap, abs=1e-4)
        assert difference.verdict == verdict
        assert found.holds == (verdict == "tie")


def test_float32_knows_no_ties(target, plain):
    changed = [replace(plain[0], tokens=(plain[0].tokens[0] ^ 1, *plain[0].tokens[1:])), *plain[1:]]
    assert not compare_with_plain(target, PROMPTS, plain, changed).holds


def test_a_text_that_ends_early_is_violated(target, plain):
    changed = [replace(plain[0], tokens=plain[0].tokens[:-1]), *plain[1:]]
    found = compare_with_plain(target, PROMPTS, plain, changed, epsilon=1e9)
    assert found.violated == 1
    assert found.differences[0].position == len(plain[0].tokens) - 1
    assert found.differences[0].drafted is None


def test_first_difference():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


# ---- the report ----


def test_report_is_json_and_a_table(target, plain):
    seen = []
    report = evaluate(target, make_drafter(SPEC), PROMPTS, max_new_tokens=12, plain=plain, on_progress=seen.append)
    values = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert values["acceptance"]["tau"] == pytest.approx(report.acceptance.tau)
    assert values["lossless"]["holds"] is True
    assert values["generated_tokens"] == sum(len(answer.tokens) for answer in plain)
    assert values["dtype"] == "float32"
    table = report.table()
    for part in ("tau ", "pooled", "slot ", "if reached", "4 of 4 texts equal plain greedy decoding"):
        assert part in table
    assert "/s" not in table, "acceptance reports make no claim of speed"
    assert seen[-1].done == len(PROMPTS)


def test_report_names_a_violation(target, plain):
    wrong = [replace(plain[0], tokens=(*plain[0].tokens[:2], 0, 0)), *plain[1:]]
    report = evaluate(target, make_drafter(SPEC), PROMPTS, max_new_tokens=12, plain=wrong)
    assert "VIOLATED in 1, first: prompt 0, token 2" in report.table()
    unchecked = evaluate(target, make_drafter(SPEC), PROMPTS, max_new_tokens=12, check_lossless=False)
    assert unchecked.to_dict()["lossless"] is None
    with pytest.raises(ValueError, match="no prompts"):
        evaluate(target, make_drafter(SPEC), [], max_new_tokens=12)
