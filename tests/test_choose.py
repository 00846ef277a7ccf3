"""`auto`: equal candidates are taken, unequal or failing ones passed over with a reason, by all drafters alike."""

import pytest
import torch
from torch import nn

from drafter_helpers import make_documents, make_pack
from draftmill.drafter.objective import LossSums
from draftmill.train.choose import CHECKS, Choice, ChoosingStep
from draftmill.train.gradients import Alone, FlatGradients

PACK, FEATURES = make_pack(make_documents([12]), [2])


class Rank:
    """A drafter of one parameter whose eager gradient is the number of its calls so far."""

    def __init__(self, **candidates):
        self.module = nn.Module()
        self.module.weight = nn.Parameter(torch.zeros(4, 4))
        self.gradients = FlatGradients(self.module, 2)
        self.calls, self.choices = [], []
        makers = {mode: lambda mode=mode, wrong=wrong: self.make(mode, wrong) for mode, wrong in candidates.items()}
        self.step = ChoosingStep(
            self.make("eager", 0.0), makers, self.gradients, "float32",
            lambda choice, step: self.choices.append(choice),
        )  # fmt: skip

    def make(self, mode, wrong):
        if wrong == "cannot be made":
            raise RuntimeError("no kernel for this device\nand a long story")

        def step(pack, features):
            self.calls.append(mode)
            self.gradients.begin()
            self.gradients.gradient.add_(1.0 + wrong)
            return LossSums.zero(2, torch.device("cpu"))

        return step


def train(ranks, steps, accumulation=2):
    """Optimizer steps in lockstep; what each drafter's gradient was at each exchange."""
    seen = []
    for _ in range(steps):
        for rank in ranks:
            for _ in range(accumulation):
                sums = rank.step(PACK, FEATURES)
        flats = [rank.gradients for rank in ranks]
        if len(ranks) == 1:
            flats[0].exchange(sums, Alone())
        else:
            exchange_together(flats, sums)
        seen.append([float(flat.gradient[0]) for flat in flats])
        for flat in flats:
            flat.stale = True
    return seen


def exchange_together(flats, sums):
    """An all-reduce without processes: everyone's numbers first, then their sum for everyone."""
    collected = []

    class Collect:
        def sum(self, flat):
            collected.append(flat.clone())

    class Total:
        def sum(self, flat):
            flat.copy_(sum(collected))

    gradients = [flat.gradient.clone() for flat in flats]
    for flat in flats:
        flat.exchange(sums, Collect())
    for flat, gradient in zip(flats, gradients, strict=True):
        flat.gradient.copy_(gradient)
        flat.exchange(sums, Total())


def test_an_equal_candidate_is_chosen_after_enough_packs():
    rank = Rank(graph=0.0, compile=0.0)
    seen = train([rank], 6)
    (choice,) = rank.choices
    assert choice == Choice("graph", "equal to eager")
    assert rank.calls[: 2 * CHECKS] == ["eager", "graph"] * CHECKS and "compile" not in rank.calls
    assert rank.calls[-4:] == ["graph"] * 4
    assert [value[0] for value in seen] == [2.0] * 6  # checking never shows in the gradients


def test_an_unequal_candidate_is_passed_over_and_named():
    rank = Rank(graph=0.1, compile=0.0)
    seen = train([rank], 8)
    (choice,) = rank.choices
    assert choice.mode == "compile" and "graph: pack 0: gradient off by 0.1, at most 0.002" in choice.why
    assert [value[0] for value in seen] == [2.0] * 8


def test_where_nothing_is_equal_or_can_be_made_the_step_stays_eager():
    rank = Rank(graph="cannot be made", compile=float("nan"))
    seen = train([rank], 8)
    (choice,) = rank.choices
    assert choice.mode == "eager"
    assert "graph: RuntimeError: no kernel for this device;" in choice.why and "off by nan" in choice.why
    assert rank.calls[-4:] == ["eager"] * 4 and [value[0] for value in seen] == [2.0] * 8


def test_one_drafters_doubt_holds_for_all_at_the_same_step():
    ranks = [Rank(graph=0.0, compile=0.0), Rank(graph=0.5, compile=0.0)]
    train(ranks, 8)
    assert [rank.choices[0].mode for rank in ranks] == ["compile", "compile"]
    assert "another drafter found it unequal" in ranks[0].choices[0].why
    turn = [rank.calls.index("compile") for rank in ranks]
    assert turn[0] == turn[1]


def test_the_choice_is_kept(tmp_path):
    assert Choice.read(tmp_path) is None
    Choice("graph", "equal to eager").write(tmp_path)
    assert Choice.read(tmp_path) == Choice("graph", "equal to eager")
    assert [path.name for path in tmp_path.iterdir()] == ["step-mode.json"]


@pytest.mark.parametrize("accumulation", [1, 3])
def test_gradients_of_earlier_micro_steps_stay(accumulation):
    rank = Rank(graph=0.0)
    assert [value[0] for value in train([rank], 4, accumulation)] == [float(accumulation)] * 4
