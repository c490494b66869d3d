"""What the families with latent attention share: their keys, their names on disk, and layers that predict further on.

They read out of one config what the attention is, which layers have experts, and how many prediction layers follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from asbuilt.families.shared import dimensions as shared
from asbuilt.families.shared import experts, predictors
from asbuilt.families.shared.common import ACTIVATION_NAMES, MOST_LAYERS, config_of, read_common
from asbuilt.families.shared.reader import ConfigReader, Reading
from asbuilt.families.shared.rotary import read_rotary, write_rotary
from asbuilt.families.shared.table import Concat, Entry, Interleave, Table
from asbuilt.spec import (
    Activation,
    GatedMLP,
    Head,
    LatentAttention,
    MixtureOfExperts,
    Model,
    RMSNorm,
    Rotary,
    Router,
    TiedHead,
    TokenEmbedding,
    YaRN,
)

INNER_EPS = 1e-6  # of the norms of latents, whatever rms_norm_eps says: so in the published code and in transformers
DERIVED = ("head_dim", "qk_head_dim")
# config key -> field of the part
WIDTHS = {
    "kv_lora_rank": "kv_rank",
    "qk_nope_head_dim": "d_nope",
    "qk_rope_head_dim": "d_rope",
    "v_head_dim": "d_value",
}

ATTENTION_STEMS = {
    f"attention.body.{part}": f"self_attn.{name}"
    for part, name in (
        ("q", "q_proj"),
        ("q_down", "q_a_proj"),
        ("q_norm", "q_a_layernorm"),
        ("q_up", "q_b_proj"),
        ("kv_norm", "kv_a_layernorm"),
        ("o", "o_proj"),
    )
}
JOINED = tuple(f"attention.body.{part}" for part in ("kv_down", "k_rope", "k_up", "v_up"))
STEMS = shared.NORM_STEMS | ATTENTION_STEMS | shared.GATED_STEMS | {"ffn.body.router": "mlp.gate"}
STEMS |= {"ffn.body.router.correction": f"mlp.gate.{experts.CORRECTION}"}
STEMS |= {f"ffn.body.shared.{part}": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
EXPERTS = {part: f"mlp.experts.{{}}.{part}_proj.weight" for part in ("gate", "up", "down")}


@dataclass(frozen=True, kw_only=True)
class Family:
    """What one of these families says of itself: class defaults by key, its router, whether its pairs are adjacent."""

    name: str
    heads: tuple[str, ...]
    defaults: Mapping[str, Any]
    read_router: Callable[[ConfigReader, int, int], Router]
    write_router: Callable[[Router, Mapping[str, Any]], dict[str, Any]]
    interleave_key: str | None = None
    predicts: bool = False


def build(
    attention: LatentAttention,
    router: Router,
    *,
    n_vocab: int,
    n_layers: int,
    n_dense: int,
    d_ff: int,
    d_expert: int,
    n_shared: int,
    max_positions: int,
    n_predictors: int = 0,
    activation: Activation = "silu",
    eps: float = 1e-6,
    tied: bool = False,
    name: str = "model",
) -> Model:
    """Returns the model: the first `n_dense` layers without experts, `n_predictors` prediction layers with them."""
    d_model = attention.d_model
    dense = GatedMLP(d_model=d_model, d_ff=d_ff, activation=activation)
    mixture = MixtureOfExperts(
        d_model=d_model,
        d_ff=d_expert,
        n_experts=router.n_experts,
        activation=activation,
        router=router,
        shared=replace(dense, d_ff=n_shared * d_expert),
    )
    norm, embedding = RMSNorm(d=d_model, eps=eps), TokenEmbedding(n_vocab=n_vocab, d_model=d_model)
    first, later = (shared.pre_norm(attention, ffn, norm) for ffn in (dense, mixture))
    head = Head(d_model=d_model, n_vocab=n_vocab)
    spec = Model(
        embedding=embedding,
        blocks=(first,) * n_dense + (later,) * (n_layers - n_dense),
        norm=norm,
        head=TiedHead(d_model=d_model, n_vocab=n_vocab) if tied else head,
        max_positions=max_positions,
        name=name,
    )
    return predictors.with_predictors(spec, later, norm, n_predictors)


def read(family: Family, config: dict[str, Any], name: str) -> Reading:
    """Returns what a config.json of the family says; raises InputError naming the key at fault."""
    reader, defaults = ConfigReader(config, name), family.defaults
    dtype = read_common(reader, family.name, family.heads)
    for key in DERIVED:
        reader.irrelevant(key, "follows from the widths that are read")
    for key in ("ep_size", "pretraining_tp"):
        reader.irrelevant(key, "only shares out or slices the same products")
    reader.only("moe_layer_freq", 1, reason="every layer after the dense ones has experts")
    reader.only("mlp_bias", False, None, reason="feed-forward parts have no biases here")
    d_model = reader.size("hidden_size", default=defaults["hidden_size"])
    n_layers = reader.size("num_hidden_layers", default=defaults["num_hidden_layers"], most=MOST_LAYERS)
    context = reader.size("max_position_embeddings", default=defaults["max_position_embeddings"])
    n_dense = experts.read_first_dense(reader, n_layers, defaults["first_k_dense_replace"])
    spec = build(
        _read_attention(reader, family, d_model, context),
        family.read_router(reader, d_model, n_layers),
        n_vocab=reader.size("vocab_size", default=defaults["vocab_size"]),
        n_layers=n_layers,
        n_dense=n_dense,
        d_ff=reader.size("intermediate_size", default=defaults["intermediate_size"]),
        d_expert=reader.size("moe_intermediate_size", default=defaults["moe_intermediate_size"]),
        n_shared=reader.size("n_shared_experts", default=defaults["n_shared_experts"]),
        max_positions=context,
        n_predictors=predictors.read_count(reader) if family.predicts else 0,
        activation=reader.choice("hidden_act", choices=ACTIVATION_NAMES, default="silu"),
        eps=reader.number("rms_norm_eps", default=1e-6, most=1.0),
        tied=reader.flag("tie_word_embeddings", default=False),
        name=reader.where,
    )
    reader.irrelevant("intermediate_size", "of the dense layers, where there are any")
    reader.finish()
    return Reading(
        spec=spec, carried=reader.carried, dtype=dtype, family=family.name, defaults=reader.defaults, notes=reader.notes
    )


def _read_attention(reader: ConfigReader, family: Family, d_model: int, context: int) -> LatentAttention:
    defaults = family.defaults
    n_heads = reader.size("num_attention_heads", default=defaults["num_attention_heads"])
    usual = defaults["num_key_value_heads"]
    kv_heads = reader.size("num_key_value_heads", default=usual or n_heads, null=n_heads, derived=usual is None)
    reader.require("num_key_value_heads", kv_heads == n_heads, f"num_attention_heads = {n_heads}, or null")
    widths = {field: reader.size(key, default=defaults[key]) for key, field in WIDTHS.items()}
    reader.require("qk_rope_head_dim", widths["d_rope"] % 2 == 0, "an even number: rotary positions turn pairs")
    q_rank = reader.size("q_lora_rank", default=defaults["q_lora_rank"], null=0)
    rotary = read_rotary(reader, widths["d_rope"], context)
    key = family.interleave_key
    if key is None or reader.flag(key, default=True, null=False):
        rotary = replace(rotary, pairing="adjacent")
    bias = reader.flag("attention_bias", default=False)
    return LatentAttention(
        d_model=d_model,
        n_heads=n_heads,
        q_rank=q_rank or None,
        q_norm=RMSNorm(d=q_rank, eps=INNER_EPS) if q_rank else None,
        kv_norm=RMSNorm(d=widths["kv_rank"], eps=INNER_EPS),
        positions=rotary,
        mscale=_read_mscale(reader, rotary),
        bias=bias,
        output_bias=bias,
        **widths,
    )


def _read_mscale(reader: ConfigReader, rotary: Rotary) -> float | None:
    """Returns `mscale_all_dim`, which widens the softmax scale too; where one mscale stands alone, codes disagree."""
    inner = reader.nested("rope_parameters", "rope_scaling")
    if inner is None or not isinstance(rotary.scaling, YaRN):
        return None
    both = inner.given("mscale"), inner.given("mscale_all_dim")
    if both[0] != both[1]:
        alone = "mscale" if both[0] else "mscale_all_dim"
        raise inner.error(alone, "stands alone", value=inner.config[alone], allowed="mscale and mscale_all_dim")
    return inner.number("mscale_all_dim") if both[1] else None


def write(family: Family, spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express.

    Where the spec has no prediction layers, the number that was carried is kept: a folder without them says it too.
    """
    attention = _attention(spec, family.name)
    ffn = experts.first_mixture(spec, family.name)
    if ffn.shared is None or ffn.shared.d_ff % ffn.d_ff:
        raise shared.wrong_part(family.name, "blocks.0.ffn.body.shared", ffn.shared, GatedMLP)
    dense = next((body for block in spec.blocks if isinstance(body := block.branches[-1].body, GatedMLP)), None)
    usual = carried.get("intermediate_size", family.defaults["intermediate_size"])
    written = {
        "architectures": [family.heads[0]],
        "model_type": family.name,
        "vocab_size": spec.n_vocab,
        "hidden_size": spec.d_model,
        "intermediate_size": usual if dense is None else dense.d_ff,
        "moe_intermediate_size": ffn.d_ff,
        "n_shared_experts": ffn.shared.d_ff // ffn.d_ff,
        "first_k_dense_replace": experts.first_dense(spec),
        "num_hidden_layers": spec.n_layers,
        "hidden_act": shared.WRITTEN_ACTIVATIONS.get(ffn.activation, ffn.activation),
        "max_position_embeddings": spec.max_positions,
        "tie_word_embeddings": isinstance(spec.head, TiedHead),
        "rms_norm_eps": float(shared.final_norm(spec, family.name, RMSNorm).eps),
        **_write_attention(family, attention, spec.max_positions),
        **family.write_router(ffn.router, carried),
    }
    if family.predicts:
        written |= predictors.write_count(spec, carried)
    derived = {"head_dim": attention.d_rope, "qk_head_dim": attention.d_head}
    written |= {key: value for key, value in derived.items() if key in carried}
    kept = {key: value for key, value in carried.items() if key != predictors.OTHER}
    config = config_of(written, kept, dtype)
    predictors.require_same_but_predictors(spec, read(family, config, spec.name).spec, family.name)
    return config


