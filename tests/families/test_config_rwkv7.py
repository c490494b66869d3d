"""rwkv7: flash-linear-attention's folders, against the paper's equations written out with the names on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from one_mixer import near
from safetensors.torch import load_file, save_file
from torch import Tensor

from asbuilt import cost
from asbuilt.checkpoint.load import load
from asbuilt.checkpoint.save import save
from asbuilt.checkpoint.source import open_model
from asbuilt.errors import InputError
from asbuilt.families import read_config, write_config
from asbuilt.nn.cache import Cache
from asbuilt.spec import ChannelMixing, DeltaTimeMixing, Model

TINY: dict[str, Any] = {
    "architectures": ["RWKV7ForCausalLM"],
    "model_type": "rwkv7",
    "vocab_size": 37,
    "hidden_size": 12,
    "num_hidden_layers": 3,
    "head_dim": 4,
    "num_heads": None,
    "intermediate_size": 22,
    "hidden_ratio": 4.0,
    "decay_low_rank_dim": 5,
    "a_low_rank_dim": 3,
    "v_low_rank_dim": 2,
    "gate_low_rank_dim": 7,
    "norm_eps": 0.02,
    "norm_first": True,
    "norm_bias": True,
    "fuse_norm": False,
    "hidden_act": "sqrelu",
    "attn": None,
    "attn_mode": "chunk",
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
# What the published 1.5B's config has.
WORLD: dict[str, Any] = TINY | {
    "vocab_size": 65536,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "head_dim": 64,
    "num_heads": 32,
    "intermediate_size": 8192,
    "decay_low_rank_dim": 96,
    "a_low_rank_dim": 96,
    "v_low_rank_dim": 64,
    "gate_low_rank_dim": 256,
    "norm_eps": 1e-5,
    "value_dim": [2048] * 24,
    "initializer_range": 0.006,
    "use_cache": True,
    "fuse_cross_entropy": True,
    "fuse_linear_cross_entropy": False,
    "use_l2warp": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def spec_of(config: dict[str, Any] = TINY, **changes: object) -> Model:
    return read_config(config | changes, "x").spec


def stored(config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """Every tensor of a file by its name, drawn."""
    M, V, F_, L = (config[key] for key in ("hidden_size", "vocab_size", "intermediate_size", "num_hidden_layers"))
    H, D = M // config["head_dim"], config["head_dim"]
    values = (config.get("value_dim") or [M])[0]
    ranks = {"w": "decay_low_rank_dim", "a": "a_low_rank_dim", "v": "v_low_rank_dim", "g": "gate_low_rank_dim"}
    shapes: dict[str, tuple[int, ...]] = {"model.embeddings.weight": (V, M), "lm_head.weight": (V, M)}
    norms = ["model.norm", *(["model.layers.0.pre_norm"] if config["norm_first"] else [])]
    for i in range(L):
        at = f"model.layers.{i}."
        norms += [f"{at}attn_norm", f"{at}ffn_norm"]
        shapes |= {f"{at}attn.{name}_proj.weight": (M, M) for name in "rk"}
        shapes |= {f"{at}attn.v_proj.weight": (values, M), f"{at}attn.o_proj.weight": (M, values)}
        shapes |= {f"{at}attn.x_{name}": (1, 1, M) for name in "rwkvag"}
        shapes |= {f"{at}attn.k_k": (M,), f"{at}attn.k_a": (M,), f"{at}attn.r_k": (H, D)}
        shapes |= {f"{at}attn.g_norm.{kind}": (values,) for kind in ("weight", "bias")}
        shapes |= {f"{at}ffn.x_k": (M,), f"{at}ffn.key.weight": (F_, M), f"{at}ffn.value.weight": (M, F_)}
        for name, key in ranks.items():
            if name == "v" and i == 0:
                continue
            out = values if name in "vg" else M
            shapes[f"{at}attn.{name}_lora.lora.0.weight"] = (config[key], M)
            shapes[f"{at}attn.{name}_lora.lora.2.weight"] = (out, config[key])
            shapes |= {f"{at}attn.{name}_lora.lora.2.bias": (out,)} if name != "g" else {}
    kinds = ("weight", "bias") if config["norm_bias"] else ("weight",)
    shapes |= {f"{name}.{kind}": (M,) for name in norms for kind in kinds}
    if config["tie_word_embeddings"]:
        del shapes["lm_head.weight"]
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for name, shape in shapes.items()}


def folder(path: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def resaved(path: Path, into: Path) -> dict[str, Tensor]:
    """Returns the tensors of a folder that is loaded and saved again."""
    reading = open_model(path).reading
    save(load(path), into, family="rwkv7", carried=reading.carried)
    return load_file(into / "model.safetensors")


def logits(config: dict[str, Any], w: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Equations 3 to 22 of the paper for one text (T), state rows as values, columns as keys, token by token."""
    M, D = config["hidden_size"], config["head_dim"]
    H, w = M // D, {name: tensor.double() for name, tensor in w.items()}

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (M,), w[f"{name}.weight"], w.get(f"{name}.bias"), config["norm_eps"])

    def shifted(x: Tensor, mu: Tensor) -> Tensor:
        before = torch.cat((torch.zeros_like(x[:1]), x[:-1]))
        return x + (before - x) * mu.flatten()

    x = w["model.embeddings.weight"][tokens]
    x = norm(x, "model.layers.0.pre_norm") if config["norm_first"] else x
    first = torch.empty(0)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}.attn."
        n = norm(x, f"model.layers.{i}.attn_norm")
        mixed = {name: shifted(n, w[f"{at}x_{name}"]) for name in "rwkvag"}
        r, k, v = (mixed[name] @ w[f"{at}{name}_proj.weight"].T for name in "rkv")

        def low(name: str, act: Any = lambda z: z, at: str = at, mixed: Any = mixed) -> Tensor:  # noqa: ANN401
            inner = act(mixed[name] @ w[f"{at}{name}_lora.lora.0.weight"].T)
            return inner @ w[f"{at}{name}_lora.lora.2.weight"].T + w.get(f"{at}{name}_lora.lora.2.bias", 0)

        decay = torch.exp(-torch.exp(torch.tensor(-0.5, dtype=torch.float64)) * torch.sigmoid(low("w", torch.tanh)))
        a, g = torch.sigmoid(low("a")), low("g", torch.sigmoid)
        first = v if i == 0 else first
        v = v if i == 0 else v + (first - v) * torch.sigmoid(low("v"))
        kk = (k * w[f"{at}k_k"]).view(-1, H, D)
        length = (kk.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        kk = kk / length if config["fuse_norm"] else F.normalize(kk, dim=-1)
        k = k * (1 + (a - 1) * w[f"{at}k_a"])
        r, k, v, a, decay = (z.view(len(tokens), H, -1) for z in (r, k, v, a, decay))
        S, read = torch.zeros(H, v.shape[-1], D, dtype=torch.float64), []
        for t in range(len(tokens)):
            found = torch.einsum("hvd,hd->hv", S, kk[t])
            S = S * decay[t, :, None] - found[:, :, None] * (kk[t] * a[t])[:, None] + v[t, :, :, None] * k[t, :, None]
            read.append(torch.einsum("hvd,hd->hv", S, r[t]).flatten())
        gains = w[f"{at}g_norm.weight"], w[f"{at}g_norm.bias"]
        y = F.group_norm(torch.stack(read), H, *gains, D * config["norm_eps"])
        y = y + ((r * k * w[f"{at}r_k"]).sum(-1, keepdim=True) * v).flatten(1)
        x = x + (y * g) @ w[f"{at}o_proj.weight"].T
        at = f"model.layers.{i}.ffn."
        hidden = shifted(norm(x, f"model.layers.{i}.ffn_norm"), w[f"{at}x_k"]) @ w[f"{at}key.weight"].T
        x = x + F.relu(hidden) ** 2 @ w[f"{at}value.weight"].T
    return norm(x, "model.norm") @ w.get("lm_head.weight", w["model.embeddings.weight"]).T


VARIANTS: dict[str, dict[str, Any]] = {
    "usual": {},
    "fused": {"fuse_norm": True},
    "tied": {"tie_word_embeddings": True, "norm_first": False, "norm_bias": False},
    "wide values": {"value_dim": [24] * 3},
    "one layer": {"num_hidden_layers": 1},
}


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_a_folder_is_the_papers_model(variant: str, tmp_path: Path) -> None:
    """Whole texts, and token by token from the cache."""
    config = TINY | VARIANTS[variant]
    tensors = stored(config, 1)
    model = load(folder(tmp_path, config, tensors), dtype="fp32").double()
    tokens = torch.randint(37, (2, 70), generator=torch.Generator().manual_seed(2))
    wanted = torch.stack([logits(config, tensors, row) for row in tokens])
    near(model(tokens), wanted, 1e-9)
    cache = Cache(model.spec, batch=2, capacity=70, dtype=torch.float64)
    steps = [model(tokens[:, :66], cache=cache), *(model(tokens[:, i : i + 1], cache=cache) for i in range(66, 70))]
    near(torch.cat(steps, 1), wanted, 1e-9)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_loaded_is_saved(variant: str, tmp_path: Path) -> None:
    config = TINY | VARIANTS[variant]
    tensors = stored(config, 1)
    again = resaved(folder(tmp_path / "first", config, tensors), tmp_path / "second")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)
    written = json.loads((tmp_path / "second" / "config.json").read_text())
    spec = load(tmp_path / "second").spec
    assert (spec.blocks, spec.embedding_norm) == (spec_of(config).blocks, spec_of(config).embedding_norm)
    kept = {key: value for key, value in config.items() if key not in ("num_heads", "value_dim", "torch_dtype")}
    assert {key: written.get(key) for key in kept} == kept


