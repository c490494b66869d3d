"""The deepseek families: the first against the paper's equations, an alias, what is stored beside the third's model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from strategies import randomised
from torch import Tensor

from asbuilt import cost
from asbuilt.checkpoint.load import load, stored_parameters
from asbuilt.checkpoint.save import save
from asbuilt.checkpoint.source import open_model
from asbuilt.description import bill
from asbuilt.errors import InputError
from asbuilt.families import load_config_file, read_config, write_config
from asbuilt.nn import stored_tensors
from asbuilt.packing import block_scales
from asbuilt.spec import LatentAttention, MixtureOfExperts, Model

MODELS = Path(__file__).parents[3] / "shared" / "models"
Config = dict[str, Any]
FIRST: Config = {
    "architectures": ["DeepseekForCausalLM"],
    "model_type": "deepseek",
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 17,
    "moe_intermediate_size": 5,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "n_routed_experts": 7,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 0.01,
    "rope_theta": 100.0,
}
THIRD: Config = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 40,
    "hidden_size": 20,
    "intermediate_size": 17,
    "moe_intermediate_size": 5,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 3,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 9,
    "kv_lora_rank": 7,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_nextn_predict_layers": 1,
}


def published(name: str) -> Config:
    if not MODELS.exists():
        pytest.skip(f"no published models at {MODELS}")
    return load_config_file(MODELS / f"{name}.json")


def written(config: Config, folder: Path) -> dict[str, Tensor]:
    """Saves a randomised model of the config in float64, and returns the tensors under their names on disk."""
    reading = read_config(config, "x")
    save(randomised(reading.spec, 0, std=0.3), folder, family=reading.family, carried=reading.carried)
    return load_file(folder / "model.safetensors")


class Published:
    """The first DeepSeek model as arXiv 2401.06066, section 3, and its checkpoint's names have it; in plain torch."""

    def __init__(self, config: Config, tensors: dict[str, Tensor]) -> None:
        self.config, self.tensors = config, tensors

    def logits(self, tokens_T: Tensor) -> Tensor:
        x = self.tensors["model.embed_tokens.weight"][tokens_T]
        for i in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{i}"
            x = x + self.attention(self.norm(x, f"{at}.input_layernorm"), f"{at}.self_attn")
            h = self.norm(x, f"{at}.post_attention_layernorm")
            dense = i < self.config["first_k_dense_replace"]
            x = x + (self.mlp(h, f"{at}.mlp") if dense else torch.stack([self.experts(u, f"{at}.mlp") for u in h]))
        return self.norm(x, "model.norm") @ self.tensors["lm_head.weight"].T

    def norm(self, x: Tensor, name: str) -> Tensor:
        rms = (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt()
        return x / rms * self.tensors[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def mlp(self, x: Tensor, name: str) -> Tensor:
        gate, up = (self.linear(x, f"{name}.{part}_proj") for part in ("gate", "up"))
        return self.linear(gate * torch.sigmoid(gate) * up, f"{name}.down_proj")

    def experts(self, u: Tensor, name: str) -> Tensor:
        """Equations 9 to 11: shared experts, and the K_r routed ones of the highest affinity, weighed by it."""
        scores = torch.exp(self.tensors[f"{name}.gate.weight"] @ u)
        scores = scores / scores.sum()
        best = sorted(range(len(scores)), key=lambda e: -float(scores[e]))[: self.config["num_experts_per_tok"]]
        total = sum(float(scores[e]) for e in best) if self.config.get("norm_topk_prob") else 1.0
        routed = [float(scores[e]) / total * self.mlp(u, f"{name}.experts.{e}") for e in best]
        return torch.stack(routed).sum(0) + self.mlp(u, f"{name}.shared_experts")

    def attention(self, x: Tensor, name: str) -> Tensor:
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        q, k, v = (self.linear(x, f"{name}.{part}_proj").unflatten(-1, (-1, x.shape[-1] // heads)) for part in "qkv")
        out = []
        for h in range(heads):
            g = h // (heads // kv_heads)
            scores = self.turned(q[:, h]) @ self.turned(k[:, g]).T / q.shape[-1] ** 0.5
            seen = torch.ones_like(scores, dtype=torch.bool).tril()
            out.append(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v[:, g])
        return self.linear(torch.cat(out, -1), f"{name}.o_proj")

    def turned(self, x_TD: Tensor) -> Tensor:
        """Number i turns with i + d/2, as a complex number."""
        first, second = x_TD.chunk(2, -1)
        pairs = first.shape[-1]
        speed = self.config["rope_theta"] ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
        angle = torch.arange(len(x_TD), dtype=torch.float64)[:, None] * speed
        z = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((z.real, z.imag), -1)


@pytest.mark.parametrize(
    "more",
    [{}, {"norm_topk_prob": True, "attention_bias": True, "num_key_value_heads": 1}, {"first_k_dense_replace": 0}],
    ids=["plain", "renormalised", "sparse"],
)
@torch.no_grad()
def test_the_first_against_the_equations(more: Config, tmp_path: Path) -> None:
    config = FIRST | more
    tensors = written(config, tmp_path / "x")
    tokens = torch.randint(40, (19,), generator=torch.Generator().manual_seed(1))
    want = Published(config, tensors).logits(tokens)
    have = load(tmp_path / "x", dtype="float64")(tokens[None])[0]
    # our rotary tables are made in float32
    torch.testing.assert_close(have, want, rtol=0, atol=1e-5 * float(want.abs().max()))
    for key, value in {"num_experts_per_tok": 2, "rope_theta": 90.0, "rms_norm_eps": 0.02}.items():
        other = Published(config | {key: value}, tensors).logits(tokens)
        assert float((have - other).abs().max()) > 1e-3 * float(want.abs().max()), key


def test_the_first_goes_to_its_config_and_back() -> None:
    for more in ({}, {"n_shared_experts": None}, {"norm_topk_prob": True, "attention_bias": True}):
        reading = read_config(FIRST | more, "x")
        again = read_config(write_config("deepseek", reading.spec, reading.carried, None), "x")
        assert again.spec == reading.spec


REFUSED: list[tuple[Config, Config, str]] = [
    (FIRST, {"scoring_func": "sigmoid"}, "scoring_func"),
    (FIRST, {"moe_layer_freq": 2}, "moe_layer_freq"),
    (FIRST, {"n_routed_experts": None}, "n_routed_experts"),
    (FIRST, {"num_experts_per_tok": 1, "norm_topk_prob": True}, "norm_topk_prob"),
    (FIRST, {"first_k_dense_replace": 3}, "first_k_dense_replace"),
    (THIRD, {"topk_method": "greedy"}, "topk_method"),
    (THIRD, {"num_key_value_heads": 1}, "num_key_value_heads"),
    (THIRD, {"qk_rope_head_dim": 3}, "qk_rope_head_dim"),
    (THIRD, {"num_nextn_predict_layers": 17}, "num_nextn_predict_layers"),
    (THIRD, {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 1.0}}, "mscale"),
    (THIRD, {"rope_scaling": {"type": "linear", "factor": 4.0, "mscale_all_dim": 1.0}}, "mscale_all_dim"),
]


@pytest.mark.parametrize(("config", "more", "key"), REFUSED, ids=[key for _, _, key in REFUSED])
def test_what_is_refused(config: Config, more: Config, key: str) -> None:
    with pytest.raises(InputError, match=key):
        read_config(config | more, "x")


@pytest.mark.parametrize("mscale", [0.707, 1.0, 1.4])
def test_mscales_of_either_spelling(mscale: float) -> None:
    """Both alike leave cos and sin as they are; the softmax scale takes the square of one."""
    yarn = {"factor": 8.0, "original_max_position_embeddings": 16, "mscale": mscale, "mscale_all_dim": mscale}
    older = read_config(THIRD | {"rope_theta": 100.0, "rope_scaling": yarn | {"type": "yarn"}}, "x").spec
    newer = {"rope_parameters": yarn | {"rope_type": "yarn", "rope_theta": 100.0}}
    assert read_config(THIRD | newer, "x").spec == older
    attention = older.blocks[0].branches[0].body
    assert isinstance(attention, LatentAttention)
    assert attention.positions is not None
    assert attention.positions.attention_factor == 1.0
    assert attention.scale == pytest.approx(9**-0.5 * (0.1 * mscale * 2.0794415416798357 + 1) ** 2)


# what moonshotai/Kimi-K2-Instruct says of its shape
KIMI: Config = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    "vocab_size": 163840,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.827,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_nextn_predict_layers": 0,
}


def test_an_alias_is_the_same_model_and_keeps_its_name() -> None:
    reading = read_config(KIMI, "x")
    assert reading.spec == read_config(KIMI | {"model_type": "deepseek_v3"}, "x").spec
    back = write_config("kimi_k2", reading.spec, reading.carried, None)
    assert back["model_type"] == "kimi_k2"
    assert {key: back[key] for key in KIMI} == KIMI
    assert write_config("deepseek_v3", reading.spec, {}, None)["model_type"] == "deepseek_v3"
    # 61 layers of attention, 60 of 385 experts and a router, one dense, norms, embedding and head
    attention = 1536 * 7168 + 12288 * 1536 + 576 * 7168 + 16384 * 512 + 7168 * 8192 + 1536 + 512
    sparse = 385 * 3 * 2048 * 7168 + 384 * 7168
    norms = (2 * 61 + 1) * 7168
    total = 61 * attention + 60 * sparse + 3 * 18432 * 7168 + norms + 2 * 163840 * 7168
    assert cost.total_parameters(reading.spec) == total == 1_026_408_209_408
    assert 32e9 < cost.active_parameters(reading.spec) < 33e9
    assert not [*reading.spec.extras()]


def test_active_parameters_of_the_third() -> None:
    """What a token uses: everything but 248 of the 256 routed experts in each of 58 layers; tables and head whole."""
    spec = read_config(published("deepseek-v3"), "x").spec
    idle = 58 * 248 * 3 * 7168 * 2048
    assert cost.active_parameters(spec) == cost.total_parameters(spec) - idle == 37_552_282_624


def test_dense_first_layers_are_not_overlooked() -> None:
    """traps.json: with experts in all layers there would be 703,797,812,224."""
    config = published("deepseek-v3")
    trap = next(one for one in json.loads((MODELS / "traps.json").read_text()) if one["name"] == "deepseek-v3")
    spec = read_config(config, "x").spec
    assert cost.total_parameters(spec) == trap["right_total"] == 671_026_404_352
    assert sum(isinstance(block.branches[-1].body, MixtureOfExperts) for block in spec.blocks) == 58
    wrong = read_config(config | {"first_k_dense_replace": 0}, "x").spec
    assert cost.total_parameters(wrong) == trap["wrong_total"]


def test_what_the_hub_counts_is_itemised_to_the_last_number() -> None:
    """The hub's metadata count 684,531,386,000 numbers: the model, its corrections, a prediction layer, and scales."""
    source = open_model(MODELS / "deepseek-v3.json") if MODELS.exists() else pytest.skip("no published models")
    said = bill.describe(source, seq=1024, batch=1, dtype="bf16", kv_dtype="bf16")
    block = 11_507_286_016 + 256  # as layers 3 to 60, and its router's corrections
    predictor = block + 2 * 7168 * 7168 + 3 * 7168 + 2 * 129280 * 7168  # eh_proj, three norms, embedding and head
    tiles = {"q_a": 12 * 56, "q_b": 192 * 12, "kv_a": 5 * 56, "kv_b": 256 * 4, "o": 56 * 128}  # 576 rows take 5
    scales = 62 * sum(tiles.values()) + 3 * 3 * 144 * 56 + 59 * 257 * 3 * 16 * 56
    extra = {"buffers": 58 * 256, "predictors": predictor, "scales": scales, "computed": 0}
    assert said["stored_extra"] == extra
    assert said["parameters_stored"] == 671_026_404_352 + 58 * 256 + predictor + scales == 684_531_386_000
    assert said["cache"]["bytes_per_token"] == 70_272
    assert said["cache"]["bytes_per_token_expanded"] == 4_997_120


def test_tiles_that_are_none_are_refused() -> None:
    config = THIRD | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 0]}}
    reading = read_config(config, "x")
    with pytest.raises(InputError, match="weight_block_size"):
        block_scales("deepseek_v3", reading.spec, reading.quantization)
    assert block_scales("deepseek_v3", reading.spec, {"quant_method": "fp8"}) == 0
    whole = {"quant_method": "fp8", "weight_block_size": [1000, 1000]}
    one_each = block_scales("deepseek_v3", reading.spec, whole)
    assert one_each == 4 * 5 + 3 + 3 * 7 * 3
    named = whole | {"modules_to_not_convert": ["self_attn.o_proj"]}
    assert block_scales("deepseek_v3", reading.spec, named) == one_each - 4


