"""The gemma3n reader: published sizes of the whole, what its towers are, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from asbuilt import cost
from asbuilt.errors import InputError
from asbuilt.families import read_config, write_config
from asbuilt.spec import Attention, ConvolvedPatches, GridAttention, MelSubsampling, Pass, VisionLanguageModel

FULL, SLIDING = "full_attention", "sliding_attention"
# google/gemma-3n-E2B-it and E4B-it: what differs from the classes' defaults
E2B_TEXT: dict[str, Any] = {
    "model_type": "gemma3n_text",
    "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20,
    "intermediate_size": [8192] * 30,
    "layer_types": ([SLIDING] * 4 + [FULL]) * 6,
    "num_hidden_layers": 30,
    "num_kv_shared_layers": 10,
}
VISION: dict[str, Any] = {
    "model_type": "gemma3n_vision",
    "architecture": "mobilenetv5_300m_enc",
    "do_pooling": False,
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "label_names": ["LABEL_0", "LABEL_1"],
    "model_args": None,
    "num_classes": 2,
    "rms_norm_eps": 1e-06,
    "torch_dtype": "bfloat16",
    "vocab_offset": 262144,
    "vocab_size": 128,
}
AUDIO: dict[str, Any] = {
    "model_type": "gemma3n_audio",
    "conf_attention_chunk_size": 12,
    "conf_attention_context_left": 13,
    "conf_attention_context_right": 0,
    "conf_attention_logit_cap": 50.0,
    "conf_conv_kernel_size": 5,
    "conf_num_attention_heads": 8,
    "conf_num_hidden_layers": 12,
    "conf_reduction_factor": 4,
    "conf_residual_weight": 0.5,
    "gradient_clipping": 10000000000.0,
    "hidden_size": 1536,
    "input_feat_size": 128,
    "rms_norm_eps": 1e-06,
    "sscp_conv_channel_size": [128, 32],
    "sscp_conv_group_norm_eps": 0.001,
    "sscp_conv_kernel_size": [[3, 3], [3, 3]],
    "sscp_conv_stride_size": [[2, 2], [2, 2]],
    "vocab_offset": 262272,
    "vocab_size": 128,
}
E4B: dict[str, Any] = {
    "model_type": "gemma3n",
    "architectures": ["Gemma3nForConditionalGeneration"],
    "audio_config": AUDIO,
    "audio_soft_tokens_per_image": 188,
    "audio_token_id": 262273,
    "boa_token_id": 256000,
    "boi_token_id": 255999,
    "eoa_token_id": 262272,
    "eoi_token_id": 262144,
    "image_token_id": 262145,
    "text_config": {"model_type": "gemma3n_text"},
    "vision_config": VISION,
    "vision_soft_tokens_per_image": 256,
}
E2B = E4B | {"text_config": E2B_TEXT}
NETWORK = 294_126_912  # parameters of timm's mobilenetv5_300m_enc
TEXTS = {"E2B": 4_435_182_688, "E4B": 6_835_235_568}  # as test_config_gemma3n.py counts them
HUB = {"E2B": 5_439_438_272, "E4B": 7_849_978_192}  # that the hub says, of keys and values too that no layer reads


def read(config: dict[str, Any]) -> VisionLanguageModel:
    spec = read_config(config, "x").spec
    assert isinstance(spec, VisionLanguageModel)
    return spec


def conformer() -> int:
    """Its parameters, one after the other."""
    d = 1536
    halves = 2 * (2 * d * 4 * d + 2 * d)
    attention = 5 * d * d + d // 8 + 2 * d
    convolution = d + 2 * d * d + 5 * d + d + d * d
    steps = 9 * 128 + 128 + 9 * 128 * 32 + 32 + 32 * 32 * d
    return 12 * (halves + attention + convolution + d) + steps


@pytest.mark.parametrize(("name", "config", "unread"), [("E2B", E2B, 10), ("E4B", E4B, 15)])
def test_published_sizes(name: str, config: dict[str, Any], unread: int) -> None:
    spec = read(config)
    own = sum(128 * d + 2 * d + d * 2048 for d in (2048, 1536))
    assert cost.total_parameters(spec) == TEXTS[name] + NETWORK + conformer() + own
    assert cost.total_parameters(spec) + unread * (2 * 2048 * 512 + 256) == HUB[name]
    written = write_config("gemma3n", spec, {}, "bfloat16")
    assert read(written) == spec


def test_what_the_towers_are() -> None:
    spec = read(E4B)
    network = spec.vision.tower.embedding
    assert isinstance(network, ConvolvedPatches)
    assert (network.sides[:2], network.side, network.sides[-1], network.n_side) == ((768, 384), 48, 24, 16)
    heads = [(one.n_heads, one.d_head) for one in network.blocks if isinstance(one, GridAttention)]
    assert heads == [(12, 64)] * 14 + [(16, 96)] * 19
    assert (spec.vision.n_tokens, len(network.blocks)) == (256, 3 + 5 + 37 + 39)
    assert spec.hearing is not None
    embedding, block = spec.hearing.tower.embedding, spec.hearing.tower.blocks[0]
    assert isinstance(embedding, MelSubsampling)
    assert (embedding.ahead, embedding.cumulative, embedding.d_frame) == (True, True, 1024)
    attention = block.branches[1].body
    assert isinstance(attention, Attention)
    assert (attention.window, attention.softcap) == (13, 50.0)
    assert [spec.hearing.vectors_of(n) for n in (1, 4, 16, 17, 2997)] == [1, 1, 1, 2, 188]
    assert {spec.hearing.tokens_of(n) for n in (1, 16, 2997)} == {188}
    assert [(one.through, one.first, one.past) for one in spec.own_tokens] == [
        ("vision", 262144, 262272),
        ("hearing", 262272, 262400),
    ]


def test_an_image_costs_what_timm_counts() -> None:
    """871,482,949,632 FLOPs, as PyTorch counts them in timm's network; the projector's map beside."""
    spec = read(E2B)
    seen, text = (cost.flops(spec, Pass(tokens=300, images=n, kernel="reference")).forward for n in (1, 0))
    assert seen - text == 871_482_949_632 + 2 * 256 * 2048 * 2048


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"vision_config": VISION | {"architecture": "resnet50"}}, "vision_config.architecture"),
        ({"vision_config": VISION | {"hidden_size": 1024}}, "vision_config.hidden_size"),
        ({"vision_config": VISION | {"model_args": {"depth": 3}}}, "vision_config.model_args"),
        ({"vision_config": VISION | {"unheard": 1}}, "vision_config"),
        ({"vision_soft_tokens_per_image": 64}, "vision_soft_tokens_per_image"),
        ({"audio_config": AUDIO | {"conf_attention_context_right": 1}}, "audio_config.conf_attention_context_right"),
        ({"audio_config": AUDIO | {"sscp_conv_kernel_size": [[5, 5], [3, 3]]}}, "audio_config.sscp_conv_kernel_size"),
        ({"audio_config": AUDIO | {"sscp_conv_channel_size": [128]}}, "audio_config.sscp_conv_channel_size"),
        ({"audio_config": AUDIO | {"gradient_clipping": 10.0}}, "audio_config.gradient_clipping"),
        ({"audio_config": AUDIO | {"conf_num_attention_heads": 7}}, "audio_config.conf_num_attention_heads"),
        ({"audio_config": AUDIO | {"vocab_offset": 262271}}, "audio_config"),
        ({"audio_config": AUDIO | {"vocab_size": 127}}, "audio_config"),
        ({"image_token_id": 17}, "image_token_id"),
        ({"audio_token_id": 262145}, "audio_token_id"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"text_config": {"model_type": "gemma3_text"}}, "text_config.model_type"),
    ],
)
def test_what_is_refused_is_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        read_config(E2B | change, "x")
    assert (caught.value.field or "").startswith(f"x: {field}")
