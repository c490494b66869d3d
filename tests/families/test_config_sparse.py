"""Families whose layers attend to chosen keys: published totals, what the keys of indexers say, what is refused."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asbuilt import cost
from asbuilt.errors import InputError
from asbuilt.families import load_config_file, read_config, write_config
from asbuilt.spec import CompressedAttention, GatedMLP, Indexer, LatentAttention, Model, SharedChoice

PUBLISHED = Path(__file__).parents[3] / "shared" / "frontier"
Config = dict[str, Any]
FAMILIES = ("deepseek_v32", "glm_moe_dsa", "deepseek_v4")
# bytes of cache a token in 16 bits: 61 x (576 + 128) numbers; 78 of them; 78 x 576 + 21 x 128
CACHES = {"deepseek_v32": 85_888, "GLM-5": 109_824, "GLM-5.1": 109_824, "GLM-5.2": 95_232}
# once windows are full: 21 x 640 / 4 + 20 x 512 / 128 numbers; 30 and 31 such layers
CACHES |= {"deepseek4_284b": 6_880, "DeepSeek-V4-Pro": 9_848}
SIZES: Config = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 10,
    "moe_intermediate_size": 7,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 6,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "index_n_heads": 2,
    "index_head_dim": 6,
    "index_topk": 3,
}
V32, GLM = (SIZES | {"model_type": family} for family in ("deepseek_v32", "glm_moe_dsa"))


def published() -> list[dict[str, str]]:
    """The rows of totals.csv of these families; one empty row where the folder is absent."""
    if not (PUBLISHED / "totals.csv").exists():
        return [{"name": ""}]
    with (PUBLISHED / "totals.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["model_type"] in FAMILIES]
    return [row for row in rows if (PUBLISHED / row["name"] / "config.json").exists()]


@pytest.mark.parametrize("row", published(), ids=lambda row: row["name"] or "absent")
def test_published_totals(row: dict[str, str]) -> None:
    if not row["name"]:
        pytest.skip(f"no published models at {PUBLISHED}")
    spec = read_config(load_config_file(PUBLISHED / row["name"] / "config.json"), row["name"]).spec
    assert cost.total_parameters(spec) == int(row["total"])
    assert cost.active_parameters(spec) == int(row["active"])
    assert cost.stored_extra(spec)["buffers"] == int(row["buffers"])
    name = row["name"].partition("--")[2].partition("-FP8")[0].partition("-NVFP4")[0]
    assert cost.cache(spec, 1, "bf16").unbounded == (CACHES.get(name) or CACHES[row["model_type"]])


def spec_of(config: Config) -> Model:
    return read_config(config, "x").spec


def bodies(spec: Model) -> list[LatentAttention]:
    found = [block.branches[0].body for block in spec.blocks]
    return [body for body in found if isinstance(body, LatentAttention)]


def own(spec: Model) -> list[bool]:
    """Which layers have an indexer of their own; the others share a choice."""
    assert all(isinstance(body.indexer, Indexer | SharedChoice) for body in bodies(spec))
    return [isinstance(body.indexer, Indexer) for body in bodies(spec)]


def test_the_families_pair_an_indexers_rope_differently() -> None:
    pairings = [body.indexer.positions.pairing for body in bodies(spec_of(V32))]  # type: ignore[union-attr]
    assert pairings == ["halves"] * 4
    pairings = [body.indexer.positions.pairing for body in bodies(spec_of(GLM))]  # type: ignore[union-attr]
    assert pairings == ["adjacent"] * 4


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ({}, [True] * 4),
        ({"indexer_types": ["full", "shared", "shared", "full"]}, [True, False, False, True]),
        ({"index_topk_pattern": "FSFS"}, [True, False, True, False]),
        ({"index_topk_pattern": ["full", "full", "shared", "shared"]}, [True, True, False, False]),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, [True, False, True, False]),
        ({"index_topk_freq": 2}, [True, True, False, True]),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, [True, True, True, False]),
        ({"indexer_types": ["full"] * 4, "index_topk_freq": 4}, [True] * 4),
    ],
)
def test_which_layers_share_a_choice(said: Config, wanted: list[bool]) -> None:
    """As transformers' GlmMoeDsaConfig works it out; a list comes before a pattern, a pattern before a frequency."""
    reading = read_config(GLM | said, "x")
    assert own(reading.spec) == wanted
    assert spec_of(write_config("glm_moe_dsa", reading.spec, reading.carried, None)) == reading.spec


@given(st.lists(st.booleans(), min_size=3, max_size=3), st.lists(st.booleans(), min_size=4, max_size=4))
def test_what_is_written_reads_back(shares: list[bool], dense: list[bool]) -> None:
    types = ["full", *("shared" if one else "full" for one in shares)]
    kinds = ["dense" if one else "sparse" for one in dense]
    config = GLM | {"indexer_types": types, "mlp_layer_types": kinds}
    if all(dense):
        with pytest.raises(InputError, match="mlp_layer_types"):
            spec_of(config)
        return
    spec = spec_of(config)
    assert [isinstance(block.branches[1].body, GatedMLP) for block in spec.blocks] == dense
    written = write_config("glm_moe_dsa", spec, {}, None)
    assert (written["indexer_types"], written["mlp_layer_types"]) == (types, kinds)
    assert spec_of(written) == spec


