"""The cache of every config of ../shared/frontier, beside arithmetic on the raw config alone, in bf16.

What a token of a layer takes is stated here once more, by the kinds of layers that a config names: keys and values of
its KV heads, latents, keys of an indexer, compressed entries, windows of these, and states of recurrences in float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asbuilt import cost
from asbuilt.families import load_config_file, read_config

FRONTIER = Path(__file__).parents[3] / "shared" / "frontier"
BF16, FP32 = 2, 4
Config = dict[str, Any]
# Bytes per token of layers that keep every token, of full windows, and of a sequence whatever its length.
Cache = tuple[int, int, int]


def heads(said: Config, prefix: str = "") -> int:
    """Bytes of one token's keys and values in one layer."""
    n_heads = said["num_attention_heads"]
    width = said.get(f"{prefix}head_dim") or said["hidden_size"] // n_heads
    values = said.get(f"{prefix}v_head_dim") or width
    return BF16 * (said.get(f"{prefix}num_key_value_heads") or n_heads) * (width + values)


def windows(said: Config, slides: list[bool]) -> Cache:
    """Layers with one window, and layers with none."""
    full = len(slides) - sum(slides)
    return full * heads(said), sum(slides) * (said.get("sliding_window") or 0) * heads(said), 0


def plain(said: Config) -> Cache:
    slides = said.get("use_sliding_window", True) and said.get("sliding_window") is not None
    return windows(said, [slides] * said["num_hidden_layers"])


def by_types(said: Config) -> Cache:
    return windows(said, [kind == "sliding_attention" for kind in said["layer_types"]])


def alternating(said: Config) -> Cache:
    """The first layer slides, the second does not, and so on."""
    return windows(said, [layer % 2 == 0 for layer in range(said["num_hidden_layers"])])


def gemma3(said: Config) -> Cache:
    """Of six layers the last has no window."""
    return windows(said, [layer % 6 != 5 for layer in range(said["num_hidden_layers"])])


def gemma4(said: Config) -> Cache:
    """The last layers keep nothing, as they attend to keys and values of earlier ones; full layers have wider heads."""
    own = said["layer_types"][: said["num_hidden_layers"] - (said.get("num_kv_shared_layers") or 0)]
    few = said.get("num_global_key_value_heads") if said.get("attention_k_eq_v") else None
    wide = 2 * BF16 * (few or said["num_key_value_heads"]) * said["global_head_dim"]
    sliding = own.count("sliding_attention")
    return own.count("full_attention") * wide, sliding * said["sliding_window"] * heads(said), 0


def latent(said: Config) -> Cache:
    """A latent and one rotary key, which all heads share."""
    return BF16 * said["num_hidden_layers"] * (said["kv_lora_rank"] + said["qk_rope_head_dim"]), 0, 0


def indexed(said: Config) -> Cache:
    """Latents, and a key in layers that hold an indexer of their own: all, or those named `full`."""
    layers = said["num_hidden_layers"]
    types = said.get("indexer_types") or ["full"] * layers
    return latent(said)[0] + BF16 * types.count("full") * said["index_head_dim"], 0, 0


def compressed(said: Config) -> Cache:
    """A window of one vector that is key and value, and entries of 4 or 128 tokens with the numbers of open blocks.

    An entry of 128 is of one block; one of 4 is of two, with two series of numbers, and has an indexer's beside it.
    """
    width, index = said["head_dim"], said["index_head_dim"]
    ratios = said["compress_ratios"][: said["num_hidden_layers"]]
    coarse, fine = ratios.count(128), ratios.count(4)
    entries = coarse * width // 128 + fine * (width + index) // 4
    still_open = coarse * 128 * 2 * width + fine * 2 * 4 * 2 * 2 * (width + index)
    return BF16 * entries, BF16 * (len(ratios) * said["sliding_window"] * width + still_open), 0


