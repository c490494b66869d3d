"""xlstm: published sizes, widths as factors, keys that repeat others, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asbuilt import cost
from asbuilt.errors import InputError
from asbuilt.families import read_config, write_config
from asbuilt.families.xlstm import factor, rounded_up
from asbuilt.spec import GatedMLP, Head, MatrixLSTM, Model, walk

# the keys of NX-AI/xLSTM-7b
PUBLISHED: dict[str, Any] = {
    "model_type": "xlstm",
    "architectures": ["xLSTMForCausalLM"],
    "vocab_size": 50304,
    "embedding_dim": 4096,
    "num_blocks": 32,
    "num_heads": 8,
    "head_dim": 512,
    "qk_dim_factor": 0.5,
    "v_dim_factor": 1.0,
    "mlstm_round_up_to_multiple_of": 64,
    "ffn_proj_factor": 2.667,
    "ffn_round_up_to_multiple_of": 64,
    "norm_eps": 1e-6,
    "cell_norm_eps": 1e-6,
    "eps": 1e-6,
    "gate_soft_cap": 15.0,
    "output_logit_soft_cap": 30.0,
    "igate_bias_init_range": -10.0,
    "use_bias": False,
    "add_out_norm": True,
    "add_post_blocks_norm": True,
    "add_post_norm": False,
    "add_qk_norm": False,
    "add_embedding_dropout": False,
    "add_forward_backend_padding": False,
    "force_bos_token_insert": True,
    "tie_word_embeddings": False,
    "weight_mode": "single",
    "mode": "inference",
    "chunk_size": 64,
    "chunkwise_kernel": "chunkwise--triton_xl_chunk",
    "sequence_kernel": "native_sequence__triton",
    "step_kernel": "triton",
    "return_last_states": True,
    "autocast_kernel_dtype": "bfloat16",
    "inference_state_dtype": "float32",
    "norm_reduction_force_float32": True,
    "use_cache": True,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
SMALL = {"model_type": "xlstm", "vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 2, "num_heads": 2}


def spec_of(config: dict[str, Any] = SMALL, **changes: object) -> Model:
    return read_config(config | changes, "x").spec


def mixer(spec: Model) -> MatrixLSTM:
    return next(part for _, part in walk(spec) if isinstance(part, MatrixLSTM))


def test_xlstm_7b_is_as_large_as_published() -> None:
    """As many parameters as transformers' class of this config has; 8 heads of 256 x 512 in each layer."""
    spec = spec_of(PUBLISHED)
    assert cost.total_parameters(spec) == 6_865_424_896
    part = mixer(spec)
    assert (part.n_heads, part.d_key, part.d_value, part.cap) == (8, 256, 512, 15.0)
    assert isinstance(spec.head, Head)
    assert spec.head.softcap == 30.0
    bill = cost.cache(spec, 10**6, "bf16")
    assert (bill.per_token, bill.fixed) == (0, 32 * 8 * (256 * 512 + 256 + 1) * 4)


def test_what_is_published_is_written_again() -> None:
    reading = read_config(PUBLISHED, "x")
    made = write_config("xlstm", reading.spec, reading.carried, None)
    assert {key: made.get(key) for key in PUBLISHED} == PUBLISHED
    assert read_config(made, "x").spec == reading.spec


@given(st.integers(1, 10**6), st.integers(1, 10**5))
def test_a_factor_gives_back_its_width(width: int, d_model: int) -> None:
    assert int(d_model * factor(width, d_model)) == width
    assert rounded_up(d_model * factor(width, d_model), 1) == width


@given(st.integers(1, 9), st.integers(1, 9), st.floats(0.1, 9.0), st.integers(1, 70))
def test_widths(keys: int, values: int, wide: float, multiple: int) -> None:
    sizes: dict[str, Any] = {"qk_dim_factor": keys / 12 + 1e-9, "v_dim_factor": values / 12 + 1e-9}
    spec = spec_of(**sizes, ffn_proj_factor=wide, ffn_round_up_to_multiple_of=multiple)
    assert (mixer(spec).d_key, mixer(spec).d_value) == (keys, values)
    d_ff = next(part.d_ff for _, part in walk(spec) if isinstance(part, GatedMLP))
    assert d_ff % multiple == 0
    assert -1 < d_ff - 24 * wide < multiple  # what is beyond the point is dropped
    assert read_config(write_config("xlstm", spec, {}, None), "x").spec == spec


def test_what_is_carried_gives_way_to_what_was_changed() -> None:
    said = SMALL | {"embedding_dim": 24, "num_blocks": 2, "qk_dim_factor": 0.51, "ffn_proj_factor": 2.0}
    reading = read_config(said, "x")
    made = write_config("xlstm", reading.spec, reading.carried, None)
    assert (made["embedding_dim"], made["num_blocks"], made["qk_dim_factor"]) == (24, 2, 0.51)
    longer = spec_of(num_hidden_layers=3, qk_dim_factor=0.25, ffn_proj_factor=3.0)
    made = write_config("xlstm", longer, reading.carried, None)
    assert (made["num_blocks"], made["qk_dim_factor"]) == (3, 0.25)
    assert read_config(made, "x").spec == longer


def test_a_head_without_a_cap_has_no_config() -> None:
    spec = spec_of()
    with pytest.raises(InputError, match=r"head\.softcap"):
        write_config("xlstm", replace(spec, head=Head(d_model=24, n_vocab=50)), {}, None)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_bias", True),
        ("tie_word_embeddings", True),
        ("weight_mode", "fused"),
        ("add_out_norm", False),
        ("add_post_norm", True),
        ("add_qk_norm", True),
        ("embedding_dim", 25),
        ("num_blocks", 3),
        ("qk_dim_factor", 0.01),
        ("v_dim_factor", 13 / 24),
        ("ffn_proj_factor", 1e30),
        ("gate_soft_cap", 81.0),
        ("gate_soft_cap", None),
        ("slstm_at", [1]),
        ("slstm_block", {}),
    ],
)
def test_refused(key: str, value: object) -> None:
    with pytest.raises(InputError, match=key):
        spec_of(SMALL | {key: value})
