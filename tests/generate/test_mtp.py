"""Qwen's prediction layers, named `mtp` in files: against the published equations written out with those names.

transformers does not run them. With h the stream after the final norm, e the embedded next token and all norms
x / sqrt(mean(x^2) + eps) * (1 + w), as vLLM's qwen3_next_mtp and qwen3_5_mtp have it: x = fc [norm(e), norm(h)], one
layer of gated attention and its feed-forward, norm, and the model's own head.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from strategies import randomised
from torch import Tensor

import asbuilt
from asbuilt import cost
from asbuilt.checkpoint.load import load
from asbuilt.checkpoint.save import save
from asbuilt.checkpoint.source import Source, open_model
from asbuilt.errors import InputError
from asbuilt.families import read_config, tensor_table, write_config
from asbuilt.generate.decode import generate
from asbuilt.generate.draft import Predictors
from asbuilt.nn.language_model import LanguageModel as Built
from asbuilt.nn.language_model import Predictor as Module
from asbuilt.spec import LanguageModel, Pass, SharedHead

Config = dict[str, Any]
V, M, H, K, D, EPS, THETA, EXPERTS, TOP = 37, 12, 4, 2, 8, 0.02, 100.0, 5, 2
TEXT: Config = {
    "vocab_size": V,
    "hidden_size": M,
    "intermediate_size": 14,
    "num_hidden_layers": 3,
    "full_attention_interval": 2,
    "num_attention_heads": H,
    "num_key_value_heads": K,
    "head_dim": D,
    "max_position_embeddings": 64,
    "rms_norm_eps": EPS,
    "rope_parameters": {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 0.5},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
}
SPARSE: Config = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP,
    "moe_intermediate_size": 7,
    "shared_expert_intermediate_size": 9,
}
SEES: Config = {
    "vision_config": {
        "depth": 1,
        "hidden_size": 8,
        "num_heads": 2,
        "intermediate_size": 6,
        "out_hidden_size": M,
        "patch_size": 2,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 4,
        "deepstack_visual_indexes": [],
    },
    "image_token_id": 30,
    "video_token_id": 31,
    "vision_start_token_id": 32,
    "vision_end_token_id": 33,
}
MTP = {"mtp_num_hidden_layers": 1}
OLDER = {key: value for key, value in TEXT.items() if key != "rope_parameters"}
ROPE = {"rope_theta": THETA, "partial_rotary_factor": 0.5}
GRID = TEXT | {"rope_parameters": TEXT["rope_parameters"] | {"mrope_section": [1, 1, 0], "mrope_interleaved": True}}
CONFIGS: dict[str, Config] = {
    "qwen3_next": OLDER | ROPE | SPARSE | {"decoder_sparse_step": 1},
    "qwen3_5_text": TEXT | MTP | {"tie_word_embeddings": True},
    "qwen3_5_moe_text": {key: value for key, value in TEXT.items() if key != "intermediate_size"} | SPARSE | MTP,
    "qwen3_5": SEES | {"text_config": GRID | MTP | {"model_type": "qwen3_5_text"}},
}


def spec_of(family: str, **changes: object) -> LanguageModel:
    spec = read_config(CONFIGS[family] | {"model_type": family} | changes, "x").spec
    assert isinstance(spec, LanguageModel)
    return spec


def shapes(sparse: bool) -> dict[str, tuple[int, ...]]:
    """The published names of one prediction layer, and the shapes that they have at these sizes."""
    found: dict[str, tuple[int, ...]] = {
        "fc.weight": (M, 2 * M),
        "layers.0.self_attn.q_proj.weight": (2 * H * D, M),
        "layers.0.self_attn.k_proj.weight": (K * D, M),
        "layers.0.self_attn.v_proj.weight": (K * D, M),
        "layers.0.self_attn.o_proj.weight": (M, H * D),
        "layers.0.self_attn.q_norm.weight": (D,),
        "layers.0.self_attn.k_norm.weight": (D,),
    }
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "layers.0.input_layernorm")
    found |= {f"{name}.weight": (M,) for name in (*norms, "layers.0.post_attention_layernorm")}
    widths = {f"experts.{e}.": 7 for e in range(EXPERTS)} | {"shared_expert.": 9} if sparse else {"": 14}
    for name, width in widths.items():
        found |= {f"layers.0.mlp.{name}{part}_proj.weight": (width, M) for part in ("gate", "up")}
        found[f"layers.0.mlp.{name}down_proj.weight"] = (M, width)
    gates = {"layers.0.mlp.gate.weight": (EXPERTS, M), "layers.0.mlp.shared_expert_gate.weight": (1, M)}
    return found | (gates if sparse else {})


def stored(family: str, folder: Path, seed: int, *, stacked: bool = False) -> dict[str, Tensor]:
    """Writes a folder of random weights, the layer's by hand; returns its tensors by their names in float64."""
    config = CONFIGS[family] | {"model_type": family}
    spec = spec_of(family).without_extras
    save(randomised(spec, seed), folder, family=family)
    held = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    own = {
        f"mtp.{name}": torch.randn(shape, generator=generator, dtype=torch.float64) / 2
        for name, shape in shapes("moe" in family or "next" in family).items()
    }
    kept = own
    if stacked:  # as newer files hold experts
        mlp = "mtp.layers.0.mlp.experts."
        kept = {name: tensor for name, tensor in own.items() if not name.startswith(mlp)}
        each = [[own[f"{mlp}{e}.{part}_proj.weight"] for e in range(EXPERTS)] for part in ("gate", "up", "down")]
        kept[f"{mlp}gate_up_proj"] = torch.cat((torch.stack(each[0]), torch.stack(each[1])), 1)
        kept[f"{mlp}down_proj"] = torch.stack(each[2])
    save_file(held | kept, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return held | own


def normed(x: Tensor, w: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * (1 + w)


def turned(x_THD: Tensor) -> Tensor:
    """RoPE on the first half of each head, number i with number i + D/4."""
    half = D // 4
    places, pairs = (torch.arange(n, dtype=torch.float64) for n in (len(x_THD), half))
    angles = places[:, None] * THETA ** (-pairs / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b, rest = x_THD.split((half, half, D - 2 * half), -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def attended(x_TM: Tensor, w: dict[str, Tensor]) -> Tensor:
    n = len(x_TM)
    q, gate = (x_TM @ w["q_proj"].T).view(n, H, 2 * D).chunk(2, -1)
    q, k = turned(normed(q, w["q_norm"])), turned(normed((x_TM @ w["k_proj"].T).view(n, K, D), w["k_norm"]))
    v = (x_TM @ w["v_proj"].T).view(n, K, D)
    k, v = k.repeat_interleave(H // K, 1), v.repeat_interleave(H // K, 1)
    scores = torch.einsum("thd,shd->hts", q, k) / D**0.5
    weights = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf).softmax(-1)
    sums = torch.einsum("hts,shd->thd", weights, v) * gate.sigmoid()
    return sums.reshape(n, H * D) @ w["o_proj"].T


def gated(x: Tensor, w: dict[str, Tensor], name: str = "") -> Tensor:
    return (F.silu(x @ w[f"{name}gate_proj"].T) * (x @ w[f"{name}up_proj"].T)) @ w[f"{name}down_proj"].T


def fed(x_TM: Tensor, w: dict[str, Tensor]) -> Tensor:
    if "gate" not in w:
        return gated(x_TM, w)
    made = (x_TM @ w["shared_expert_gate"].T).sigmoid() * gated(x_TM, w, "shared_expert.")
    for t, p in enumerate((x_TM @ w["gate"].T).softmax(-1)):
        best = p.topk(TOP)
        for share, e in zip(best.values / best.values.sum(), best.indices.tolist(), strict=True):
            made[t] += share * gated(x_TM[t], w, f"experts.{e}.")
    return made


def below(tensors: dict[str, Tensor], start: str) -> dict[str, Tensor]:
    """The weights whose names begin so, by what follows."""
    return {n.removeprefix(start).removesuffix(".weight"): t for n, t in tensors.items() if n.startswith(start)}


def by_equations(tensors: dict[str, Tensor], next_T: Tensor, stream_TM: Tensor) -> tuple[Tensor, Tensor]:
    """The layer's own stream (T, M) and logits (T, V)."""
    w, layer = below(tensors, "mtp."), "mtp.layers.0."
    table = next(tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight"))
    halves = normed(table[next_T], w["pre_fc_norm_embedding"]), normed(stream_TM, w["pre_fc_norm_hidden"])
    x = torch.cat(halves, -1) @ w["fc"].T
    x = x + attended(normed(x, w["layers.0.input_layernorm"]), below(tensors, f"{layer}self_attn."))
    x = x + fed(normed(x, w["layers.0.post_attention_layernorm"]), below(tensors, f"{layer}mlp."))
    x = normed(x, w["norm"])
    return x, x @ tensors.get("lm_head.weight", table).T


def opened(folder: Path) -> tuple[Source, Built]:
    source = open_model(folder)
    model = load(source, torch.float64)
    assert isinstance(model, Built)
    return source, model


@pytest.mark.parametrize(
    ("family", "stacked"), [*((name, False) for name in CONFIGS), ("qwen3_next", True), ("qwen3_5_moe_text", True)]
)
@torch.no_grad()
def test_it_predicts_as_published(family: str, stacked: bool, tmp_path: Path) -> None:
    tensors = stored(family, tmp_path, seed=len(family), stacked=stacked)
    _, model = opened(tmp_path)
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    stream = model.states(ids)
    step = model.begin((1, 7), ids.device, None, None, "reference")
    step.table = model.table
    (layer,) = model.predictors
    assert isinstance(layer, Module)
    _, want = by_equations(tensors, ids[0, 1:], stream[0, :-1])
    torch.testing.assert_close(layer(ids[:, 1:], stream[:, :-1], step, model.scores)[0], want, rtol=0, atol=1e-10)
    again = tmp_path / "again"
    save(model, again, family=family)
    written = load_file(again / "model.safetensors")
    assert {name: tensor.tolist() for name, tensor in written.items() if name.startswith("mtp.")} == {
        name: tensor.tolist() for name, tensor in tensors.items() if name.startswith("mtp.")
    }


def greedy(model: Built, prompt: list[int], draft: Predictors | None) -> list[int]:
    return [t for (t,) in generate(model, [prompt], max_new_tokens=14, draft=draft) if t is not None]


@pytest.mark.parametrize("family", CONFIGS)
@torch.no_grad()
def test_drafts_are_those_of_the_equations_and_change_no_text(family: str, tmp_path: Path) -> None:
    tensors = stored(family, tmp_path, seed=7)
    _, model = opened(tmp_path)
    made: list[tuple[list[int], list[int]]] = []

    class Watched(Predictors):
        def propose(self, text: Any, count: int, chooser: Any) -> Any:  # noqa: ANN401
            drafts = super().propose(text, count, chooser)
            made.append((list(text), [one.token for one in drafts]))
            return drafts

    prompt = [3, 1, 4, 1, 5]
    assert greedy(model, prompt, Watched(2)) == greedy(model, prompt, None)
    assert made
    drafted = asbuilt.generate(tmp_path, prompt, max_new_tokens=14, draft="own", dtype="float64")
    assert drafted == greedy(model, prompt, None)
    for text, drafts in made:
        next_T, stream = torch.tensor(text[1:]), model.states(torch.tensor([text]))[0, :-1]
        own, scores = by_equations(tensors, next_T, stream)
        assert drafts[0] == int(scores[-1].argmax())
        if len(drafts) > 1:  # it goes on from its own stream, which stands for that of the next position
            next_T, stream = torch.cat((next_T, torch.tensor(drafts[:1]))), torch.cat((stream, own[-1:]))
            assert drafts[1] == int(by_equations(tensors, next_T, stream)[1][-1].argmax())


def test_a_file_without_the_layer_is_read_without_it(tmp_path: Path) -> None:
    stored("qwen3_next", tmp_path, seed=1)
    assert len(open_model(tmp_path).spec.predictors) == 1  # type: ignore[attr-defined]  # pyright: ignore
    held = load_file(tmp_path / "model.safetensors")
    bare = {name: tensor for name, tensor in held.items() if not name.startswith("mtp.")}
    save_file(bare, tmp_path / "model.safetensors")
    source, model = opened(tmp_path)
    assert replace(source.spec, name="x") == spec_of("qwen3_next").without_extras
    with pytest.raises(InputError, match="no predictors of its own"):
        greedy(model, [1, 2], Predictors())
    save_file(bare | {"mtp.fc.weight": held["mtp.fc.weight"]}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"mtp\."):
        opened(tmp_path)


def test_images_are_not_drafted_beside(tmp_path: Path) -> None:
    stored("qwen3_5", tmp_path, seed=1)
    _, model = opened(tmp_path)
    with pytest.raises(InputError, match="only prompt lookup drafts beside images"):
        generate(model, [[1, 2]], max_new_tokens=2, draft=Predictors(), images=torch.zeros(1))


@pytest.mark.parametrize("family", [name for name in CONFIGS if name != "qwen3_5"])
@given(count=st.integers(0, 3), dedicated=st.booleans())
def test_one_layer_is_built_that_shares_the_embedding(family: str, count: int, dedicated: bool) -> None:
    key = "num_nextn_predict_layers" if family == "qwen3_next" else "mtp_num_hidden_layers"
    config = CONFIGS[family] | {"model_type": family, key: count, "mtp_use_dedicated_embeddings": dedicated}
    reading = read_config(config, "x")
    spec = reading.spec
    assert isinstance(spec, LanguageModel)
    assert len(spec.predictors) == int(count == 1 and not dedicated)
    assert (key in reading.notes) == (count > 1 or (count == 1 and dedicated))
    said = write_config(family, spec, reading.carried, None)
    assert said[key] == count
    assert said["mtp_use_dedicated_embeddings"] == dedicated
    assert read_config(said, "x").spec == spec
    names = {name for entry in tensor_table(family, spec).entries for name in entry.names}
    wanted = {f"mtp.{name}" for name in shapes(family != "qwen3_5_text")} if spec.predictors else set()
    assert {name for name in names if name.startswith("mtp.")} == wanted


def test_other_spellings_and_what_cannot_be() -> None:
    assert not spec_of("qwen3_next", mtp_num_hidden_layers=0).predictors
    assert not spec_of("qwen3_5_text", mtp_num_hidden_layers=None).predictors
    for value in (-1, True, 2.0, 17):
        with pytest.raises(InputError, match="num_nextn_predict_layers"):
            spec_of("qwen3_next", num_nextn_predict_layers=value)
    spec = spec_of("qwen3_5_text")
    twice = {"predictors": spec.predictors * 2}
    with pytest.raises(InputError, match="predictors"):
        tensor_table("qwen3_5_text", spec.changed(**twice))


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_its_costs(family: str) -> None:
    """It counts as stored beside the model: its tensors, and neither a second embedding nor a second head."""
    spec = spec_of(family)
    held = sum(torch.Size(shape).numel() for shape in shapes(family == "qwen3_next").values())
    assert cost.stored_extra(spec)["predictors"] == held
    assert cost.total_parameters(spec) == cost.total_parameters(spec.without_extras)
    (layer,) = spec.predictors
    assert isinstance(layer.head, SharedHead)
    assert layer.head.tied == (family == "qwen3_5_text")
    (logits,) = layer.head.multiplies(Pass(tokens=3))
    assert (logits.a, logits.b, logits.c) == (3, M, V)
    assert logits.weight == ("/embedding.weight" if layer.head.tied else "/head.weight")
