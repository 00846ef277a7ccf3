"""`auto` on a GPU: graph where it is equal, something slower with a reason where a mode is wrong.

make test-gpu
"""

import pytest
import torch
from test_eager_step import on, own_compilations, wide  # noqa: F401
from test_fixed_step import SHAPE, Arm, cases, config, own_stream  # noqa: F401

from drafter_helpers import ALL_LAYOUTS, make_vocabulary
from draftmill.drafter.objective import LossSums
from draftmill.train.choose import ChoosingStep
from draftmill.train.fixed_step import ComputeWeights, FixedStep
from draftmill.train.gradients import Alone
from draftmill.train.step import EagerStep

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def train(planted):
    """Twelve steps in `auto`, in bfloat16; `planted`: mode -> decay length of its loss, where 4.0 is right."""
    spec, settings = wide(ALL_LAYOUTS["mixed"]), config(dtype="bfloat16")
    arm = Arm(spec, settings, "compile")
    weights = ComputeWeights(arm.drafter, torch.bfloat16)
    arm.optimizer._compute = weights.flat
    arm.optimizer.refresh()
    vocabulary = on("cuda", make_vocabulary(spec))
    choices = []
    candidates = {
        mode: lambda mode=mode: FixedStep(
            weights, vocabulary, settings, planted.get(mode, 4.0), SHAPE, arm.gradients, captured=mode == "graph"
        )
        for mode in ("graph", "compile")
    }
    step = ChoosingStep(
        EagerStep(arm.drafter, vocabulary, settings, 4.0, arm.gradients), candidates, arm.gradients, "bfloat16",
        lambda choice, _: choices.append(choice),
    )  # fmt: skip
    packs = [(pack, features.cuda()) for pack, features in cases(spec, 6)]
    for number in range(12):
        total = LossSums.zero(spec.block_size - 1, torch.device("cuda"))
        for micro in range(2):
            total = total.plus(step(*packs[(2 * number + micro) % len(packs)]))
        total = arm.gradients.exchange(total, Alone())
        assert bool(arm.optimizer.update(total.numerator, total.denominator, 1e-3).applied)
    (choice,) = choices
    return choice


def test_graph_is_chosen():
    choice = train({})
    assert (choice.mode, choice.why) == ("graph", "equal to eager")


def test_a_planted_error_falls_back_and_says_why():
    choice = train({"graph": 5.0})
    assert choice.mode == "compile" and "graph: pack" in choice.why and "off by" in choice.why
    choice = train({"graph": 5.0, "compile": 5.0})
    assert choice.mode == "eager" and "compile: pack" in choice.why
