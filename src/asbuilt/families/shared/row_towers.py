"""Towers over images of any size whose patches are of one frame and stand row by row: MoonViT and Pixtral.

Kimi Team 2025 (arXiv 2504.07491); Agrawal et al. 2024 (arXiv 2410.07073). Norms have an epsilon of 1e-5 in the
published code, which no key says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from asbuilt.errors import InputError
from asbuilt.families.shared.dimensions import pre_norm, sized
from asbuilt.families.shared.image_grid import USUAL_SIDE
from asbuilt.families.shared.parts import Parts, expect
from asbuilt.families.shared.reader import TIED
from asbuilt.families.shared.table import Reshaped
from asbuilt.spec import GridPatches, GridVision, ImageEncoder, Norm, Plane, Rotary, VisionLanguageModel

EPS = 1e-5
SIZES = ("d_model", "n_heads", "n_layers", "d_ff", "activation")


def tower(
    images: Mapping[str, Any],
    norm: Norm,
    plane: Plane | None,
    /,
    *,
    pairing: Literal["halves", "adjacent"] = "halves",
    gated: bool = False,
    bias: bool = False,
    **ends: Any,  # noqa: ANN401
) -> ImageEncoder:
    """Returns the tower of the sizes `images`, whose blocks have `norm`; `ends` are fields of `ImageEncoder`.

    Without a `plane` its attention has no positions. Images whose costs are declared are `image_size` wide and high,
    where the sizes say, or 32 patches and as many as make whole squares of `merge`.
    """
    made = sized({name: images[name] for name in SIZES}, n_vocab=0, max_positions=1)
    embedding = GridPatches(
        image_size=images.get("image_size") or _usual(images["merge"]) * images["patch_size"],
        patch_size=images["patch_size"],
        channels=images["channels"],
        d_model=made.d_model,
        bias=bias,
    )
    rotary = None
    if plane is not None:
        rotary = Rotary(d_rotary=made.head_width, theta=images["theta"], axes=plane, pairing=pairing)
    attention = made.attention(causal=False, cached=False, bias=bias, output_bias=bias, positions=rotary)
    block = pre_norm(attention, made.gated(bias) if gated else made.plain(bias), norm)
    blocks, n = (block,) * made.n_layers, embedding.n_tokens
    return ImageEncoder(name="tower", embedding=embedding, blocks=blocks, max_positions=n, **ends)


def _usual(merge: int) -> int:
    """Returns how many patches a side has, of images whose costs are declared: whole squares of `merge`."""
    return -(-USUAL_SIDE // merge) * merge


def tied_as_whole(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a config whose text says what the whole does of tied embeddings, which decides; they are unless said."""
    inner = config.get("text_config")
    said = {TIED: config.get(TIED, True)}
    return config | {"text_config": inner | said} if isinstance(inner, dict) else config


def patches(tower: ImageEncoder, family: str, path: str = "") -> Reshaped:
    """Returns the layout of the patches' convolution of the tower at `path`, stored without a dimension for frames."""
    embedding = expect(tower.embedding, GridPatches, f"{path}embedding", family)
    if embedding.frames != 1:
        field = f"{path}embedding.frames"
        raise InputError(f"{family} files have patches of one frame", field=field, value=embedding.frames, allowed="1")
    shape = embedding.holds()["weight"].shape
    return Reshaped(shape, (*shape[:2], *shape[3:]))


def vision(parts: Parts) -> GridVision:
    """Returns what becomes of images, where `parts` are a tower's or the whole's."""
    whole = parts.around.whole(VisionLanguageModel)
    return parts.around.expect(whole.vision, GridVision, "vision")
