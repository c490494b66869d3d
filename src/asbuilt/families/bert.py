"""The bert family: an encoder of learned positions and token types, LayerNorm after each sum, erf GELU.

Devlin et al. 2018 (arXiv 1810.04805); sentence embedders such as all-MiniLM-L6-v2 are published under it. With
BertForMaskedLM the model ends in that head, with BertModel in the stream and the pooler, which `add_pooling_layer`
false leaves out (what transformers has as an argument, no config of its own says). The next-sentence head of
BertForPreTraining is refused. Padding is expected on the right, as these models were trained.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    HeadTransform,
    LayerNorm,
    LearnedPositions,
    Model,
    Pooler,
    TiedHead,
    TokenEmbedding,
    TypeEmbedding,
)

FAMILY = "bert"
PREFIX = "bert."
HEADS = ("BertForMaskedLM", "BertModel")
WRITTEN_ACTIVATIONS: dict[str, str] = {"gelu_tanh": "gelu_new"}
DEFAULTS: dict[str, Any] = {"vocab_size": 30522, "max_position_embeddings": 512}

OUTSIDE = {
    "embedding": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "types": "embeddings.token_type_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
    "pooler.dense": "pooler.dense",
}
HEAD = {
    "head.transform.dense": "cls.predictions.transform.dense",
    "head.transform.norm": "cls.predictions.transform.LayerNorm",
    "head": "cls.predictions",
}
DECODER = "cls.predictions.decoder"
STEMS = {
    "attention.body.q": "attention.self.query",
    "attention.body.k": "attention.self.key",
    "attention.body.v": "attention.self.value",
    "attention.body.o": "attention.output.dense",
    "attention.sum_norm": "attention.output.LayerNorm",
    "ffn.body.up": "intermediate.dense",
    "ffn.body.down": "output.dense",
    "ffn.sum_norm": "output.LayerNorm",
}
BUFFERS = {r"(.*\.)?embeddings\.(position_ids|token_type_ids)": "whole numbers from 0 on, or zeros"}
UNUSED = {
    r"bert\.pooler\..*": "BertForMaskedLM has no pooler; files of BertForPreTraining hold one all the same",
    r"cls\.seq_relationship\..*": "the next-sentence head, which BertForMaskedLM lacks",
}


def build(
    *,
    n_vocab: int,
    d_model: int,
    n_layers: int,
    n_heads: int,
    d_ff: int,
    n_positions: int,
    n_types: int,
    eps: float,
    activation: Activation = "gelu",
    offset: int = 0,
    masked: bool = True,
    head_activation: Activation | None = None,
    pooled: bool = False,
    name: str = FAMILY,
) -> Model:
    """Returns the model of these dimensions, `masked` with the masked language model's head, `pooled` with a pooler.

    Position 0 is found in row `offset` of its table; `head_activation` None means `activation`.
    """
    norm = LayerNorm(d=d_model, eps=eps)
    attention = Attention(
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        d_head=d_model // n_heads,
        causal=False,
        bias=True,
        output_bias=True,
    )
    ffn = MLP(d_model=d_model, d_ff=d_ff, activation=activation, bias=True)
    both = (Branch(name="attention", body=attention, sum_norm=norm), Branch(name="ffn", body=ffn, sum_norm=norm))
    transform = HeadTransform(d_model=d_model, activation=head_activation or activation, eps=eps)
    return Model(
        embedding=TokenEmbedding(n_vocab=n_vocab, d_model=d_model),
        positions=LearnedPositions(n_positions=n_positions, d_model=d_model, offset=offset),
        types=TypeEmbedding(n_types=n_types, d_model=d_model),
        embedding_norm=norm,
        blocks=(Block(branches=both),) * n_layers,
        head=TiedHead(d_model=d_model, n_vocab=n_vocab, bias=True, transform=transform) if masked else None,
        pooler=Pooler(d_model=d_model) if pooled else None,
        max_positions=n_positions,
        name=name,
    )


def read(config: dict[str, Any], name: str) -> Reading:
    """Returns what a config.json of this family says; class defaults are those of transformers' BertConfig.

    `name` becomes the model's name and stands in messages. Raises InputError naming the key at fault.
    """
    reader = ConfigReader(config, name)
    if config.get("architectures") == ["BertForPreTraining"]:
        raise reader.error(
            "architectures",
            "the next-sentence head is not read",
            value=config["architectures"],
            fix='say ["BertForMaskedLM"] to read its file without that head',
        )
    for key in ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head", "type"):
        reader.irrelevant(f"pooler_{key}", "of the first release's code, read by nobody")
    reader.irrelevant("directionality", "of the first release's code, read by nobody")
    dtype, sizes = read_sizes(reader, FAMILY, HEADS, DEFAULTS)
    sizes["n_positions"] = sizes.pop("rows")
    reader.finish()
    return Reading(
        spec=build(name=name, **sizes),
        carried=reader.carried,
        dtype=dtype,
        family=FAMILY,
        defaults=reader.defaults,
        notes=reader.notes,
    )


def read_sizes(
    reader: ConfigReader, family: str, heads: tuple[str, str], defaults: Mapping[str, Any]
) -> tuple[str | None, dict[str, Any]]:
    """Returns the stored dtype and what `build` takes, `rows` of the position table in place of `n_positions`.

    `heads` are the classes with the masked language model's head and without; the first is meant where none is named.
    """
    dtype = read_common(reader, family, heads, causal=False)
    reader.irrelevant("attention_probs_dropout_prob", "training only")
    reader.only("position_embedding_type", "absolute", None, reason="only learned absolute positions are read")
    reader.only("is_decoder", False, reason="as a decoder its tokens would not see those after them")
    masked = reader.config.get("architectures") != [heads[1]]
    if masked:
        reader.only("add_pooling_layer", False, reason="a masked language model has no pooler")
        reader.only(
            "tie_word_embeddings", True, reason="a decoder of its own is not read: of its two biases one is idle"
        )
    else:
        reader.irrelevant("tie_word_embeddings", "there is no head to tie")
    d_model = reader.size("hidden_size", default=768)
    n_heads = reader.size("num_attention_heads", default=12)
    divide(reader, d_model, "hidden_size", n_heads, "num_attention_heads")
    return dtype, {
        "n_vocab": reader.size("vocab_size", default=defaults["vocab_size"]),
        "d_model": d_model,
        "n_layers": reader.size("num_hidden_layers", default=12, most=MOST_LAYERS),
        "n_heads": n_heads,
        "d_ff": reader.size("intermediate_size", default=3072),
        "rows": reader.size("max_position_embeddings", default=defaults["max_position_embeddings"]),
        "n_types": reader.size("type_vocab_size", default=2),
        "eps": reader.number("layer_norm_eps", default=1e-12, most=1.0),
        "activation": reader.choice("hidden_act", choices=ACTIVATION_NAMES, default="gelu"),
        "masked": masked,
        "pooled": not masked and reader.flag("add_pooling_layer", default=True),
    }


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    config = config_of(write_sizes(spec, FAMILY, HEADS), carried, dtype)
    require_same(spec, read(config, spec.name).spec, FAMILY)
    return config


def write_sizes(spec: Model, family: str, heads: tuple[str, str]) -> dict[str, Any]:
    """Returns the keys that `read_sizes` reads; raises InputError where the spec has other parts."""
    first, second = branches(spec, family)
    attention = expect(first.body, Attention, "blocks.0.attention.body", family)
    ffn = expect(second.body, MLP, "blocks.0.ffn.body", family)
    norm = expect(first.sum_norm, LayerNorm, "blocks.0.attention.sum_norm", family)
    positions = expect(spec.positions, LearnedPositions, "positions", family)
    types = expect(spec.types, TypeEmbedding, "types", family)
    bare = spec.head is None
    written = {
        "architectures": [heads[1 if bare else 0]],
        "model_type": family,
        "vocab_size": spec.n_vocab,
        "hidden_size": spec.d_model,
        "num_hidden_layers": spec.n_layers,
        "num_attention_heads": attention.n_heads,
        "intermediate_size": ffn.d_ff,
        "hidden_act": WRITTEN_ACTIVATIONS.get(ffn.activation, ffn.activation),
        "max_position_embeddings": positions.n_positions + positions.offset,
        "type_vocab_size": types.n_types,
        "layer_norm_eps": float(norm.eps),
    }
    if bare:
        return written | ({"add_pooling_layer": False} if spec.pooler is None else {})
    return written | {"tie_word_embeddings": True}


def table(spec: Model) -> Table:
    """Returns the names and layouts of a checkpoint folder's tensors."""
    return table_of(spec, FAMILY, HEAD, DECODER, UNUSED)


def table_of(spec: Model, family: str, head: dict[str, str], decoder: str, unused: dict[str, str]) -> Table:
    """Returns the table of a family of these names; with a head they have the family's name in front.

    `decoder` is the stem under which the tied table and the head's bias may be stored again, `unused` are tensors that
    the class with the head leaves aside. Early files say gamma and beta of a LayerNorm.
    """
    if spec.head is not None and spec.pooler is not None:
        raise InputError(f"{family} has no pooler beside a head", field="pooler", value=repr(spec.pooler))
    prefix = "" if spec.head is None else f"{family}."
    entries = outside_entries(spec, {path: prefix + stem for path, stem in OUTSIDE.items()} | head, family)
    for i, block in enumerate(spec.blocks):
        entries += named_entries(block, f"blocks.{i}.", STEMS, f"{prefix}encoder.layer.{i}.", {}, family)
    again = {f"{decoder}.weight": "embedding.weight", f"{decoder}.bias": "head.bias"}
    word = head["head"].partition(".")[0]
    if spec.head is None:
        unused = {rf"{word}\..*": "a head, which the model without one leaves aside"}
    return Table(
        entries=tuple(entries),
        ignored=BUFFERS | unused,
        duplicates={} if spec.head is None else again,
        older={"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"},
    )
