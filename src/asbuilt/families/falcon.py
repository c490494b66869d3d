"""The falcon family: rotary attention beside the feed-forward, few key heads, q, k and v stored key head by key head.

Almazrouei et al. 2023 (arXiv 2311.16867). Two generations share the name. The older (7B) has one norm for both branches
and, under `multi_query`, one key head whatever `num_kv_heads` says; the newer (40B, 180B, 11B) has `num_kv_heads` key
heads, and a norm for each branch unless `num_ln_in_parallel_attn` is 1. Files that ask for ALiBi are refused:
transformers adds it twice in one of its two ways of computing, and rounds it to bfloat16 in both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from asbuilt.errors import InputError
from asbuilt.families.shared.common import ACTIVATION_NAMES, MOST_LAYERS, config_of, divide, read_common, require_same
from asbuilt.families.shared.fused import branches, expect, fused_table, grouped
from asbuilt.families.shared.reader import ConfigReader, Reading
from asbuilt.families.shared.rotary import read_rotary, write_rotary
from asbuilt.families.shared.table import Table
from asbuilt.spec import (
    MLP,
    Activation,
    Attention,
    Block,
    Branch,
    Head,
    LayerNorm,
    Model,
    Parallel,
    Rotary,
    TiedHead,
    TokenEmbedding,
)
from asbuilt.spec.part import LARGEST_SIZE

FAMILY = "falcon"
HEADS = ("FalconForCausalLM", "RWForCausalLM")  # the second in the files that bring their own code
WRITTEN_ACTIVATIONS: dict[str, str] = {"gelu_tanh": "gelu_new"}
PREFIX = "transformer."
ONE_NORM, TWO_NORMS, SEQUENTIAL = "one norm", "two norms", "sequential"

OUTSIDE = {"embedding": "transformer.word_embeddings", "norm": "transformer.ln_f", "head": "lm_head"}
STEMS = {
    "attention.body.o": "self_attention.dense",
    "ffn.body.up": "mlp.dense_h_to_4h",
    "ffn.body.down": "mlp.dense_4h_to_h",
    "parallel.norm": "input_layernorm",
    "parallel.body.attention.o": "self_attention.dense",
    "parallel.body.ffn.up": "mlp.dense_h_to_4h",
    "parallel.body.ffn.down": "mlp.dense_4h_to_h",
}
PARALLEL_NORMS = {"attention.norm": "ln_attn", "ffn.norm": "ln_mlp"}
SEQUENTIAL_NORMS = {"attention.norm": "input_layernorm", "ffn.norm": "post_attention_layernorm"}


def build(
    *,
    n_vocab: int,
    d_model: int,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int,
    max_positions: int,
    rotary: Rotary,
    kind: str = ONE_NORM,
    d_ff: int | None = None,
    eps: float = 1e-5,
    activation: Activation = "gelu",
    bias: bool = False,
    tied: bool = True,
    name: str = FAMILY,
) -> Model:
    """Returns the model of these dimensions; `kind` is ONE_NORM, TWO_NORMS (both parallel) or SEQUENTIAL.

    d_ff None means 4 * d_model.
    """
    norm = LayerNorm(d=d_model, eps=eps)
    attention = Attention(
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        d_head=d_model // n_heads,
        positions=rotary,
        bias=bias,
        output_bias=bias,
    )
    ffn = MLP(d_model=d_model, d_ff=d_ff or 4 * d_model, activation=activation, bias=bias)
    first = Branch(name="attention", body=attention, norm=norm)
    both = (first, Branch(name="ffn", body=ffn, norm=norm, parallel=kind == TWO_NORMS))
    if kind == ONE_NORM:
        both = (Branch(name="parallel", body=Parallel(attention=attention, ffn=ffn), norm=norm),)
    return Model(
        embedding=TokenEmbedding(n_vocab=n_vocab, d_model=d_model),
        blocks=(Block(branches=both),) * n_layers,
        head=(TiedHead if tied else Head)(d_model=d_model, n_vocab=n_vocab),
        max_positions=max_positions,
        norm=norm,
        name=name,
    )


def read(config: dict[str, Any], name: str) -> Reading:
    """Returns what a config.json of this family says; class defaults are those of transformers' FalconConfig.

    `name` becomes the model's name and stands in messages. Raises InputError naming the key at fault.
    """
    reader = ConfigReader(config, name)
    dtype = read_common(reader, FAMILY, HEADS)
    reader.only("alibi", False, reason="ALiBi is not read in this family: transformers computes it in two ways")
    reader.only("apply_residual_connection_post_layernorm", False, reason="residuals after the norm are not read")
    d_model = reader.size("hidden_size", "n_embed", default=4544, most=LARGEST_SIZE // 4)  # d_ff is 4 times that
    n_heads = reader.size("num_attention_heads", "n_head", default=71)
    context = reader.size("max_position_embeddings", default=2048)
    d_head = divide(reader, d_model, "hidden_size", n_heads, "num_attention_heads")
    reader.require("hidden_size", d_head % 2 == 0, f"an even multiple of the {n_heads} heads: rotary turns pairs")
    kind, n_kv_heads = _generation(reader, n_heads)
    rotary = read_rotary(reader, d_head, context)
    sizes: dict[str, Any] = {
        "n_vocab": reader.size("vocab_size", default=65024),
        "n_layers": reader.size("num_hidden_layers", "n_layer", default=32, most=MOST_LAYERS),
        "d_ff": reader.size("ffn_hidden_size", default=4 * d_model, null=4 * d_model, derived=True),
        "eps": reader.number("layer_norm_epsilon", default=1e-5, most=1.0),
        "activation": reader.choice("activation", choices=ACTIVATION_NAMES, default="gelu"),
        "bias": reader.flag("bias", default=False),
        "tied": reader.flag("tie_word_embeddings", default=True),
    }
    reader.only("ff_factor", sizes["d_ff"] // d_model, reason="what ffn_hidden_size says, in an older spelling")
    reader.finish()
    spec = build(
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        max_positions=context,
        rotary=rotary,
        kind=kind,
        name=name,
        **sizes,
    )
    return Reading(
        spec=spec, carried=reader.carried, dtype=dtype, family=FAMILY, defaults=reader.defaults, notes=reader.notes
    )


def _generation(reader: ConfigReader, n_heads: int) -> tuple[str, int]:
    """Returns the kind of block and how many key heads there are."""
    newer = reader.flag("new_decoder_architecture", default=False)
    multi_query = reader.flag("multi_query", default=True)
    parallel = reader.flag("parallel_attn", default=True)
    kv_heads = reader.size("num_kv_heads", "n_head_kv", default=n_heads, null=n_heads)
    usual = 2 if newer else 1
    norms = reader.size("num_ln_in_parallel_attn", default=usual, null=usual, most=2)
    if newer:
        reader.require("parallel_attn", parallel, "true beside new_decoder_architecture")
        divide(reader, n_heads, "num_attention_heads", kv_heads, "num_kv_heads")
        return (TWO_NORMS if norms == 2 else ONE_NORM), kv_heads
    reader.require("num_ln_in_parallel_attn", norms == 1 or not parallel, "1 without new_decoder_architecture")
    if multi_query:
        for key in ("num_kv_heads", "n_head_kv"):
            reader.irrelevant(key, "ignored: multi_query means one key head")
    else:
        reader.require("num_kv_heads", kv_heads == n_heads, f"num_attention_heads = {n_heads} without multi_query")
    return (ONE_NORM if parallel else SEQUENTIAL), 1 if multi_query else n_heads


@dataclass(frozen=True)
class _Parts:
    kind: str
    attention: Attention
    ffn: MLP
    norm: LayerNorm
    rotary: Rotary


def _kind_of(spec: Model) -> tuple[str, Branch, object, object]:
    """Returns the kind of the first block, its first branch, and what should be its attention and feed-forward."""
    if len(spec.blocks[0].branches) == 1:
        (both,) = branches(spec, FAMILY, ("parallel",))
        body = expect(both.body, Parallel, "blocks.0.parallel.body", FAMILY)
        return ONE_NORM, both, body.attention, body.ffn
    first, second = branches(spec, FAMILY)
    return (TWO_NORMS if second.parallel else SEQUENTIAL), first, first.body, second.body


def _parts(spec: Model) -> _Parts:
    kind, first, body, ffn = _kind_of(spec)
    attention = expect(body, Attention, "blocks.0: attention", FAMILY)
    return _Parts(
        kind=kind,
        attention=attention,
        ffn=expect(ffn, MLP, "blocks.0: ffn", FAMILY),
        norm=expect(first.norm, LayerNorm, f"blocks.0.{first.name}.norm", FAMILY),
        rotary=expect(attention.positions, Rotary, "blocks.0: attention.positions", FAMILY),
    )


def _write_generation(kind: str, attention: Attention) -> dict[str, Any]:
    """The older generation where it can say it, since only the newer has a number of key heads in between."""
    n_heads, kv_heads = attention.n_heads, attention.n_kv_heads
    if kind == TWO_NORMS or (kind == ONE_NORM and kv_heads not in (1, n_heads)):
        norms = 2 if kind == TWO_NORMS else 1
        return {"new_decoder_architecture": True, "num_kv_heads": kv_heads, "num_ln_in_parallel_attn": norms}
    if kv_heads not in (1, n_heads):
        raise InputError(
            f"a {FAMILY} config cannot express this",
            field="blocks.0.attention.body.n_kv_heads",
            value=kv_heads,
            allowed=f"1 or {n_heads}",
        )
    older = {"new_decoder_architecture": False, "multi_query": kv_heads == 1, "parallel_attn": kind == ONE_NORM}
    return older if kv_heads == 1 else older | {"num_kv_heads": n_heads}


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    parts = _parts(spec)
    written = {
        "architectures": [HEADS[0]],
        "model_type": FAMILY,
        "vocab_size": spec.n_vocab,
        "hidden_size": spec.d_model,
        "num_hidden_layers": spec.n_layers,
        "num_attention_heads": parts.attention.n_heads,
        "ffn_hidden_size": parts.ffn.d_ff,
        "activation": WRITTEN_ACTIVATIONS.get(parts.ffn.activation, parts.ffn.activation),
        "alibi": False,
        "bias": parts.ffn.bias,
        "max_position_embeddings": spec.max_positions,
        "layer_norm_epsilon": float(parts.norm.eps),
        "tie_word_embeddings": isinstance(spec.head, TiedHead),
        **_write_generation(parts.kind, parts.attention),
        **write_rotary(parts.rotary, spec.max_positions),
    }
    config = config_of(written, carried, dtype)
    require_same(spec, read(config, spec.name).spec, FAMILY)
    return config


def table(spec: Model) -> Table:
    """Returns the names and layouts of a checkpoint folder's tensors."""
    kind, _, body, _ = _kind_of(spec)
    attention = expect(body, Attention, "blocks.0: attention", FAMILY)
    path = "parallel.body.attention" if kind == ONE_NORM else "attention.body"
    stems = STEMS | (PARALLEL_NORMS if kind == TWO_NORMS else SEQUENTIAL_NORMS)
    fused = (path, "self_attention.query_key_value", grouped(attention))
    return fused_table(spec, FAMILY, outside=OUTSIDE, layers="transformer.h", stems=stems, fused=fused)
