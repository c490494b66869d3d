"""Published models in our own form: one row of dimensions each, with the source the numbers come from.

A row is checked against the published parameter count by the tests. `dtype` is what the published weights are stored
in, None where none were published. Contexts are those the model was made for.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from asbuilt.errors import InputError, near
from asbuilt.families import gpt2, llama
from asbuilt.spec import Llama3Scaling, Model, Rotary


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One published model; `spec()` builds its description."""

    name: str
    family: str
    source: str
    dtype: str | None
    make: Callable[[], Model]

    def spec(self) -> Model:
        """Returns the model's description, built anew."""
        return self.make()


ROWS: dict[str, Entry] = {}

GPT2_SOURCE = "Radford et al. 2019, Table 2; config of openai-community/"
GPT3_SOURCE = "Brown et al. 2020, arXiv 2005.14165, Table 2.1"
LLAMA1_SOURCE = "Touvron et al. 2023, arXiv 2302.13971, Table 2"
LLAMA2_SOURCE = "Touvron et al. 2023, arXiv 2307.09288; config of meta-llama/"
LLAMA3_SOURCE = "Grattafiori et al. 2024, arXiv 2407.21783, Table 3; config of meta-llama/"
SMOLLM2_SOURCE = "Allal et al. 2025, arXiv 2502.02737; config of HuggingFaceTB/"


def _gpt2(name: str, layers: int, d_model: int, heads: int, source: str, dtype: str | None = "float32", *,
          context: int = 1024) -> None:  # fmt: skip
    make = partial(gpt2.build, n_vocab=50257, d_model=d_model, n_layers=layers, n_heads=heads, max_positions=context,
                   name=name)  # fmt: skip
    ROWS[name] = Entry(name=name, family="gpt2", source=source, dtype=dtype, make=make)


