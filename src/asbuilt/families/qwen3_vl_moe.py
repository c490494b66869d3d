"""The qwen3_vl_moe family: qwen3_vl with a text of experts, stored in stacks.

Bai et al. 2025 (arXiv 2511.21631). The stacks of published folders are transposed (inputs first); transformers 5 reads
both and writes them as its linear maps are, which is what is written here.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from asbuilt.families import qwen3_moe, qwen3_vl
from asbuilt.families.shared import experts
from asbuilt.families.shared.key import Irrelevant, Only, but
from asbuilt.families.shared.multimodal import Text
from asbuilt.families.shared.names import QK_NORMS, ROUTER, STEMS, Names
from asbuilt.families.shared.sizes import ATTENTION_BIAS, RMS_EPS, sizes
from asbuilt.families.shared.table import Chain, Concat, EachExpert, Entry, InwardOrNot, Same, Transpose, entry
from asbuilt.spec import MixtureOfExperts

HEAD = "Qwen3VLMoeForConditionalGeneration"


def _stacked(part: MixtureOfExperts) -> list[Entry]:
    """Returns the entries of the experts: in stacks, gates before ups."""
    join = Concat((part.d_ff, part.d_ff))
    inward = InwardOrNot(EachExpert(join), EachExpert(Chain((join, Transpose()))))
    return [
        Entry(paths=("gate", "up"), names=("mlp.experts.gate_up_proj",), layout=inward),
        entry("down", "mlp.experts.down_proj", InwardOrNot(EachExpert(Same()), EachExpert(Transpose()))),
    ]


TEXT = replace(
    qwen3_moe.FAMILY,
    name="qwen3_vl_moe_text",
    heads=(HEAD,),
    keys=(  # defaults as in transformers' Qwen3VLMoeTextConfig
        *but(
            sizes(n_vocab=151936, d_model=2048, d_ff=5632, n_layers=24, n_heads=16, n_kv_heads=16, context=128000),
            d_ff=experts.dense,
            rotary=qwen3_vl.ROPE,
        ),
        experts.TRAINING,
        experts.routed(*experts.counts("num_experts", "num_local_experts", n_experts=60, top_k=4), renormalise=True),
        Only("norm_topk_prob", True, reason="this family divides the weights of a token's experts by their sum"),
        experts.expert_width(1408),
        RMS_EPS,
        ATTENTION_BIAS,
        experts.DenseLayers(),
        Irrelevant("this family has no windows, whatever a config says", "sliding_window", "use_sliding_window"),
    ),
    names=Names(stems=STEMS | QK_NORMS | ROUTER, stacked=_stacked),
)

FAMILY = replace(
    qwen3_vl.FAMILY,
    name="qwen3_vl_moe",
    heads=(HEAD,),
    prepare=partial(qwen3_vl.prepared, "qwen3_vl_moe"),
    keys=but(qwen3_vl.FAMILY.keys, text=Text(TEXT), images=qwen3_vl.nested("qwen3_vl_moe_vision")),
    names=partial(qwen3_vl.table, TEXT),
)
