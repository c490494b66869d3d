"""EAGLE-3 draft folders: read as published, computed as by hand, drafts that change no greedy text, refusals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from small_parts import FUSED
from strategies import SEEDS, randomised
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import asbuilt
from asbuilt import cost
from asbuilt.checkpoint.eagle3 import Eagle3Folder
from asbuilt.errors import InputError
from asbuilt.families import llama
from asbuilt.families.shared.eagle3 import after_blocks
from asbuilt.generate.decode import generate
from asbuilt.generate.draft import Chooser, Draft, FusedStreams
from asbuilt.nn import build
from asbuilt.nn.cache import Cache
from asbuilt.nn.fused_predictor import FusedPredictor as Module
from asbuilt.nn.model import Model
from asbuilt.nn.step import Step
from asbuilt.spec import LanguageModel, Pass, Rotary, stored_weights

CONFIG: dict[str, Any] = {  # the keys of a published folder
    "architectures": ["LlamaForCausalLMEagle3"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 12,
    "initializer_range": 0.02,
    "intermediate_size": 10,
    "max_position_embeddings": 64,
    "model_type": "llama",
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 0.01,
    "rope_theta": 100.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.28.1",
    "use_cache": True,
    "vocab_size": 23,
    "draft_vocab_size": 9,
}
TOKENS = [0, 1, 3, 4, 7, 11, 12, 20, 22]  # those that it drafts


def folder_of(
    path: Path, seed: int, said: Mapping[str, object] | None = None, *, embedding: bool = True, renamed: bool = False
) -> Path:
    """A draft layer's folder with random weights, written by names that other programs read."""
    config: dict[str, Any] = CONFIG | dict(said or {})
    m, f, heads, kv, d = 12, 10, 2, 1, 4
    target = config.get("target_hidden_size") or m
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "fc.weight": (m, 3 * target),
        "midlayer.input_layernorm.weight": (m,),
        "midlayer.hidden_norm.weight": (m,),
        "midlayer.post_attention_layernorm.weight": (m,),
        "midlayer.self_attn.q_proj.weight": (heads * d, 2 * m),
        "midlayer.self_attn.k_proj.weight": (kv * d, 2 * m),
        "midlayer.self_attn.v_proj.weight": (kv * d, 2 * m),
        "midlayer.self_attn.o_proj.weight": (m, heads * d),
        "midlayer.mlp.gate_proj.weight": (f, m),
        "midlayer.mlp.up_proj.weight": (f, m),
        "midlayer.mlp.down_proj.weight": (m, f),
        "norm.weight": (m,),
        "lm_head.weight": (len(TOKENS), m),
    } | ({"embed_tokens.weight": (23, m)} if embedding else {})
    tensors: dict[str, Tensor] = {name: torch.randn(shape, generator=generator) * 0.4 for name, shape in shapes.items()}
    tensors["d2t"] = torch.tensor(TOKENS) - torch.arange(len(TOKENS))
    tensors["t2d"] = torch.tensor([i in TOKENS for i in range(23)])
    if renamed:
        tensors = {name.replace("midlayer", "model.layers.0"): tensor for name, tensor in tensors.items()}
    path.mkdir(exist_ok=True, parents=True)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def target(d_model: int = 12, seed: int = 0, n_layers: int = 8) -> Model:
    """A llama that it drafts for."""
    spec = llama.build(
        n_vocab=23,
        d_model=d_model,
        n_layers=n_layers,
        n_heads=2,
        n_kv_heads=1,
        d_ff=8,
        max_positions=64,
        rotary=Rotary(d_rotary=4),
        d_head=4,
    )
    return randomised(spec, seed)


def normed(x: Tensor, gain: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 0.01).rsqrt() * gain


def rotated(x_THD: Tensor) -> Tensor:
    """RoPE in halves, theta 100."""
    angles = torch.arange(len(x_THD)).double()[:, None] * 100.0 ** (-torch.arange(0, 4, 2).double() / 4)
    cos, sin = (f(angles)[:, None].repeat(1, 1, 2) for f in (torch.cos, torch.sin))
    a, b = x_THD.chunk(2, -1)
    return x_THD * cos + torch.cat((-b, a), -1) * sin


