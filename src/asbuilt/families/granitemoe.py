"""The granitemoe family: granite with experts in every layer, whose matrices are stored in stacks.

Granite 3 MoE (IBM 2024, its model cards).
"""

from __future__ import annotations

from dataclasses import replace

from asbuilt.families import granite, llama
from asbuilt.families.shared import experts
from asbuilt.families.shared.names import ATTENTION, NORMS, Names
from asbuilt.families.shared.sizes import ATTENTION_BIAS, RMS_EPS, sizes
from asbuilt.families.shared.table import Concat, EachExpert, Entry, entry
from asbuilt.spec import MixtureOfExperts


def stacked(part: MixtureOfExperts) -> list[Entry]:
    """Returns the entries of the experts: in stacks, outputs first, gates before ups."""
    inward = EachExpert(Concat((part.d_ff, part.d_ff)))
    return [
        Entry(paths=("gate", "up"), names=("block_sparse_moe.input_linear.weight",), layout=inward),
        entry("down", "block_sparse_moe.output_linear.weight"),
    ]


FAMILY = replace(
    llama.FAMILY,
    name="granitemoe",
    heads=("GraniteMoeForCausalLM",),
    keys=(  # defaults as in transformers' GraniteMoeConfig
        *sizes(n_vocab=32000, d_model=4096, d_ff=11008, n_layers=32, n_heads=32, context=2048),
        experts.TRAINING,
        experts.routed(*experts.counts("num_local_experts", n_experts=8, top_k=2), renormalise=True),
        RMS_EPS,
        ATTENTION_BIAS,
        *granite.FACTORS,
    ),
    names=Names(
        stems=NORMS | ATTENTION | {"ffn.body.router": "block_sparse_moe.router.layer"},
        stacked=stacked,
    ),
)
