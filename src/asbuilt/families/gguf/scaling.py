"""What the families share in reading a GGUF header: metadata common to all, float32 values, rotary scaling.

The meaning of the keys and their defaults follow llama.cpp (`llama-model.cpp`, `llama-context.cpp`), the reader these
files are made for; names are those of the GGUF specification and of `gguf/constants.py`.
"""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from asbuilt.dtypes import STORED_FLOATS
from asbuilt.errors import InputError
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.files import open_regular
from asbuilt.spec import FrequencyFactors, LinearScaling, Llama3Scaling, Rotary, Scaling, YaRN

if TYPE_CHECKING:
    from asbuilt.formats.gguf import GGUFFile

MOST_FACTOR = 1e6
ELSEWHERE = {
    "general.": "says what the file is",
    "tokenizer.": "the tokenizer's",
    "quantize.": "says how the weights were quantised",
    "imatrix.": "says how the weights were quantised",
    "split.": "says how the model lies in files",
}
TOKENS = {"bos": "bos_token_id", "eos": "eos_token_id", "unknown": "unk_token_id", "padding": "pad_token_id"}

# Llama 3.1 and 3.3 stretch by 8, Llama 3.2 by 32, with one ramp; Llama 4 Scout by 16, without any ramp.
PUBLISHED_LLAMA3 = tuple(
    Llama3Scaling(factor=factor, low_freq_factor=1.0, high_freq_factor=high, original_context=8192)
    for factor, high in ((8.0, 4.0), (32.0, 4.0), (16.0, 1.0))
)
# The writers compute the divisors in float32 throughout; a power of 500000 loses 4 bits of the 24 there.
FLOAT32_ROUNDING = 2.0**-18


def gguf_reader(file: GGUFFile, where: str) -> ConfigReader:
    """Returns a reader of the metadata in which all that does not describe the model is already declared."""
    reader = ConfigReader(file.metadata, where)
    reader.known.add("general.architecture")
    for key in file.metadata:
        for prefix, reason in ELSEWHERE.items():
            if key.startswith(prefix):
                reader.irrelevant(key, reason)
    return reader


def carried_tokens(file: GGUFFile) -> dict[str, Any]:
    """Returns the token numbers as a config.json names them."""
    stored = {ours: file.metadata.get(f"tokenizer.ggml.{theirs}_token_id") for theirs, ours in TOKENS.items()}
    return {key: value for key, value in stored.items() if isinstance(value, int) and not isinstance(value, bool)}


def stored_dtype(file: GGUFFile, name: str) -> str | None:
    """Returns the dtype of the named tensor, None where it is quantised or absent."""
    tensor = file.tensors.get(name)
    return STORED_FLOATS.get(tensor.type) if tensor is not None else None


def rows_of(file: GGUFFile, name: str, otherwise: int) -> int:
    """Returns the first dimension of the named matrix, or `otherwise` where the file has none."""
    tensor = file.tensors.get(name)
    return tensor.shape[0] if tensor is not None and len(tensor.shape) == 2 else otherwise


