"""The optimizer step: against a hand-written AdamW, and that a bad step moves nothing."""

import math

import pytest
import torch
from torch import nn

from draftmill.config.schema import TrainConfig
from draftmill.drafter.objective import LossSums
from draftmill.train.gradients import FlatGradients
from draftmill.train.optimizer import Optimizer
from draftmill.train.schedule import learning_rate

CONFIG = TrainConfig(steps=10, lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.05, clip=0.7)


def module():
    torch.manual_seed(0)
    made = nn.Module()
    made.matrix = nn.Parameter(torch.randn(3, 2))
    made.norm = nn.Parameter(torch.ones(4))
    return made


def optimizer_of(made):
    return Optimizer(made, FlatGradients(made, 1), CONFIG)


def test_one_exchange_adds_up_gradients_and_sums():
    """Case 41: two drafters with unequal weights give the gradient and the sums of both together."""
    drafters = module(), module()
    flats = [FlatGradients(drafter, 2) for drafter in drafters]
    for value, drafter in zip((1.0, 5.0), drafters, strict=True):
        for p in drafter.parameters():
            p.grad.add_(value)
    sums = [
        LossSums(torch.tensor(n), torch.tensor(d), *(torch.tensor([n, d]) + i for i in range(4)))
        for n, d in ((2.0, 1.0), (30.0, 10.0))
    ]
    seen = []

    class Collect:
        def sum(self, flat):
            seen.append(flat.clone())

    flats[1].exchange(sums[1], Collect())

    class Add:
        def sum(self, flat):
            flat.add_(seen[0])

    total = flats[0].exchange(sums[0], Add())
    assert (float(total.numerator), float(total.denominator)) == (32.0, 11.0)
    assert total.counted.tolist() == [32.0, 11.0] and total.cross_entropy.tolist() == [38.0, 17.0]
    assert all(torch.equal(p.grad, torch.full_like(p, 6.0)) for p in drafters[0].parameters())


def test_updates_equal_adamw_by_hand():
    """Gradients are sums: divided by the denominator, clipped by their joint norm; norms are not decayed."""
    ours = module()
    gradients = FlatGradients(ours, 1)
    optimizer = Optimizer(ours, gradients, CONFIG)
    weights = {n: p.detach().double().clone() for n, p in ours.named_parameters()}
    first, second = ({n: torch.zeros_like(w) for n, w in weights.items()} for _ in range(2))
    for t in range(1, 4):
        gradient = {n: torch.randn(w.shape, dtype=torch.float64) * 9 for n, w in weights.items()}
        gradients.begin()
        assert all(not p.grad.any() for p in ours.parameters())
        for n, p in ours.named_parameters():
            p.grad.add_(gradient[n].float())
        update = optimizer.update(torch.tensor(5.0), torch.tensor(3.0), 0.1 / t)
        norm = math.sqrt(sum(float((g / 3).pow(2).sum()) for g in gradient.values()))
        assert float(update.gradient_norm) == pytest.approx(norm, rel=1e-5)
        assert bool(update.applied) and bool(update.finite)
        for n, w in weights.items():
            g = gradient[n] / 3 * min(1, 0.7 / norm)
            first[n] = 0.8 * first[n] + 0.2 * g
            second[n] = 0.9 * second[n] + 0.1 * g * g
            w *= 1 - 0.1 / t * (0.05 if n == "matrix" else 0)
            w -= 0.1 / t * (first[n] / (1 - 0.8**t)) / ((second[n] / (1 - 0.9**t)).sqrt() + 1e-6)
            torch.testing.assert_close(dict(ours.named_parameters())[n].detach().double(), w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("gradient", "numerator", "denominator", "finite"),
    [
        (float("nan"), 1.0, 1.0, False),
        (float("inf"), 1.0, 1.0, False),
        (1.0, float("nan"), 1.0, False),
        (0.0, 0.0, 0.0, True),
    ],
)
def test_a_step_that_is_not_finite_or_has_no_weight_moves_nothing(gradient, numerator, denominator, finite):
    """Cases 34, 42: weights, moments and step counters stay, and the next good step is as if it had not been."""
    touched, clean = module(), module()
    optimizers = optimizer_of(touched), optimizer_of(clean)

    def good(made, optimizer):
        for p in made.parameters():
            p.grad.fill_(0.5)
        return optimizer.update(torch.tensor(1.0), torch.tensor(2.0), 0.1)

    good(touched, optimizers[0]), good(clean, optimizers[1])
    next(touched.parameters()).grad.view(-1)[0] = gradient
    update = optimizers[0].update(torch.tensor(numerator), torch.tensor(denominator), 0.1)
    assert not update.applied and bool(update.finite) == finite
    good(touched, optimizers[0]), good(clean, optimizers[1])
    for a, b in zip(touched.parameters(), clean.parameters(), strict=True):
        assert torch.equal(a, b)
    states = optimizers[0].state(), optimizers[1].state()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])


def test_state_survives_a_round_trip():
    ours, other = module(), module()
    optimizer = optimizer_of(ours)
    for p in ours.parameters():
        p.grad.fill_(0.3)
    optimizer.update(torch.tensor(1.0), torch.tensor(1.0), 0.1)
    loaded = optimizer_of(other)
    loaded.load(optimizer.state())
    assert {n: v.tolist() for n, v in loaded.state().items()} == {n: v.tolist() for n, v in optimizer.state().items()}
    with pytest.raises(ValueError, match="does not fit"):
        loaded.load({"step.matrix": torch.zeros(())})


def test_schedules_by_hand():
    cosine = TrainConfig(steps=11, lr=2.0, warmup_ratio=0.2, min_lr_ratio=0.1)
    rates = [learning_rate(s, 11, cosine) for s in range(11)]
    assert rates[:3] == pytest.approx([1.0, 2.0, 2.0])
    assert rates[6] == pytest.approx(0.1 * 2 + 0.9 * 2 * 0.5)  # half way from step 2 to step 10
    assert rates[10] == pytest.approx(0.2)
    wsd = TrainConfig(steps=10, lr=1.0, schedule="wsd", warmup_ratio=0.2, decay_ratio=0.4)
    assert [learning_rate(s, 10, wsd) for s in range(10)] == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0])
    with pytest.raises(ValueError, match="outside a run of 10 steps"):
        learning_rate(10, 10, wsd)
