"""The opt family: learned positions that start at row 2, LayerNorm before each branch or after each sum, ReLU.

Zhang et al. 2022 (arXiv 2205.01068). OPT-350M has tables narrower than its stream, a matrix to and one from it, and
norms after the sums.
"""

from __future__ import annotations

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
from asbuilt.families.shared.fused import branches, expect, outside_entries
from asbuilt.families.shared.reader import ConfigReader, Reading
from asbuilt.families.shared.table import Table
from asbuilt.spec import (
    MLP,
    Activation,
    Attention,
    Block,
    Branch,
    Head,
    LayerNorm,
    LearnedPositions,
    Model,
    TiedHead,
    TokenEmbedding,
)

FAMILY = "opt"
HEADS = ("OPTForCausalLM",)
WRITTEN_ACTIVATIONS: dict[str, str] = {"gelu_tanh": "gelu_new"}
OFFSET = 2  # rows of the table before that of position 0
EPS = 1e-5  # PyTorch's own; no config says another

OUTSIDE = {
    "embedding": "model.decoder.embed_tokens",
    "positions": "model.decoder.embed_positions",
    "norm": "model.decoder.final_layer_norm",
    "head": "lm_head",
}
PROJECTIONS = {
    "embedding.project": "model.decoder.project_in",
    "head.project": "model.decoder.project_out",
}
STEMS = {
    "attention.body.q": "self_attn.q_proj",
    "attention.body.k": "self_attn.k_proj",
    "attention.body.v": "self_attn.v_proj",
    "attention.body.o": "self_attn.out_proj",
    "ffn.body.up": "fc1",
    "ffn.body.down": "fc2",
}
NORMS_BEFORE = {"attention.norm": "self_attn_layer_norm", "ffn.norm": "final_layer_norm"}
NORMS_AFTER = {"attention.sum_norm": "self_attn_layer_norm", "ffn.sum_norm": "final_layer_norm"}


def build(
    *,
    n_vocab: int,
    d_model: int,
    n_layers: int,
    n_heads: int,
    d_ff: int,
    max_positions: int,
    activation: Activation = "relu",
    bias: bool = True,
    affine: bool = True,
    norm_first: bool = True,
    final_norm: bool = True,
    tied: bool = True,
    d_table: int | None = None,
    name: str = FAMILY,
) -> Model:
    """Returns the model of these dimensions; tables as wide as the stream, or `d_table`.

    `norm_first` norms what each branch reads, otherwise each sum is normed and there is no final norm; `affine` gives
    the norms their gains and biases.
    """
    norm = LayerNorm(d=d_model, eps=EPS, gain=affine, bias=affine)
    attention = Attention(
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        d_head=d_model // n_heads,
        bias=bias,
        output_bias=bias,
    )
    ffn = MLP(d_model=d_model, d_ff=d_ff, activation=activation, bias=bias)
    before, after = (norm, None) if norm_first else (None, norm)
    both = (
        Branch(name="attention", body=attention, norm=before, sum_norm=after),
        Branch(name="ffn", body=ffn, norm=before, sum_norm=after),
    )
    return Model(
        embedding=TokenEmbedding(n_vocab=n_vocab, d_model=d_model, d_table=d_table),
        positions=LearnedPositions(n_positions=max_positions, d_model=d_model, offset=OFFSET),
        blocks=(Block(branches=both),) * n_layers,
        head=(TiedHead if tied else Head)(d_model=d_model, n_vocab=n_vocab, d_table=d_table),
        max_positions=max_positions,
        norm=norm if norm_first and final_norm else None,
        name=name,
    )


