"""One spelling of dtypes: `bf16`, `bfloat16` and `torch.bfloat16` are the same, whoever asks."""

from __future__ import annotations

from asbuilt.errors import InputError

# What a model can compute in: our short name, and torch's.
TORCH_NAMES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
ALIASES = {
    **{long: short for short, long in TORCH_NAMES.items()},
    "f64": "fp64",
    "f32": "fp32",
    "f16": "fp16",
    "half": "fp16",
    "float8": "fp8",
}


def short_name(dtype: object) -> str:
    """Returns the short name of a dtype given as a name or as torch's own object: bf16; an unknown name as it is."""
    name = str(dtype).removeprefix("torch.").lower()
    return ALIASES.get(name, name)


def torch_name(dtype: object, field: str = "dtype") -> str:
    """Returns torch's name of a dtype that a model computes in; raises InputError for one that it does not."""
    name = short_name(dtype)
    if name not in TORCH_NAMES:
        raise InputError("no dtype to compute in", field=field, value=str(dtype), allowed=", ".join(TORCH_NAMES))
    return TORCH_NAMES[name]
