"""The phi3 family: llama's blocks with q, k, v and gate, up stored as one matrix each, longrope, and perhaps windows.

Abdin et al. 2024 (arXiv 2404.14219); longrope: Ding et al. 2024 (arXiv 2402.13753).
"""

from __future__ import annotations

import math
from typing import Any

from asbuilt.errors import InputError
from asbuilt.families.shared.common import (
    ACTIVATION_NAMES,
    MOST_LAYERS,
    config_of,
    divide,
    named_entries,
    read_common,
    require_same,
)
from asbuilt.families.shared.reader import ConfigReader, Reading
from asbuilt.families.shared.rotary import MOST_FACTOR, ORIGINAL, partial_factor, read_rotary
from asbuilt.families.shared.table import Concat, Entry, Table, entry
from asbuilt.spec import (
    Activation,
    Attention,
    Block,
    Branch,
    GatedMLP,
    Head,
    LongRope,
    Model,
    Part,
    RMSNorm,
    Rotary,
    Scaling,
    TiedHead,
    TokenEmbedding,
    weights,
)

FAMILY = "phi3"
HEADS = ("Phi3ForCausalLM",)

STEMS = {
    "attention.norm": "input_layernorm",
    "attention.body.o": "self_attn.o_proj",
    "ffn.norm": "post_attention_layernorm",
    "ffn.body.down": "mlp.down_proj",
}
# stored stem -> what is joined in it, in order
FUSED = {
    "self_attn.qkv_proj": ("attention.body.q", "attention.body.k", "attention.body.v"),
    "mlp.gate_up_proj": ("ffn.body.gate", "ffn.body.up"),
}


def build(
    *,
    n_vocab: int,
    d_model: int,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int,
    d_ff: int,
    max_positions: int,
    rotary: Rotary,
    window: int | None = None,
    eps: float = 1e-5,
    activation: Activation = "silu",
    tied: bool = False,
    name: str = FAMILY,
) -> Model:
    """Returns the model of these dimensions; d_head is d_model / n_heads, and all layers have the same window."""
    norm = RMSNorm(d=d_model, eps=eps)
    attention = Attention(
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        d_head=d_model // n_heads,
        positions=rotary,
        window=window,
    )
    ffn = GatedMLP(d_model=d_model, d_ff=d_ff, activation=activation)
    branches = (Branch(name="attention", body=attention, norm=norm), Branch(name="ffn", body=ffn, norm=norm))
    return Model(
        embedding=TokenEmbedding(n_vocab=n_vocab, d_model=d_model),
        blocks=(Block(branches=branches),) * n_layers,
        head=(TiedHead if tied else Head)(d_model=d_model, n_vocab=n_vocab),
        max_positions=max_positions,
        norm=norm,
        name=name,
    )


def read(config: dict[str, Any], name: str) -> Reading:
    """Returns what a config.json of this family says; class defaults are those of transformers' Phi3Config.

    `name` becomes the model's name and stands in messages. Raises InputError naming the key at fault.
    """
    reader = ConfigReader(config, name)
    dtype = read_common(reader, FAMILY, HEADS)
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        reader.only(key, False, reason="no matrix of this family has a bias")
    reader.only("full_attn_mod", 1, reason="every layer of this family attends alike")
    reader.only("interpolate_factor", 1, reason="positions are scaled by rope_scaling alone")
    d_model = reader.size("hidden_size", default=3072)
    n_heads = reader.size("num_attention_heads", default=32)
    d_head = divide(reader, d_model, "hidden_size", n_heads, "num_attention_heads")
    context = reader.size("max_position_embeddings", default=4096)
    sizes: dict[str, Any] = {
        "n_vocab": reader.size("vocab_size", default=32064),
        "n_layers": reader.size("num_hidden_layers", default=32, most=MOST_LAYERS),
        "n_kv_heads": reader.size("num_key_value_heads", default=n_heads, null=n_heads, derived=True),
        "d_ff": reader.size("intermediate_size", default=8192),
        "eps": reader.number("rms_norm_eps", default=1e-5, most=1.0),
        "activation": reader.choice("hidden_act", choices=ACTIVATION_NAMES, default="silu"),
        "window": reader.size("sliding_window") if reader.given("sliding_window") else None,
        "tied": reader.flag("tie_word_embeddings", default=False),
        "rotary": _read_rotary(reader, d_head, context),
    }
    reader.finish()
    divide(reader, n_heads, "num_attention_heads", sizes["n_kv_heads"], "num_key_value_heads")
    spec = build(d_model=d_model, n_heads=n_heads, max_positions=context, name=name, **sizes)
    return Reading(
        spec=spec, carried=reader.carried, dtype=dtype, family=FAMILY, defaults=reader.defaults, notes=reader.notes
    )