def _llama(
    name: str,
    layers: int,
    d_model: int,
    heads: int,
    kv_heads: int,
    d_ff: int,
    source: str,
    dtype: str,
    *,
    vocab: int,
    context: int,
    theta: float = 10000.0,
    stretched: float | None = None,
    eps: float = 1e-5,
    tied: bool = False,
) -> None:
    """Adds a row; `stretched` is the factor by which Llama 3.1 and its kin reach beyond their first 8192 tokens."""

    def make() -> Model:
        usual = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_context": 8192}
        scaling = None if stretched is None else Llama3Scaling(factor=stretched, **usual)
        rotary = Rotary(d_rotary=d_model // heads, theta=theta, scaling=scaling)
        return llama.build(n_vocab=vocab, d_model=d_model, n_layers=layers, n_heads=heads, n_kv_heads=kv_heads,
                           d_ff=d_ff, max_positions=context, rotary=rotary, eps=eps, tied=tied, name=name)  # fmt: skip

    ROWS[name] = Entry(name=name, family="llama", source=source, dtype=dtype, make=make)


# layers, d_model, heads
_gpt2("distilgpt2", 6, 768, 12, "config of distilbert/distilgpt2")
_gpt2("gpt2", 12, 768, 12, GPT2_SOURCE + "gpt2")
_gpt2("gpt2-medium", 24, 1024, 16, GPT2_SOURCE + "gpt2-medium")
_gpt2("gpt2-large", 36, 1280, 20, GPT2_SOURCE + "gpt2-large")
_gpt2("gpt2-xl", 48, 1600, 25, GPT2_SOURCE + "gpt2-xl")
# the paper alternates dense and banded layers, which changes no parameter; every layer is dense here
_gpt2("gpt3-175b", 96, 12288, 96, GPT3_SOURCE, None, context=2048)

# layers, d_model, heads, key/value heads, d_ff
_llama1 = partial(_llama, source=LLAMA1_SOURCE, dtype="float16", vocab=32000, context=2048, eps=1e-6)
_llama1("llama-1-7b", 32, 4096, 32, 32, 11008)
_llama1("llama-1-13b", 40, 5120, 40, 40, 13824)
_llama1("llama-1-30b", 60, 6656, 52, 52, 17920)
_llama1("llama-1-65b", 80, 8192, 64, 64, 22016, eps=1e-5)

_llama2 = partial(_llama, dtype="float16", vocab=32000, context=4096)
_llama2("llama-2-7b", 32, 4096, 32, 32, 11008, source=LLAMA2_SOURCE + "Llama-2-7b-hf")
_llama2("llama-2-13b", 40, 5120, 40, 40, 13824, source=LLAMA2_SOURCE + "Llama-2-13b-hf")
_llama2("llama-2-70b", 80, 8192, 64, 8, 28672, source=LLAMA2_SOURCE + "Llama-2-70b-hf")

_llama3 = partial(_llama, dtype="bfloat16", vocab=128256, theta=500000.0)
_llama3("llama-3-8b", 32, 4096, 32, 8, 14336, source=LLAMA3_SOURCE + "Meta-Llama-3-8B", context=8192)
_llama3("llama-3-70b", 80, 8192, 64, 8, 28672, source=LLAMA3_SOURCE + "Meta-Llama-3-70B", context=8192)
_llama31 = partial(_llama3, context=131072, stretched=8.0)
_llama31("llama-3.1-8b", 32, 4096, 32, 8, 14336, source=LLAMA3_SOURCE + "Llama-3.1-8B")
_llama31("llama-3.1-70b", 80, 8192, 64, 8, 28672, source=LLAMA3_SOURCE + "Llama-3.1-70B")
_llama31("llama-3.1-405b", 126, 16384, 128, 8, 53248, source=LLAMA3_SOURCE + "Llama-3.1-405B")
_llama31("llama-3.3-70b", 80, 8192, 64, 8, 28672, source="config of meta-llama/Llama-3.3-70B-Instruct")
_llama32 = partial(_llama3, context=131072, stretched=32.0, tied=True)
_llama32("llama-3.2-1b", 16, 2048, 32, 8, 8192, source="config of meta-llama/Llama-3.2-1B")
_llama32("llama-3.2-3b", 28, 3072, 24, 8, 8192, source="config of meta-llama/Llama-3.2-3B")

_smollm2 = partial(_llama, dtype="bfloat16", vocab=49152, context=8192, tied=True)
_smollm2("smollm2-135m", 30, 576, 9, 3, 1536, source=SMOLLM2_SOURCE + "SmolLM2-135M", theta=100000.0)
_smollm2("smollm2-360m", 32, 960, 15, 5, 2560, source=SMOLLM2_SOURCE + "SmolLM2-360M", theta=100000.0)
_smollm2("smollm2-1.7b", 24, 2048, 32, 32, 8192, source=SMOLLM2_SOURCE + "SmolLM2-1.7B", theta=130000.0)

TINYLLAMA_SOURCE = "Zhang et al. 2024, arXiv 2401.02385; config of TinyLlama/TinyLlama-1.1B-Chat-v1.0"
_llama("tinyllama-1.1b", 22, 2048, 32, 4, 5632, TINYLLAMA_SOURCE, "bfloat16", vocab=32000, context=2048)


def names() -> list[str]:
    """Returns the names of all rows."""
    return list(ROWS)


def find(name: str) -> Entry:
    """Returns the row of that name: case, `_` for `-`, an organisation before a slash, `Meta-` and `-hf` are forgiven.

    Raises InputError with the nearest names where there is none.
    """
    plain = re.sub(r"[_\s]+", "-", name.strip().lower().rsplit("/", 1)[-1])
    plain = plain.removeprefix("meta-").removesuffix("-hf")
    if plain not in ROWS:
        hint = near(plain[:80], ROWS)
        raise InputError("not in the catalogue", field="model", value=name, fix=hint or "`asbuilt models` lists them")
    return ROWS[plain]