def _attention(spec: Model, family: str) -> LatentAttention:
    body = spec.blocks[0].branches[0].body
    if not isinstance(body, LatentAttention):
        raise shared.wrong_part(family, f"blocks.0.{spec.blocks[0].branches[0].name}.body", body, LatentAttention)
    return body


def _write_attention(family: Family, attention: LatentAttention, context: int) -> dict[str, Any]:
    rotary = attention.positions
    if rotary is None:
        raise shared.wrong_part(family.name, "blocks.0.attention.body.positions", rotary, Rotary)
    written = {
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_heads,
        "q_lora_rank": attention.q_rank,
        **{key: getattr(attention, field) for key, field in WIDTHS.items()},
        "attention_bias": attention.output_bias,
        **write_rotary(rotary, context),
    }
    if family.interleave_key is not None:
        written[family.interleave_key] = rotary.pairing == "adjacent"
    if attention.mscale is not None:
        written["rope_scaling"] |= _write_mscales(rotary, attention.mscale)
    return written


def _write_mscales(rotary: Rotary, mscale: float) -> dict[str, float]:
    """Returns both mscales; their quotient is the attention factor, which is written beside them."""
    assert isinstance(rotary.scaling, YaRN)
    length = 0.1 * math.log(rotary.scaling.factor) if rotary.scaling.factor > 1 else 0.0
    own = mscale
    if rotary.attention_factor != 1.0 and length:
        own = (rotary.attention_factor * (length * mscale + 1) - 1) / length
    return {"mscale": float(own), "mscale_all_dim": float(mscale)}


