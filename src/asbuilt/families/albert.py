"""The albert family: bert whose layers share their weights, all of them or those of a group, and narrow embeddings.

Lan et al. 2019 (arXiv 1909.11942). Embeddings are always mapped to the stream's width, also where they have it. With
AlbertForMaskedLM the model ends in that head; the sentence-order head of AlbertForPreTraining is refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.families import bert
from asbuilt.families.shared.ends import End
from asbuilt.families.shared.key import Irrelevant, Only, Size, activation, but
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.table import TensorTable, respelled
from asbuilt.spec import Block, Model

STEMS = {
    **{
        f"attention.body.{part}": f"attention.{name}"
        for part, name in zip("qkv", ("query", "key", "value"), strict=True)
    },
    "attention.body.o": "attention.dense",
    "attention.sum_norm": "attention.LayerNorm",
    "ffn.body.up": "ffn",
    "ffn.body.down": "ffn_output",
    "ffn.sum_norm": "full_layer_layer_norm",
}
OUTSIDE = {
    "embedding_projection.dense": "albert.encoder.embedding_hidden_mapping_in",
    "head.transform.dense": "predictions.dense",
    "head.transform.norm": "predictions.LayerNorm",
    "head": "predictions",
}
POOLER = {r"albert\.pooler\..*": "this class has no pooler; files of others hold one all the same"}
ORDER = {r"sop_classifier\..*": "the sentence-order head, which this class lacks"}
PREDICTIONS = {r"predictions\..*": "the masked language model's head, which this class lacks"}
LAYERS = "encoder.layer"


def build(*, n_groups: int = 1, **sizes: Any) -> Model:  # noqa: ANN401  # what bert's `build` takes
    """Returns the model of these sizes, whose layers are divided into `n_groups` runs of those that share weights."""
    spec = bert.build(always_projected=True, **sizes)
    n_layers, block = spec.n_layers, spec.blocks[0]
    groups = [int(i / (n_layers / n_groups)) for i in range(n_layers)]
    blocks = (_block(block, i, group, groups) for i, group in enumerate(groups))
    return replace(spec, blocks=tuple(blocks))


def _block(block: Block, i: int, group: int, groups: list[int]) -> Block:
    """Returns layer i: the first of its group lends its weights, if there are others, which borrow them."""
    if groups.count(group) == 1:
        return block
    name = f"group{group}"
    first = groups.index(group) == i
    return replace(block, weights_name=name) if first else replace(block, weights_from=name)


def _holders(spec: Model) -> list[int]:
    """Returns the numbers of the layers that have weights of their own, the first of each group."""
    return [i for i, block in enumerate(spec.blocks) if block.weights_from is None]


def _n_groups(parts: Parts) -> int:
    return len(_holders(parts.model))


def _ends(name: str) -> dict[str, End]:
    labels = End(
        labels="first",
        transform=bert.pooler("tanh"),
        stems={"head": "classifier", "head.transform.dense": "albert.pooler"},
        unused=PREDICTIONS | ORDER,
    )
    return {
        f"{name}Model": End(pools=True, stems={"pooler.dense": "albert.pooler"}, unused=PREDICTIONS | ORDER),
        f"{name}ForSequenceClassification": labels,
        f"{name}ForMultipleChoice": replace(labels, n_labels=1),
        **bert.token_ends(name, POOLER | PREDICTIONS | ORDER),
    }


def _names(spec: Model, family: str) -> TensorTable:
    """Returns the table: layers are stored by group, each of one layer."""
    table = bert.names(spec, family, "albert", OUTSIDE, "predictions.decoder", POOLER | ORDER, STEMS, LAYERS)
    groups = [
        (f"albert.{LAYERS}.{i}.", f"albert.encoder.albert_layer_groups.{group}.albert_layers.0.")
        for group, i in enumerate(_holders(spec))
    ]
    return replace(table, entries=respelled(table.entries, groups))


FAMILY = replace(
    bert.FAMILY,
    name="albert",
    prefix="albert.",
    heads=("AlbertForMaskedLM",),
    ends=_ends,
    prepare=lambda config, name: config,
    keys=(  # defaults as in transformers' AlbertConfig
        *but(
            bert.keys(30000, Size("max_position_embeddings", "max_positions", default=512)),
            d_model={"default": 4096},
            n_heads={"default": 64},
            d_ff={"default": 16384},
            activation=activation(default="gelu_new", tanh="gelu_new"),
        ),
        Size("embedding_size", "d_embedding", default=128, at=lambda parts: parts.embedding.d_model),
        Size("num_hidden_groups", "n_groups", default=1, most=lambda values: values["n_layers"], at=_n_groups),
        Only("inner_group_num", 1, reason="groups of several layers are not supported"),
        Irrelevant("training only", "classifier_dropout_prob"),
        Irrelevant(
            "of the first release's code, read by nobody",
            "down_scale_factor",
            "gap_size",
            "layers_to_keep",
            "net_structure_type",
            "num_memory_blocks",
        ),
    ),
    build=build,
    names=_names,
)
