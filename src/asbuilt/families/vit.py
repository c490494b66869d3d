"""The vit family: an image's patches and a class token through pre-norm blocks; a classifier or pooler over that token.

Dosovitskiy et al. 2020 (arXiv 2010.11929); names on disk as on the hub.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.families.shared.common import config_of, named_entries, read_common, require_same
from asbuilt.families.shared.fused import expect
from asbuilt.families.shared.reader import ConfigReader, Reading
from asbuilt.families.shared.table import Leading, Table, entry
from asbuilt.families.shared.towers import CLIP_DEFAULTS, first_parts, outside_entries, read_tower, tower, write_tower
from asbuilt.spec import Classifier, Model, Pooler

FAMILY = "vit"
PREFIX = "vit."
HEADS = ("ViTForImageClassification", "ViTModel")
DEFAULTS = CLIP_DEFAULTS | {"patch_size": 16, "hidden_act": "gelu", "layer_norm_eps": 1e-12}
# A classifier of more labels than this is a mistake: the largest published has 21,843.
MOST_LABELS = 10_000_000

OUTSIDE = {
    "embedding.weight": "embeddings.patch_embeddings.projection.weight",
    "embedding.bias": "embeddings.patch_embeddings.projection.bias",
    "embedding.class_token": "embeddings.cls_token",
    "positions.weight": "embeddings.position_embeddings",
    "norm.weight": "layernorm.weight",
    "norm.bias": "layernorm.bias",
}
NO_HEAD = {r"classifier\..*": "the classifier, which ViTModel leaves aside"}
LEADING = {"embedding.class_token": Leading(2), "positions.weight": Leading(1)}
STEMS = {
    "attention.norm": "layernorm_before",
    "attention.body.q": "attention.attention.query",
    "attention.body.k": "attention.attention.key",
    "attention.body.v": "attention.attention.value",
    "attention.body.o": "attention.output.dense",
    "ffn.norm": "layernorm_after",
    "ffn.body.up": "intermediate.dense",
    "ffn.body.down": "output.dense",
}


def read(config: dict[str, Any], name: str) -> Reading:
    """Returns what a config.json of this family says; class defaults are those of transformers' ViTConfig.

    `name` becomes the model's name and stands in messages. Raises InputError naming the key at fault.
    """
    reader = ConfigReader(config, name)
    dtype = read_common(reader, FAMILY, HEADS, causal=False)
    reader.irrelevant("attention_probs_dropout_prob", "training only")
    reader.irrelevant("encoder_stride", "of the decoder that learns from masked images")
    bare = reader.config.get("architectures") == [HEADS[1]]
    sizes = read_tower(reader, DEFAULTS)
    reader.only("pooler_output_size", None, sizes["d_model"], reason="only a pooler of the model's width is read")
    reader.only("pooler_act", "tanh", reason="only a pooler with tanh is read")
    bias = reader.flag("qkv_bias", default=True)
    labels = read_labels(reader)
    pooled = bare and reader.flag("add_pooling_layer", default=True)
    reader.finish()
    head = None if bare else Classifier(d_model=sizes["d_model"], n_labels=labels)
    spec = tower(**sizes, bias=bias, patch_bias=True, head=head, name=name)
    spec = replace(spec, pooler=Pooler(d_model=spec.d_model) if pooled else None)
    return Reading(
        spec=spec, carried=reader.carried, dtype=dtype, family=FAMILY, defaults=reader.defaults, notes=reader.notes
    )


def read_labels(reader: ConfigReader) -> int:
    """Returns how many labels there are: the names told, or their number; two where neither is said."""
    named = reader.config.get("id2label")
    if named is None:
        return reader.size("num_labels", default=2, null=2, most=MOST_LABELS)
    if not isinstance(named, dict) or not named:
        raise reader.error("id2label", "not allowed", value=named, allowed="an object with a name for each label")
    return reader.size("num_labels", default=len(named), null=len(named), least=len(named), most=len(named))


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    attention, _, _ = first_parts(spec, FAMILY)
    written = {
        "architectures": [HEADS[spec.head is None]],
        "model_type": FAMILY,
        "qkv_bias": attention.bias,
        **write_tower(spec, FAMILY),
        **({"add_pooling_layer": False} if spec.head is None and spec.pooler is None else {}),
    }
    config = config_of(written, carried, dtype)
    if isinstance(spec.head, Classifier) and len(config.get("id2label") or {}) != spec.head.n_labels:
        names = [f"LABEL_{i}" for i in range(spec.head.n_labels)]
        config |= {"id2label": {str(i): label for i, label in enumerate(names)}}
        config |= {"label2id": {label: i for i, label in enumerate(names)}}
    require_same(spec, read(config, spec.name).spec, FAMILY)
    return config


def table(spec: Model) -> Table:
    """Returns the names and layouts of a checkpoint folder's tensors."""
    prefix = "" if spec.head is None else "vit."
    entries = outside_entries(spec, "", prefix, OUTSIDE, FAMILY, LEADING)
    for i, block in enumerate(spec.blocks):
        entries += named_entries(block, f"blocks.{i}.", STEMS, f"{prefix}encoder.layer.{i}.", {}, FAMILY)
    if spec.head is not None:
        head = expect(spec.head, Classifier, "head", FAMILY)
        entries += [entry(f"head.{name}", f"classifier.{name}") for name in head.holds()]
    elif spec.pooler is not None:
        entries += [entry(f"pooler.{name}", f"pooler.{name}") for name in spec.pooler.holds()]
    return Table(entries=tuple(entries), ignored={} if spec.head is not None else NO_HEAD)
