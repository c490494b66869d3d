"""Sizes of GGUF formats: fallbacks of odd rows, and file types as mixtures, against files that were published."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asbuilt import InputError, cost
from asbuilt.catalog import find
from asbuilt.cost.mixtures import MIXTURES
from asbuilt.cost.mixtures import held as find_held
from asbuilt.dtypes import GGUF_BLOCKS
from asbuilt.families import llama, mixtral
from asbuilt.packing import holding
from asbuilt.spec import Model, Rotary, Router, weights
from asbuilt.spec.part import Weight

# Bytes of whole files as published, metadata and alignment included: of bartowski's (Llama 3), Qwen's and TheBloke's
# repositories (Mistral, Llama 2). The metadata is mostly the vocabulary, so it is one and the same for files of one
# tokenizer: 7.84 MB of Llama 3's 128,256 tokens, 5.95 MB of Qwen2.5's 152,064, 0.74 MB of 32,000.
FILES = [
    ("llama-3-8b", "q4_k_m", 4_920_734_272, 7_836_224),
    ("llama-3.1-8b", "q4_k_m", 4_920_739_232, 7_841_184),
    ("llama-3.1-8b", "Q5_K_M", 5_732_992_416, 7_841_184),
    ("llama-3.1-8b", "mostly_iq4_xs", 4_447_667_616, 7_841_184),
    ("llama-3.1-8b", "mostly_q8_0", 8_540_775_840, 7_841_184),
    ("llama-3.2-3b", "q4_k_m", 2_019_377_696, 7_838_240),  # a tied table takes the head's format
    ("llama-3.2-3b", "mostly_q8_0", 3_421_899_296, 7_838_240),
    ("qwen2.5-7b", "q4_k_m", 4_683_073_536, 5_953_536),
    ("qwen2.5-7b", "q5_k_m", 5_444_831_232, 5_953_536),
    ("qwen2.5-7b", "mostly_q6_k", 6_254_198_784, 5_953_536),
    ("qwen3-30b-a3b", "q4_k_m", 18_556_689_568, 5_973_152),  # experts, with their routers in float32
    ("qwen3-30b-a3b", "q5_k_m", 21_725_581_728, 5_970_336),
    ("qwen3-30b-a3b", "mostly_q6_k", 25_092_532_640, 5_970_336),
    ("mistral-7b-v0.1", "q4_k_m", 4_368_439_584, 735_520),
    ("llama-3.2-1b", "q4_k_m", 807_694_464, 7_831_680),
    ("qwen2-0.5b", "q4_k_m", 397_808_192, 5_948_480),  # Qwen2.5's, of the same sizes: rows of 896, and tied
    ("llama-2-7b", "q4_k_m", 4_081_004_224, 741_056),
    ("llama-2-7b", "q3_k_m", 3_298_004_672, 741_056),
    ("llama-2-7b", "q3_k_l", 3_597_110_976, 741_056),
    ("llama-2-7b", "q3_k_s", 2_948_304_576, 741_056),
    ("llama-2-7b", "q5_k_m", 4_783_156_928, 741_056),
    ("llama-2-7b", "q5_k_s", 4_651_691_712, 741_056),
    ("llama-2-7b", "q4_k_s", 3_856_739_008, 740_032),
    ("phi-3-mini", "q4_k_m", 2_393_231_360, 737_792),  # queries, keys and values are one map in its files
]


@pytest.mark.parametrize(("model", "dtype", "published", "metadata"), FILES)
def test_published_files(model: str, dtype: str, published: int, metadata: int) -> None:
    row = find(model)
    spec = row.spec()
    assert published - cost.weight_bytes(spec, holding(row.family, spec, dtype)) == metadata


# GB of Llama-3.1-70B's files as bartowski's model card has them, rounded to two digits after the point; of each,
# 0.008 GB are metadata.
SEVENTY = {
    "mostly_q6_k": 57.89,
    "q5_k_l": 50.60,
    "q5_k_m": 49.95,
    "q5_k_s": 48.66,
    "q4_k_l": 43.30,
    "q4_k_m": 42.52,
    "q4_k_s": 40.35,
    "q3_k_xl": 38.06,
    "mostly_iq4_xs": 37.90,
    "q3_k_l": 37.14,
    "q3_k_m": 34.27,
    "iq3_m": 31.94,
    "q3_k_s": 30.91,
    "iq3_xs": 29.31,
    "q2_k_l": 27.40,
    "mostly_q2_k": 26.38,
    "iq2_m": 24.12,
    "mostly_iq2_s": 22.24,
    "mostly_iq2_xs": 21.14,
    "mostly_iq2_xxs": 19.10,
    "mostly_iq1_m": 16.75,
}


def test_every_mixture_of_a_published_70b() -> None:
    spec = find("llama-3.1-70b").spec()
    for name, published in SEVENTY.items():
        assert cost.weight_bytes(spec, name) / 1e9 + 0.00784 == pytest.approx(published, abs=0.0051), name


def _tiny(*, n_kv_heads: int = 8, n_layers: int = 16, d_ff: int = 512, d_model: int = 256, tied: bool = False) -> Model:
    return llama.build(
        n_vocab=512,
        d_model=d_model,
        n_layers=n_layers,
        n_heads=8,
        n_kv_heads=n_kv_heads,
        d_ff=d_ff,
        max_positions=64,
        rotary=Rotary(d_rotary=d_model // 8),
        tied=tied,
        name="tiny",
    )


def _of_eight(experts: int = 8) -> Model:
    return mixtral.FAMILY.build(
        router=Router(d_model=256, n_experts=experts, top_k=2),
        n_vocab=512,
        d_model=256,
        n_layers=8,
        n_heads=8,
        n_kv_heads=8,
        d_ff=512,
        max_positions=64,
        rotary=Rotary(d_rotary=32),
        name="tiny",
    )


def _bits(spec: Model, name: str, end: str, joined: bool = False) -> list[float]:
    """Bits of one number in each layer's weight of that name."""
    held = find_held(spec, name, joined=joined)
    return [
        8 * float(held(path, weight, owner)) / weight.size
        for path, weight, owner in weights(spec)
        if path.endswith(end)
    ]


Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, Q8_0 = 2.625, 3.4375, 4.5, 5.5, 6.5625, 8.5
IQ2_XXS, IQ2_S, IQ3_XXS, IQ3_S = 2.0625, 2.5625, 3.0625, 3.4375

