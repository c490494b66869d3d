"""The gemma4 family: images of any size, positions by column and row, patches averaged and projected; a gemma4_text.

Small ones hear too, through a conformer. Gemma Team 2026, as published. Costs are those of square images, as large as
the most tokens of an image allow; processors keep an image's own proportions, with as many patches or fewer.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from asbuilt.families import gemma4_text
from asbuilt.families.gemma2 import ACTIVATION, SANDWICH
from asbuilt.families.shared import conformer
from asbuilt.families.shared.dimensions import residual, sized
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Check, Flag, Irrelevant, Only, Size, Values, depth, tied
from asbuilt.families.shared.multimodal import (
    IMAGE_DELIMITERS,
    SAME_TIE,
    Text,
    placeholder,
    projector_of,
    vision_of,
)
from asbuilt.families.shared.names import QK_NORMS, Names
from asbuilt.families.shared.parts import Parts, expect_whole
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.sizes import RMS_EPS, HeadWidth
from asbuilt.families.shared.table import AxesApart, Entry, PixelsLast, Stacked, TensorTable, entry, respelled
from asbuilt.families.shared.towers import Nested
from asbuilt.spec import (
    AxialPositions,
    GridPatches,
    GridVision,
    ImageEncoder,
    LanguageModel,
    Linear,
    Model,
    Plane,
    PooledProjector,
    RMSNorm,
    Rotary,
    TiedHead,
    VisionLanguageModel,
)
from asbuilt.spec.linear import transform_maps


def build(
    text: LanguageModel,
    images: dict[str, Any],
    sounds: dict[str, Any] | None = None,
    *,
    placeholder: int,
    n_tokens: int,
    both_ways: bool,
) -> Model:
    """Returns the text with images in it, usually of at most `n_tokens`, in windows bidirectional if `both_ways`.

    With `sounds`, a conformer's sizes, the text hears too.
    """
    pool, own = images["pool"], {key: images[key] for key in images.keys() - {"pool", "standardised"}}
    made = _tower(**own, n_side=_side(pool, n_tokens))
    projector = PooledProjector(
        d_in=made.d_model,
        d_out=text.d_model,
        n_side=made.embedding.n_side,
        pool=pool,
        norm=RMSNorm(d=made.d_model, eps=images["eps"], gain="none"),
        scale=made.d_model**0.5,
        standardised=images["standardised"],
    )
    vision = GridVision(
        tower=made, projector=projector, placeholder=placeholder, both_ways=both_ways, in_windows=both_ways
    )
    heard = None if sounds is None else conformer.hearing(**sounds, d_text=text.d_model)
    return VisionLanguageModel.of(text, vision, heard)


def _tower(
    *,
    patch_size: int,
    n_side: int,
    n_entries: int,
    theta: float,
    eps: float,
    clipped: bool,
    **sizes: Any,  # noqa: ANN401  # those of `Dimensions`
) -> ImageEncoder:
    """Returns the tower, which costs as much as images of `n_side` patches on a side take."""
    made = sized(sizes, n_vocab=0, max_positions=n_side**2, name="tower")
    norm, per_head = RMSNorm(d=made.d_model, eps=eps), RMSNorm(d=made.head_width, eps=eps)
    attention = made.attention(
        causal=False,
        cached=False,
        scale=1.0,
        q_norm=per_head,
        k_norm=per_head,
        v_norm=replace(per_head, gain="none"),
        positions=Rotary(d_rotary=made.head_width, theta=theta, axes=Plane()),
    )
    block = transform_maps(
        residual(attention, made.gated(), norm, norm), lambda _, one: replace(one.plain, clipped=clipped)
    )
    size, width = patch_size * n_side, made.d_model
    return made.whole(
        ImageEncoder,
        (block,) * made.n_layers,
        None,
        embedding=GridPatches(image_size=size, patch_size=patch_size, d_model=width, centred=True),
        positions=AxialPositions(n_entries=n_entries, d_model=width),
        head=None,
    )


class _Text(Text):
    """The text, which also says whether an image's tokens attend to each other in layers with a window."""

    both = "use_bidirectional_attention"

    def read(self, reader: ConfigReader, values: Values) -> None:
        super().read(reader, values)
        values["both_ways"] = reader.carried[self.key].get(self.both) == "vision"

    def write(self, parts: Parts) -> dict[str, Any]:
        written = super().write(parts)
        written[self.key][self.both] = "vision" if vision_of(parts).both_ways else None
        return written


class _Tokens:
    """The most tokens of an image; the square whose costs are declared has as many or fewer, so it is carried."""

    key = "vision_soft_tokens_per_image"

    def read(self, reader: ConfigReader, values: Values) -> None:
        values["n_tokens"] = reader.size(self.key, default=280, most=2**20)
        reader.irrelevant(self.key, "the tower says it, up to the largest square")

    def write(self, parts: Parts) -> dict[str, Any]:
        made = vision_of(parts).n_tokens
        said = parts.carried.get(self.key, 280)
        return {self.key: said if math.isqrt(said) ** 2 == made else made}


class _Rope:
    """RoPE by column and row, on whole heads."""

    key = "rope_parameters"

    def read(self, reader: ConfigReader, values: Values) -> None:
        inner = reader.nested(self.key) or ConfigReader({}, reader.where, f"{reader.prefix}{self.key}.")
        inner.choice("rope_type", choices={"axial": None, "default": None}, default="axial")
        values["theta"] = inner.number("rope_theta", default=100.0, above=1.0)
        inner.finish()

    def write(self, parts: Parts) -> dict[str, Any]:
        return {self.key: {"rope_type": "axial", "rope_theta": float(parts.rotary.theta)}}


