"""Number formats: one table of their sizes and their names in each library and file format.

`bf16`, `bfloat16` and `torch.bfloat16` are the same everywhere; safetensors and GGUF files call it BF16.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from asbuilt.errors import InputError, one_of


@dataclass(frozen=True, kw_only=True)
class Format:
    """One format without blocks: our name, bits, torch's name, the one in safetensors and GGUF files, GGUF's number."""

    name: str
    bits: int
    torch: str | None = None
    stored: str | None = None
    gguf: int | None = None


FORMATS = (
    Format(name="fp64", bits=64, torch="float64", stored="F64", gguf=28),
    Format(name="fp32", bits=32, torch="float32", stored="F32", gguf=0),
    Format(name="bf16", bits=16, torch="bfloat16", stored="BF16", gguf=30),
    Format(name="fp16", bits=16, torch="float16", stored="F16", gguf=1),
    Format(name="fp8", bits=8, torch="float8_e4m3fn", stored="F8_E4M3"),
    Format(name="fp8_e5m2", bits=8, torch="float8_e5m2", stored="F8_E5M2"),
    Format(name="int8", bits=8, stored="I8", gguf=24),
    Format(name="int4", bits=4),
    Format(name="int16", bits=16, stored="I16", gguf=25),
    Format(name="int32", bits=32, stored="I32", gguf=26),
    Format(name="int64", bits=64, stored="I64", gguf=27),
    Format(name="uint8", bits=8, stored="U8"),
    Format(name="uint16", bits=16, stored="U16"),
    Format(name="uint32", bits=32, stored="U32"),
    Format(name="uint64", bits=64, stored="U64"),
    Format(name="bool", bits=8, stored="BOOL"),
    Format(name="complex64", bits=64, stored="C64"),
    Format(name="fp4", bits=4, stored="F4"),
    Format(name="fp6_e2m3", bits=6, stored="F6_E2M3"),
    Format(name="fp6_e3m2", bits=6, stored="F6_E3M2"),
    Format(name="fp8_e8m0", bits=8, stored="F8_E8M0"),
    Format(name="fp8_e4m3fnuz", bits=8, stored="F8_E4M3FNUZ"),
    Format(name="fp8_e5m2fnuz", bits=8, stored="F8_E5M2FNUZ"),
)


@dataclass(frozen=True)
class GGMLType:
    """One tensor type of GGUF: `block` elements of a row are stored in `nbytes` bytes (ggml.h and ggml-common.h)."""

    name: str
    block: int
    nbytes: int


# The sixteen numbers of four bits: one for the sign, two for the power of two, one for the half beside it (E2M1).
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

# The missing numbers (4, 5, 31-33, 36-38) belonged to formats since withdrawn; such files cannot be read.
_GGUF_BLOCKS = {
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    9: GGMLType("Q8_1", 32, 40),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    15: GGMLType("Q8_K", 256, 292),
    16: GGMLType("IQ2_XXS", 256, 66),
    17: GGMLType("IQ2_XS", 256, 74),
    18: GGMLType("IQ3_XXS", 256, 98),
    19: GGMLType("IQ1_S", 256, 50),
    20: GGMLType("IQ4_NL", 32, 18),
    21: GGMLType("IQ3_S", 256, 110),
    22: GGMLType("IQ2_S", 256, 82),
    23: GGMLType("IQ4_XS", 256, 136),
    29: GGMLType("IQ1_M", 256, 56),
    34: GGMLType("TQ1_0", 256, 54),
    35: GGMLType("TQ2_0", 256, 66),
    39: GGMLType("MXFP4", 32, 17),
    40: GGMLType("NVFP4", 64, 36),
}
GGML_TYPES: dict[int, GGMLType] = _GGUF_BLOCKS | {
    f.gguf: GGMLType(f.stored, 1, f.bits // 8) for f in FORMATS if f.gguf is not None and f.stored is not None
}
# The types that can be read: floats, and blocks that weights can stay in, whose codes are numbers or are looked up.
GGUF_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
GGUF_NUMBERS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
GGUF_LOOKED_UP = (
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    *("TQ1_0", "TQ2_0", "NVFP4"),
)
GGUF_PACKABLE = (*GGUF_NUMBERS, *GGUF_LOOKED_UP)
GGUF_READABLE = (*GGUF_FLOATS, *GGUF_PACKABLE)

_NAMED = ("fp64", "fp32", "bf16", "fp16", "fp8", "int8", "int4")
# Bytes per number of each format that a user may name for weights or a cache.
PLAIN = {f.name: Fraction(f.bits, 8) for f in FORMATS if f.name in _NAMED}
# Bytes of the scales beside each vector of a token and head, of the cache formats that store them: NAME:head has codes
# in NAME. A scale is bfloat16; 4 bits have a minimum too.
CACHE_SCALES = {"int8:head": 2, "fp8:head": 2, "int4:head": 4}
# The block formats that model files are published in, by name: (numbers, bytes) of a block. Q8_K is never stored.
GGUF_BLOCKS = {kind.name.lower(): (kind.block, kind.nbytes) for kind in _GGUF_BLOCKS.values() if kind.name != "Q8_K"}
# The block formats of llama.cpp's caches (common/arg.cpp, --cache-type-k): scales beside every 32 numbers of a vector.
CACHE_BLOCKS = {name: GGUF_BLOCKS[name] for name in ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")}
# Our own, for numbers of checkpoint folders that no other format holds exactly (kernels/blocks.py).
OWN_BLOCKS = {"int4_zero": (32, 19), "int4_wide": (32, 21), "int8_wide": (32, 36), "nvfp4_wide": (64, 40)}
# All formats that a weight can be packed in.
BLOCKS = GGUF_BLOCKS | OWN_BLOCKS
# The dtypes a model can compute in (our name -> torch's), those a machine is calibrated for, and those for training.
TORCH_NAMES = {f.name: f.torch for f in FORMATS if f.name in _NAMED[:4] and f.torch is not None}
CALIBRATED = ("fp32", "bf16")
TRAINED = ("bf16", "fp16", "fp32")
# By their names in safetensors: bits, and torch's names of the floats that a weight may be stored in, all of which
# can be converted to bfloat16 or wider.

STORED_BITS = {f.stored: f.bits for f in FORMATS if f.stored is not None}
STORED_FLOATS = {f.stored: f.torch for f in FORMATS if f.stored is not None and f.torch is not None}

ALIASES = {
    **{long: short for short, long in TORCH_NAMES.items()},
    "f64": "fp64",
    "f32": "fp32",
    "f16": "fp16",
    "half": "fp16",
    "float8": "fp8",
}


def short_name(dtype: object) -> str:
    """Returns the short name of a dtype given by name or as a torch.dtype: bf16; an unknown name unchanged."""
    name = str(dtype).removeprefix("torch.").lower()
    return ALIASES.get(name, name)


def torch_name(dtype: object, field: str = "dtype") -> str:
    """Returns torch's name of a dtype; raises InputError unless a model can compute in it."""
    name = short_name(dtype)
    if name not in TORCH_NAMES:
        raise InputError(field=field, value=str(dtype), allowed=one_of(TORCH_NAMES))
    return TORCH_NAMES[name]