def by_hand(w: dict[str, Tensor], h_TM: Tensor, tokens: list[int], before: bool) -> tuple[Tensor, Tensor]:
    """The layer's stream and logits of one whole text, as in EAGLE's own code, from the stored tensors."""
    layer = {name.removeprefix("midlayer."): tensor for name, tensor in w.items()}
    e_TM = normed(w["embed_tokens.weight"][tokens], layer["input_layernorm.weight"])
    s_TM = normed(h_TM, layer["hidden_norm.weight"])
    x, t = torch.cat((e_TM, s_TM), -1), len(tokens)
    q, k, v = ((x @ layer[f"self_attn.{n}_proj.weight"].T).view(t, -1, 4) for n in "qkv")
    q, k = rotated(q), rotated(k)
    scores_HTS = torch.einsum("thd,sd->hts", q, k[:, 0]) / 2
    scores_HTS = scores_HTS.masked_fill(torch.ones(t, t).triu(1).bool(), -torch.inf)
    mixed = torch.einsum("hts,sd->thd", scores_HTS.softmax(-1), v[:, 0]).reshape(t, -1)
    x_TM = (s_TM if before else h_TM) + mixed @ layer["self_attn.o_proj.weight"].T
    z = normed(x_TM, layer["post_attention_layernorm.weight"])
    gate, up = (z @ layer[f"mlp.{n}_proj.weight"].T for n in ("gate", "up"))
    y_TM = x_TM + (torch.nn.functional.silu(gate) * up) @ layer["mlp.down_proj.weight"].T
    return y_TM, normed(y_TM, w["norm.weight"]) @ w["lm_head.weight"].T


@settings(max_examples=10)
@given(SEEDS, st.booleans(), st.sampled_from([None, 12, 6]), st.booleans())
@torch.no_grad()
def test_a_layer_computes_as_published(
    tmp_path_factory: pytest.TempPathFactory, seed: int, before: bool, width: int | None, renamed: bool
) -> None:
    said: dict[str, Any] = {"norm_before_residual": True} if before else {}
    said |= {} if width is None else {"target_hidden_size": width}
    path = tmp_path_factory.mktemp("eagle")
    layer = Eagle3Folder(folder_of(path, seed, said, renamed=renamed)).load(torch.float64, torch.device("cpu"), None)
    stored = load_file(path / "model.safetensors")
    w = {name.replace("model.layers.0", "midlayer"): t.double() for name, t in stored.items()}
    tokens, t = [3, 22, 7, 7, 0, 15], 6
    streams = [torch.randn(1, t, width or 12, dtype=torch.float64) for _ in range(3)]
    h_TM = torch.cat(streams, -1)[0] @ w["fc.weight"].T
    _, want_TU = by_hand(w, h_TM, tokens, before)
    ids = torch.tensor([tokens])
    step = Step((1, t), ids.device, dtype=torch.float64)
    have_TV = layer(ids, streams, step)[0]
    torch.testing.assert_close(have_TV[:, TOKENS], want_TU, rtol=1e-9, atol=1e-9)
    others = [i for i in range(23) if i not in TOKENS]
    assert bool((have_TV[:, others] == -torch.inf).all())


class Watched(FusedStreams):
    """Keeps what was proposed after each text."""

    def begin(self, *given: Any, **named: Any) -> None:  # noqa: ANN401
        super().begin(*given, **named)
        self.made: list[tuple[list[int], list[int]]] = []

    def propose(self, text: Any, count: int, chooser: Chooser) -> list[Draft]:  # noqa: ANN401
        drafts = super().propose(text, count, chooser)
        self.made.append((list(text), [draft.token for draft in drafts]))
        return drafts


@pytest.mark.parametrize("chunk", [None, 2])
@torch.no_grad()
def test_it_drafts_with_the_streams_of_three_blocks(tmp_path: Path, chunk: int | None) -> None:
    """Each proposal is that of the whole text by hand; streams are those after 2, 4 and 5 of 8 blocks."""
    model, path = target(), folder_of(tmp_path, 5)
    layer = Eagle3Folder(path).load(torch.float64, torch.device("cpu"), None)
    w = {name: t.double() for name, t in load_file(path / "model.safetensors").items()}
    draft = Watched(layer, after_blocks(8, None), 3)
    prompt = [1, 5, 9, 2, 2, 20]
    steps = generate(model, [prompt], max_new_tokens=12, draft=draft, prefill_chunk=chunk)
    want = [row[0] for row in generate(model, [prompt], max_new_tokens=12)]
    assert [row[0] for row in steps] == want
    for text, made in draft.made:
        ids = torch.tensor([text])
        step = model.begin((1, len(text)), ids.device, None, None, "reference")
        streams = [
            model.stream(ids, model.begin((1, len(text)), ids.device, None, None, "reference"), n) for n in (2, 4, 5)
        ]
        assert step.tokens == len(text)
        h_TM, tokens = torch.cat(streams, -1)[0, :-1] @ w["fc.weight"].T, list(text)
        for token in made:
            y_TM, logits_TU = by_hand(w, h_TM, tokens[1:], before=False)
            assert TOKENS[int(logits_TU[-1].argmax())] == token
            tokens.append(token)
            h_TM = torch.cat((h_TM, y_TM[-1:]))


