"""The vit family: patches of an image and a class token through pre-norm blocks; a classifier or pooler on that token.

Dosovitskiy et al. 2020 (arXiv 2010.11929); names on disk as on the hub.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Flag, Headed, Irrelevant, Only, Values, defaults
from asbuilt.families.shared.labels import read_labels, written_labels
from asbuilt.families.shared.names import Names
from asbuilt.families.shared.parts import Parts, expect
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.table import Leading, TensorTable, entry
from asbuilt.families.shared.towers import CLIP, tower
from asbuilt.spec import Classifier, ImageEncoder, Model, Pooler

HEADS = ("ViTForImageClassification", "ViTModel")

NAMES = Names(
    stems={
        "attention.norm": "layernorm_before",
        "attention.body.q": "attention.attention.query",
        "attention.body.k": "attention.attention.key",
        "attention.body.v": "attention.attention.value",
        "attention.body.o": "attention.output.dense",
        "ffn.norm": "layernorm_after",
        "ffn.body.up": "intermediate.dense",
        "ffn.body.down": "output.dense",
    },
    outside={
        "embedding": "embeddings.patch_embeddings.projection",
        "embedding.class_token": "embeddings.cls_token",
        "positions.weight": "embeddings.position_embeddings",
        "norm": "layernorm",
        "pooler.dense": "pooler.dense",
    },
    layers="encoder.layer",
    layouts={"embedding.class_token": Leading(2), "positions": Leading(1)},
    elsewhere=("head",),
)


def _build(*, classifies: bool, n_labels: int, pooled: bool, **sizes: Any) -> Model:  # noqa: ANN401
    head = Classifier(d_model=sizes["d_model"], n_labels=n_labels) if classifies else None
    spec = tower(**sizes, patch_bias=True, head=head)
    return replace(spec, pooler=Pooler(d_model=spec.d_model) if pooled else None)


class _Ends(Headed):
    """What the model ends in: a classifier, or the stream and a pooler, which may be left out."""

    pooler = "add_pooling_layer"

    def read(self, reader: ConfigReader, values: Values) -> None:
        super().read(reader, values)
        values["n_labels"] = read_labels(reader)
        values["pooled"] = not values[self.into] and reader.flag(self.pooler, default=True)

    def write(self, parts: Parts) -> dict[str, Any]:
        head, none = parts.model.head, parts.model.head is None and parts.whole(ImageEncoder).pooler is None
        written = super().write(parts) | ({self.pooler: False} if none else {})
        return written | (written_labels(head.n_labels, parts.carried) if isinstance(head, Classifier) else {})


def _names(spec: Model, family: str) -> TensorTable:
    """Returns the names and layouts of a checkpoint folder's tensors."""
    if spec.head is None:
        unused = {r"classifier\..*": "the classifier, which ViTModel leaves aside"}
        return TensorTable(entries=tuple(NAMES.entries(spec, family)), ignored=unused)
    head = [
        entry(f"head.{name}", f"classifier.{name}") for name in expect(spec.head, Classifier, "head", family).holds()
    ]
    return TensorTable(entries=(*NAMES.entries(spec, family, prefix="vit."), *head))


FAMILY = Family(
    name="vit",
    prefix="vit.",
    heads=HEADS,
    causal=False,
    keys=(  # defaults as in transformers' ViTConfig
        *defaults(CLIP, patch_size=16, activation="gelu", eps=1e-12),
        Flag("qkv_bias", "bias", default=True),
        _Ends(HEADS, "classifies"),
        Irrelevant("training only", "attention_probs_dropout_prob"),
        Irrelevant("of the decoder that learns from masked images", "encoder_stride"),
        Only(
            "pooler_output_size",
            None,
            lambda values: values["d_model"],
            reason="only a pooler of the model's width is read",
        ),
        Only("pooler_act", "tanh", reason="only a pooler with tanh is read"),
    ),
    build=_build,
    names=_names,
)