def _read_rotary(reader: ConfigReader, d_head: int, context: int) -> Rotary:
    """Returns the rotation; the original context stands beside the rotary object, and is 4096 unless told there.

    What stands inside may not disagree with it; alone it counts for nothing, as in transformers, which overwrites it.
    """
    original = reader.size(ORIGINAL, default=4096)

    def longrope(inner: ConfigReader, agreed: int, context: int, d_rotary: int) -> Scaling:
        short, long = (inner.numbers(key, d_rotary // 2) for key in ("short_factor", "long_factor"))
        factor = _attention_factor(inner, context, original)
        return LongRope(short_factors=short, long_factors=long, original_context=original, attention_factor=factor)

    kinds = {"default": lambda *_: None, "longrope": longrope, "su": longrope}
    rotary = read_rotary(reader, d_head, context, partial=1.0, kinds=kinds)
    if rotary.scaling is None:
        reader.irrelevant(ORIGINAL, "positions are not scaled")
    return rotary


def _attention_factor(inner: ConfigReader, context: int, original: int) -> float:
    """Returns sqrt(1 + ln(factor) / ln(original context)) unless the object says otherwise (transformers' longrope)."""
    factor = inner.number("factor", default=context / original, null=context / original, most=MOST_FACTOR)
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return inner.number("attention_factor", default=usual, null=usual, most=MOST_FACTOR)


def _wrong(path: str, value: Part | None, kind: type[Part]) -> InputError:
    return InputError(f"{FAMILY} has {kind.__name__} here", field=path, value=repr(value))


def _parts(spec: Model) -> tuple[Attention, GatedMLP, RMSNorm, Rotary]:
    """Returns the parts of the first block; raises InputError naming the place where the spec is no phi3."""
    named = {branch.name: branch for branch in spec.blocks[0].branches}
    if named.keys() != {"attention", "ffn"}:
        raise InputError(f"{FAMILY} has two branches", field="blocks.0", value=list(named), allowed="attention, ffn")
    body, norm, mlp = named["attention"].body, named["attention"].norm, named["ffn"].body
    if not isinstance(body, Attention):
        raise _wrong("blocks.0.attention.body", body, Attention)
    if not isinstance(norm, RMSNorm):
        raise _wrong("blocks.0.attention.norm", norm, RMSNorm)
    if not isinstance(mlp, GatedMLP):
        raise _wrong("blocks.0.ffn.body", mlp, GatedMLP)
    if not isinstance(body.positions, Rotary):
        raise _wrong("blocks.0.attention.body.positions", body.positions, Rotary)
    return body, mlp, norm, body.positions


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    attention, ffn, norm, rotary = _parts(spec)
    written = {
        "architectures": [HEADS[0]],
        "model_type": FAMILY,
        "vocab_size": spec.n_vocab,
        "hidden_size": spec.d_model,
        "intermediate_size": ffn.d_ff,
        "num_hidden_layers": spec.n_layers,
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads,
        "hidden_act": {"gelu_tanh": "gelu_pytorch_tanh"}.get(ffn.activation, ffn.activation),
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": float(norm.eps),
        "sliding_window": attention.window,
        "tie_word_embeddings": isinstance(spec.head, TiedHead),
        **_write_rotary(rotary, attention.d_head),
    }
    config = config_of(written, carried, dtype)
    require_same(spec, read(config, spec.name).spec, FAMILY)
    return config


def _write_rotary(rotary: Rotary, d_head: int) -> dict[str, Any]:
    written: dict[str, Any] = {"rope_theta": float(rotary.theta), "rope_scaling": None}
    if rotary.d_rotary != d_head:
        written["partial_rotary_factor"] = partial_factor(rotary.d_rotary, d_head)
    if isinstance(rotary.scaling, LongRope):
        written[ORIGINAL] = rotary.scaling.original_context
        written["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": list(rotary.scaling.short_factors),
            "long_factor": list(rotary.scaling.long_factors),
            "attention_factor": float(rotary.scaling.attention_factor),
        }
    return written


def table(spec: Model) -> Table:
    """Returns the names and layouts of a checkpoint folder's tensors."""
    tied = isinstance(spec.head, TiedHead)
    entries = [entry("embedding.weight", "model.embed_tokens.weight"), entry("norm.weight", "model.norm.weight")]
    if not tied:
        entries.append(entry("head.weight", "lm_head.weight"))
    joined = tuple(stem for stems in FUSED.values() for stem in stems)
    for i, block in enumerate(spec.blocks):
        path, prefix = f"blocks.{i}.", f"model.layers.{i}."
        entries += [_fused(block, path, stems, f"{prefix}{stored}.weight") for stored, stems in FUSED.items()]
        entries += named_entries(block, path, STEMS, prefix, {}, FAMILY, elsewhere=joined)
    return Table(
        entries=tuple(entries),
        ignored={r"(.*\.)?rotary_emb\.inv_freq": "rotary frequencies, computed from the config"},
        duplicates={"lm_head.weight": "embedding.weight"} if tied else {},
    )


def _fused(block: Block, path: str, stems: tuple[str, ...], stored: str) -> Entry:
    """Returns the entry of matrices that are stored as one."""
    rows = {name: weight.shape[0] for name, weight, _ in weights(block)}
    names = [f"{stem}.weight" for stem in stems]
    for name in names:
        if name not in rows:
            raise InputError(f"{FAMILY} models have this weight", field=path + name)
    return Entry(
        paths=tuple(path + name for name in names), names=(stored,), layout=Concat(tuple(map(rows.__getitem__, names)))
    )
