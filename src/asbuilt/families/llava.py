"""The llava family: CLIP's tower, read below its last layer, two matrices, and a llama text.

Liu et al. 2023 (arXiv 2304.08485, 2310.03744).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.families import llama
from asbuilt.families.clip import IMAGES, nested
from asbuilt.families.shared.common import ACTIVATION_NAMES, read_common
from asbuilt.families.shared.fused import expect
from asbuilt.families.shared.multimodal import (
    multimodal_table,
    read_placeholder,
    read_text,
    vision_of,
    write_multimodal,
)
from asbuilt.families.shared.reader import ConfigReader, Reading, is_whole
from asbuilt.families.shared.table import Table, entry
from asbuilt.families.shared.towers import (
    CLIP_DEFAULTS,
    WRITTEN_ACTIVATIONS,
    read_tower,
    read_tower_common,
    tower,
    write_tower,
)
from asbuilt.spec import Activation, MLPProjector, Model, TiedHead, Vision

FAMILY = "llava"
HEADS = ("LlavaForConditionalGeneration",)
# Where no tower is described at all, CLIP's large one.
LARGE = CLIP_DEFAULTS | {
    "intermediate_size": 4096,
    "hidden_size": 1024,
    "patch_size": 14,
    "image_size": 336,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}


def build(
    text: Model,
    images: dict[str, Any],
    *,
    placeholder: int,
    layers: int,
    keep_class: bool = False,
    activation: Activation = "gelu",
    bias: bool = True,
) -> Model:
    """Returns the text with images in it, of a tower as `towers.tower` takes it whose first `layers` blocks run."""
    widths = (images["d_model"], text.d_model, text.d_model)
    vision = Vision(
        tower=tower(**images, pre_norm=True),
        projector=MLPProjector(widths=widths, activation=activation, bias=bias),
        placeholder=placeholder,
        layers=layers,
        keep_class=keep_class,
    )
    return replace(text, vision=vision)


def read(config: dict[str, Any], name: str) -> Reading:
    """Returns what a config.json of this family says; class defaults are those of transformers' LlavaConfig.

    `name` becomes the model's name and stands in messages. Raises InputError naming the key at fault.
    """
    reader = ConfigReader(config, name)
    dtype = read_common(reader, FAMILY, HEADS)
    reader.irrelevant("ignore_index", "training only")
    reader.irrelevant("image_seq_length", "told by the tower's size, and used by the processor alone")
    reader.irrelevant("vocab_size", "the text's own says it")
    text = read_text(reader, llama)
    if reader.flag("tie_word_embeddings", default=False):  # or where the text says so
        head = TiedHead(d_model=text.spec.d_model, n_vocab=text.spec.n_vocab)
        text = replace(text, spec=replace(text.spec, head=head))
    images = nested(reader, "vision_config", IMAGES)
    read_tower_common(images)
    seen = read_tower(images, CLIP_DEFAULTS if reader.given("vision_config") else LARGE)
    images.finish()
    strategy = reader.choice(
        "vision_feature_select_strategy", choices={"default": False, "full": True}, default="default"
    )
    activation = reader.choice("projector_hidden_act", choices=ACTIVATION_NAMES, default="gelu")
    spec = build(
        text.spec,
        seen,
        placeholder=read_placeholder(reader, 32000, text.spec),
        layers=_layers(reader, seen["n_layers"]),
        keep_class=strategy,
        activation=activation,
        bias=reader.flag("multimodal_projector_bias", default=True),
    )
    reader.irrelevant("vision_feature_layer", "counted from above or below, as it was")
    reader.finish()
    carried = reader.carried | {"text_config": text.carried, "vision_config": images.carried}
    return Reading(spec=spec, carried=carried, dtype=dtype, family=FAMILY, defaults=reader.defaults, notes=reader.notes)


def _layers(reader: ConfigReader, n_layers: int) -> int:
    """Returns after how many blocks the stream is taken: counted from 0, or from the end, where -1 is after all."""
    said = reader.config.get("vision_feature_layer", -2)
    ok = is_whole(said) and -n_layers - 1 <= said <= n_layers
    reader.require("vision_feature_layer", ok, f"one whole number, {-n_layers - 1} to {n_layers}")
    return said % (n_layers + 1)


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    vision = vision_of(spec, FAMILY)
    projector = expect(vision.projector, MLPProjector, "vision.projector", FAMILY)
    n = vision.tower.n_layers + 1
    layers = n - 1 if vision.layers is None else vision.layers
    said = carried.get("vision_feature_layer", layers - n)
    written = {
        "architectures": [HEADS[0]],
        "vision_config": write_tower(vision.tower, FAMILY) | {"model_type": IMAGES},
        "projector_hidden_act": WRITTEN_ACTIVATIONS.get(projector.activation, projector.activation),
        "multimodal_projector_bias": projector.bias,
        "vision_feature_layer": said if said % n == layers else layers - n,
        "vision_feature_select_strategy": "full" if vision.keep_class else "default",
        "tie_word_embeddings": isinstance(spec.head, TiedHead),
    }
    return write_multimodal(spec, llama, written, carried, dtype, FAMILY, read)


def table(spec: Model) -> Table:
    """Returns the names and layouts of a checkpoint folder's tensors."""
    held = vision_of(spec, FAMILY).projector.holds()
    stored = {"layers_0": "linear_1", "layers_1": "linear_2"}
    projector = []
    for name in held:
        stem, _, kind = name.partition(".")
        projector.append(entry(f"vision.projector.{name}", f"multi_modal_projector.{stored.get(stem, stem)}.{kind}"))
    return multimodal_table(spec, llama.table(replace(spec, vision=None)), projector, FAMILY)
