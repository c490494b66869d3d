"""The MiniMax families: which layers are of which kind, what factors and decays mean, published sizes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asbuilt import cost
from asbuilt.description.bill import distinct
from asbuilt.errors import InputError
from asbuilt.families import read_config, write_config
from asbuilt.spec import Attention, LightningAttention, Model, Pass, Rotary, walk

FULL, LINEAR = "full_attention", "linear_attention"
SIZES: dict[str, Any] = {
    "model_type": "minimax",
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 30,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
}
FACTOR = 3.5565588200778455  # (2 * 80)^(1/4), DeepNorm's of 80 layers
TEXT_01 = SIZES | {
    "vocab_size": 200064,
    "hidden_size": 6144,
    "intermediate_size": 9216,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_local_experts": 32,
    "num_experts_per_tok": 2,
    "layer_types": ([LINEAR] * 7 + [FULL]) * 10,
    **{f"{kind}_alpha_factor": FACTOR for kind in ("linear_attn", "full_attn", "mlp")},
    # what else the published config has
    "rotary_dim": 64,
    "postnorm": True,
    "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid",
    "sliding_window": None,
}


def spec_of(config: dict[str, Any] = SIZES, **changes: object) -> Model:
    return read_config(config | changes, "x").spec


def test_minimax_text_01_is_as_large_as_published() -> None:
    """The paper's abstract: 456 billion parameters, 45.9 billion of them activated, which leaves out both tables."""
    spec = spec_of(TEXT_01)
    found = cost.total_parameters(spec)
    assert round(found / 1e9) == 456
    tables = 2 * 200064 * 6144
    inactive = 80 * 30 * 3 * 6144 * 9216
    assert round((found - inactive - tables) / 1e8) == 459
    first = next(part for _, part in walk(spec) if isinstance(part, Attention))
    assert isinstance(first.positions, Rotary)
    assert (first.d_head, first.positions.d_rotary) == (128, 64)
    bill = cost.cache(spec, 1024, "bf16")
    assert (bill.per_token, bill.fixed) == (10 * 2 * 8 * 128 * 2, 70 * 64 * 128 * 128 * 4)


def test_layers_that_cost_the_same_are_one_row() -> None:
    """Heads of each layer forget at rates of their own, which changes no cost."""
    rows = cost.rows(spec_of(TEXT_01), Pass(tokens=8), "bf16")
    found = [(row.path, row.count) for row in rows if row.part == "LightningAttention"]
    assert found == [(f"blocks.{8 * i}-{8 * i + 6}.mixer.body", 7) for i in range(10)]
    assert [(block.branches[0].name, len(where)) for block, where in distinct(spec_of(TEXT_01))] == [
        ("mixer", 70),
        ("attention", 10),
    ]


@given(st.lists(st.sampled_from([FULL, LINEAR]), min_size=1, max_size=6))
def test_kinds_of_layers(kinds: list[str]) -> None:
    spec = spec_of(num_hidden_layers=len(kinds), layer_types=kinds)
    bodies = [block.branches[0].body for block in spec.blocks]
    assert [isinstance(body, LightningAttention) for body in bodies] == [kind == LINEAR for kind in kinds]
    if FULL in kinds:  # what no layer has is not known
        assert read_config(write_config("minimax", spec, {}, None), "x").spec == spec
    usual = [type(block.branches[0].body) for block in spec_of().blocks]
    assert usual == [Attention, LightningAttention] * 2


def test_heads_of_later_layers_forget_more_slowly() -> None:
    """As in the published code: from the whole slope in the first layer to next to nothing in the last."""
    spec = spec_of(layer_types=[LINEAR] * 4)
    decays = [part.decay for _, part in walk(spec) if isinstance(part, LightningAttention)]
    assert decays == pytest.approx([1 + 1e-5, 2 / 3, 1 / 3, 1e-5], abs=2e-5)


@given(st.floats(0.1, 9.0), st.floats(0.1, 9.0))
def test_factors(alpha: float, beta: float) -> None:
    spec = spec_of(linear_attn_alpha_factor=alpha, mlp_beta_factor=beta)
    mixer, ffn = spec.blocks[1].branches
    assert (mixer.stream_scale, mixer.scale, ffn.stream_scale, ffn.scale) == (alpha, 1.0, 1.0, beta)
    assert mixer.normed
    assert spec.blocks[0].branches[0].stream_scale == 1.0
    assert read_config(write_config("minimax", spec, {}, None), "x").spec == spec


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layer_types", [FULL]),
        ("layer_types", ["sliding_attention"] * 4),
        ("attention_bias", True),
        ("mlp_alpha_factor", 0),
        ("hidden_act", "tanh"),
        ("postnorm", False),
        ("shared_intermediate_size", 8),
        ("rotary_dim", 5),
        ("rotary_dim", 10),
    ],
)
def test_what_is_refused(key: str, value: object) -> None:
    with pytest.raises(InputError, match=key):
        spec_of(SIZES | {key: value})
