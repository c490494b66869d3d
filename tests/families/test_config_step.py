"""Step-3.7 and MiniMax-M3: published sizes, what older keys mean, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from asbuilt import cost
from asbuilt.errors import InputError
from asbuilt.families import read_config, write_config
from asbuilt.spec import Attention, ClampedGate, GatedMLP, MixtureOfExperts, Model, Rotary, VisionLanguageModel

FULL, SLIDING, SPARSE = "full_attention", "sliding_attention", "minimax_m3_sparse"
# The published text of Step-3.7-Flash, but that its windows have as many heads as the other layers.
STEP: dict[str, Any] = {
    "num_hidden_layers": 45,
    "num_nextn_predict_layers": 3,
    "layer_types": [FULL, SLIDING, SLIDING, SLIDING] * 12,
    "moe_layers_enum": ",".join(str(i) for i in range(3, 45)),
    "num_attention_groups": 8,
    "moe_num_experts": 288,
    "moe_top_k": 8,
    "sliding_window": 512,
    "rope_theta": [5e6, 1e4, 1e4, 1e4] * 12,
    "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0] * 12,
    "swiglu_limits": [0.0] * 43 + [7.0] * 2 + [0.0] * 3,
    "swiglu_limits_shared": [0.0] * 43 + [16.0] * 2 + [0.0] * 3,
    "moe_router_scaling_factor": 3.0,
}
SPARSE_57 = [0] * 3 + [1] * 57
M3: dict[str, Any] = {
    "moe_layer_freq": SPARSE_57,
    "rotary_dim": 64,
    "partial_rotary_factor": 0.5,
    "sparse_attention_config": {
        "use_sparse_attention": True,
        "sparse_index_dim": 128,
        "sparse_num_index_heads": 4,
        "sparse_topk_blocks": 16,
        "sparse_block_size": 128,
        "sparse_score_type": "max",
        "sparse_init_block": 0,
        "sparse_local_block": 1,
        "sparse_attention_freq": SPARSE_57,
        "sparse_disable_index_value": SPARSE_57,
    },
}


def whole(family: str, text: dict[str, Any], **more: object) -> Model:
    return read_config({"model_type": family, "text_config": text, "vision_config": {}} | more, "x").spec


def test_step_is_as_large_as_published() -> None:
    """Parameters and buffers as transformers counts its classes' defaults; the cache by hand."""
    spec = whole("step3p7", STEP)
    assert (cost.total_parameters(spec), cost.active_parameters(spec)) == (197_824_847_872, 12_856_041_472)
    assert cost.stored_extra(spec)["buffers"] == 42 * 288
    # three layers without experts, with a window, a map of both halves, three norms more and a head
    layer = 4096 * (2 * 64 * 128 + 2 * 8 * 128 + 64 + 3 * 11264 + 2) + 2 * 128
    assert cost.stored_extra(spec)["predictors"] == 3 * (layer + 4096 * (2 * 4096 + 3 + 128815))
    found = cost.cache(spec, 10**6, "bf16")
    each = 2 * 8 * 128 * 2  # keys and values of 8 heads, 2 bytes a number
    assert (found.unbounded, found.window) == (12 * each, 512 * 33 * each)
    assert (12 * each, 33 * each) == (49_152, 135_168)


def test_step_layers_have_bases_clamps_and_heads_of_their_own() -> None:
    spec = whole("step3p7", STEP | {"attention_other_setting": {"num_attention_heads": 96, "head_dim": 128}})
    attentions = [block.branches[0].body for block in spec.blocks]
    assert all(isinstance(one, Attention) and one.gating == "head" for one in attentions)
    heads = [(one.n_heads, one.window) for one in attentions if isinstance(one, Attention)]
    assert heads == [(64, None) if i % 4 == 0 else (96, 512) for i in range(45)]
    ropes = [one.positions for one in attentions if isinstance(one, Attention)]
    assert ropes[:2] == [Rotary(d_rotary=64, theta=5e6), Rotary(d_rotary=128, theta=1e4)]
    mixture = spec.blocks[44].branches[1].body
    assert isinstance(mixture, MixtureOfExperts)
    gate = ClampedGate(alpha=1.0, limit=7.0, shift=False, activated=True)
    assert isinstance(mixture.shared, GatedMLP)
    assert mixture.shared.clamp is not None
    assert (mixture.gating, mixture.shared.clamp.limit) == (gate, 16.0)
    before = spec.blocks[42].branches[1].body
    assert isinstance(before, MixtureOfExperts)
    assert (before.gating, before.n_experts, before.top_k, before.router.scale) == ("gated", 288, 8, 3.0)
    assert read_config(write_config("step3p7", spec, {}, None), "x").spec == spec