def read(config: dict[str, Any], name: str) -> Reading:
    """Returns what a config.json of this family says; class defaults are those of transformers' OPTConfig.

    `name` becomes the model's name and stands in messages. Raises InputError naming the key at fault.
    """
    reader = ConfigReader(config, name)
    dtype = read_common(reader, FAMILY, HEADS)
    for key in ("activation_dropout", "layerdrop", "init_std"):
        reader.irrelevant(key, "training only")
    reader.only("learned_embeddings", True, reason="positions are learned in this family")
    reader.only("scale_embeddings", False, reason="embeddings are not scaled in this family")
    d_model = reader.size("hidden_size", default=768)
    n_heads = reader.size("num_attention_heads", default=12)
    d_table = reader.size("word_embed_proj_dim", default=d_model, null=d_model, derived=True)
    sizes: dict[str, Any] = {
        "n_vocab": reader.size("vocab_size", default=50272),
        "n_layers": reader.size("num_hidden_layers", default=12, most=MOST_LAYERS),
        "d_ff": reader.size("ffn_dim", default=3072),
        "max_positions": reader.size("max_position_embeddings", default=2048),
        "activation": reader.choice("activation_function", choices=ACTIVATION_NAMES, default="relu"),
        "bias": reader.flag("enable_bias", default=True),
        "affine": reader.flag("layer_norm_elementwise_affine", default=True),
        "norm_first": reader.flag("do_layer_norm_before", default=True),
        "final_norm": not reader.flag("_remove_final_layer_norm", default=False),
        "tied": reader.flag("tie_word_embeddings", default=True),
        "d_table": None if d_table == d_model else d_table,
    }
    reader.finish()
    divide(reader, d_model, "hidden_size", n_heads, "num_attention_heads")
    spec = build(d_model=d_model, n_heads=n_heads, name=name, **sizes)
    return Reading(
        spec=spec, carried=reader.carried, dtype=dtype, family=FAMILY, defaults=reader.defaults, notes=reader.notes
    )


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    first, second = branches(spec, FAMILY)
    attention = expect(first.body, Attention, "blocks.0.attention.body", FAMILY)
    ffn = expect(second.body, MLP, "blocks.0.ffn.body", FAMILY)
    norm = expect(first.norm or first.sum_norm, LayerNorm, "blocks.0.attention.norm", FAMILY)
    if spec.positions is None:
        raise InputError(f"{FAMILY} has LearnedPositions here", field="positions", value=None)
    norm_first = first.norm is not None
    written = {
        "architectures": [HEADS[0]],
        "model_type": FAMILY,
        "vocab_size": spec.n_vocab,
        "hidden_size": spec.d_model,
        "word_embed_proj_dim": _table_width(spec),
        "num_hidden_layers": spec.n_layers,
        "num_attention_heads": attention.n_heads,
        "ffn_dim": ffn.d_ff,
        "activation_function": WRITTEN_ACTIVATIONS.get(ffn.activation, ffn.activation),
        "max_position_embeddings": spec.max_positions,
        "enable_bias": attention.bias,
        "layer_norm_elementwise_affine": norm.gain,
        "do_layer_norm_before": norm_first,
        "_remove_final_layer_norm": norm_first and spec.norm is None,
        "tie_word_embeddings": isinstance(spec.head, TiedHead),
    }
    config = config_of(written, carried, dtype)
    require_same(spec, read(config, spec.name).spec, FAMILY)
    return config


def _table_width(spec: Model) -> int:
    embedding = expect(spec.embedding, TokenEmbedding, "embedding", FAMILY)
    return spec.d_model if embedding.d_table is None else embedding.d_table


def table(spec: Model) -> Table:
    """Returns the names and layouts of a checkpoint folder's tensors."""
    norm_after = branches(spec, FAMILY)[0].sum_norm is not None
    stems = STEMS | (NORMS_AFTER if norm_after else NORMS_BEFORE)
    outside = OUTSIDE if _table_width(spec) == spec.d_model else OUTSIDE | PROJECTIONS
    entries = outside_entries(spec, outside, FAMILY)
    for i, block in enumerate(spec.blocks):
        entries += named_entries(block, f"blocks.{i}.", stems, f"model.decoder.layers.{i}.", {}, FAMILY)
    tied = isinstance(spec.head, TiedHead)
    return Table(
        entries=tuple(entries),
        duplicates={"lm_head.weight": "embedding.weight"} if tied else {},
    )