# Worked out by hand for 16 layers without grouped queries: first eighth 0, 1; last eighth 14, 15; each third between
# them, counted from the first eighth's end, 4, 7, 10, 13.
OFTEN = (0, 1, 4, 7, 10, 13, 14, 15)
LAYERS = [
    ("q4_k_m", "v.weight", [Q6_K if i in OFTEN else Q4_K for i in range(16)]),
    ("q4_k_m", "down.weight", [Q6_K if i in OFTEN else Q4_K for i in range(16)]),
    ("q4_k_m", "o.weight", [Q4_K] * 16),
    ("q5_k_m", "v.weight", [Q6_K if i in OFTEN else Q5_K for i in range(16)]),
    ("q4_k_s", "v.weight", [Q5_K] * 4 + [Q4_K] * 12),
    ("q4_k_s", "down.weight", [Q5_K] * 2 + [Q4_K] * 14),
    ("q3_k_m", "v.weight", [Q5_K] * 2 + [Q4_K] * 14),
    ("q3_k_m", "down.weight", [Q5_K] + [Q4_K] * 15),
    ("q3_k_m", "gate.weight", [Q3_K] * 16),
    ("q3_k_l", "o.weight", [Q5_K] * 16),
    ("q2_k_s", "down.weight", [Q4_K] * 2 + [Q2_K] * 14),
    ("q2_k_s", "v.weight", [Q2_K] * 16),
    ("mostly_q2_k", "v.weight", [Q3_K] * 16),
    ("iq3_xs", "up.weight", [IQ3_S] * 2 + [IQ3_XXS] * 12 + [IQ3_S] * 2),
    ("iq3_xs", "q.weight", [IQ3_XXS] * 16),
    ("mostly_iq3_xxs", "k.weight", [IQ2_S] * 16),
    ("mostly_iq2_xxs", "down.weight", [Q2_K] * 2 + [IQ2_XXS] * 14),
    ("iq2_m", "v.weight", [IQ3_S] * 16),
    ("q4_k_m", "embedding.weight", [Q4_K]),
    ("q4_k_m", "head.weight", [Q6_K]),
    ("mostly_iq2_xxs", "embedding.weight", [Q2_K]),
    ("mostly_iq2_xxs", "head.weight", [Q5_K]),
    ("q4_k_l", "embedding.weight", [Q8_0]),
    ("q4_k_m", "norm.weight", [32.0] * 33),
]


@pytest.mark.parametrize(("name", "end", "bits"), LAYERS)
def test_which_layers_get_more(name: str, end: str, bits: list[float]) -> None:
    assert _bits(_tiny(), name, end) == bits