@torch.no_grad()
def test_older_files_have_the_factors_of_a_shift_as_one(tmp_path: Path) -> None:
    tensors = stored(TINY, 3)
    older = dict(tensors)
    for i in range(3):
        factors = [older.pop(f"model.layers.{i}.attn.x_{name}") for name in "rwkvag"]
        older[f"model.layers.{i}.attn.x_x"] = torch.stack(factors)
    one, other = load(folder(tmp_path / "new", TINY, tensors)), load(folder(tmp_path / "old", TINY, older))
    tokens = torch.arange(9)[None]
    assert torch.equal(one(tokens), other(tokens))
    assert resaved(tmp_path / "old", tmp_path / "saved").keys() == tensors.keys()


SIZE = st.integers(1, 9)


@given(SIZE, SIZE, SIZE, SIZE, SIZE, SIZE, SIZE)
def test_parameters_are_the_papers_formula(v: int, heads: int, n: int, dw: int, da: int, dv: int, dg: int) -> None:
    """2 D V + 4 D + L D (12 D + 2 (dw + da + dv + dg) + 19) - (2 dv D + D), of a feed-forward of 4 D."""
    d = 4 * heads
    keys = (f"{name}_low_rank_dim" for name in ("decay", "a", "v", "gate"))
    ranks: dict[str, Any] = dict(zip(keys, (dw, da, dv, dg), strict=True))
    sizes: dict[str, Any] = {"vocab_size": v, "hidden_size": d, "num_hidden_layers": n, "intermediate_size": 4 * d}
    found = cost.total_parameters(spec_of(**sizes, **ranks))
    assert found == 2 * d * v + 4 * d + n * d * (12 * d + 2 * (dw + da + dv + dg) + 19) - (2 * dv * d + d)


