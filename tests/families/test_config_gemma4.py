"""The gemma4 and gemma4_text readers: which layers share keys, both spellings of their heads, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from asbuilt import cost, describe
from asbuilt.errors import InputError
from asbuilt.families import read_config, write_config
from asbuilt.spec import Attention, GridVision, Model, Pass, VisionLanguageModel, buffers
from asbuilt.spec.linear import maps_by_path

FULL, SLIDING = "full_attention", "sliding_attention"
SIZES: dict[str, Any] = {
    "model_type": "gemma4_text",
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_hidden_layers": 6,
    "vocab_size": 100,
    "vocab_size_per_layer_input": 100,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
    "sliding_window": 8,
}


def attentions(**changes: object) -> list[Attention]:
    spec: Model = read_config(SIZES | changes, "x").spec
    return [block.branches[0].body for block in spec.blocks if isinstance(block.branches[0].body, Attention)]


def test_the_last_layers_read_the_last_layer_of_their_kind_before_them() -> None:
    found = attentions(num_kv_shared_layers=3)
    assert [one.kv_name for one in found] == [None, "sliding", "full", None, None, None]
    assert [one.kv_from for one in found] == [None, None, None, "sliding", "sliding", "full"]
    for n in (4, 6, 7):  # then no full layer, or none at all, is before them
        with pytest.raises(InputError, match="num_kv_shared_layers: must be fewer"):
            attentions(num_kv_shared_layers=n)


def test_heads_of_full_layers_are_said_by_kind_or_by_layer() -> None:
    by_kind = attentions(attention_k_eq_v=True, num_global_key_value_heads=1)
    own = {"head_dim": 32, "num_key_value_heads": 1}
    by_layer = {key: value for key, value in SIZES.items() if key != "global_head_dim"}
    by_layer |= {"attention_k_eq_v": True, "per_layer_config": {"02": own, "5": own}}
    spec = read_config(by_layer, "x").spec
    assert [block.branches[0].body for block in spec.blocks] == by_kind
    assert [(one.d_head, one.n_kv_heads, one.values_are_keys) for one in by_kind[1:3]] == [
        (16, 2, False),
        (32, 1, True),
    ]
    for wrong in ({"02": own}, {"0": own, "2": own, "5": own}, {"9": own}, {"x": own}, [own]):
        with pytest.raises(InputError, match="per_layer_config"):
            read_config(by_layer | {"per_layer_config": wrong}, "x")


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match="layer_types: must be a list that ends in full_attention"):
        attentions(layer_types=[FULL] * 5 + [SLIDING])
    with pytest.raises(InputError, match="use_bidirectional_attention"):
        attentions(use_bidirectional_attention="all")


WHOLE = {"model_type": "gemma4", "text_config": SIZES, "vision_config": {"num_hidden_layers": 2}}


@pytest.mark.parametrize(
    ("said", "match"),
    [
        ({"subsampling_conv_channels": [130, 32]}, "subsampling_conv_channels: must be two whole numbers, the first a"),
        ({"subsampling_conv_channels": [128]}, "subsampling_conv_channels"),
        ({"attention_context_right": 1}, "attention_context_right: tokens attend to none after them"),
        ({"attention_chunk_size": 11}, "attention_chunk_size: must be 12 or 13, beside attention_context_left = 13"),
        ({"attention_context_left": 1}, "attention_context_left"),
        ({"attention_invalid_logits_value": -100.0}, "attention_invalid_logits_value: must be at most -1050"),
        ({"gradient_clipping": 10.0}, "gradient_clipping: must be at least 1e\\+06: smaller numbers would clamp"),
        ({"num_attention_heads": 7}, "num_attention_heads"),
        ({"conv_bias": True}, "conv_bias"),
        ({"model_type": "gemma3n_audio"}, "model_type"),
    ],
)
def test_sounds_that_are_refused(said: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        read_config(WHOLE | {"audio_config": said}, "x")


def test_sounds_and_images_need_placeholders_of_their_own() -> None:
    with pytest.raises(InputError, match="audio_token_id: must be another token than image_token_id"):
        read_config(WHOLE | {"audio_config": {}, "audio_token_id": 7, "image_token_id": 7}, "x")


def test_sounds_are_written_as_they_were_read() -> None:
    said: dict[str, Any] = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "hidden_act": "gelu"}
    said |= {"subsampling_conv_channels": [12, 5], "conv_kernel_size": 3, "residual_weight": 0.25}
    said |= {"attention_chunk_size": 8, "attention_context_left": 8, "attention_logit_cap": 3.0}
    said |= {"use_clipped_linears": False, "rms_norm_eps": 1e-3, "output_proj_dims": 10}
    reading = read_config(WHOLE | {"audio_config": said, "audio_token_id": 300}, "x")
    spec = reading.spec
    assert isinstance(spec, VisionLanguageModel)
    assert spec.hearing is not None
    assert spec.reads == ("tokens", "images", "audio")
    assert spec.hearing.tower.embedding.bands == (6, 3)  # type: ignore[union-attr]  # pyright: ignore
    assert (spec.hearing.n_tokens, spec.hearing.tokens_of(29), spec.hearing.placeholder) == (750, 8, 300)
    written = write_config("gemma4", spec, reading.carried, None)
    assert {key: written["audio_config"][key] for key in said} == said
    assert read_config(written, "x").spec == spec
    bare = write_config("gemma4", spec, {}, None)
    assert bare["audio_config"]["attention_chunk_size"] == 7  # another size, of the same model
    assert read_config(bare, "x").spec == spec
    assert write_config("gemma4", read_config(WHOLE, "x").spec, {}, None)["audio_config"] is None
    plain = {"model_type": "llava", "text_config": SIZES}
    with pytest.raises(InputError):  # a family whose files know of no sounds
        write_config(plain["model_type"], spec, {}, None)  # type: ignore[arg-type]  # pyright: ignore


def test_clipped_maps_are_those_of_the_tower() -> None:
    whole = {"model_type": "gemma4", "text_config": SIZES, "vision_config": {"num_hidden_layers": 2}}
    plain = read_config(whole, "x").spec
    reading = read_config(whole | {"vision_config": {"num_hidden_layers": 2, "use_clipped_linears": True}}, "x")
    spec = reading.spec
    assert isinstance(spec, VisionLanguageModel)
    assert {path for path, one in maps_by_path(spec).items() if one.plain.clipped} == {
        f"vision.tower.blocks.{i}.{name}.weight"
        for i in range(2)
        for name in (*(f"attention.body.{x}" for x in "qkvo"), *(f"ffn.body.{x}" for x in ("gate", "up", "down")))
    }
    assert len([*buffers(spec)]) == len([*buffers(plain)]) + 2 * 7 * 4
    assert cost.total_parameters(spec) == cost.total_parameters(plain)
    written = write_config("gemma4", spec, reading.carried, None)
    assert written["vision_config"]["use_clipped_linears"] is True
    one = spec.edit("vision.tower.blocks.1.ffn.body", up=None)
    with pytest.raises(InputError):  # a file says it of all maps at once
        write_config("gemma4", one, {}, None)


def test_images_are_of_any_size_up_to_the_tables_of_positions() -> None:
    """Costs are those of 280 tokens' largest square, 16 x 16 of them."""
    spec = read_config(WHOLE, "x").spec
    assert isinstance(spec, VisionLanguageModel)
    assert isinstance(spec.vision, GridVision)
    assert (spec.vision.n_tokens, spec.vision.tower.embedding.n_patches) == (256, 48**2)
    assert not spec.vision.both_ways
    small = {"num_hidden_layers": 2, "pooling_kernel_size": 2, "position_embedding_size": 31}
    said = WHOLE | {"vision_config": small, "vision_soft_tokens_per_image": 250}
    assert read_config(said, "x").spec.image_tokens == 15**2
    with pytest.raises(InputError, match=r"position_embedding_size: must be at least 32, the patches per side"):
        read_config(said | {"vision_soft_tokens_per_image": 256}, "x")


