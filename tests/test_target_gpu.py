"""Do features, cached steps and generation hold on a GPU, in both dtypes? Skipped where there is none."""

from __future__ import annotations

import pytest
import torch

from draftmill.target.answers import Sampling
from draftmill.target.cache import RaggedCache
from draftmill.target.generate import generate
from draftmill.target.model import Target
from tiny_models import HIDDEN, VOCAB, save_tiny, tiny_llama, tiny_mistral, tiny_qwen3

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen3, tiny_mistral])
def test_target_on_a_gpu(tmp_path, build, dtype):
    target = Target.load(save_tiny(tmp_path, build()), dtype, "auto", (1, 3, 5))
    assert target.device.type == "cuda"
    assert target.packs
    ids = torch.randint(4, VOCAB, (50,), generator=torch.Generator().manual_seed(1))
    features = target.features(ids, [50])  # ids may come from the host
    with torch.no_grad():
        output = target.model(input_ids=ids[None].cuda(), use_cache=False, output_hidden_states=True)
    assert torch.equal(features[:, :HIDDEN], output.hidden_states[2][0])
    assert torch.equal(target.model.model.norm(features[:, 2 * HIDDEN :]), output.hidden_states[-1][0])

    cache, positions = RaggedCache(60), torch.arange(50, device="cuda")[None]
    cache.place(positions, [0])
    logits, again = target.forward(ids[None].cuda(), positions, cache, cache.visible())
    tolerance = {"rtol": 1e-3, "atol": 1e-3} if dtype == "float32" else {"rtol": 5e-2, "atol": 5e-2}
    torch.testing.assert_close(logits, output.logits, **tolerance)
    torch.testing.assert_close(again[0], features, **tolerance)

    if dtype == "float32":
        own = target.model.generate(ids[None, :11].cuda(), max_new_tokens=30, do_sample=False, pad_token_id=2)
        responses = generate(target, [ids[:n].tolist() for n in (11, 30, 3)], Sampling(30))
        assert list(responses[0].token_ids) == own[0, 11:].tolist()
    assert len(generate(target, [[5, 6], [7]], Sampling(20, temperature=1.0, top_p=0.9))) == 2