def test_m3_is_as_large_as_published() -> None:
    spec = whole("minimax_m3_vl", M3)
    assert isinstance(spec, VisionLanguageModel)
    assert (cost.total_parameters(spec), cost.active_parameters(spec)) == (427_040_132_864, 26_828_033_792)
    assert cost.stored_extra(spec)["buffers"] == 57 * 128
    # keys and values of 4 heads, and an index key of all layers but the first three
    assert cost.cache(spec, 1, "bf16").per_token == 2 * (60 * 2 * 4 * 128 + 57 * 128) == 137_472
    bodies = [block.branches[0].body for block in spec.blocks]
    chosen = [body.indexer for body in bodies if isinstance(body, Attention)]
    assert [one is not None for one in chosen] == [bool(one) for one in SPARSE_57]
    assert chosen[-1] is not None
    assert (chosen[-1].block, chosen[-1].top_k, chosen[-1].local, chosen[-1].most_keys) == (128, 16, 1, 2048)
    assert read_config(write_config("minimax_m3_vl", spec, {}, None), "x").spec == spec


ALL_SPARSE = M3 | {"sparse_attention_config": None, "layer_types": [SPARSE] * 60}
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("step3p7", STEP, {"sliding_window": None}, "sliding_window"),
    ("step3p7", STEP, {"attention_bias": True}, "attention_bias"),
    ("step3p7", STEP, {"swiglu_limits": [1.0]}, "swiglu_limits"),
    ("step3p7", STEP, {"swiglu_limits_shared": [-1.0] * 45}, "swiglu_limits_shared"),
    ("step3p7", STEP, {"num_sliding_attention_heads": 12}, "num_sliding_attention_heads"),
    ("step3p7", STEP, {"per_layer_config": {"0": {"num_attention_heads": 96}}}, "per_layer_config"),
    ("step3p7", STEP, {"attention_other_setting": {"num_attention_groups": 4}}, "num_attention_groups"),
    ("step3p7", STEP, {"moe_router_activation": "softmax"}, "moe_router_activation"),
    ("step3p7", STEP, {"use_head_wise_attn_gate": False}, "use_head_wise_attn_gate"),
    ("minimax_m3_vl", M3, {"sparse_attention_config": {"sparse_score_type": "mean"}}, "sparse_score_type"),
    ("minimax_m3_vl", ALL_SPARSE, {"index_n_heads": 8}, "index_n_heads"),
    ("minimax_m3_vl", ALL_SPARSE, {"index_head_dim": 32}, "index_head_dim"),
    ("minimax_m3_vl", ALL_SPARSE, {"index_local_blocks": 17}, "index_local_blocks"),
    ("minimax_m3_vl", M3, {"qk_norm_type": "per_layer"}, "qk_norm_type"),
    ("minimax_m3_vl", M3, {"scoring_func": "softmax"}, "scoring_func"),
    ("minimax_m3_vl", M3, {"layer_types": [SLIDING] * 60}, "layer_types"),
]


@pytest.mark.parametrize(("family", "text", "changes", "key"), REFUSED)
def test_what_is_refused_by_name(family: str, text: dict[str, Any], changes: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError, match=rf"\b{key}\b"):
        whole(family, text | changes)


def test_unread_keys_are_refused() -> None:
    with pytest.raises(InputError, match="no_such_key"):
        whole("step3p7", STEP | {"no_such_key": 1})
    with pytest.raises(InputError, match="no_such_key"):
        whole("minimax_m3_vl", M3 | {"sparse_attention_config": {"no_such_key": 1}})
