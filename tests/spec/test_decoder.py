"""`asbuilt.decoder`: what is said once, and what follows; the same spec as a Llama config of those sizes gives."""

from __future__ import annotations

import random
from typing import Any

import pytest

import asbuilt
from asbuilt.families import read_config
from asbuilt.spec import Attention, GatedMLP


def test_it_is_a_llama_of_those_sizes() -> None:
    """Held to the published family's reader, with sizes drawn."""
    kv_heads, group, d_head = random.randint(1, 4), random.randint(1, 3), 2 * random.randint(1, 8)
    n_heads = kv_heads * group
    sizes: dict[str, Any] = {
        "n_vocab": random.randint(1, 99),
        "d_ff": random.randint(1, 99),
        "n_layers": random.randint(1, 5),
        "max_positions": random.randint(1, 99),
        "theta": random.choice([1e4, 5e5]),
        "eps": random.choice([1e-5, 1e-6]),
        "tied": random.choice([True, False]),
    }
    config = {
        "model_type": "llama",
        "hidden_size": n_heads * d_head,
        "num_attention_heads": n_heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": sizes["n_vocab"],
        "intermediate_size": sizes["d_ff"],
        "num_hidden_layers": sizes["n_layers"],
        "max_position_embeddings": sizes["max_positions"],
        "rope_theta": sizes["theta"],
        "rms_norm_eps": sizes["eps"],
        "tie_word_embeddings": sizes["tied"],
    }
    made = asbuilt.decoder(d_model=n_heads * d_head, n_heads=n_heads, n_kv_heads=kv_heads, name="own", **sizes)
    assert made == read_config(config, "own").spec


def test_defaults() -> None:
    """Llama 7B's sizes (Touvron et al. 2023, table 2; its d_ff is 11008, 8/3 of 4096 up to a multiple of 256)."""
    made = asbuilt.decoder(d_model=4096, n_layers=2, n_heads=32)
    attention, ffn = made.at("blocks.1.attention.body"), made.at("blocks.1.ffn.body")
    assert isinstance(attention, Attention)
    assert isinstance(ffn, GatedMLP)
    assert (attention.n_kv_heads, attention.d_head, ffn.d_ff, made.n_vocab, made.max_positions) == (
        32,
        128,
        10944,
        32000,
        2048,
    )
    assert asbuilt.decoder(d_model=24, n_layers=1, n_heads=1).at("blocks.0.ffn.body").d_ff == 64  # type: ignore[attr-defined]
    wide = asbuilt.decoder(d_model=30, n_layers=1, n_heads=4, d_head=16).at("blocks.0.attention.body")
    assert isinstance(wide, Attention)
    assert wide.d_head == 16


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"d_model": 30}, r"d_model: must be a multiple of n_heads = 4, got 30; or give d_head"),
        ({"n_heads": 0}, r"n_heads: must be a whole number from 1 to [\d,]+, got 0"),
        ({"n_layers": 5000}, r"n_layers: must be a whole number from 1 to 1,024, got 5000"),
        ({"d_model": 32.0}, r"d_model: must be a whole number"),
        ({"n_kv_heads": 3}, r"Attention.n_kv_heads"),
        ({"n_kv_heads": 0}, r"Attention.n_kv_heads"),
        ({"d_ff": 0}, r"GatedMLP.d_ff"),
    ],
)
def test_what_is_refused(sizes: dict[str, Any], said: str) -> None:
    made: dict[str, Any] = {"d_model": 32, "n_layers": 1, "n_heads": 4}
    with pytest.raises(asbuilt.InputError, match=said):
        asbuilt.decoder(**(made | sizes))
