"""Configs as transformers writes them, whole and as differences from its classes' defaults: every key is known."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from asbuilt.families import FAMILIES, read_config

# What version 4 wrote into every config, of which version 5 has moved generation's to a file of their own.
OLDER: dict[str, Any] = {
    "_name_or_path": "a/b",
    "auto_map": {"AutoConfig": "configuration_x.XConfig"},
    "bad_words_ids": None,
    "diversity_penalty": 0.0,
    "exponential_decay_length_penalty": None,
    "finetuning_task": None,
    "num_beams": 1,
    "output_router_logits": False,
    "prefix": None,
    "pretraining_tp": 1,
    "pruned_heads": {},
    "remove_invalid_values": False,
    "task_specific_params": None,
    "tf_legacy_loss": False,
    "tie_encoder_decoder": False,
    "torchscript": False,
    "transformers_version": "4.40.0",
    "typical_p": 1.0,
    "use_bfloat16": False,
    "use_cache": True,
}
INSIDE = ("text_config", "vision_config", "audio_config")


# Sizes of a class's defaults that do not fit together, or are missing, with ones that do.
FITTING: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gemma3": {"vision_config": {"vision_use_head": False, "image_size": 896}},
    "glm4_moe": {"num_attention_heads": 32},
    "kimi_k25": {"image_token_id": 7},
    "lfm2_vl": {"vision_config": {"vision_use_head": False}},
    "llama4": {"vision_config": {"intermediate_size": 3072, "vision_output_dim": 4096}},
    "llava": {"image_token_index": 7},
    "qwen2_vl": {"vision_config": {"hidden_size": 8192}},
    "qwen2_5_vl": {"vision_config": {"out_hidden_size": 8192}},
    "qwen3_5": {"vision_config": {"out_hidden_size": 4096}},
    "qwen3_5_moe": {"vision_config": {"out_hidden_size": 2048}},
    "qwen3_vl": {"vision_config": {"out_hidden_size": 4096}},
    "qwen3_vl_moe": {"vision_config": {"out_hidden_size": 2048}},
    "voxtral": {"audio_token_id": 7},
}


def fitted(family: str, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config with sizes that fit together."""
    mine = FITTING.get(family, {})
    return config | {
        k: {**(config.get(k) or {}), **said} if isinstance(said, dict) else said for k, said in mine.items()
    }


def older(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config, and those inside it, with what version 4 wrote besides."""
    inside = {key: OLDER | config[key] for key in INSIDE if isinstance(config.get(key), dict)}
    return OLDER | config | inside


@pytest.mark.parametrize("family", sorted(set(FAMILIES) & set(CONFIG_MAPPING)))
def test_every_key_is_known(family: str) -> None:
    made = CONFIG_MAPPING[family]()
    whole = json.loads(made.to_json_string(use_diff=False))
    spec = read_config(fitted(family, whole), "x").spec
    assert read_config(fitted(family, older(whole)), "x").spec == spec
    read_config(fitted(family, json.loads(made.to_json_string(use_diff=True))), "x")