def vocabulary(reader: ConfigReader, file: GGUFFile, arch: str) -> int:
    """Returns the rows of the token table; raises InputError where the metadata disagrees with it."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    stored = rows_of(file, "token_embd.weight", len(tokens) if isinstance(tokens, list) else 0)
    key = f"{arch}.vocab_size"
    said = reader.size(key) if not stored else reader.size(key, default=stored)
    reader.require(key, not stored or said == stored, f"{stored}, the rows of token_embd.weight")
    return said


def shortest(value: float) -> float:
    """Returns the shortest decimal that rounds to the same float32: 9.999999747378752e-06 was written as 1e-05."""
    try:
        stored = struct.pack("<f", value)
    except OverflowError:
        return value
    decimals = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next((x for x in decimals if abs(x) < 3.4e38 and struct.pack("<f", x) == stored), value)


def read_gguf_rotary(
    reader: ConfigReader, file: GGUFFile, arch: str, d_head: int, context: int, *, partial: bool = False
) -> Rotary:
    """Returns the rotary positions of a file whose heads are turned as a whole, or in a `partial` family less.

    `rope_freqs.weight` holds one divisor per pair; where these are the published ones of Llama 3 it is named so.
    """
    rope = f"{arch}.rope"
    turned = reader.size(f"{rope}.dimension_count", default=d_head)
    if partial:
        even = turned <= d_head and turned % 2 == 0
        reader.require(f"{rope}.dimension_count", even, f"an even part of the {d_head} numbers of a head")
    else:
        reader.require(f"{rope}.dimension_count", turned == d_head, f"{d_head}, the whole head")
    theta = read_base(reader, rope)
    scaling = read_gguf_scaling(reader, rope, context)
    factors = rope_factors(file, turned // 2)
    if factors is not None:
        if scaling is not None:
            raise reader.error(f"{rope}.scaling.type", "rope_freqs.weight beside another scaling is not read")
        scaling = name_factors(factors, turned, theta)
    return Rotary(d_rotary=turned, theta=theta, scaling=scaling)


def read_base(reader: ConfigReader, rope: str, key: str = "freq_base") -> float:
    """Returns the base of the frequencies, 10000 where the file says none."""
    return shortest(reader.number(f"{rope}.{key}", default=10000.0, above=1.0))


def read_gguf_scaling(reader: ConfigReader, rope: str, context: int, *, log_multiplier: bool = False) -> Scaling | None:
    """Returns the scaling of the keys `rope.scaling.*`, None where positions are not scaled.

    `log_multiplier` leaves `yarn_log_multiplier` to the caller; elsewhere it is refused.
    """
    key = f"{rope}.scaling"
    # a missing type means linear, and a missing factor (or 0) means 1
    kind = reader.choice(f"{key}.type", choices={"none": "", "linear": "linear", "yarn": "yarn"}, default="linear")
    named = reader.spelled(f"{key}.factor", f"{rope}.scale_linear")
    zero = named is None or reader.config[named] == 0
    factor = 1.0 if zero else shortest(reader.number(named or "", most=MOST_FACTOR))
    original = reader.size(f"{key}.original_context_length", default=context)
    reader.irrelevant(f"{key}.finetuned", "says how the model was made")
    usual: dict[str, tuple[object, ...]] = {"yarn_ext_factor": (1, -1), "yarn_attn_factor": (1, -1)}
    usual |= {} if log_multiplier else {"yarn_log_multiplier": (0,)}
    for one, allowed in usual.items():
        reader.only(f"{key}.{one}", *allowed, reason="only the usual YaRN is read")
    extra = shortest(reader.number(f"{key}.attn_factor", default=1.0, most=MOST_FACTOR))
    fast = shortest(reader.number(f"{key}.yarn_beta_fast", default=32.0, most=MOST_FACTOR))
    slow = shortest(reader.number(f"{key}.yarn_beta_slow", default=1.0, most=MOST_FACTOR))
    reader.require(f"{key}.yarn_beta_fast", fast >= slow, f"at least yarn_beta_slow = {slow:g}")
    if kind != "yarn":
        reader.require(f"{key}.attn_factor", extra == 1.0, "1 where the scaling is not yarn")
        return LinearScaling(factor=factor) if kind and factor != 1.0 else None
    # llama.cpp multiplies what the file says with the usual attention factor
    mscale = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    attention = None if extra == 1.0 else extra * mscale
    return YaRN(factor=factor, original_context=original, beta_fast=fast, beta_slow=slow, attention_factor=attention)


def rope_factors(file: GGUFFile, n: int, name: str = "rope_freqs.weight") -> tuple[float, ...] | None:
    """Returns the `n` divisors of the named tensor, None where the file has none; it is 4n bytes of float32."""
    tensor = file.tensors.get(name)
    if tensor is None:
        return None
    if name in file.values:
        return tuple(map(shortest, file.values[name]))
    field = f"{file.path}: {name}"
    if tensor.type != "F32" or tensor.shape != (n,):
        raise InputError(field=field, value=(tensor.type, tensor.shape), allowed=f"F32 of shape ({n},)")
    try:
        with open_regular(file.holder(tensor)) as data:
            data.seek(tensor.offset)
            factors = struct.unpack(f"<{n}f", data.read(4 * n))
    except (OSError, struct.error) as error:
        raise InputError(f"cannot be read: {error}", field=field) from error
    if not all(math.isfinite(x) and x > 0 for x in factors):
        raise InputError(field=field, value=factors, allowed="finite numbers above 0")
    return tuple(map(shortest, factors))


def name_factors(factors: tuple[float, ...], d_rotary: int, theta: float) -> Scaling:
    """Returns the published Llama 3 scaling that these divisors are to float32 rounding, else the divisors."""
    plain = Rotary(d_rotary=d_rotary, theta=theta).inverse_frequencies()
    for scaling in PUBLISHED_LLAMA3:
        scaled = Rotary(d_rotary=d_rotary, theta=theta, scaling=scaling).inverse_frequencies()
        divisors = (a / b for a, b in zip(plain, scaled, strict=True))
        if all(abs(x - y) <= FLOAT32_ROUNDING * y for x, y in zip(factors, divisors, strict=True)):
            return scaling
    return FrequencyFactors(factors=factors)


Said = dict[str, Any]  # keys after `rope.`, and what they say


def write_gguf_rotary(
    rotary: Rotary, *, log_multiplier: float | None = None
) -> tuple[Said, dict[str, tuple[float, ...]]]:
    """Returns what a header says of rotary positions, and the tensors of divisors that go with it.

    With a `log_multiplier` YaRN's attention factor is said by that. Raises InputError for a scaling that files of
    most architectures cannot say.
    """
    said: Said = {"dimension_count": rotary.d_rotary, "freq_base": rotary.theta}
    scaling = rotary.scaling
    if isinstance(scaling, Llama3Scaling | FrequencyFactors):
        plain = replace(rotary, scaling=None).inverse_frequencies()
        divisors = tuple(a / b for a, b in zip(plain, rotary.inverse_frequencies(), strict=True))
        return said, {"rope_freqs.weight": divisors}
    if isinstance(scaling, LinearScaling):
        said |= {"scaling.type": "linear", "scaling.factor": scaling.factor}
    elif isinstance(scaling, YaRN):
        said |= _written_yarn(scaling, log_multiplier)
    elif scaling is not None:
        raise InputError("GGUF files cannot say this scaling", field="positions.scaling", value=type(scaling).__name__)
    return said, {}


def _written_yarn(scaling: YaRN, log_multiplier: float | None) -> Said:
    usual = {"scaling.yarn_beta_fast": (scaling.beta_fast, 32.0), "scaling.yarn_beta_slow": (scaling.beta_slow, 1.0)}
    said: Said = {
        "scaling.type": "yarn",
        "scaling.factor": scaling.factor,
        "scaling.original_context_length": scaling.original_context,
        **{key: value for key, (value, default) in usual.items() if value != default},
    }
    if log_multiplier is not None:
        return said | {"scaling.yarn_log_multiplier": log_multiplier}
    if scaling.attention_factor is None:
        return said
    mscale = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return said | {"scaling.attn_factor": scaling.attention_factor / mscale}


def alike(wanted: object, got: object) -> bool:
    """Returns whether two values of specs are the same as far as a file says them.

    Its numbers are float32, and divisors of frequencies stand for whatever scaling they came from.
    """
    if isinstance(wanted, float) and isinstance(got, float):
        return math.isclose(wanted, got, rel_tol=1e-6)
    if isinstance(wanted, Rotary) and isinstance(got, Rotary) and isinstance(got.scaling, FrequencyFactors):
        if not isinstance(wanted.scaling, Llama3Scaling | FrequencyFactors):
            return False
        pairs = zip(wanted.inverse_frequencies(), got.inverse_frequencies(), strict=False)
        rest = replace(wanted, scaling=None, theta=1.5) == replace(got, scaling=None, theta=1.5)
        return rest and alike(wanted.theta, got.theta) and all(math.isclose(a, b, rel_tol=1e-5) for a, b in pairs)
    return type(wanted) is type(got) and wanted == got
