"""The mpt family: ALiBi instead of positions, LayerNorm without bias, no biases anywhere, q, k and v stored as one.

MosaicML 2023, MPT-7B and MPT-30B; ALiBi: Press et al. 2021 (arXiv 2108.12409). The published files say
`learned_pos_emb` although ALiBi is on: there is no table of positions.
"""

from __future__ import annotations

from typing import Any

from asbuilt.families.shared.common import MOST_LAYERS, config_of, divide, read_common, require_same
from asbuilt.families.shared.fused import branches, expect, fused_table
from asbuilt.families.shared.reader import ConfigReader, Reading
from asbuilt.families.shared.table import Concat, Table
from asbuilt.spec import (
    MLP,
    Alibi,
    Attention,
    Block,
    Branch,
    Head,
    LayerNorm,
    Model,
    TiedHead,
    TokenEmbedding,
)
from asbuilt.spec.part import LARGEST_SIZE

FAMILY = "mpt"
PREFIX = "transformer."
HEADS = ("MptForCausalLM", "MPTForCausalLM")  # the second in the files that bring their own code

OUTSIDE = {"embedding": "transformer.wte", "norm": "transformer.norm_f", "head": "lm_head"}
STEMS = {
    "attention.norm": "norm_1",
    "attention.body.o": "attn.out_proj",
    "ffn.norm": "norm_2",
    "ffn.body.up": "ffn.up_proj",
    "ffn.body.down": "ffn.down_proj",
}
TRAINING = ("emb_pdrop", "embedding_fraction", "init_config", "init_device", "verbose")
NESTED_ONLY: dict[str, tuple[tuple[object, ...], str]] = {
    "attn_type": (("multihead_attention",), "multi-query attention is not read in this family"),
    "clip_qkv": ((None,), "clipped queries, keys and values are not read"),
    "prefix_lm": ((False,), "a prefix that is seen both ways is not read"),
    "qk_ln": ((False,), "norms of queries and keys are not read in this family"),
    "attn_uses_sequence_id": ((False,), "several texts in one sequence are not read"),
    "alibi": ((True,), "without ALiBi the published code has a table of positions, and transformers none"),
    # the published code heeds it, transformers computes 8 whatever it says: nothing to check another value against
    "alibi_bias_max": ((8,), "another slope of ALiBi is not read"),
}


def build(
    *,
    n_vocab: int,
    d_model: int,
    n_layers: int,
    n_heads: int,
    max_positions: int,
    eps: float = 1e-5,
    scale: float | None = None,
    tied: bool = True,
    name: str = FAMILY,
) -> Model:
    """Returns the model of these dimensions; d_ff is 4 * d_model, `scale` None means d_head^-0.5."""
    norm = LayerNorm(d=d_model, eps=eps, bias=False)
    attention = Attention(
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        d_head=d_model // n_heads,
        positions=Alibi(n_heads=n_heads),
        scale=scale,
    )
    ffn = MLP(d_model=d_model, d_ff=4 * d_model, activation="gelu")
    both = (Branch(name="attention", body=attention, norm=norm), Branch(name="ffn", body=ffn, norm=norm))
    return Model(
        embedding=TokenEmbedding(n_vocab=n_vocab, d_model=d_model),
        blocks=(Block(branches=both),) * n_layers,
        head=(TiedHead if tied else Head)(d_model=d_model, n_vocab=n_vocab),
        max_positions=max_positions,
        norm=norm,
        name=name,
    )


def read(config: dict[str, Any], name: str) -> Reading:
    """Returns what a config.json of this family says; class defaults are those of transformers' MptConfig.

    `name` becomes the model's name and stands in messages. Raises InputError naming the key at fault.
    """
    reader = ConfigReader(config, name)
    dtype = read_common(reader, FAMILY, HEADS)
    for key in TRAINING:
        reader.irrelevant(key, "training only")
    reader.irrelevant("tokenizer_name", "names the tokenizer")
    reader.irrelevant("learned_pos_emb", "has no effect beside ALiBi")
    reader.only("expansion_ratio", 4, reason="the feed-forward is 4 times as wide as the stream")
    reader.only("logit_scale", None, reason="scaled logits are not read in this family")
    reader.only("no_bias", True, reason="biases are not read in this family")
    reader.only("norm_type", "low_precision_layernorm", "layernorm", reason="other norms are not read in this family")
    d_model = reader.size("d_model", "hidden_size", default=2048, most=LARGEST_SIZE // 4)  # d_ff is 4 times that
    n_heads = reader.size("n_heads", "num_attention_heads", default=16)
    sizes: dict[str, Any] = {
        "n_vocab": reader.size("vocab_size", default=50368),
        "n_layers": reader.size("n_layers", "num_hidden_layers", default=24, most=MOST_LAYERS),
        "max_positions": reader.size("max_seq_len", default=2048),
        "eps": reader.number("layer_norm_epsilon", default=1e-5, most=1.0),
        "scale": _scale(reader, d_model / n_heads),
        "tied": reader.flag("tie_word_embeddings", default=True),
    }
    reader.finish()
    key = reader.spelled("n_heads", "num_attention_heads") or "n_heads"
    divide(reader, d_model, "d_model", n_heads, key)
    spec = build(d_model=d_model, n_heads=n_heads, name=name, **sizes)
    return Reading(
        spec=spec, carried=reader.carried, dtype=dtype, family=FAMILY, defaults=reader.defaults, notes=reader.notes
    )


def _scale(reader: ConfigReader, d_head: float) -> float | None:
    """Returns what scores are multiplied by, None for the usual, once the nested attention config is read wholly."""
    inner = reader.nested("attn_config")
    if inner is None:
        return None
    read_common(inner, FAMILY, HEADS)  # transformers writes the object as a config of its own
    for key in ("attn_pdrop", "attn_impl"):
        inner.irrelevant(key, "training, and how it is computed")
    for key, (allowed, reason) in NESTED_ONLY.items():
        inner.only(key, *allowed, reason=reason)
    said = inner.number("softmax_scale") if inner.given("softmax_scale") else None
    inner.finish()
    reader.carried["attn_config"] = inner.carried
    return None if said == d_head**-0.5 else said


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    first, _ = branches(spec, FAMILY)
    attention = expect(first.body, Attention, "blocks.0.attention.body", FAMILY)
    norm = expect(first.norm, LayerNorm, "blocks.0.attention.norm", FAMILY)
    written = {
        "architectures": [HEADS[0]],
        "model_type": FAMILY,
        "vocab_size": spec.n_vocab,
        "d_model": spec.d_model,
        "n_layers": spec.n_layers,
        "n_heads": attention.n_heads,
        "max_seq_len": spec.max_positions,
        "layer_norm_epsilon": float(norm.eps),
        "attn_config": carried.get("attn_config", {}) | {"softmax_scale": attention.scale},
        "tie_word_embeddings": isinstance(spec.head, TiedHead),
    }
    config = config_of(written, carried, dtype)
    require_same(spec, read(config, spec.name).spec, FAMILY)
    return config


def table(spec: Model) -> Table:
    """Returns the names and layouts of a checkpoint folder's tensors."""
    attention = expect(branches(spec, FAMILY)[0].body, Attention, "blocks.0.attention.body", FAMILY)
    layout = Concat((attention.d_query, attention.d_kv, attention.d_kv))
    fused = ("attention.body", "attn.Wqkv", layout)
    return fused_table(spec, FAMILY, outside=OUTSIDE, layers="transformer.blocks", stems=STEMS, fused=fused)