def table(spec: Model, family: str) -> Table:
    """Returns the names and layouts of a checkpoint folder's tensors: prediction layers follow the last block."""

    def of_blocks(longer: Model) -> Table:
        whole = experts.table(longer, STEMS, EXPERTS, family, elsewhere=JOINED)
        return replace(whole, entries=(*whole.entries, *_joined_entries(longer)))

    return predictors.table(spec, of_blocks)


def _joined_entries(spec: Model) -> list[Entry]:
    """Latent and shared key are one tensor; so are each head's key and value maps, head by head."""
    entries = []
    named = [(i, branch) for i, block in enumerate(spec.blocks) for branch in block.branches]
    bodies = [(i, branch.body) for i, branch in named if branch.name == "attention"]
    for i, body in bodies:
        if not isinstance(body, LatentAttention):
            continue  # whatever it is, it has names of its own or none
        at, stored = f"blocks.{i}.attention.body", f"model.layers.{i}.self_attn"
        for kind in ("weight", "bias") if body.bias else ("weight",):
            entries.append(
                Entry(
                    paths=(f"{at}.kv_down.{kind}", f"{at}.k_rope.{kind}"),
                    names=(f"{stored}.kv_a_proj_with_mqa.{kind}",),
                    layout=Concat((body.kv_rank, body.d_rope)),
                )
            )
        entries.append(
            Entry(
                paths=(f"{at}.k_up.weight", f"{at}.v_up.weight"),
                names=(f"{stored}.kv_b_proj.weight",),
                layout=Interleave(body.n_heads, (body.d_nope, body.d_value)),
            )
        )
    return entries