# Bits a number of the type that a file type is called after, or that llama.cpp begins from (iq2_s, iq2_m, iq3_xs).
BASES = {
    "mostly_iq1_s": 1.5625,
    "mostly_iq1_m": 1.75,
    "mostly_iq2_xxs": 2.0625,
    "mostly_iq2_xs": 2.3125,
    "mostly_iq2_s": 2.3125,
    "iq2_m": 2.5625,
    "mostly_iq3_xxs": 3.0625,
    "iq3_xs": 3.4375,
    "mostly_iq3_s": 3.4375,
    "iq3_m": 3.4375,
    "mostly_iq4_nl": 4.5,
    "mostly_iq4_xs": 4.25,
    "mostly_tq1_0": 1.6875,
    "mostly_tq2_0": 2.0625,
    "mostly_q2_k": 2.625,
    "q2_k_s": 2.625,
    "q2_k_l": 2.625,
    "q3_k_s": 3.4375,
    "q3_k_m": 3.4375,
    "q3_k_l": 3.4375,
    "q3_k_xl": 3.4375,
    "q4_k_s": 4.5,
    "q4_k_m": 4.5,
    "q4_k_l": 4.5,
    "q5_k_s": 5.5,
    "q5_k_m": 5.5,
    "q5_k_l": 5.5,
    "mostly_q6_k": 6.5625,
    "q6_k_l": 6.5625,
    "mostly_q4_0": 4.5,
    "mostly_q4_1": 5.0,
    "mostly_q5_0": 5.5,
    "mostly_q5_1": 6.0,
    "mostly_q8_0": 8.5,
    "mxfp4_moe": 8.5,
}


def test_what_each_file_type_begins_from() -> None:
    assert MIXTURES.keys() == BASES.keys()
    for name, bits in BASES.items():
        assert _bits(_tiny(), name, "gate.weight")[0] == bits, name
    assert _bits(_tiny(), "mostly_iq3_xxs", "q.weight") == [IQ2_S] * 16


def test_values_that_many_queries_read_get_more() -> None:
    assert _bits(_tiny(n_kv_heads=2), "mostly_q2_k", "v.weight") == [Q4_K] * 16
    assert _bits(_tiny(n_kv_heads=2), "mostly_iq4_xs", "v.weight") == [Q5_K] * 16
    assert _bits(_tiny(n_kv_heads=4), "mostly_iq4_xs", "v.weight") == [4.25] * 16
    # 80 layers with grouped queries are what llama.cpp takes for a 70B
    assert set(_bits(_tiny(n_kv_heads=4, n_layers=80), "q4_k_m", "v.weight")) == {Q5_K, Q6_K}
    assert set(_bits(_tiny(n_layers=80), "q4_k_m", "v.weight")) == {Q4_K, Q6_K}


def test_attention_beside_eight_experts_gets_more() -> None:
    eight, four = _of_eight(), _of_eight(4)
    assert _bits(eight, "q4_k_m", "v.weight") == _bits(eight, "q4_k_m", "k.weight") == [Q8_0] * 8
    assert _bits(eight, "q4_k_m", "o.weight") == [Q5_K] * 8
    assert _bits(eight, "q3_k_l", "o.weight") == [Q3_K] * 8  # llama.cpp leaves this one out
    assert _bits(eight, "mostly_iq2_xxs", "k.weight") == [Q4_K] * 8
    assert _bits(four, "mostly_iq2_xxs", "v.weight") == [Q4_K] * 8
    assert _bits(four, "q4_k_m", "k.weight") == [Q4_K] * 8
    assert _bits(eight, "q4_k_m", "router.weight") == [32.0] * 8
    assert _bits(eight, "mxfp4_moe", "body.up") == [4.25] * 8
    assert _bits(eight, "mxfp4_moe", "q.weight") == [Q8_0] * 8


def test_a_joined_map_has_one_format() -> None:
    assert _bits(_tiny(), "q4_k_m", "q.weight", joined=True) == [Q5_K] * 16
    assert _bits(_tiny(), "q5_k_m", "k.weight", joined=True) == [Q6_K] * 16
    for name in ("q3_k_m", "q3_k_l", "iq3_m"):
        assert _bits(_tiny(), name, "v.weight", joined=True) == [Q4_K] * 16


def test_values_are_counted_among_the_layers_that_attend() -> None:
    """Of 16 layers every other one attends: of eight the first, the last, and of those between every third, 3 and 6."""
    spec = _tiny()
    blocks = tuple(
        block if i % 2 else replace(block, branches=block.branches[1:]) for i, block in enumerate(spec.blocks)
    )
    assert blocks[0].branches[0].name == "ffn"
    some = replace(spec, blocks=blocks)
    assert _bits(some, "q4_k_m", "v.weight") == [Q6_K if i in (0, 3, 6, 7) else Q4_K for i in range(8)]
    assert _bits(some, "q4_k_m", "down.weight") == [Q6_K if i in OFTEN else Q4_K for i in range(16)]


