"""The diffllama family: llama with differential attention, whose heads in pairs are subtracted.

Ye et al. 2024 (arXiv 2410.05258); as transformers' class, the first half of the heads is paired with the second.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from asbuilt.families import llama
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Check, Irrelevant, but, eps
from asbuilt.families.shared.names import STEMS, Names
from asbuilt.families.shared.sizes import ATTENTION_BIAS, NullableHeadWidth, sizes
from asbuilt.spec import Attention, Block, Differential, LanguageModel, RMSNorm


def build(*, eps: float = 1e-5, **fields: Any) -> LanguageModel:  # noqa: ANN401  what llama's takes
    """Returns the model of these sizes; later layers subtract more, from 0.2 of the second attention up to 0.8."""
    plain = llama.build(eps=eps, **fields)
    blocks = tuple(_subtracting(block, 0.8 - 0.6 * math.exp(-0.3 * i), eps) for i, block in enumerate(plain.blocks))
    return replace(plain, blocks=blocks)


def _subtracting(block: Block, start: float, eps: float) -> Block:
    """Returns the block with differential attention."""
    first, *others = block.branches
    body = first.body
    assert isinstance(body, Attention)
    norm = RMSNorm(d=2 * body.value_width, eps=eps, gain="none")
    pairs = Differential(n_heads=body.n_heads, d_head=body.d_head, norm=norm, start=start)
    return replace(block, branches=(replace(first, body=replace(body, differential=pairs)), *others))


FAMILY = Family(
    name="diffllama",
    heads=("DiffLlamaForCausalLM",),
    keys=(  # defaults as in transformers' DiffLlamaConfig
        *but(
            sizes(n_vocab=32000, d_model=2048, d_ff=8192, n_layers=16, n_heads=32, context=2048),
            d_head=NullableHeadWidth(),
        ),
        Check("num_attention_heads", (lambda read: read["n_heads"] % 2 == 0, "even: heads are in pairs")),
        Check("num_key_value_heads", (lambda read: read["n_kv_heads"] % 2 == 0, "even: heads are in pairs")),
        eps("rms_norm_eps", 1e-5),
        ATTENTION_BIAS,
        Irrelevant("initialisation only", "lambda_std_dev"),
    ),
    build=build,
    names=Names(
        stems=STEMS
        | {f"attention.body.differential.{part}": f"self_attn.lambda_{part}" for part in ("q1", "k1", "q2", "k2")}
    ),
)