def test_the_published_1_5b() -> None:
    """Its parameters, and the state of a sequence: 64 x 64 numbers a head in float32, and two tokens a layer."""
    spec = spec_of(WORLD)
    assert cost.total_parameters(spec) == 1_527_404_544
    bill = cost.cache(spec, 100_000, "bf16")
    assert (bill.fixed, bill.per_token) == (24 * (32 * 64 * 64 * 4 + 2 * 2048 * 2), 0)
    assert all(WORLD[key] == value for key, value in write_config("rwkv7", spec, {}, None).items() if key in WORLD)


def test_what_is_not_said() -> None:
    plain = {key: value for key, value in TINY.items() if key not in ("head_dim", "intermediate_size", "hidden_ratio")}
    assert spec_of(plain, hidden_size=128).blocks == spec_of(hidden_size=128, head_dim=64, intermediate_size=512).blocks
    for changes, wide in (({"hidden_ratio": 3.5}, 64), ({"hidden_ratio": None}, 64), ({"hidden_ratio": 8}, 96)):
        config = TINY | {"intermediate_size": None} | changes
        body = spec_of(config).blocks[0].branches[1].body
        assert isinstance(body, ChannelMixing)
        assert body.d_ff == wide
    # the width of a head decides, whatever number of heads stands beside it
    assert spec_of(num_heads=32).blocks == spec_of().blocks
    assert spec_of(head_dim=None, num_heads=3).blocks == spec_of().blocks
    assert spec_of(value_dim=12).blocks == spec_of(value_dim=None).blocks == spec_of().blocks
    body = spec_of(value_dim=24).blocks[1].branches[0].body
    assert isinstance(body, DeltaTimeMixing)
    assert (body.d_value, body.d_key, body.norm.eps) == (8, 4, 4 * 0.02)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn", {"layers": [0], "num_heads": 2}),
        ("hidden_act", "relu"),
        ("head_dim", 5),
        ("value_dim", 13),
        ("value_dim", [12, 24, 12]),
        ("value_dim", [12, 12]),
        ("value_dim", "wide"),
        ("decay_low_rank_dim", None),
        ("v_low_rank_dim", 0),
        ("norm_first", "yes"),
        ("head_size", 4),
        ("hidden_ratio", -1),
    ],
)
def test_refused_by_name(key: str, value: object) -> None:
    beside: dict[str, Any] = {"intermediate_size": None} if key == "hidden_ratio" else {}
    with pytest.raises(InputError, match=key):
        spec_of(**{key: value}, **beside)
    with pytest.raises(InputError, match="num_heads"):
        spec_of(head_dim=None, num_heads=5)


@pytest.mark.parametrize("key", ["decay_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim"])
def test_ranks_must_be_said(key: str) -> None:
    with pytest.raises(InputError, match=key):
        spec_of({name: value for name, value in TINY.items() if name != key})