def test_a_prediction_layer_is_loaded_and_saved(tmp_path: Path) -> None:
    """Under the names of the layer after the last, every tensor bit by bit, and counted as stored."""
    tensors = written(THIRD, tmp_path / "first")
    at = "model.layers.3"
    for name in (
        "enorm",
        "hnorm",
        "eh_proj",
        "embed_tokens",
        "shared_head.norm",
        "shared_head.head",
        "self_attn.kv_b_proj",
        "mlp.experts.5.down_proj",
        "input_layernorm",
    ):
        assert f"{at}.{name}.weight" in tensors
    assert f"{at}.mlp.gate.e_score_correction_bias" in tensors
    source = open_model(tmp_path / "first")
    model = load(source)
    assert len([*model.spec.extras()]) == 1
    save(model, tmp_path / "second", family=source.family, carried=source.reading.carried)
    again = load_file(tmp_path / "second" / "model.safetensors")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)
    extra = cost.stored_extra(source.spec)
    assert stored_parameters(source) == cost.total_parameters(source.spec) + sum(extra.values())


def test_a_folder_without_its_prediction_layer(tmp_path: Path) -> None:
    """As transformers writes it: the config says one, no tensor of it is there; some of them alone are refused."""
    tensors = written(THIRD, tmp_path / "x")
    file = tmp_path / "x" / "model.safetensors"
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.layers.3.")}
    save_file(kept, file)
    source = open_model(tmp_path / "x")
    assert not [*source.spec.extras()]
    model = load(source)
    assert stored_parameters(source) == sum(tensor.numel() for tensor in stored_tensors(model).values())
    save(model, tmp_path / "again", family=source.family, carried=source.reading.carried)
    config = load_config_file(tmp_path / "again" / "config.json")
    assert config["num_nextn_predict_layers"] == 1
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == kept.keys()
    assert open_model(tmp_path / "again").spec == replace(source.spec, name="again")

    save_file(kept | {"model.layers.3.enorm.weight": tensors["model.layers.3.enorm.weight"]}, file)
    broken = open_model(tmp_path / "x")
    with pytest.raises(InputError, match=r"missing: model\.layers\.3\."):
        load(broken)


@torch.no_grad()
def test_half_of_a_prediction_layer_is_refused_by_its_number(tmp_path: Path) -> None:
    """A config that says two where one is stored."""
    written(THIRD, tmp_path / "x")
    config = load_config_file(tmp_path / "x" / "config.json")
    (tmp_path / "x" / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 2}))
    with pytest.raises(InputError, match=r"model\.layers\.4\."):
        load(tmp_path / "x")


def spec_of(config: Config) -> Model:
    return read_config(config, "x").spec


def test_prediction_layers_count_for_nothing_but_what_is_stored() -> None:
    bare, one = spec_of(THIRD | {"num_nextn_predict_layers": 0}), spec_of(THIRD)
    assert cost.total_parameters(one) == cost.total_parameters(bare)
    assert cost.stored_extra(bare)["predictors"] == 0
    assert spec_of({key: value for key, value in THIRD.items() if key != "num_nextn_predict_layers"}) == one
    assert spec_of(THIRD | {"num_mtp_layers": 1}) == one
