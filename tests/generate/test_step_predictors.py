"""Step-3.5's prediction layers: against the equations, as vLLM's step3p5_mtp and SGLang's have them, with stored names.

With h the stream before the final norm, e the embedded next token and all norms x / sqrt(mean(x^2) + eps) * (1 + w):
x = eh_proj [enorm(e), hnorm(h)], one layer with a window and a gate for each head, and from its result both logits, by
a norm and a head of its own, and the h of the next prediction layer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from strategies import randomised
from torch import Tensor

from asbuilt import cost
from asbuilt.checkpoint.load import load
from asbuilt.checkpoint.save import save
from asbuilt.checkpoint.source import open_model
from asbuilt.families import read_config, write_config
from asbuilt.generate.decode import generate
from asbuilt.generate.draft import Predictors
from asbuilt.nn.language_model import LanguageModel as Built
from asbuilt.spec import LanguageModel

FULL, SLIDING = "full_attention", "sliding_attention"
V, M, H, K, D, WINDOW, EPS, THETA, FF, N = 37, 12, 6, 2, 8, 4, 0.02, 20.0, 14, 3
COUNT = 2
CONFIG: dict[str, Any] = {
    "model_type": "step3p5",
    "vocab_size": V,
    "hidden_size": M,
    "intermediate_size": FF,
    "num_hidden_layers": N,
    "num_nextn_predict_layers": COUNT,
    "num_attention_heads": 4,
    "num_attention_groups": K,
    "attention_other_setting": {"num_attention_heads": H},
    "head_dim": D,
    "max_position_embeddings": 64,
    "rms_norm_eps": EPS,
    "rope_theta": [100.0, THETA, 100.0, THETA, THETA],
    "partial_rotary_factors": [0.5, 1.0, 0.5, 1.0, 1.0],
    "sliding_window": WINDOW,
    "layer_types": [FULL, SLIDING, FULL, SLIDING, SLIDING],
    "moe_layers_enum": "1,2",
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "moe_intermediate_size": 7,
    "share_expert_dim": 5,
    "swiglu_limits": [0.0, 0.0, 0.5, 0.0, 0.0],
    "swiglu_limits_shared": [0.0, 0.0, 0.6, 0.0, 0.0],
}
SHAPES: dict[str, tuple[int, ...]] = {
    "eh_proj.weight": (M, 2 * M),
    "self_attn.q_proj.weight": (H * D, M),
    "self_attn.k_proj.weight": (K * D, M),
    "self_attn.v_proj.weight": (K * D, M),
    "self_attn.o_proj.weight": (M, H * D),
    "self_attn.g_proj.weight": (H, M),
    "self_attn.q_norm.weight": (D,),
    "self_attn.k_norm.weight": (D,),
    "mlp.gate_proj.weight": (FF, M),
    "mlp.up_proj.weight": (FF, M),
    "mlp.down_proj.weight": (M, FF),
    "transformer.shared_head.output.weight": (V, M),
} | {
    f"{name}.weight": (M,)
    for name in ("enorm", "hnorm", "input_layernorm", "post_attention_layernorm", "transformer.shared_head.norm")
}


def spec_of(**changes: object) -> LanguageModel:
    spec = read_config(CONFIG | changes, "x").spec
    assert isinstance(spec, LanguageModel)
    return spec


def stored(folder: Path, seed: int) -> dict[str, Tensor]:
    """Writes a folder of random weights, the prediction layers by hand; returns its tensors by name in float64."""
    save(randomised(spec_of().without_extras, seed), folder, family="step3p5")
    held = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    own = {
        f"model.layers.{N + i}.{name}": torch.randn(shape, generator=generator, dtype=torch.float64) / 2
        for i in range(COUNT)
        for name, shape in SHAPES.items()
    }
    save_file(held | own, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return held | own


def normed(x: Tensor, w: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * (1 + w)


def turned(x_THD: Tensor) -> Tensor:
    places, pairs = (torch.arange(n, dtype=torch.float64) for n in (len(x_THD), D // 2))
    angles = places[:, None] * THETA ** (-pairs / (D // 2))
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x_THD.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def attended(x_TM: Tensor, w: dict[str, Tensor]) -> Tensor:
    n = len(x_TM)
    q = turned(normed((x_TM @ w["q_proj"].T).view(n, H, D), w["q_norm"]))
    k = turned(normed((x_TM @ w["k_proj"].T).view(n, K, D), w["k_norm"])).repeat_interleave(H // K, 1)
    v = (x_TM @ w["v_proj"].T).view(n, K, D).repeat_interleave(H // K, 1)
    behind = torch.arange(n)[:, None] - torch.arange(n)
    scores = torch.einsum("thd,shd->hts", q, k) / D**0.5
    weights = scores.masked_fill((behind < 0) | (behind >= WINDOW), -torch.inf).softmax(-1)
    sums = torch.einsum("hts,shd->thd", weights, v) * (x_TM @ w["g_proj"].T).sigmoid()[..., None]
    return sums.reshape(n, H * D) @ w["o_proj"].T


def by_equations(tensors: dict[str, Tensor], i: int, next_T: Tensor, stream_TM: Tensor) -> tuple[Tensor, Tensor]:
    """Layer i's result (T, M), before its norm, and its logits (T, V)."""
    start = f"model.layers.{N + i}."
    w = {name.removeprefix(start).removesuffix(".weight"): t for name, t in tensors.items() if name.startswith(start)}
    inner = {name.removeprefix("self_attn."): t for name, t in w.items() if name.startswith("self_attn.")}
    e = tensors["model.embed_tokens.weight"][next_T]
    x = torch.cat((normed(e, w["enorm"]), normed(stream_TM, w["hnorm"])), -1) @ w["eh_proj"].T
    x = x + attended(normed(x, w["input_layernorm"]), inner)
    h = normed(x, w["post_attention_layernorm"])
    x = x + (F.silu(h @ w["mlp.gate_proj"].T) * (h @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T
    return x, normed(x, w["transformer.shared_head.norm"]) @ w["transformer.shared_head.output"].T


def opened(folder: Path) -> Built:
    model = load(open_model(folder), torch.float64)
    assert isinstance(model, Built)
    return model


def stream(model: Built, text: list[int]) -> Tensor:
    """The stream (T, M) before the final norm."""
    ids = torch.tensor([text])
    return model.stream(ids, model.begin((1, len(text)), ids.device, None, None, "reference"))[0]


@torch.no_grad()
def test_they_draft_as_published_and_change_no_text(tmp_path: Path) -> None:
    tensors = stored(tmp_path, seed=5)
    model = opened(tmp_path)
    made: list[tuple[list[int], list[int]]] = []

    class Watched(Predictors):
        def propose(self, text: Any, count: int, chooser: Any) -> Any:  # noqa: ANN401
            drafts = super().propose(text, count, chooser)
            made.append((list(text), [one.token for one in drafts]))
            return drafts

    prompt = [3, 1, 4, 1, 5, 9]
    drafted, plain = (generate(model, [prompt], max_new_tokens=16, draft=draft) for draft in (Watched(2), None))
    assert list(drafted) == list(plain)
    assert any(len(drafts) == COUNT for _, drafts in made)
    for text, drafts in made:
        h, tokens = stream(model, text)[:-1], list(text)
        for i, draft in enumerate(drafts):
            next_T = torch.tensor(tokens[i + 1 :])
            h, scores = by_equations(tensors, i, next_T, h)
            assert draft == int(scores[-1].argmax())
            tokens.append(draft)


@torch.no_grad()
def test_logits_and_names(tmp_path: Path) -> None:
    """Logits within rounding, and the same tensors written again."""
    tensors = stored(tmp_path, seed=2)
    model, text = opened(tmp_path), [3, 1, 4, 1, 5, 9, 2, 6]
    step = model.begin((1, 7), torch.device("cpu"), None, None, "reference")
    step.table = model.table
    h = stream(model, text)[:-1]
    _, want = by_equations(tensors, 0, torch.tensor(text[1:]), h)
    have = model.predictors[0](torch.tensor([text[1:]]), h[None], step)[0]  # pyright: ignore
    torch.testing.assert_close(have, want, rtol=0, atol=1e-10)
    save(model, tmp_path / "again", family="step3p5")
    written = load_file(tmp_path / "again" / "model.safetensors")
    assert {name: tensor.tolist() for name, tensor in written.items()} == {
        name: tensor.tolist() for name, tensor in tensors.items()
    }


def test_they_are_billed_as_stored_and_written() -> None:
    spec = spec_of()
    each = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    assert cost.stored_extra(spec)["predictors"] == COUNT * each
    assert cost.total_parameters(spec) == cost.total_parameters(spec.without_extras)
    said = write_config("step3p5", spec, {}, None)
    assert (said["num_nextn_predict_layers"], said["mtp_layer_types"]) == (COUNT, [SLIDING] * COUNT)
    assert read_config(said, "x").spec == spec
    assert spec.predictors[0].block.branches[0].body == spec.blocks[1].branches[0].body


@pytest.mark.parametrize(
    "said",
    [
        {"moe_layers_enum": "1,2,4"},
        {"swiglu_limits_shared": [0.0, 0.0, 0.6, 0.0, 0.7]},
        {"rope_theta": [100.0, THETA, 100.0, THETA, 7.0]},
        {"layer_types": [FULL, SLIDING, FULL]},
    ],
)
def test_others_are_not_built(said: dict[str, Any]) -> None:
    """What the config does not say, or what files have no published names for; a note says so."""
    reading = read_config(CONFIG | said, "x")
    assert list(reading.spec.extras()) == []
    assert "num_nextn_predict_layers" in reading.notes
    again = write_config("step3p5", reading.spec, reading.carried, None)
    assert again["num_nextn_predict_layers"] == COUNT
    assert read_config(again, "x").spec == reading.spec


def test_a_file_without_them_is_read_without_them(tmp_path: Path) -> None:
    tensors = stored(tmp_path, seed=1)
    bare = {
        name: tensor for name, tensor in tensors.items() if not name.startswith(("model.layers.3", "model.layers.4"))
    }
    save_file(bare, tmp_path / "model.safetensors")
    assert list(open_model(tmp_path).spec.extras()) == []
    opened(tmp_path)