def test_costs_are_those_of_its_parts(tmp_path: Path) -> None:
    """Published sizes: EAGLE3 for Llama 3.1 8B; counted by hand."""
    m, f, v, u = 12, 10, 23, 9
    part = Eagle3Folder(folder_of(tmp_path, 0)).read.part
    layer = 2 * m * (8 + 2 * 4) + 8 * m + 3 * m * f
    assert cost.total_parameters(part) == 3 * m * m + layer + 4 * m + v * m + u * m
    flops = cost.flops(part, Pass(tokens=5))
    assert flops.products == 2 * 5 * (3 * m * m + layer + u * m)
    cache = Cache(part, batch=1, capacity=7, dtype=torch.bfloat16)
    assert cache.nbytes == cost.cache(part, 7, "bf16").at_seq == 7 * 2 * 4 * 2
    assert sum(weight.size for path, weight, _ in stored_weights(part) if path == "offsets") == u


@given(st.integers(1, 6), st.integers(0, 5))
def test_what_it_multiplies_is_counted(tokens: int, past: int) -> None:
    built = Module(FUSED, "").to("meta")
    assert sum(weight.numel() for weight in built.parameters()) == cost.total_parameters(FUSED)
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    streams = [torch.zeros(1, tokens, 7, device="meta")] * 3
    cache = Cache(FUSED, batch=1, capacity=tokens + past, dtype=torch.float32, device="meta")
    cache.advance((past + tokens,))
    step = Step((1, tokens), ids.device, past=(past,), cache=cache, kernel="reference")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        built(ids, streams, step)
    assert counter.get_total_flops() == cost.flops(FUSED, Pass(tokens=tokens, past=past)).forward


def test_a_folder_drafts(tmp_path: Path) -> None:
    """By path, with its own embedding or the model's."""
    model = build(target().spec)
    want = asbuilt.generate(model, [1, 2, 3], max_new_tokens=9)
    for embedding in (True, False):
        path = folder_of(tmp_path / f"{embedding}", 1, embedding=embedding)
        assert asbuilt.generate(model, [1, 2, 3], max_new_tokens=9, draft=path, draft_tokens=2) == want
    asbuilt.save(model, tmp_path / "model")
    assert asbuilt.generate(tmp_path / "model", [1, 2, 3], max_new_tokens=9, draft=path) == want


def test_what_is_refused(tmp_path: Path) -> None:
    model = target()
    for said, why in (
        ({"draft_vocab_size": "many"}, "draft_vocab_size"),
        ({"norm_before_residual": 1}, "norm_before_residual"),
        ({"num_hidden_layers": 2}, "num_hidden_layers"),
        ({"colour": "blue"}, "colour"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm"),
        ({"eagle_config": {"other": 1}}, "eagle_config.other"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}, "three whole numbers"),
        ({"draft_vocab_size": 8}, "another shape"),
    ):
        with pytest.raises(InputError, match=why):
            Eagle3Folder(folder_of(tmp_path, 1, said))
    asked: dict[str, Any] = {"max_new_tokens": 3}
    for said, why in (
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}, "engines disagree"),
        ({"target_hidden_size": 6}, "target_hidden_size"),
    ):
        with pytest.raises(InputError, match=why):
            asbuilt.generate(build(model.spec), [1], draft=folder_of(tmp_path, 1, said), **asked)
    usual = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True}}
    assert len(asbuilt.generate(build(model.spec), [1], draft=folder_of(tmp_path, 1, usual), **asked)) == 3
    with pytest.raises(InputError, match="too few blocks"):
        after_blocks(5, None)
    tensors = load_file(folder_of(tmp_path, 1) / "model.safetensors")
    for changed, why in (
        ({"d2t": torch.zeros(9, dtype=torch.long) + 20}, "distinct tokens"),
        ({"fc.bias": torch.zeros(12)}, "unexpected: fc.bias"),
        ({"norm.weight": None}, "missing: norm.weight"),
    ):
        kept = {name: tensor for name, tensor in (tensors | changed).items() if tensor is not None}
        save_file(kept, tmp_path / "model.safetensors")
        with pytest.raises(InputError, match=why):
            Eagle3Folder(tmp_path).load(torch.float32, torch.device("cpu"), None)
    assert isinstance(model.spec, LanguageModel)