def edge(
    d_model: int, n_kv_heads: int, d_ff: int, n_layers: int, shared: int, every: int, wide: bool, *, hears: bool = False
) -> Model:
    """The published E2B or E4B, whose towers are the same, with its ears or without."""
    kinds = [FULL if i % every == every - 1 else SLIDING for i in range(n_layers)]
    text = {
        "model_type": "gemma4_text",
        "hidden_size": d_model,
        "num_attention_heads": 8,
        "num_key_value_heads": n_kv_heads,
        "intermediate_size": d_ff,
        "num_hidden_layers": n_layers,
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": wide,
        "layer_types": kinds,
    }
    tower = {"use_clipped_linears": True, "standardize": False}
    whole = {"model_type": "gemma4", "text_config": text, "vision_config": tower, "audio_config": {} if hears else None}
    return read_config(whole, "x").spec


@pytest.mark.parametrize(
    ("spec", "total", "n_buffers", "grows", "window"),
    [
        (edge(1536, 1, 6144, 35, 20, 5, True), 4_797_113_600, 483, 6_144, 512 * 12_288),
        (edge(2560, 2, 10240, 42, 18, 6, False), 7_632_344_064, 490, 16_384, 512 * 40_960),
    ],
    ids=["e2b", "e4b"],
)
def test_published_sums(spec: Model, total: int, n_buffers: int, grows: int, window: int) -> None:
    """Counted with transformers; the cache of E4B is 4 and 20 layers of keys and values, the others share theirs."""
    counted = cost.total_parameters(spec), cost.active_parameters(spec), cost.stored_extra(spec)["buffers"]
    assert counted == (total, total, n_buffers)
    assert (cost.cache(spec, 512, "bf16").unbounded, cost.cache(spec, 512, "bf16").window) == (grows, window)


