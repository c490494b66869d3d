"""The bytes of a weight in a plain dtype, or in a block format of GGUF files, and those of a cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from asbuilt.dtypes import CACHE_BLOCKS, CACHE_SCALES, GGUF_BLOCKS, PLAIN, short_name
from asbuilt.errors import InputError, near, one_of
from asbuilt.spec.part import CacheFormat, Weight

# A row whose length is not a multiple of 256 falls back to blocks of 32, as in llama.cpp's quantiser; rows that fit
# neither stay in fp16.
FALLBACK = {
    **{name: "iq4_nl" for name in GGUF_BLOCKS if name.startswith(("iq1_", "iq2_", "iq3_"))},
    "iq4_xs": "iq4_nl",
    "q2_k": "iq4_nl",
    "q3_k": "iq4_nl",
    "q4_k": "q5_0",
    "q5_k": "q5_1",
    "q6_k": "q8_0",
    "tq1_0": "q4_0",
    "tq2_0": "q4_0",
}


@dataclass(frozen=True)
class Dtype:
    """A number format; without blocks, `block` is 1 and `block_bytes` the size of one number."""

    name: str
    block: int
    block_bytes: Fraction

    def nbytes(self, weight: Weight) -> Fraction:
        """Returns the bytes of one weight.

        Block formats store matrices and tables row by row; vectors stay in fp32, as in GGUF files. A weight that the
        spec declares as packed has the bytes of its own format.
        """
        if weight.format is not None:
            return Fraction(math.prod(weight.stored_shape))
        if self.block == 1:
            return weight.size * self.block_bytes
        if len(weight.shape) <= 1:
            return Fraction(4 * weight.size)
        if weight.shape[-1] % self.block == 0:
            return weight.size // self.block * self.block_bytes
        return dtype(FALLBACK.get(self.name, "fp16")).nbytes(weight)


def dtype(name: str) -> Dtype:
    """Returns the format of this name; raises InputError for an unknown name."""
    key = short_name(name)
    if key in PLAIN:
        return Dtype(key, 1, PLAIN[key])
    if key in GGUF_BLOCKS:
        block, nbytes = GGUF_BLOCKS[key]
        return Dtype(key, block, Fraction(nbytes))
    known = sorted(PLAIN) + sorted(GGUF_BLOCKS)
    raise InputError("unknown dtype", field="dtype", value=name, allowed=one_of(known), fix=near(key, known))


def cache_name(name: str) -> str:
    """Returns the name of a format of caches; raises InputError for any other, field `kv-dtype`."""
    key = short_name(name)
    if key in PLAIN or key in CACHE_SCALES or key in CACHE_BLOCKS:
        return key
    known = [*PLAIN, *CACHE_SCALES, *CACHE_BLOCKS]
    problem = "not a format for caches" if key in GGUF_BLOCKS else "unknown dtype"
    raise InputError(problem, field="kv-dtype", value=name, allowed=one_of(known), fix=near(key, known))


def cache_format(name: str, state: str | None = None) -> int | Fraction | CacheFormat:
    """Returns how a cache of this format holds numbers; without scales or a `state`, the bytes of one number.

    A plain name is that many bits a number, scaled per tensor if at all, as engines do: fp8 is one byte. NAME:head
    stores scales beside each vector of one token and head; q8_0 and its like are llama.cpp's, whose scales lie in the
    blocks. `state` is the dtype of states: None means the format itself, or bf16 for one with scales.
    """
    key = cache_name(name)
    if key in CACHE_BLOCKS:
        numbers, nbytes = CACHE_BLOCKS[key]
        return CacheFormat(each=Fraction(nbytes, numbers), scales=0, state=PLAIN[short_name(state or "bf16")])
    each = PLAIN[key.removesuffix(":head")]
    each = each.numerator if each.denominator == 1 else each
    if state is None and key in PLAIN:
        return each
    return CacheFormat(each=each, scales=CACHE_SCALES.get(key, 0), state=PLAIN[short_name(state or "bf16")])


def state_beside(name: str, activation: str) -> str | None:
    """Returns the dtype of states beside keys and values in this format: None for a plain one, which is theirs too."""
    return activation if cache_name(name) in (*CACHE_SCALES, *CACHE_BLOCKS) else None
