"""Feature noise: its distribution, and that it depends on nothing but what it is added to."""

import torch

from drafter_helpers import make_documents, make_pack
from draftmill.config.schema import NoiseConfig
from draftmill.drafter.noise import add_noise
from draftmill.drafter.pack import to_device


def noise_of(documents, ids, config, seed=0, width=50):
    pack, _ = make_pack(documents, [0] * len(documents), ids)
    return add_noise(torch.zeros(pack.tokens, width), to_device(pack, "cpu"), config, seed)


def test_off_means_untouched():
    features = torch.randn(8, 4)
    pack = to_device(make_pack(make_documents([8]), [0])[0], "cpu")
    assert add_noise(features, pack, NoiseConfig(), 0) is features


def test_distributions():
    documents = make_documents([400])
    uniform = noise_of(documents, [3], NoiseConfig(kind="uniform", scale=0.5))
    assert uniform.abs().max() <= 0.5
    assert abs(uniform.mean()) < 0.01 and abs(uniform.var() - 0.25 / 3) < 0.005
    gaussian = noise_of(documents, [3], NoiseConfig(kind="gaussian", scale=0.5))
    assert abs(gaussian.mean()) < 0.02 and abs(gaussian.std() - 0.5) < 0.01
    assert abs(torch.corrcoef(gaussian.T)[0, 1]) < 0.15


def test_noise_does_not_depend_on_packing():
    documents = make_documents([20, 11])
    config = NoiseConfig(kind="gaussian", scale=1.0)
    together = noise_of(documents, [4, 9], config)
    apart = torch.cat([noise_of(documents[:1], [4], config), noise_of(documents[1:], [9], config)])
    assert torch.equal(together, apart)
    assert not torch.equal(noise_of(documents, [4, 9], config, seed=1), together)