def _side(pool: int, n_tokens: int) -> int:
    """Returns the patches per side of the largest square image of at most `n_tokens`."""
    return pool * math.isqrt(n_tokens)


def _usual(values: Values) -> int:
    return _side(values["images"]["pool"], values["n_tokens"])


def _projector(parts: Parts) -> PooledProjector:
    return projector_of(parts.around, PooledProjector)


TOWER = (
    Size("hidden_size", "d_model", default=768),
    depth("num_hidden_layers", 16),
    Size("num_attention_heads", "n_heads", default=12),
    Size("num_key_value_heads", "n_kv_heads", default=12, divides="n_heads"),
    HeadWidth(64),
    Size("intermediate_size", "d_ff", default=3072),
    replace(ACTIVATION, again=""),
    replace(RMS_EPS, at="first.norm.eps"),
    _Rope(),
    Size("patch_size", "patch_size", default=16, most=2**10, at="model.embedding.patch_size"),
    Size("position_embedding_size", "n_entries", default=10240, at="model.positions.n_entries"),
    Size("pooling_kernel_size", "pool", default=3, most=2**10, at=lambda parts: _projector(parts).pool),
    Flag("standardize", "standardised", default=False, at=lambda parts: _projector(parts).standardised),
    Check("head_dim", (lambda values: values["d_head"] % 4 == 0, "a multiple of 4, with pairs for columns and rows")),
    Flag("use_clipped_linears", "clipped", default=False, at=lambda parts: parts.attention.maps["q"].plain.clipped),
    Only("attention_bias", False, None, reason="the tower's maps have no biases"),
    Irrelevant("head_dim says it", "global_head_dim"),
    Irrelevant("the processor's", "default_output_length", "image_seq_length", "video_seq_length"),
    Irrelevant("positions are those of the tables", "max_position_embeddings"),
)
STEMS = {
    path: f"{name}.linear" if path.rpartition(".")[2] in {"q", "k", "v", "o", "gate", "up", "down"} else name
    for path, name in (SANDWICH | QK_NORMS).items()
}
BOUNDS = {  # of a clipped map, whose matrix alone is in `linear`
    f"{path}.{bound}": f"{name.removesuffix('.linear')}.{bound}"
    for path, name in STEMS.items()
    if name.endswith(".linear")
    for bound in Linear(d_in=1, d_out=1, clipped=True).buffers()
}
OUTSIDE = {"embedding": "patch_embedder.input_proj"}
TEXT = (("model.", "model.language_model."),)


def _names(spec: Model, family: str) -> TensorTable:
    whole = expect_whole(spec, VisionLanguageModel, family)
    tower, text = whole.vision.tower, gemma4_text.FAMILY.table(whole.text)
    body = Parts(tower, family, {}).attention
    shape = tower.embedding.holds()["weight"].shape[1:]
    heads = {"q": body.n_heads, "k": body.n_kv_heads, "q_norm": 1, "k_norm": 1}
    names = Names(
        stems=STEMS | BOUNDS,
        outside=OUTSIDE,
        layers="encoder.layers",
        layouts={f"attention.body.{name}.weight": AxesApart(n) for name, n in heads.items()}
        | {"embedding.weight": PixelsLast(shape)},
        elsewhere=("positions",),
    )
    tables = tuple(f"vision.tower.positions.{name}" for name in ("columns", "rows"))
    standard = {"shift": "std_bias", "factor": "std_scale"} if _standardised(whole) else {}
    entries = (
        *respelled(text.entries, TEXT),
        *names.entries(tower, family, "vision.tower.", "model.vision_tower."),
        Entry(paths=tables, names=("model.vision_tower.patch_embedder.position_embedding_table",), layout=Stacked()),
        *(entry(f"vision.projector.{path}", f"model.vision_tower.{name}") for path, name in standard.items()),
        entry("vision.projector.weight", "model.embed_vision.embedding_projection.weight"),
        *(() if whole.hearing is None else conformer.entries(whole.hearing, family)),
    )
    again = {"lm_head.weight": "embedding.weight"} if isinstance(whole.head, TiedHead) else {}
    return TensorTable(entries=entries, ignored=text.ignored, duplicates=again)


def _standardised(spec: VisionLanguageModel) -> bool:
    return isinstance(spec.vision.projector, PooledProjector) and spec.vision.projector.standardised


FAMILY = Family(
    name="gemma4",
    heads=("Gemma4ForConditionalGeneration",),
    keys=(  # defaults as in transformers' Gemma4Config
        IMAGE_DELIMITERS,
        Irrelevant("tokens that the processor puts around sounds", "boa_token_id", "eoa_token_id", "eoa_token_index"),
        Irrelevant("the placeholder of videos, which are not read", "video_token_id"),
        tied(True),
        _Text(gemma4_text.FAMILY),
        SAME_TIE,
        Nested(key="vision_config", into="images", kind="gemma4_vision", at="vision.tower", keys=TOWER),
        _Tokens(),
        Check(
            "vision_config.position_embedding_size",
            (
                lambda values: values["images"]["n_entries"] >= _usual(values),
                lambda values: f"at least {_usual(values)}, the patches per side of a square image",
            ),
        ),
        replace(placeholder(258880, beyond=True), key="image_token_id", also=("image_token_index",)),
        conformer.Sounds(
            key="audio_config", into="sounds", kind="gemma4_audio", at="hearing.tower", keys=conformer.KEYS
        ),
        Check(
            "audio_token_id",
            (
                lambda values: values["sounds"] is None or values["sounds"]["placeholder"] != values["placeholder"],
                "another token than image_token_id",
            ),
        ),
    ),
    build=build,
    names=_names,
)
