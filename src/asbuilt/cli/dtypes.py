"""Dtypes as they are typed: `bf16` and `bfloat16` are the same."""

from __future__ import annotations

TORCH_NAMES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def torch_name(dtype: str | None) -> str | None:
    """Returns torch's name of a dtype that a model computes in; None stays None.

    Raises InputError for a name that is none of these.
    """
    from asbuilt import cost
    from asbuilt.errors import InputError

    if dtype is None:
        return None
    name = cost.dtype(dtype).name
    if name not in TORCH_NAMES:
        raise InputError("no dtype to compute in", field="--dtype", value=dtype, allowed=", ".join(TORCH_NAMES))
    return TORCH_NAMES[name]