def test_a_tower_is_kept_in_16_bits() -> None:
    spec = find("gemma-3-4b-mm").spec()
    held = find_held(spec, "q4_k_m")
    bits = {path.startswith("vision."): set[float]() for path, _, _ in weights(spec)}
    for path, weight, owner in weights(spec):
        bits[path.startswith("vision.")].add(8 * float(held(path, weight, owner)) / weight.size)
    assert bits[True] == {16.0}
    assert bits[False] == {Q4_K, Q6_K, 32.0}


def test_a_tied_table_takes_the_heads_format_and_odd_rows_eight_bits() -> None:
    assert _bits(_tiny(tied=True), "q4_k_m", "embedding.weight") == [Q6_K]
    assert _bits(_tiny(tied=True, d_model=192), "q4_k_m", "embedding.weight") == [Q8_0]
    assert _bits(_tiny(d_model=192), "q4_k_m", "head.weight") == [Q8_0]
    assert _bits(_tiny(d_model=192), "mostly_iq2_xxs", "head.weight") == [Q8_0]  # not what Q5_K falls back to


def test_what_a_narrow_table_is_multiplied_to_takes_the_tables_format() -> None:
    """A table whose width is not that of the stream, as OPT-350M's, and the map behind it."""
    narrow = _tiny().edit("embedding", d_table=256)
    assert _bits(narrow, "q4_k_m", "embedding.weight") == [Q4_K]
    assert _bits(narrow, "q4_k_m", "embedding.project.weight") == [Q4_K]


# What llama.cpp makes of rows that are no multiple of 256 but one of 32 (bits a number); of others, 16.
FALLBACKS = {
    "iq1_s": 4.5,
    "iq1_m": 4.5,
    "iq2_xxs": 4.5,
    "iq2_xs": 4.5,
    "iq2_s": 4.5,
    "iq3_xxs": 4.5,
    "iq3_s": 4.5,
    "iq4_xs": 4.5,
    "q2_k": 4.5,
    "q3_k": 4.5,
    "tq1_0": 4.5,
    "tq2_0": 4.5,
    "q4_k": 5.5,
    "q5_k": 6.0,
    "q6_k": 8.5,
    "nvfp4": 16,  # blocks of 64
}


@pytest.mark.parametrize("name", GGUF_BLOCKS)
def test_rows_that_no_block_divides(name: str) -> None:
    bits = {n: 8 * float(cost.dtype(name).nbytes(Weight(shape=(3, n), role="matrix"))) / (3 * n) for n in (256, 96, 40)}
    assert bits[40] == 16
    if name in FALLBACKS:
        assert bits[96] == FALLBACKS[name]
        assert bits[256] < bits[96]
    else:
        assert bits[96] == bits[256]


def test_a_published_model_of_odd_rows() -> None:
    """Qwen2.5-0.5B: rows of 896, which 256 does not divide, but for what comes down, of 4,864 = 19 x 256."""
    spec = llama.build(
        n_vocab=151936,
        d_model=896,
        n_layers=24,
        n_heads=14,
        n_kv_heads=2,
        d_ff=4864,
        max_positions=64,
        rotary=Rotary(d_rotary=64),
        tied=True,
        name="odd",
    )
    vectors = 4 * 896 * 49
    down = 24 * 896 * 4864
    rest = cost.total_parameters(spec) - down - 896 * 49
    for name, bits in (("iq3_xxs", 3.0625), ("iq2_xxs", 2.0625), ("iq4_xs", 4.25), ("tq1_0", 1.6875)):
        assert cost.weight_bytes(spec, name) == down * bits / 8 + rest * 4.5 / 8 + vectors


@pytest.mark.parametrize("name", ["q4_k_x", "mostly_", "mostly_q4_k", "q4_k_m_", ""])
def test_no_such_format(name: str) -> None:
    with pytest.raises(InputError, match=r"dtype: unknown dtype.*q4_k_m"):
        cost.weight_bytes(_tiny(), name)


def test_what_the_rules_do_not_cover_is_refused() -> None:
    for model in ("t5-small", "vit-base-patch16-224"):
        with pytest.raises(InputError, match="dtype: this mixture applies only to text models"):
            cost.weight_bytes(find(model).spec(), "q4_k_m")
    falcon = find("falcon-7b")
    with pytest.raises(InputError, match="dtype: this mixture is not stated for falcon"):
        holding("falcon", falcon.spec(), "q4_k_m")
    assert cost.format_name("Q4_K_M") == "q4_k_m"
    assert cost.format_name("mostly_iq4_xs") == "mostly_iq4_xs"
    assert cost.format_name("mostly_q4_k_m") == "q4_k_m"
    assert cost.format_name("HALF") == "fp16"
