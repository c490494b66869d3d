"""The phimoe config reader: the published model, its router and its longrope, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from asbuilt.cost import active_parameters, total_parameters
from asbuilt.errors import InputError
from asbuilt.families import read_config, write_config
from asbuilt.spec import Attention, LongRope, Router, walk

LISTS = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64, "short_mscale": 1.25, "long_mscale": 1.25}
ROPE: dict[str, Any] = {"type": "longrope", **LISTS, "original_max_position_embeddings": 4096}
# as published, but for the lists of 64 numbers
PUBLISHED: dict[str, Any] = {
    "architectures": ["PhiMoEForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 32000,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "input_jitter_noise": 0.01,
    "intermediate_size": 6400,
    "lm_head_bias": True,
    "max_position_embeddings": 131072,
    "model_type": "phimoe",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 16,
    "original_max_position_embeddings": 4096,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": ROPE,
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.0,
    "router_jitter_noise": 0.01,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 32064,
}


def scaling_of(**changes: object) -> LongRope:
    spec = read_config(PUBLISHED | {"rope_scaling": ROPE | changes}, "x").spec
    attention = next(part for _, part in walk(spec) if isinstance(part, Attention))
    scaling = getattr(attention.positions, "scaling", None)
    assert isinstance(scaling, LongRope)
    return scaling


def test_phi_3_5_moe_as_published() -> None:
    """Microsoft's model card: 16 experts of 3.8B, 41.9B parameters in all, 6.6B of them active."""
    reading = read_config(PUBLISHED, "x")
    attention = 4096 * 128 * (2 * 32 + 2 * 8) + 128 * (32 + 2 * 8) + 4096
    expert, norm = 3 * 4096 * 6400, 2 * 4096
    block = attention + 16 * expert + 16 * 4096 + 2 * norm
    total = 2 * 32064 * 4096 + 32064 + 32 * block + norm
    assert total_parameters(reading.spec) == total == 41_873_153_344
    assert active_parameters(reading.spec) == total - 32 * 14 * expert == 6_640_999_744
    router = next(part for _, part in walk(reading.spec) if isinstance(part, Router))
    assert (router.nearness, router.top_k, router.renormalise) == (0.02, 2, False)
    written = write_config("phimoe", reading.spec, reading.carried, reading.dtype)
    assert read_config(written, "x").spec == reading.spec
    assert {key: written[key] for key in ("num_experts_per_tok", "router_jitter_noise", "input_jitter_noise")} == {
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.01,
        "input_jitter_noise": 0.01,
    }


def test_factors_on_cos_and_sin_up_to_the_original_context_and_beyond() -> None:
    assert (scaling_of().attention_factor, scaling_of().long_attention_factor) == (1.25, None)
    other = scaling_of(long_mscale=1.5, attention_factor=9.0, factor=3.0)
    assert (other.attention_factor, other.long_attention_factor, other.original_context) == (1.25, 1.5, 4096)
    spec = read_config(PUBLISHED | {"rope_scaling": ROPE | {"long_mscale": 1.5}}, "x").spec
    written = write_config("phimoe", spec, {}, None)
    assert (written["rope_scaling"]["short_mscale"], written["rope_scaling"]["long_mscale"]) == (1.25, 1.5)
    assert read_config(written, "x").spec == spec


LESS = {key: value for key, value in ROPE.items() if key != "original_max_position_embeddings"}


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("num_experts_per_tok", {"num_experts_per_tok": 3}),
        ("router_jitter_noise", {"router_jitter_noise": 0.0}),
        ("original_max_position_embeddings", {"rope_scaling": LESS}),
        ("rope_scaling.original_max_position_embeddings", {"original_max_position_embeddings": 2048}),
        ("rope_scaling.short_mscale", {"rope_scaling": {k: v for k, v in ROPE.items() if k != "short_mscale"}}),
        ("rope_scaling.long_mscale", {"rope_scaling": ROPE | {"long_mscale": None}}),
        ("rope_scaling.rope_type", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}),
        ("lm_head_bias", {"lm_head_bias": None}),
    ],
)
def test_what_is_refused_is_named(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        read_config(PUBLISHED | changes, "x")
    assert field.rpartition(".")[2] in (caught.value.field or "")
