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
from asbuilt.spec import GatedMLP, Indexer, LatentAttention, Model, SharedChoice

PUBLISHED = Path(__file__).parents[3] / "shared" / "frontier"
Config = dict[str, Any]
# bytes of cache a token in 16 bits: 61 x (576 + 128) numbers; 78 of them; 78 x 576 + 21 x 128
CACHES = {"deepseek_v32": 85_888, "GLM-5": 109_824, "GLM-5.1": 109_824, "GLM-5.2": 95_232}
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
        rows = [row for row in csv.DictReader(file) if row["model_type"] in ("deepseek_v32", "glm_moe_dsa")]
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
    assert cost.cache(spec, 1, "bf16").per_token == (CACHES.get(name) or CACHES[row["model_type"]])


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
