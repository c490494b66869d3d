"""How weights are stored and multiplied: plain dtypes, GGUF blocks, and quantised formats with their scales."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache

from asbuilt.cost.dtypes import cache_format, state_beside
from asbuilt.cost.dtypes import dtype as find_dtype
from asbuilt.cost.folded import Held
from asbuilt.dtypes import PLAIN, TORCH_NAMES
from asbuilt.errors import InputError
from asbuilt.packing import QUANTISED_KINDS
from asbuilt.spec.part import CacheFormat, Part, Weight

GROUPED = re.compile(r"(int4|int8|fp8):([0-9]{1,6})", re.IGNORECASE)
SMALLEST_GROUP = 8
# Extra bytes of a group of g numbers. int4: a scale of 16 bits and a zero point of 4, as in AWQ and GPTQ; int8: a scale
# of 16 bits; fp8: one float32 scale for a square of g by g numbers, as in DeepSeek-V3.
SCALES = {"int4": Fraction(5, 2), "int8": Fraction(2)}
SQUARE_SCALE = Fraction(4)
# NVIDIA's Model Optimizer: an 8-bit scale per 16 numbers, and a float32 each for a matrix and for its activations.
NVFP4, NVFP4_GROUP, NVFP4_MATRIX = "nvfp4", 16, 8


@dataclass(frozen=True, kw_only=True)
class Precision:
    """A format of weights: `held` returns a weight's bytes; products run at `compute`, activations are `activation`.

    `kv` is the dtype of the cache that the weights are published for, None for that of activations.
    """

    name: str
    activation: str
    compute: str
    held: Held = field(repr=False)
    note: str = ""
    kv: str | None = None

    @property
    def width(self) -> int:
        """Bytes of one activation."""
        return int(PLAIN[self.activation])


@lru_cache(maxsize=64)  # one object per name: it is a key of the cached results of a model
def precision(name: str) -> Precision:
    """Returns the format of this name: one of `cost.dtype`, or int4:128, int8:128, fp8:128 with scales per group.

    `nvfp4` stores matrices of attention and feed-forward as NVIDIA's Model Optimizer does. Weights of 8
    bits and fewer are converted to bf16 for products; fp8 and nvfp4 are multiplied directly if the machine can. Raises
    InputError for an unknown name.
    """
    if name.lower() == NVFP4:
        return _nvfp4()
    if grouped := GROUPED.fullmatch(name):
        return _grouped(grouped[1].lower(), int(grouped[2]))
    plain = find_dtype(name)
    activation = plain.name if plain.name in TORCH_NAMES else "bf16"
    return Precision(
        name=plain.name,
        activation=activation,
        compute="fp8" if plain.name == "fp8" else activation,
        held=lambda path, weight, owner: plain.nbytes(weight),
    )


def _grouped(base: str, group: int) -> Precision:
    if group < SMALLEST_GROUP:
        raise InputError(
            "group too small", field="dtype", value=f"{base}:{group}", allowed=f"at least {SMALLEST_GROUP}"
        )
    scale = SQUARE_SCALE / group**2 if base == "fp8" else SCALES[base] / group
    each = PLAIN[base] + scale

    return Precision(
        name=f"{base}:{group}",
        activation="bf16",
        compute="fp8" if base == "fp8" else "bf16",
        held=_matrices(lambda weight: weight.size * each),
        note=MATRICES,
    )


MATRICES = "attention and feed-forward matrices with their scales; embeddings, head, routers, norms, biases in bf16"


def _matrices(stored: Callable[[Weight], Fraction]) -> Held:
    """Returns the bytes of a weight where only matrices of attention and feed-forward are `stored` so."""

    def held(path: str, weight: Weight, owner: Part) -> Fraction:
        if weight.format is not None:
            return Fraction(math.prod(weight.stored_shape))
        matrix = weight.role == "matrix" and owner.kind in QUANTISED_KINDS
        return stored(weight) if matrix else weight.size * PLAIN["bf16"]

    return held


def _nvfp4() -> Precision:
    def stored(weight: Weight) -> Fraction:
        groups = weight.size // weight.shape[-1] * math.ceil(weight.shape[-1] / NVFP4_GROUP)
        return weight.size * Fraction(1, 2) + groups + NVFP4_MATRIX * math.prod(weight.shape[:-2])

    return Precision(name=NVFP4, activation="bf16", compute="fp4", held=_matrices(stored), note=MATRICES)


def cache_bytes(name: str, activation: str = "bf16") -> Fraction | int | CacheFormat:
    """Returns the bytes of one cached number, or how a format with scales holds numbers, with states in `activation`.

    Raises InputError for a format with blocks.
    """
    return cache_format(name, state_beside(name, activation))
