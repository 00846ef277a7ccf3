"""Rotary tables: float32 always, the scalings of transformers, anything else refused."""

from dataclasses import replace

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from drafter_helpers import SPEC
from draftmill.drafter.network import Drafter

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def test_phases_are_exact_far_out_even_after_a_cast_to_bf16():
    """Case 20: positions to 32767 against float64."""
    spec = replace(SPEC, head_dim=64, rope_theta=1e6, max_position_embeddings=32768)
    drafter = Drafter(spec).to(torch.bfloat16)
    positions = torch.arange(32768)
    exact = positions[:, None].double() * 1e6 ** (-torch.arange(0, 64, 2).double() / 64)
    cos, sin = drafter.rope(positions)
    assert cos.dtype == sin.dtype == torch.float32
    phase = torch.atan2(sin.double(), cos.double())[:, :32]
    error = torch.remainder(phase - exact + torch.pi, 2 * torch.pi) - torch.pi
    assert error.abs().max() < 1e-2
    assert drafter.inverse_frequencies.dtype == torch.float32


@pytest.mark.parametrize("scaling", [None, {"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0}, YARN])
def test_tables_equal_the_ones_engines_compute(scaling):
    """Case 22: against Qwen3's own rotary module, which the published inference code uses."""
    spec = replace(SPEC, rope_scaling=scaling)
    config = Qwen3Config(
        hidden_size=16, head_dim=6, num_attention_heads=4, max_position_embeddings=512,
        rope_parameters={"rope_theta": 1000.0, **(scaling or {"rope_type": "default"})},
    )  # fmt: skip
    positions = torch.arange(300)
    cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(1, dtype=torch.float32), positions[None])
    ours = Drafter(spec).rope(positions)
    torch.testing.assert_close(ours[0], cos[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours[1], sin[0], rtol=1e-5, atol=1e-5)


def test_an_unknown_scaling_is_refused_by_name():
    """Case 22."""
    with pytest.raises(ValueError, match=r"rope_type is 'foo'.*yarn"):
        Drafter(replace(SPEC, rope_scaling={"rope_type": "foo"}))
