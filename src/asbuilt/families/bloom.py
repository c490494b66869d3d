"""The bloom family: ALiBi instead of positions, a LayerNorm after the embedding, q, k and v stored head by head.

BigScience 2022 (arXiv 2211.05100); ALiBi: Press et al. 2021 (arXiv 2108.12409).
"""

from __future__ import annotations

from typing import Any

from asbuilt.families.shared.common import MOST_LAYERS, config_of, divide, read_common, require_same
from asbuilt.families.shared.fused import branches, expect, fused_table, grouped
from asbuilt.families.shared.reader import ConfigReader, Reading
from asbuilt.families.shared.table import Table
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

FAMILY = "bloom"
HEADS = ("BloomForCausalLM",)
PREFIX = "transformer."

OUTSIDE = {
    "embedding": "transformer.word_embeddings",
    "embedding_norm": "transformer.word_embeddings_layernorm",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}
STEMS = {
    "attention.norm": "input_layernorm",
    "attention.body.o": "self_attention.dense",
    "ffn.norm": "post_attention_layernorm",
    "ffn.body.up": "mlp.dense_h_to_4h",
    "ffn.body.down": "mlp.dense_4h_to_h",
}
# what only the training code of the published files read
TRAINING = (
    "attention_softmax_in_fp32",
    "bias_dropout_fusion",
    "masked_softmax_fusion",
    "offset_alibi",
    "skip_bias_add",
    "skip_bias_add_qkv",
)


def build(
    *,
    n_vocab: int,
    d_model: int,
    n_layers: int,
    n_heads: int,
    max_positions: int = 2048,
    eps: float = 1e-5,
    tied: bool = True,
    name: str = FAMILY,
) -> Model:
    """Returns the model of these dimensions; d_ff is 4 * d_model."""
    norm = LayerNorm(d=d_model, eps=eps)
    attention = Attention(
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        d_head=d_model // n_heads,
        positions=Alibi(n_heads=n_heads),
        bias=True,
        output_bias=True,
    )
    ffn = MLP(d_model=d_model, d_ff=4 * d_model, activation="gelu_tanh", bias=True)
    both = (Branch(name="attention", body=attention, norm=norm), Branch(name="ffn", body=ffn, norm=norm))
    return Model(
        embedding=TokenEmbedding(n_vocab=n_vocab, d_model=d_model),
        embedding_norm=norm,
        blocks=(Block(branches=both),) * n_layers,
        head=(TiedHead if tied else Head)(d_model=d_model, n_vocab=n_vocab),
        max_positions=max_positions,
        norm=norm,
        name=name,
    )


def read(config: dict[str, Any], name: str) -> Reading:
    """Returns what a config.json of this family says; class defaults are those of transformers' BloomConfig.

    `name` becomes the model's name and stands in messages. Raises InputError naming the key at fault.
    """
    reader = ConfigReader(config, name)
    dtype = read_common(reader, FAMILY, HEADS)
    for key in TRAINING:
        reader.irrelevant(key, "read by the code that trained the model only")
    for key in ("pretraining_tp", "slow_but_exact"):
        reader.irrelevant(key, "only slices the same products")
    reader.only("apply_residual_connection_post_layernorm", False, reason="residuals after the norm are not read")
    d_model = reader.size("hidden_size", "n_embed", default=64, most=LARGEST_SIZE // 4)  # d_ff is 4 times that
    reader.only("n_inner", None, 4 * d_model, reason="the feed-forward is 4 times as wide as the stream")
    n_heads = reader.size("n_head", "num_attention_heads", default=8)
    sizes: dict[str, Any] = {
        "n_vocab": reader.size("vocab_size", default=250880),
        "n_layers": reader.size("n_layer", "num_hidden_layers", default=2, most=MOST_LAYERS),
        "max_positions": reader.size("seq_length", default=2048),  # no limit of the model's, what it was trained on
        "eps": reader.number("layer_norm_epsilon", default=1e-5, most=1.0),
        "tied": reader.flag("tie_word_embeddings", default=True),
    }
    reader.finish()
    key = reader.spelled("n_head", "num_attention_heads") or "n_head"
    divide(reader, d_model, "hidden_size", n_heads, key)
    spec = build(d_model=d_model, n_heads=n_heads, name=name, **sizes)
    return Reading(
        spec=spec, carried=reader.carried, dtype=dtype, family=FAMILY, defaults=reader.defaults, notes=reader.notes
    )


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    first, _ = branches(spec, FAMILY)
    attention = expect(first.body, Attention, "blocks.0.attention.body", FAMILY)
    norm = expect(first.norm, LayerNorm, "blocks.0.attention.norm", FAMILY)
    written = {
        "architectures": [HEADS[0]],
        "model_type": FAMILY,
        "vocab_size": spec.n_vocab,
        "hidden_size": spec.d_model,
        "n_layer": spec.n_layers,
        "n_head": attention.n_heads,
        "layer_norm_epsilon": float(norm.eps),
        "seq_length": spec.max_positions,
        "tie_word_embeddings": isinstance(spec.head, TiedHead),
    }
    config = config_of(written, carried, dtype)
    require_same(spec, read(config, spec.name).spec, FAMILY)
    return config


def table(spec: Model) -> Table:
    """Returns the names and layouts of a checkpoint folder's tensors; the published files lack `transformer.`."""
    attention = expect(branches(spec, FAMILY)[0].body, Attention, "blocks.0.attention.body", FAMILY)
    fused = ("attention.body", "self_attention.query_key_value", grouped(attention))
    return fused_table(spec, FAMILY, outside=OUTSIDE, layers="transformer.h", stems=STEMS, fused=fused)