def delta(said: Config) -> Cache:
    """Gated delta nets: a matrix for each value head in float32, and what the convolution needs of earlier tokens."""
    attention = said["num_hidden_layers"] // said.get("full_attention_interval", 4)
    key, value = said["linear_key_head_dim"], said["linear_value_head_dim"]
    keys, values = said["linear_num_key_heads"] * key, said["linear_num_value_heads"] * value
    convolved = (said["linear_conv_kernel_dim"] - 1) * (2 * keys + values)
    fixed = FP32 * values * key + BF16 * convolved
    return attention * heads(said), 0, (said["num_hidden_layers"] - attention) * fixed


def nemotron_h(said: Config) -> Cache:
    """Mamba-2: heads x width x states in float32, and what the convolution needs of earlier tokens."""
    kinds = said.get("layers_block_type") or list(said["hybrid_override_pattern"])
    recurrent, attention = (sum(kinds.count(name) for name in names) for names in (("M", "mamba"), ("*", "attention")))
    inner = said["mamba_num_heads"] * said["mamba_head_dim"]
    convolved = (said["conv_kernel"] - 1) * (inner + 2 * said["n_groups"] * said["ssm_state_size"])
    return attention * heads(said), 0, recurrent * (FP32 * inner * said["ssm_state_size"] + BF16 * convolved)


def lfm2(said: Config) -> Cache:
    """Short convolutions: of kernel 3 the two earlier tokens."""
    layers = said["num_hidden_layers"]
    attention = said.get("full_attn_idxs") or [i for i in range(layers) if said["layer_types"][i] == "full_attention"]
    earlier = (said["conv_L_cache"] - 1) * said["hidden_size"]
    return len(attention) * heads(said), 0, (layers - len(attention)) * BF16 * earlier


def mimo(said: Config) -> Cache:
    """Keys wider than values, and other KV heads in windows, whose size counts the tokens before the one that looks."""
    pattern = said["hybrid_layer_pattern"]
    window = heads(said, "swa_") * (said["sliding_window_size"] + 1)
    return pattern.count(0) * heads(said), pattern.count(1) * window, 0


def mllama(said: Config, whole: Config) -> Cache:
    """Cross-attention layers keep the keys and values of an image: four tiles at most, of patches and a class token."""
    across = len(said["cross_attention_layers"])
    seen = whole["vision_config"]
    patches = (seen["image_size"] // seen["patch_size"]) ** 2 + 1
    kept = across * seen["max_num_tiles"] * patches * heads(said)
    return (said["num_hidden_layers"] - across) * heads(said), 0, kept


KINDS: dict[str, Callable[[Config], Cache]] = {
    "deepseek_v2": latent,
    "deepseek_v3": latent,
    "kimi_k2": latent,
    "kimi_k25": latent,
    "deepseek_v32": indexed,
    "glm_moe_dsa": indexed,
    "deepseek_v4": compressed,
    "exaone4": by_types,
    "olmo3": by_types,
    "gemma2": alternating,
    "gpt_oss": alternating,
    "gemma3": gemma3,
    "gemma4": gemma4,
    "qwen3_next": delta,
    "qwen3_5": delta,
    "qwen3_5_moe": delta,
    "nemotron_h": nemotron_h,
    "lfm2": lfm2,
    "lfm2_vl": lfm2,
    "mimo_v2_flash": mimo,
}


def by_arithmetic(config: Config) -> Cache:
    said = config.get("text_config") or config
    if config["model_type"] == "mllama":
        return mllama(said, config)
    return KINDS.get(config["model_type"], plain)(said)


def names() -> list[str]:
    return sorted(path.parent.name for path in FRONTIER.glob("*/config.json")) or ["absent"]


@pytest.mark.parametrize("name", names())
def test_cache_is_what_the_config_says(name: str) -> None:
    if name == "absent":
        pytest.skip(f"no published models at {FRONTIER}")
    file = FRONTIER / name / "config.json"
    spec = read_config(load_config_file(file), name).spec
    bill = cost.cache(spec, 1, "bf16")
    assert (bill.unbounded, bill.window, bill.fixed) == by_arithmetic(json.loads(file.read_text()))
    assert bill.per_source_token == 0