@pytest.mark.parametrize(
    ("spec", "alone", "ears"),
    [
        (edge(1536, 1, 6144, 35, 20, 5, True, hears=True), 4_797_113_600, 304_824_608 + 1536 * 1536),
        (edge(2560, 2, 10240, 42, 18, 6, False, hears=True), 7_632_344_064, 304_824_608 + 1536 * 2560),
    ],
    ids=["e2b", "e4b"],
)
def test_published_sums_with_ears(spec: Model, alone: int, ears: int) -> None:
    """Counted with transformers: 304,824,608 of the tower, and what maps its vectors to the text's width."""
    assert cost.total_parameters(spec) == alone + ears
    rows = cost.rows(spec, Pass(tokens=1000, images=0, sounds=1), "bf16")
    heard = sum(row.flops_per_token * row.count for row in rows if row.path.startswith("hearing")) * 1000
    assert heard == pytest.approx(_by_hand() + 2 * 750 * (ears - 304_824_608), rel=1e-9)


def test_sounds_are_described_beside_images() -> None:
    spec = read_config(WHOLE | {"audio_config": {"num_hidden_layers": 1}}, "x").spec
    alone, heard = (describe(spec, seq=1000, sounds=n).flops["forward_per_token"] for n in (0, 1))
    tower = cost.flops(spec, Pass(tokens=1000, sounds=1)).forward - cost.flops(spec, Pass(tokens=1000)).forward
    assert heard - alone == pytest.approx(tower / 1000)
    with pytest.raises(InputError, match="the sounds take 750 tokens"):
        describe(spec, seq=700, sounds=1).document()
    with pytest.raises(InputError, match="sounds: this model hears none beside images"):
        describe(read_config(WHOLE, "x").spec, sounds=1).document()
    with pytest.raises(InputError, match="count them as --images"):
        describe("voxtral-mini-3b", sounds=1).document()


def _by_hand() -> float:
    """FLOPs of the tower of a sound of 750 tokens, all products twice a b c."""
    frames = 1500 * 64 * 9 * 128 + 750 * 32 * 9 * 128 * 32 + 750 * 1024 * 1024
    maps = 4 * 1024 * 1024 + 4 * 4 * 1024 * 1024 + 2 * 1024 * 1024 + 1024 * 1024
    scores = 2 * 750 * 750 * 1024 + 12 * 1024 * 1024 + 750 * 12 * 1024
    return 2.0 * (frames + 12 * (750 * maps + scores) + 750 * 1024 * 1536)
