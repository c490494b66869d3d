"""How weights are stored and multiplied: plain formats, GGUF blocks, and what quantisers store, with their scales."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache

from asbuilt.cost.dtypes import dtype as find_dtype
from asbuilt.cost.folded import Held
from asbuilt.dtypes import PLAIN, TORCH_NAMES
from asbuilt.errors import InputError
from asbuilt.families.shared.packing import QUANTISED_KINDS
from asbuilt.spec.part import Part, Weight

GROUPED = re.compile(r"(int4|int8|fp8):([0-9]{1,6})", re.IGNORECASE)
SMALLEST_GROUP = 8
# What one group of g numbers takes beside them. int4: a scale of 16 bits and a zero point of 4, as AWQ and GPTQ store;
# int8: a scale of 16 bits; fp8: one float32 scale for a square of g by g numbers, as DeepSeek-V3 stores.
SCALES = {"int4": Fraction(5, 2), "int8": Fraction(2)}
SQUARE_SCALE = Fraction(4)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """A way to hold weights: `held` gives a weight's bytes; products run at `compute`, activations are `activation`."""

    name: str
    activation: str
    compute: str
    held: Held = field(repr=False)
    note: str = ""

    @property
    def width(self) -> int:
        """Bytes of one activation."""
        return int(PLAIN[self.activation])


@lru_cache(maxsize=64)  # one object for one name: what is known of a model is kept by it
def precision(name: str) -> Precision:
    """Returns the format of that name: as `cost.dtype` takes it, or int4:128, int8:128, fp8:128 with scales by group.

    Weights of 8 bits and fewer are widened to bf16 to be multiplied; fp8 is multiplied as it is where the machine can.
    Raises InputError for a name that is none.
    """
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
            "too small a group", field="dtype", value=f"{base}:{group}", allowed=f"{SMALLEST_GROUP} or more"
        )
    scale = SQUARE_SCALE / group**2 if base == "fp8" else SCALES[base] / group
    each = PLAIN[base] + scale

    def held(path: str, weight: Weight, owner: Part) -> Fraction:
        if weight.format is not None:
            return Fraction(math.prod(weight.stored_shape))
        matrix = weight.role == "matrix" and owner.kind in QUANTISED_KINDS
        return weight.size * (each if matrix else PLAIN["bf16"])

    note = "matrices of attention and feed-forward with their scales; embeddings, head, routers, norms, biases in bf16"
    return Precision(
        name=f"{base}:{group}", activation="bf16", compute="fp8" if base == "fp8" else "bf16", held=held, note=note
    )


def cache_bytes(name: str) -> Fraction | int:
    """Returns the bytes of one cached number; raises InputError for a format with blocks."""
    found = find_dtype(name)
    if found.block > 1:
        raise InputError("a cache takes a plain format", field="kv-dtype", value=name, allowed=", ".join(PLAIN))
    nbytes = found.block_bytes
    return nbytes.numerator if nbytes.denominator == 1 else nbytes
