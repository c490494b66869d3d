"""The families with a tower: FLOPs at published sizes, what is refused by name, names on disk in every form."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from asbuilt import cost
from asbuilt.catalog import find
from asbuilt.checkpoint.load import load
from asbuilt.checkpoint.save import save
from asbuilt.errors import InputError
from asbuilt.families import read_config, tensor_table, write_config
from asbuilt.families.shared.multimodal import SPELLINGS
from asbuilt.families.shared.table import respelled
from asbuilt.measure import run as measured
from asbuilt.nn import build
from asbuilt.nn.cache import Cache
from asbuilt.spec import Pass, VisionLanguageModel

TOWER: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 4,
    "patch_size": 2,
}
TEXT: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 11,
    "max_position_embeddings": 16,
}
VIT = TOWER | {"model_type": "vit", "num_labels": 3}
SIGLIP = {"model_type": "siglip", "text_config": TEXT, "vision_config": TOWER}
DINOV2 = {name: size for name, size in TOWER.items() if name != "intermediate_size"} | {"model_type": "dinov2"}
DINOV3 = TOWER | {"model_type": "dinov3_vit", "num_register_tokens": 2}
PIXTRAL = TOWER | {"model_type": "pixtral"}
CLIP = {"model_type": "clip", "text_config": TEXT, "vision_config": TOWER}
LLAVA = {"model_type": "llava", "image_token_index": 7, "text_config": TEXT, "vision_config": TOWER}
GEMMA3 = {
    "model_type": "gemma3",
    "image_token_index": 7,
    "mm_tokens_per_image": 1,
    "text_config": TEXT | {"num_key_value_heads": 2, "head_dim": 4},
    "vision_config": TOWER | {"vision_use_head": False},
}
PALIGEMMA = {
    "model_type": "paligemma",
    "image_token_index": 7,
    "projection_dim": 8,
    "text_config": TEXT | {"num_key_value_heads": 2, "head_dim": 4, "hidden_size": 8},
    "vision_config": TOWER | {"vision_use_head": False},
}
INTERNVL = {
    "model_type": "internvl",
    "image_token_id": 7,
    "tie_word_embeddings": False,
    "text_config": TEXT | {"num_key_value_heads": 2},
    "vision_config": TOWER,
}
LLAMA4 = {
    "model_type": "llama4",
    "image_token_index": 7,
    "text_config": TEXT | {"num_key_value_heads": 2, "head_dim": 4, "num_local_experts": 2},
    "vision_config": TOWER | {"intermediate_size": 32, "vision_output_dim": 4096},
}
CONFIGS = {
    "vit": VIT,
    "clip": CLIP,
    "siglip": SIGLIP,
    "dinov2": DINOV2,
    "dinov3_vit": DINOV3,
    "pixtral": PIXTRAL,
    "llava": LLAVA,
    "gemma3": GEMMA3,
    "paligemma": PALIGEMMA,
    "internvl": INTERNVL,
    "llama4": LLAMA4,
}


@pytest.mark.parametrize(
    ("name", "images"),
    [
        ("vit-base-patch16-224", 0),
        ("clip-vit-base-patch32", 2),
        ("llava-1.5-7b", 1),
        ("gemma-3-4b-mm", 1),
        ("gemma-3-4b-mm", 0),
        ("llama-4-scout", 1),
    ],
)
def test_flops_at_published_size_are_the_counters(name: str, images: int) -> None:
    spec = find(name).spec()
    tokens = 600 if spec.image_tokens else 32
    run = Pass(tokens=spec.max_positions if spec.n_vocab == 0 else tokens, images=images)
    assert cost.flops(spec, run).forward == measured.flops(spec, run.tokens, images=images)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("vit", "image_size", [4, 6]),
        ("vit", "patch_size", 5),
        ("vit", "hidden_act", "tanh"),
        ("vit", "id2label", []),
        ("vit", "architectures", ["ViTForMaskedImageModeling"]),
        ("vit", "num_patches", 4),
        ("vit", "pooler_act", "relu"),
        ("vit", "pooler_output_size", 9),
        ("clip", "text_config_dict", {"d_model": 8}),
        ("clip", "text_config", {"model_type": "bert"}),
        ("clip", "vision_config", 3),
        ("clip", "text_config", {"rope_theta": 1.0}),
        ("clip", "projection_dim", 0),
        ("dinov2", "mlp_ratio", 0),
        ("dinov3_vit", "value_bias", False),
        ("dinov3_vit", "query_bias", False),
        ("dinov3_vit", "num_attention_heads", 4),
        ("dinov3_vit", "num_register_tokens", -1),
        ("dinov3_vit", "rope_theta", 0.0),
        ("dinov3_vit", "image_size", [4, 6]),
        ("dinov3_vit", "max_position_embeddings", 9),
        ("dinov3_vit", "architectures", ["DINOv3ViTBackbone"]),
        ("pixtral", "patch_size", 5),
        ("pixtral", "head_dim", 8),
        ("pixtral", "architectures", ["PixtralModel"]),
        ("pixtral", "rope_parameters", {"rope_type": "linear"}),
        ("pixtral", "num_attention_heads", 4),
        ("pixtral", "layer_norm_eps", 1e-5),
        ("dinov2", "architectures", ["Dinov2ForImageClassification"]),
        ("dinov2", "intermediate_size", 6),
        ("siglip", "text_config", {"projection_size": 7}),
        ("siglip", "vision_config", {"vision_use_head": False}),
        ("llava", "vision_feature_layer", [-2, -5]),
        ("llava", "vision_feature_layer", 3),
        ("llava", "image_token_index", 11),
        ("llava", "text_config", {"model_type": "qwen3"}),
        ("llava", "vision_feature_select_strategy", "cls"),
        ("gemma3", "mm_tokens_per_image", 9),
        ("gemma3", "vision_config", TOWER),
        ("gemma3", "tie_word_embeddings", False),
        ("internvl", "downsample_ratio", 0.3),
        ("internvl", "downsample_ratio", 0.25),
        ("internvl", "downsample_ratio", 2.0),
        ("internvl", "vision_feature_layer", -2),
        ("internvl", "vision_feature_select_strategy", "full"),
        ("internvl", "vision_config", TOWER | {"use_absolute_position_embeddings": False}),
        ("internvl", "text_config", {"model_type": "llama"}),
        ("internvl", "image_token_id", 11),
        ("paligemma", "vision_config", TOWER),
        ("paligemma", "projection_dim", 9),
        ("paligemma", "tie_word_embeddings", False),
        ("paligemma", "text_config", {"model_type": "gemma2"}),
        (
            "paligemma",
            "text_config",
            PALIGEMMA["text_config"] | {"rope_scaling": {"rope_type": "dynamic", "factor": 2}},
        ),  # type: ignore[operator]
        ("llama4", "vision_config", TOWER),
        ("llama4", "text_config", {"model_type": "llama"}),
        ("llama4", "tie_word_embeddings", True),
    ],
)
def test_refused_by_name(family: str, key: str, value: object) -> None:
    with pytest.raises(InputError, match=key.removesuffix("_config")):
        read_config({**CONFIGS[family], key: value}, "model")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("intermediate_size", 31),
        ("vision_output_dim", 4095),
        ("projector_input_dim", 5),
        ("pixel_shuffle_ratio", 0.4),
        ("pixel_shuffle_ratio", 0.25),
        ("norm_eps", 1e-6),
        ("hidden_act", "relu"),
        ("multi_modal_projector_bias", True),
        ("vision_feature_layer", -2),
        ("num_attention_heads", 4),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0}),
        ("num_queries", 3),
    ],
)
def test_a_llama4_tower_is_refused_by_name(key: str, value: object) -> None:
    config = LLAMA4 | {"vision_config": {**LLAMA4["vision_config"], key: value}}  # type: ignore[dict-item]
    with pytest.raises(InputError, match=key):
        read_config(config, "model")


@pytest.mark.parametrize("family", CONFIGS)
def test_written_configs_read_back(family: str) -> None:
    reading = read_config(CONFIGS[family], "model")
    written = write_config(family, reading.spec, reading.carried, "bfloat16")
    assert read_config(written, "model").spec == reading.spec
    for other in set(CONFIGS) - {family}:
        with pytest.raises(InputError):
            write_config(other, reading.spec, {}, None)


@pytest.mark.parametrize("key", ["image_size", "patch_size"])
def test_a_square_is_one_number_or_two(key: str) -> None:
    one = read_config(CONFIGS["vit"], "model")
    side = CONFIGS["vit"][key]
    assert read_config(CONFIGS["vit"] | {key: [side, side]}, "model").spec == one.spec
    with pytest.raises(InputError, match=f"{key}: .*a square"):
        read_config(CONFIGS["vit"] | {key: [side, side + 1]}, "model")


def test_older_clip_configs_say_each_tower_twice() -> None:
    """The second one counts, its defaults too, as transformers reads it."""
    from transformers import CLIPConfig

    twice = {"text_config_dict": {"hidden_size": 16, "vocab_size": 99}, "vision_config_dict": {"patch_size": 7}}
    config: dict[str, Any] = CLIP | twice
    reading = read_config(config, "model")
    assert reading.spec == read_config(CLIPConfig(**deepcopy(config)).to_dict(), "model").spec
    assert reading.spec != read_config(CLIP, "model").spec
    written = write_config("clip", reading.spec, reading.carried, None)
    assert read_config(written, "model").spec == reading.spec
    assert read_config(CLIP | {"text_config_dict": None}, "model").spec == read_config(CLIP, "model").spec


def test_layers_are_counted_from_either_end() -> None:
    specs = [read_config(LLAVA | {"vision_feature_layer": n}, "model").spec for n in (-3, -2, -1, 0, 1, 2)]
    assert [spec.vision.layers for spec in specs] == [0, 1, 2] * 2  # type: ignore[union-attr]


@pytest.mark.parametrize("way", [*range(len(SPELLINGS))])
@pytest.mark.parametrize("family", ["llava", "gemma3", "paligemma", "internvl"])
def test_names_of_every_release_are_read(family: str, way: int, tmp_path: Path) -> None:
    spec = read_config(CONFIGS[family], "model").spec
    model = build(spec, seed=1)
    save(model, tmp_path, family=family, carried={})
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    entries = tensor_table(family, spec).entries
    other = {
        a: b
        for e, r in zip(entries, respelled(entries, SPELLINGS[way]), strict=True)
        for a, b in zip(e.names, r.names, strict=True)
    }
    assert any(a != b for a, b in other.items())
    save_file({other[name]: tensor for name, tensor in stored.items()}, file)
    again = load(tmp_path, dtype="float32")
    assert all(torch.equal(p, again.get_parameter(name)) for name, p in model.named_parameters())


def test_nothing_is_continued_by_what_gives_no_next_token() -> None:
    from asbuilt.generate.decode import check_prompt

    for family in ("vit", "clip"):
        with pytest.raises(InputError, match="MODEL"):
            check_prompt(read_config(CONFIGS[family], "model").spec, [1])
    llava = read_config(LLAVA, "model").spec
    check_prompt(llava, [1, 7, 2])
    assert isinstance(llava, VisionLanguageModel)
    check_prompt(llava.text, [1, 7, 2])


def test_what_a_paligemma_is_without_its_towers_config() -> None:
    """The sizes of the class; counted by transformers from a config that says nothing, and from the published one."""
    spec = read_config({"model_type": "paligemma"}, "model").spec
    assert cost.total_parameters(spec) == 2_910_390_528
    published = find("paligemma-3b-pt-224").spec()
    assert (cost.total_parameters(published), cost.active_parameters(published)) == (2_923_466_480, 2_923_466_480)
    assert cost.cache(published, 1024, "bf16").per_token == 18 * 2 * 256 * 2
    for said in (True, False, None):
        text = PALIGEMMA["text_config"] | {"use_bidirectional_attention": said}  # type: ignore[operator]
        again = read_config(PALIGEMMA | {"text_config": text}, "model").spec
        assert again == read_config(PALIGEMMA, "model").spec


def test_a_prefix_is_of_the_first_pass_and_no_longer_than_the_text() -> None:
    spec = read_config(PALIGEMMA, "model").spec
    assert isinstance(spec, VisionLanguageModel)
    model, text = build(spec, seed=1), build(spec.text, seed=1)
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 8, 9]])
    with torch.inference_mode():
        assert torch.equal(model(ids), model(ids, prefix=(0, 1)))  # one token alone sees itself
        both = model(ids, prefix=(4, 2))
        assert not torch.allclose(both[0, 0], model(ids)[0, 0])
        torch.testing.assert_close(both[1, 2:], model(ids, prefix=(1, 2))[1, 2:])
        cache = Cache(spec, batch=2, capacity=8, dtype=torch.float32)
        model(ids, cache=cache)
        for given, wrong in (({}, (4,)), ({}, (4, 5)), ({}, (-1, 2)), ({"cache": cache}, (1, 1))):
            with pytest.raises(InputError, match="prefix: not of a text's first tokens"):
                model(ids, prefix=wrong, **given)
        with pytest.raises(InputError, match="prefix: not an input"):
            text(ids, prefix=(1, 1))
    windows = build(spec.edit("blocks.0.attention.body", window=2), seed=1)
    with torch.inference_mode():
        torch.testing.assert_close(windows(ids, prefix=(4, 4)), model(ids, prefix=(4, 4)))  # which no window bounds
        assert not torch.allclose(windows(ids, prefix=(2, 2))[:, 3], model(ids, prefix=(2, 2))[:, 3])


@pytest.mark.parametrize(("tied", "total"), [(True, 802_219_392), (False, 938_119_296)])
def test_published_sums_of_internvl(tied: bool, total: int) -> None:
    """InternVL3-1B, counted with transformers; the whole says whether the head is tied, whatever the text says."""
    text = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    text |= {"num_key_value_heads": 2, "vocab_size": 151674}
    said = {"text_config": text | {"model_type": "qwen2"}, "vision_config": {}, "tie_word_embeddings": tied}
    spec = read_config({"model_type": "internvl"} | said, "model").spec
    assert (cost.total_parameters(spec), cost.active_parameters(spec)) == (total, total)
    assert cost.cache(spec, 1024, "bf16").per_token == 12_288
    assert spec.image_tokens == 256


@pytest.mark.parametrize("registers", [0, 3])
def test_a_dinov3_is_read_by_names_in_memory_and_stores_that_it_has_no_registers(
    registers: int, tmp_path: Path
) -> None:
    spec = read_config(DINOV3 | {"num_register_tokens": registers}, "model").spec
    model = build(spec, seed=1)
    save(model, tmp_path, family="dinov3_vit", carried={})
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    assert stored["embeddings.register_tokens"].shape == (1, registers, 8)
    renamed = {f"model.{name}" if name.startswith("layer.") else name: x.clone() for name, x in stored.items()}
    assert renamed.keys() != stored.keys()
    save_file(renamed, file)
    again = load(tmp_path, dtype="float32")
    assert all(torch.equal(p, again.get_parameter(name)) for name, p in model.named_parameters())


@settings(deadline=None, max_examples=25)
@given(
    said=st.fixed_dictionaries(
        {},
        optional={
            **dict.fromkeys(("key_bias", "proj_bias", "mlp_bias", "use_gated_mlp"), st.booleans()),
            "num_register_tokens": st.integers(0, 5),
            "rope_theta": st.floats(1.5, 1e4),
            "image_size": st.integers(2, 9),
        },
    )
)
def test_what_a_dinov3_may_say_is_written_and_read_again(said: dict[str, Any]) -> None:
    reading = read_config(DINOV3 | said, "model")
    written = write_config("dinov3_vit", reading.spec, reading.carried, None)
    assert read_config(written, "model").spec == reading.spec
    assert {key: written[key] for key in said} == said
    unbiased = dict.fromkeys(("query_bias", "key_bias", "value_bias"), False)
    assert read_config(DINOV3 | said | unbiased, "model").spec != reading.spec