BAD: list[tuple[Config, str, object]] = [
    (GLM, "indexer_types", ["shared", "full", "full", "full"]),
    (GLM, "indexer_types", ["full"]),
    (GLM, "index_topk_pattern", "FXSS"),
    (GLM, "index_topk_pattern", "SFFF"),
    (GLM, "indexer_rope_interleave", False),
    (GLM, "rope_interleave", False),
    (GLM, "mlp_layer_types", ["dense", "moe", "sparse", "sparse"]),
    (V32, "indexer_types", ["full", "shared", "full", "full"]),
    (V32, "q_lora_rank", None),
    (V32, "index_head_dim", 2),
    (V32, "index_topk", 0),
    (V32, "layer_types", ["full_attention"] * 4),
]


@pytest.mark.parametrize(("config", "key", "value"), BAD)
def test_what_is_refused(config: Config, key: str, value: object) -> None:
    with pytest.raises(InputError, match=key):
        spec_of(config | {key: value})


V4: Config = {
    "model_type": "deepseek_v4",
    "vocab_size": 50,
    "hidden_size": 12,
    "moe_intermediate_size": 7,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 8,
    "qk_rope_head_dim": 4,
    "q_lora_rank": 6,
    "o_groups": 2,
    "o_lora_rank": 3,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 5,
    "index_n_heads": 2,
    "index_head_dim": 6,
    "index_topk": 3,
}
SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
KINDS = {SLIDING: (None, False), SPARSE: (4, True), HEAVY: (128, False)}


def kinds(spec: Model) -> list[tuple[int | None, bool]]:
    """Tokens of each layer's blocks, and whether it chooses entries."""
    found = [block.branches[0].body for block in spec.blocks]
    compressed = [body for body in found if isinstance(body, CompressedAttention)]
    return [(None if c.compressor is None else c.compressor.ratio, c.indexer is not None) for c in compressed]


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ({}, [HEAVY, HEAVY, HEAVY, SPARSE]),
        ({"compress_ratios": [0, 4, 128, 4, 0]}, [SLIDING, SPARSE, HEAVY, SPARSE]),
        (
            {"layer_types": [SPARSE, SPARSE, SLIDING, HEAVY], "compress_ratios": [0] * 4},
            [SPARSE, SPARSE, SLIDING, HEAVY],
        ),
    ],
)
def test_which_layers_compress(said: Config, wanted: list[str]) -> None:
    """As transformers' DeepseekV4Config works it out; ratios may go on with prediction layers."""
    reading = read_config(V4 | said, "x")
    assert kinds(reading.spec) == [KINDS[kind] for kind in wanted]
    written = write_config("deepseek_v4", reading.spec, reading.carried, None)
    assert written["layer_types"] == wanted
    assert spec_of(written) == reading.spec


def test_rates_in_each_spelling() -> None:
    types = {"layer_types": [SPARSE, HEAVY, SPARSE, HEAVY]}
    rates = {SPARSE: 2, HEAVY: 6}
    assert kinds(spec_of(V4 | types | {"compress_rates": rates})) == [(2, True), (6, False)] * 2
    older = {"compress_rate_csa": 2, "compress_rate_hca": 6}
    assert spec_of(V4 | types | older) == spec_of(V4 | types | {"compress_rates": rates})


@given(st.lists(st.booleans(), min_size=4, max_size=4))
def test_which_layers_choose_experts_by_token_id(hashed: list[bool]) -> None:
    named = ["hash_moe" if one else "moe" for one in hashed]
    spec = spec_of(V4 | {"mlp_layer_types": named})
    tables = [block.branches[1].body.router.table for block in spec.blocks]  # type: ignore[union-attr]
    assert tables == [50 if one else None for one in hashed]
    assert spec_of(write_config("deepseek_v4", spec, {}, None)) == spec
    if hashed == sorted(hashed, reverse=True):
        assert spec_of(V4 | {"num_hash_layers": sum(hashed)}) == spec


def test_ropes_in_both_spellings() -> None:
    """Only layers with entries are stretched, and YaRN leaves cos and sin as they are."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    older = {"rope_theta": 100.0, "compress_rope_theta": 300.0, "rope_scaling": yarn, "compress_ratios": [0, 4, 4, 128]}
    spec = spec_of(V4 | older)
    found = [block.branches[0].body for block in spec.blocks]
    rotaries = [body.positions for body in found if isinstance(body, CompressedAttention)]
    assert [rotary.theta for rotary in rotaries if rotary is not None] == [100.0, 300.0, 300.0, 300.0]
    assert [rotary is not None and rotary.scaling is not None for rotary in rotaries] == [False, True, True, True]
    assert all(rotary is not None and rotary.attention_factor == 1.0 for rotary in rotaries)
    part = {"partial_rotary_factor": 0.5}
    objects = {
        "main": {"rope_type": "default", "rope_theta": 100.0, **part},
        "compress": {**yarn, "rope_theta": 300.0, "attention_factor": 1.0, **part},
    }
    newer = {key: value for key, value in V4.items() if key != "qk_rope_head_dim"} | part
    newer |= {"rope_parameters": objects, "compress_ratios": [0, 4, 4, 128]}
    assert spec_of(newer) == spec
    assert spec_of(write_config("deepseek_v4", spec, {}, None)) == spec


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layer_types", [SPARSE]),
        ("layer_types", ["full_attention"] * 4),
        ("compress_ratios", [0, 4, 8, 4]),
        ("mlp_layer_types", ["dense"] * 4),
        ("num_key_value_heads", 2),
        ("o_groups", 3),
        ("qk_rope_head_dim", 3),
        ("qk_rope_head_dim", 10),
        ("scoring_func", "tanh"),
        ("n_shared_experts", 2),
        ("hc_mult", 0),
        ("swiglu_limit", 0),
    ],
)
def test_what_deepseek_v4_refuses(key: str, value: object) -> None:
    with pytest.raises(InputError, match=key):
        spec_of(V4 | {key: value})
