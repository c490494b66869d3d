"""The first spelling of zamba2's configs: the published one of Zamba2-7B, and what it says in transformers' words.

Zyphra's own branch of transformers 4.43 (github.com/Zyphra/transformers_zamba2) wrote them.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asbuilt.catalog import find
from asbuilt.errors import InputError
from asbuilt.families import read_config, write_config

PUBLISHED: dict[str, Any] = {
    "add_bias_linear": False,
    "architectures": ["Zamba2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "conv_dimension": 4,
    "eos_token_id": 2,
    "expansion_factor": 2,
    "ffn_hidden_size": 14336,
    "ft_lora": False,
    "gated_linear_unit": True,
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "kv_channels": 112,
    "layers_block_type": ["hybrid" if i == 6 or (i > 6 and i % 6 == 5) else "mamba" for i in range(81)],
    "lora_rank": 128,
    "mamba_headdim": 64,
    "mamba_ngroups": 2,
    "max_position_embeddings": 4096,
    "model_type": "zamba2",
    "num_attention_heads": 32,
    "num_hidden_layers": 81,
    "num_key_value_heads": 32,
    "num_logits_to_keep": 1,
    "num_mem_blocks": 2,
    "num_query_groups": 32,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000,
    "sliding_window": None,
    "state_size": 64,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "use_mamba_kernels": True,
    "use_mem_rope": True,
    "use_shared_attention_lora": False,
    "use_shared_block_lora": True,
    "vocab_size": 32000,
}
LATER = {
    "conv_dimension": "mamba_d_conv",
    "expansion_factor": "mamba_expand",
    "ffn_hidden_size": "intermediate_size",
    "lora_rank": "adapter_rank",
    "state_size": "mamba_d_state",
    "use_shared_attention_lora": "use_shared_attention_adapter",
}
SIZES = st.fixed_dictionaries(
    {
        "conv_dimension": st.integers(2, 5),
        "expansion_factor": st.integers(1, 4),
        "ffn_hidden_size": st.integers(1, 99),
        "lora_rank": st.integers(1, 9),
        "state_size": st.integers(1, 9),
        "use_shared_attention_lora": st.booleans(),
    }
)


def test_the_published_config_is_the_catalogue_s() -> None:
    assert read_config(PUBLISHED, "zamba2-7b").spec == find("zamba2-7b").make()


@given(SIZES, st.sampled_from((1, 2, 4, 8)))
def test_either_spelling_says_the_same(said: dict[str, Any], head: int) -> None:
    own = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 50}
    own |= {"layers_block_type": list("mgg"), "num_hidden_layers": 3, "mamba_ngroups": 1}
    first = PUBLISHED | own | said | {"mamba_headdim": head}
    later = {LATER.get(key, key): value for key, value in first.items()}
    later |= {
        "n_mamba_heads": 16 * said["expansion_factor"] // head,
        "layers_block_type": ["mamba", "hybrid", "hybrid"],
    }
    spec = read_config(first, "x").spec
    assert read_config(later, "x").spec == spec
    written = write_config("zamba2", spec, {}, None)
    assert not written.keys() & LATER.keys()
    assert read_config(written, "x").spec == spec


@pytest.mark.parametrize(
    ("key", "value"),
    [("gated_linear_unit", False), ("sliding_window", 128), ("use_shared_block_lora", False), ("mamba_headdim", 48)],
)
def test_what_is_not_built_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(InputError, match=key):
        read_config(PUBLISHED | {key: value}, "x")


def test_two_spellings_that_disagree_are_refused() -> None:
    with pytest.raises(InputError, match="state_size"):
        read_config(PUBLISHED | {"mamba_d_state": 128}, "x")
