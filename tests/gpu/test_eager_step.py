"""The eager step on a GPU: equal to the CPU's dense path, free of host synchronisation, flat in memory.

make test-gpu
"""

from dataclasses import replace

import pytest
import torch

from drafter_helpers import ALL_LAYOUTS, make_documents, make_drafter, make_pack, make_vocabulary
from draftmill.config.schema import NoiseConfig, TrainConfig
from draftmill.drafter import counter_hash
from draftmill.drafter.anchors import draw_anchors
from draftmill.drafter.noise import add_noise
from draftmill.drafter.objective import LossSums
from draftmill.drafter.pack import to_device
from draftmill.drafter.vocabulary import FrozenVocabulary
from draftmill.train.gradients import Alone, FlatGradients
from draftmill.train.optimizer import Optimizer
from draftmill.train.step import EagerStep

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

CONFIG = TrainConfig(steps=10, lr=1e-3, dtype="float32")


@pytest.fixture(autouse=True)
def own_compilations():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture(autouse=True)
def exact_products():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def on(device, vocabulary):
    return FrozenVocabulary(vocabulary.embedding.to(device), vocabulary.head.to(device))


def random_case(seed, spec, most=700):
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, 5, (), generator=generator))
    lengths = torch.randint(8, most, (count,), generator=generator).tolist()
    documents = make_documents(lengths, seed=seed, spec=spec)
    eligible = [int((d[1][1:] & d[1][:-1]).sum()) for d in documents]
    anchors = [max(1, int(e * float(torch.rand((), generator=generator)) / 4)) for e in eligible]
    return make_pack(documents, anchors, ids=[seed * 10 + i for i in range(count)], epoch=seed % 3)


def wide(spec):
    """Head widths and window as flex_attention's kernels take them."""
    return replace(
        spec, hidden_size=64, head_dim=16, vocab_size=128, mask_token_id=127, block_size=8,
        sliding_window=None if spec.sliding_window is None else 48,
    )  # fmt: skip


def test_draws_are_the_same_on_both_devices():
    spec = wide(ALL_LAYOUTS["full"])
    for seed in range(20):
        pack, features = random_case(seed, spec)
        packs = to_device(pack, "cpu"), to_device(pack, "cuda")
        assert torch.equal(draw_anchors(packs[0], 3), draw_anchors(packs[1], 3).cpu())
        noise = NoiseConfig(kind="uniform", scale=0.5)
        drawn = add_noise(features, packs[0], noise, 3), add_noise(features.cuda(), packs[1], noise, 3).cpu()
        torch.testing.assert_close(drawn[0], drawn[1], rtol=0, atol=1e-6)
    values = torch.arange(0, 2**32, 99_991)
    assert torch.equal(counter_hash.mix(values), counter_hash.mix(values.cuda()).cpu())


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_loss_and_gradients_equal_the_dense_path(layout):
    """Case 59: 12 packs of changing documents, lengths that are no multiple of 128."""
    spec = wide(ALL_LAYOUTS[layout])
    drafters = make_drafter(spec, std=0.1), make_drafter(spec, std=0.1).cuda()
    vocabulary = make_vocabulary(spec)
    flats = [FlatGradients(d, spec.block_size - 1) for d in drafters]
    steps = [
        EagerStep(d, on(d.fc.weight.device, vocabulary), CONFIG, 4.0, flat)
        for d, flat in zip(drafters, flats, strict=True)
    ]
    for seed in range(12):
        pack, features = random_case(seed, spec)
        sums = []
        for drafter, step, flat in zip(drafters, steps, flats, strict=True):
            flat.stale = True
            device = drafter.fc.weight.device
            sums.append(step(pack, features.to(device)))
        torch.testing.assert_close(sums[0].numerator, sums[1].numerator.cpu(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(sums[0].denominator, sums[1].denominator.cpu(), rtol=1e-5, atol=1e-5)
        for (name, ours), theirs in zip(drafters[0].named_parameters(), drafters[1].parameters(), strict=True):
            error = float((ours.grad - theirs.grad.cpu()).norm() / ours.grad.norm())
            assert error < 2e-3, f"{layout}, pack {seed}: gradient of {name} differs by {error:.2g}"


def test_no_host_synchronisation_inside_a_micro_step_and_an_update():
    """Case 79."""
    spec = wide(ALL_LAYOUTS["mixed"])
    drafter = make_drafter(spec, std=0.1).cuda()
    gradients = FlatGradients(drafter, spec.block_size - 1)
    step = EagerStep(drafter, on("cuda", make_vocabulary(spec)), CONFIG, 4.0, gradients)
    optimizer = Optimizer(drafter, gradients, CONFIG)
    cases = [random_case(seed, spec) for seed in range(12)]
    packs = [(pack, features.cuda()) for pack, features in cases]
    for i, (pack, features) in enumerate(packs):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if i >= 6 else "default")  # the first ones compile
        try:
            total = LossSums.zero(spec.block_size - 1, torch.device("cuda")).plus(step(pack, features))
            total = gradients.exchange(total, Alone())
            optimizer.update(total.numerator, total.denominator, 1e-3)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_memory_is_flat_and_nothing_recompiles_over_2000_changing_shapes():
    """Shapes, documents and anchors change in every step; compiled code does not."""
    spec = wide(ALL_LAYOUTS["mixed"])
    drafter = make_drafter(spec, std=0.1).cuda()
    config = TrainConfig(steps=10, lr=1e-3, dtype="bfloat16")
    gradients = FlatGradients(drafter, spec.block_size - 1)
    step = EagerStep(drafter, on("cuda", make_vocabulary(spec)), config, 4.0, gradients)
    optimizer = Optimizer(drafter, gradients, config)
    seen, compiled = {}, {}
    for index in range(2000):
        pack, features = random_case(index, spec, most=400)
        sums = step(pack, features.cuda().bfloat16())
        sums = gradients.exchange(sums, Alone())
        update = optimizer.update(sums.numerator, sums.denominator, 1e-4)
        if index in (199, 999, 1999):
            torch.cuda.synchronize()
            assert bool(update.applied)
            seen[index] = torch.cuda.memory_allocated()
            compiled[index] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    print("allocated bytes", seen, "compiled graphs", compiled, "peak", torch.cuda.max_memory_allocated())
    assert abs(seen[1999] - seen[199]) < 4 * 2**20
    assert compiled[1999] == compiled[199] <= 8
