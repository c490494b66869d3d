"""The dtype of the KV cache that quantised weights were published with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asbuilt.errors import shorten

# How compressed-tensors and modelopt name a type and its bits.
SCHEMES = {("float", 8): "FP8", ("int", 8): "INT8"}
DTYPES = {"FP8": "fp8", "INT8": "int8"}


def published_cache(said: Mapping[str, Any]) -> tuple[str | None, str]:
    """Returns the cache's dtype, None where nothing is stated or it is one that caches are not planned in; and a note.

    modelopt names it (`kv_cache_quant_algo`), compressed-tensors states its bits (`kv_cache_scheme`).
    """
    scheme = said.get("kv_cache_scheme")
    name = said.get("kv_cache_quant_algo") or scheme
    if isinstance(scheme, dict):
        bits = scheme.get("num_bits")
        name = SCHEMES.get((str(scheme.get("type")), bits if isinstance(bits, int) else 0), f"{bits} bits")
    if not isinstance(name, str):
        return None, ""
    kv = DTYPES.get(name.upper())
    if kv is None:
        return None, f"the published cache dtype is {shorten(name)}, in which caches are not planned"
    return kv, f"the cache in {kv}, as published, unless --kv-dtype says otherwise"
