"""The clip family: a tower of texts and a tower of images whose projected vectors are compared.

Radford et al. 2021 (arXiv 2103.00020); names on disk as on the hub. The text's tower is causal, and read as a whole.
"""

from __future__ import annotations

from typing import Any

from asbuilt.errors import InputError
from asbuilt.families.shared.common import config_of, named_entries, read_common, require_same
from asbuilt.families.shared.fused import expect
from asbuilt.families.shared.reader import ConfigReader, Reading
from asbuilt.families.shared.table import Table, entry
from asbuilt.families.shared.towers import (
    CLIP_DEFAULTS,
    POSITION_IDS,
    STEMS,
    layers,
    outside_entries,
    read_layers,
    read_tower,
    read_tower_common,
    tower,
    tower_entries,
    vocabulary,
    write_layers,
    write_tower,
)
from asbuilt.spec import Contrast, LayerNorm, LearnedPositions, Model, Projection, TokenEmbedding

FAMILY = "clip"
PREFIX = "clip."
HEADS = ("CLIPModel",)
TEXT, IMAGES = "clip_text_model", "clip_vision_model"
# The class defaults of transformers' CLIPTextConfig.
TEXT_DEFAULTS = CLIP_DEFAULTS | {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
# In the first configs it was that of another tokenizer, and the end is the highest number.
OLD_END, END = 2, 49407

OUTSIDE = {
    "embedding.weight": "embeddings.token_embedding.weight",
    "positions.weight": "embeddings.position_embedding.weight",
    "norm.weight": "final_layer_norm.weight",
    "norm.bias": "final_layer_norm.bias",
}


def build(text: dict[str, Any], images: dict[str, Any], *, d_shared: int, end: int = END, name: str = FAMILY) -> Model:
    """Returns the model of these towers: `text` as `towers.layers` takes it, with n_vocab and n_positions, `images` as
    `towers.tower`; their vectors are `d_shared` wide.
    """
    text = dict(text)
    n_vocab, n_positions, d_model = text.pop("n_vocab"), text.pop("n_positions"), text["d_model"]
    reads: dict[str, Any] = {"reads": "highest"} if end == OLD_END else {"reads": "end", "end": end}
    seen = tower(**images, pre_norm=True, head=Projection(d_model=images["d_model"], d_out=d_shared))
    return Model(
        name=name,
        vision=Contrast(tower=seen),
        embedding=TokenEmbedding(n_vocab=n_vocab, d_model=d_model),
        positions=LearnedPositions(n_positions=n_positions, d_model=d_model),
        blocks=layers(**text, causal=True),
        norm=LayerNorm(d=d_model, eps=text["eps"]),
        head=Projection(d_model=d_model, d_out=d_shared, **reads),
        max_positions=n_positions,
    )


def read(config: dict[str, Any], name: str) -> Reading:
    """Returns what a config.json of this family says; class defaults are those of transformers' CLIPConfig.

    `name` becomes the model's name and stands in messages. Raises InputError naming the key at fault.
    """
    reader = ConfigReader(config, name)
    dtype = read_common(reader, FAMILY, HEADS)
    reader.irrelevant("logit_scale_init_value", "training only: the factor is stored with the weights")
    reader.irrelevant("initializer_factor", "training only")
    text, images = (_tower(reader, key, kind) for key, kind in (("text_config", TEXT), ("vision_config", IMAGES)))
    read_tower_common(images)
    text.irrelevant("initializer_factor", "training only")
    text.irrelevant("projection_dim", "of a projection that stands outside the tower")
    sizes = read_layers(text, TEXT_DEFAULTS) | {
        "n_vocab": text.size("vocab_size", default=49408),
        "n_positions": text.size("max_position_embeddings", default=77),
    }
    end = text.size("eos_token_id", default=END, least=0)
    seen = read_tower(images, CLIP_DEFAULTS)
    d_shared = reader.size("projection_dim", default=512)
    for one in (text, images, reader):
        one.finish()
    spec = build(sizes, seen, d_shared=d_shared, end=end, name=name)
    carried = reader.carried | {"text_config": text.carried, "vision_config": images.carried}
    return Reading(spec=spec, carried=carried, dtype=dtype, family=FAMILY, defaults=reader.defaults, notes=reader.notes)


def _tower(reader: ConfigReader, key: str, kind: str) -> ConfigReader:
    """Returns a reader of a tower's config; older files say it twice, and the one with `_dict` counts."""
    older = reader.nested(f"{key}_dict") is not None
    if older:
        reader.irrelevant(key, f"overruled by {key}_dict")
        del reader.carried[key]
    return nested(reader, f"{key}_dict" if older else key, kind)


def nested(reader: ConfigReader, key: str, kind: str) -> ConfigReader:
    """Returns a reader of the object at `key`, an empty one where it is missing; of what every config may carry it has
    read all. Raises InputError unless its `model_type` is `kind`, or not said.
    """
    inner = reader.nested(key) or ConfigReader({}, reader.where, f"{key}.", within=reader)
    inner.only("model_type", kind, reason=f"only a {kind} is read here")
    inner.irrelevant("tie_word_embeddings", "a tower has no head")
    read_common(inner, kind, ("CLIPTextModel", "CLIPVisionModel", "SiglipVisionModel"))
    return inner


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    seen = expect(spec.vision, Contrast, "vision", FAMILY).tower
    head = expect(spec.head, Projection, "head", FAMILY)
    text = write_layers(spec, FAMILY) | {
        "model_type": TEXT,
        "vocab_size": vocabulary(spec, FAMILY).n_vocab,
        "max_position_embeddings": spec.max_positions,
        "eos_token_id": OLD_END if head.end is None else head.end,
    }
    images = write_tower(seen, FAMILY) | {"model_type": IMAGES}
    written = {
        "architectures": [HEADS[0]],
        "model_type": FAMILY,
        "projection_dim": head.d_out,
        "text_config": carried.get("text_config", {}) | text,
        "vision_config": carried.get("vision_config", {}) | images,
    }
    config = config_of(written, carried, dtype)
    require_same(spec, read(config, spec.name).spec, FAMILY)
    return config


def table(spec: Model) -> Table:
    """Returns the names and layouts of a checkpoint folder's tensors."""
    if not isinstance(spec.vision, Contrast):
        raise InputError(f"{FAMILY} has Contrast here", field="vision", value=repr(spec.vision))
    entries = outside_entries(spec, "", "text_model.", OUTSIDE, FAMILY)
    for i, block in enumerate(spec.blocks):
        entries += named_entries(block, f"blocks.{i}.", STEMS, f"text_model.encoder.layers.{i}.", {}, FAMILY)
    entries += tower_entries(spec.vision.tower, "vision.tower.", "vision_model.", FAMILY)
    entries += [
        entry("head.weight", "text_projection.weight"),
        entry("vision.tower.head.weight", "visual_projection.weight"),
        entry("vision.scale", "logit_scale"),
    ]
    return Table(entries=tuple(entries), ignored=POSITION_IDS)
