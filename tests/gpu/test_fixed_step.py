"""The compiled and captured steps on a GPU: equal to the eager one and to float64 over 30 changing packs.

make test-gpu
"""

import pytest
import torch
from test_eager_step import on, own_compilations, random_case, wide  # noqa: F401

from drafter_helpers import ALL_LAYOUTS, make_documents, make_drafter, make_pack, make_vocabulary
from draftmill.config.schema import LossConfig, TrainConfig
from draftmill.drafter.objective import LossSums
from draftmill.drafter.pack import PackShape
from draftmill.train.fixed_step import ComputeWeights, FixedStep
from draftmill.train.gradients import Alone, FlatGradients
from draftmill.train.optimizer import Optimizer
from draftmill.train.step import EagerStep

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SHAPE = PackShape(rows=1024, anchors=256, documents=40)


@pytest.fixture(autouse=True)
def own_stream():
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


@pytest.fixture(autouse=True)
def several_arms_in_one_process(monkeypatch):
    """Each dtype and each arm compiles flex_attention of its own; a run has one."""
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 64)


def config(**changes):
    return TrainConfig(**{"steps": 10, "lr": 1e-3, "dtype": "float32", **changes})


def cases(spec, count):
    """Changing documents and lengths; anchors at position 0; one pack with a single anchor; one that is full."""
    for seed in range(count):
        pack, features = random_case(seed, spec, most=250)
        yield pack, features
    bare = make_documents([300], seed=77, spec=spec, prompt=0)  # position 0 is eligible, and all are drawn
    yield make_pack(bare, [int((bare[0][1][1:] & bare[0][1][:-1]).sum())][:1] and [200], ids=[901])
    yield make_pack(make_documents([9], seed=78, spec=spec), [1], ids=[902])


class Arm:
    """A drafter with one way of stepping."""

    def __init__(self, spec, train, mode):
        self.drafter = make_drafter(spec, std=0.1).cuda()
        self.gradients = FlatGradients(self.drafter, spec.block_size - 1)
        vocabulary = on("cuda", make_vocabulary(spec))
        if mode == "eager":
            self.optimizer = Optimizer(self.drafter, self.gradients, train)
            self.step = EagerStep(self.drafter, vocabulary, train, 4.0, self.gradients)
            return
        weights = ComputeWeights(self.drafter, getattr(torch, train.dtype))
        self.optimizer = Optimizer(self.drafter, self.gradients, train, weights.flat)
        self.step = FixedStep(weights, vocabulary, train, 4.0, SHAPE, self.gradients, captured=mode == "graph")


@pytest.mark.parametrize("mode", ["compile", "graph"])
@pytest.mark.parametrize("layout", ["full", "mixed", "sliding both ways"])
@pytest.mark.parametrize("kind", ["decay", "dpace"])
def test_sums_and_gradients_equal_the_eager_step(layout, mode, kind):
    """Case 59: in float32, over packs that share one compilation and one graph."""
    spec, train = wide(ALL_LAYOUTS[layout]), config(loss=LossConfig(kind=kind))
    eager, fixed = Arm(spec, train, "eager"), Arm(spec, train, mode)
    for number, (pack, features) in enumerate(cases(spec, 12)):
        found = []
        for arm in (eager, fixed):
            arm.gradients.stale = True
            found.append(arm.step(pack, features.cuda()))
        for name in LossSums.__dataclass_fields__:
            ours, theirs = (getattr(sums, name) for sums in found)
            torch.testing.assert_close(theirs, ours, rtol=2e-4, atol=2e-4, msg=f"pack {number}, {name}")
        a, b = eager.gradients.gradient, fixed.gradients.gradient
        assert float((a - b).norm() / a.norm()) < 2e-3, f"pack {number}"
        assert torch.isfinite(b).all()


@pytest.mark.parametrize("mode", ["compile", "graph"])
def test_bfloat16_is_as_near_to_float32_as_the_eager_step(mode):
    spec = wide(ALL_LAYOUTS["mixed"])
    exact = Arm(spec, config(), "eager")
    eager, fixed = (Arm(spec, config(dtype="bfloat16"), name) for name in ("eager", mode))
    errors = {"eager": [], mode: []}
    for pack, features in cases(spec, 30):
        for arm in (exact, eager, fixed):
            arm.gradients.stale = True
            arm.step(pack, features.cuda())
        truth = exact.gradients.gradient
        for name, arm in (("eager", eager), (mode, fixed)):
            errors[name].append(float((arm.gradients.gradient - truth).norm() / truth.norm()))
    print({name: (sorted(found)[len(found) // 2], max(found)) for name, found in errors.items()})
    assert max(errors[mode]) < 1.3 * max(errors["eager"]) < 0.1


@pytest.mark.parametrize("mode", ["compile", "graph"])
def test_training_equals_eager_training_with_accumulation(mode):
    """Steps of three packs, then updates: weights stay together, and a step that is not finite moves nothing."""
    spec, train = wide(ALL_LAYOUTS["mixed"]), config(lr=1e-3, weight_decay=0.1)
    arms = Arm(spec, train, "eager"), Arm(spec, train, mode)
    packs = [(pack, features.cuda()) for pack, features in cases(spec, 10)]
    for step in range(8):
        for arm in arms:
            total = LossSums.zero(spec.block_size - 1, torch.device("cuda"))
            for micro in range(3):
                total = total.plus(arm.step(*packs[(3 * step + micro) % len(packs)]))
            if step == 4:
                arm.gradients.gradient[7] = float("nan")
            total = arm.gradients.exchange(total, Alone())
            update = arm.optimizer.update(total.numerator, total.denominator, 1e-3 / (1 + step))
            assert bool(update.applied) == (step != 4)
            if step == 1 and mode == "graph" and arm is arms[1]:
                arm.optimizer.capture()
    for (name, ours), theirs in zip(arms[0].drafter.named_parameters(), arms[1].drafter.parameters(), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4, msg=name)


def test_graph_steps_never_wait_nor_allocate():
    """Case 79."""
    spec, train = wide(ALL_LAYOUTS["mixed"]), config(dtype="bfloat16")
    arm = Arm(spec, train, "graph")
    packs = [(pack, features.cuda()) for pack, features in cases(spec, 10)]
    allocated = []
    for number in range(200):
        if number == 3:
            arm.optimizer.capture()
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
        torch.cuda.set_sync_debug_mode("error" if number >= 6 else "default")
        try:
            for micro in range(2):
                total = LossSums.zero(spec.block_size - 1, torch.device("cuda"))
                total = total.plus(arm.step(*packs[(2 * number + micro) % len(packs)]))
            total = arm.gradients.exchange(total, Alone())
            arm.optimizer.update(total.numerator, total.denominator, 1e-3)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert allocated[199] == allocated[20]
