"""The bert family: an encoder of learned positions and token types, LayerNorm after each sum, erf GELU.

Devlin et al. 2018 (arXiv 1810.04805); sentence embedders such as all-MiniLM-L6-v2 are published under it. With
BertForMaskedLM the model ends in that head, with BertModel in the stream and the pooler, which `add_pooling_layer`
false leaves out (what transformers has as an argument, no config of its own says), with the others in labels. The
next-sentence head of BertForPreTraining is refused. Padding is expected on the right, as these models were trained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

from asbuilt.errors import InputError
from asbuilt.families.shared.dimensions import Sizes, sized
from asbuilt.families.shared.ends import ADDS_POOLER, End
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Irrelevant, Key, Only, Size, activation, depth, eps
from asbuilt.families.shared.names import Names
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import TIED
from asbuilt.families.shared.sizes import DerivedHeadWidth
from asbuilt.families.shared.table import TensorTable
from asbuilt.spec import (
    Activation,
    BiasTable,
    Block,
    Branch,
    EmbeddingProjection,
    HeadTransform,
    LayerNorm,
    LearnedPositions,
    Model,
    Pooler,
    PoolerActivation,
    RelativeBuckets,
    TextEncoder,
    TiedHead,
    TokenEmbedding,
    TypeEmbedding,
)

OUTSIDE = {
    "embedding": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "types": "embeddings.token_type_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
    "relative": "encoder.relative_attention_bias",
}
HEAD = {
    "head.transform.dense": "cls.predictions.transform.dense",
    "head.transform.norm": "cls.predictions.transform.LayerNorm",
    "head": "cls.predictions",
}
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
    r"bert\.pooler\..*": "this class has no pooler; files of others hold one all the same",
    r"cls\.seq_relationship\..*": "the next-sentence head, which this class lacks",
}


def build(
    *,
    n_types: int = 0,
    eps: float = 1e-12,
    offset: int = 0,
    n_buckets: int = 0,
    masked: bool = True,
    head_activation: Activation | None = None,
    pooled: bool = False,
    d_embedding: int | None = None,
    always_projected: bool = False,
    **sizes: Unpack[Sizes],
) -> Model:
    """Returns the model of these sizes, `masked` with the masked language model's head, `pooled` with a pooler.

    Position 0 is found in row `offset` of its table; `head_activation` None means that of the blocks. Scores have
    biases of `n_buckets` distances, if any, and tokens `n_types` types. Embeddings are `d_embedding` wide (None for the
    stream's width) and then mapped to the stream's width, if that is another or they are `always_projected`.
    """
    made = sized(sizes, activation="gelu")
    d_model, norm = made.d_model, LayerNorm(d=made.d_model, eps=eps)
    wide = d_embedding or d_model
    other = None if wide == d_model else wide
    near = RelativeBuckets(n_buckets=n_buckets, max_distance=128, both_ways=True) if n_buckets else None
    attention = made.attention(bias=True, output_bias=True, causal=False, positions=near)
    bodies = {"attention": attention, "ffn": made.plain(True)}
    both = tuple(Branch(name=name, body=body, sum_norm=norm) for name, body in bodies.items())
    transform = HeadTransform(d_model=d_model, d_out=other, activation=head_activation or made.activation, eps=eps)
    head = TiedHead(d_model=d_model, n_vocab=made.n_vocab, d_table=other, bias=True, transform=transform)
    projected = always_projected or other is not None
    return made.whole(
        TextEncoder,
        (Block(branches=both),) * made.n_layers,
        None,
        embedding=TokenEmbedding(n_vocab=made.n_vocab, d_model=wide),
        positions=LearnedPositions(n_positions=made.max_positions, d_model=wide, offset=offset),
        types=TypeEmbedding(n_types=n_types, d_model=wide) if n_types else None,
        relative=BiasTable(n_buckets=n_buckets, n_heads=made.n_heads) if n_buckets else None,
        embedding_norm=replace(norm, d=wide),
        embedding_projection=EmbeddingProjection(d_embedding=wide, d_model=d_model) if projected else None,
        head=head if masked else None,
        pooler=Pooler(d_model=d_model) if pooled else None,
    )


# Of the class with the masked language model's head; the others leave these keys aside, or read them themselves.
MASKED: tuple[Key, ...] = (
    Only(TIED, True, reason="an untied decoder is not supported: one of its two biases would be unused"),
    Only(ADDS_POOLER, False, reason="a masked language model has no pooler"),
)


def positions_of(parts: Parts) -> LearnedPositions:
    """Returns the table of positions."""
    return parts.expect(parts.model.positions, LearnedPositions, "positions")


def keys(n_vocab: int, rows: Key) -> tuple[Key, ...]:
    """Returns the keys of bert and its kin, `rows` that of the table of positions."""
    return (
        *MASKED,
        Size("hidden_size", "d_model", default=768),
        Size("num_attention_heads", "n_heads", default=12),
        DerivedHeadWidth(),
        Size("vocab_size", "n_vocab", default=n_vocab),
        depth("num_hidden_layers", 12),
        Size("intermediate_size", "d_ff", default=3072),
        rows,
        Size("type_vocab_size", "n_types", default=2, at="types.n_types"),
        replace(eps("layer_norm_eps", 1e-12), at="first.sum_norm.eps"),
        activation(default="gelu", tanh="gelu_new"),
        Irrelevant("training only", "attention_probs_dropout_prob"),
        Only("position_embedding_type", "absolute", None, reason="only learned absolute positions are read"),
        Only("is_decoder", False, reason="as a decoder its attention would be causal"),
    )


def names(
    spec: Model,
    family: str,
    base: str,
    head: dict[str, str],
    decoder: str,
    unused: dict[str, str],
    stems: dict[str, str] = STEMS,
    layers: str = "encoder.layer",
    elsewhere: tuple[str, ...] = (),
) -> TensorTable:
    """Returns the table of a family of these names, `base` in front of all but the head.

    `stems` are those of a block, whose number follows `layers`; `decoder` is the stem under which the tied table and
    the head's bias may be stored again, parts `elsewhere` have
    entries of their own, `unused` are tensors that the class with the head leaves aside. Early files say
    gamma and beta of a LayerNorm.
    """
    prefix = f"{base}."
    own = Names(
        stems=stems,
        outside={path: prefix + stem for path, stem in OUTSIDE.items()} | head,
        layers=prefix + layers,
        elsewhere=elsewhere,
    )
    again = {f"{decoder}.weight": "embedding.weight"}
    again |= {} if decoder == head["head"] else {f"{decoder}.bias": "head.bias"}
    return replace(
        own(spec, family),
        ignored=BUFFERS | ({} if spec.head is None else unused),
        duplicates={} if spec.head is None else again,
        older={"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"},
    )


def pooler(activation: PoolerActivation) -> Callable[[Model], Pooler]:
    """Returns what makes the map and activation through which the first token passes before it is labelled."""
    return lambda spec: Pooler(d_model=spec.d_model, activation=activation)


def token_ends(name: str, unused: dict[str, str]) -> dict[str, End]:
    """Returns the ends that label every token, of classes that begin with `name`."""
    return {
        f"{name}ForTokenClassification": End(labels="all", stems={"head": "classifier"}, unused=unused),
        f"{name}ForQuestionAnswering": End(labels="span", stems={"head": "qa_outputs"}, unused=unused),
    }


def _ends(name: str) -> dict[str, End]:
    labels = End(
        labels="first",
        transform=pooler("tanh"),
        stems={"head": "classifier", "head.transform.dense": "bert.pooler.dense"},
    )
    return {
        f"{name}Model": End(pools=True, stems={"pooler.dense": "bert.pooler.dense"}),
        f"{name}ForSequenceClassification": labels,
        f"{name}ForMultipleChoice": replace(labels, n_labels=1),
        **token_ends(name, UNUSED),
    }


def _no_pre_training(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Refuses the class with two heads, whose file can be read without the second."""
    if config.get("architectures") == ["BertForPreTraining"]:
        raise InputError(
            "the next-sentence head is not read",
            field=f"{name}: architectures",
            value=config["architectures"],
            fix='say ["BertForMaskedLM"] to read its file without that head',
        )
    return config


FAMILY = Family(
    name="bert",
    prefix="bert.",
    heads=("BertForMaskedLM",),
    ends=_ends,
    causal=False,
    prepare=_no_pre_training,
    keys=(  # defaults as in transformers' BertConfig
        *keys(
            30522,
            Size(
                "max_position_embeddings",
                "max_positions",
                default=512,
                at=lambda parts: positions_of(parts).n_positions + positions_of(parts).offset,
            ),
        ),
        Irrelevant(
            "of the first release's code, read by nobody",
            *(f"pooler_{key}" for key in ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head", "type")),
            "directionality",
        ),
    ),
    build=build,
    names=partial(names, base="bert", head=HEAD, decoder="cls.predictions.decoder", unused=UNUSED),
)
