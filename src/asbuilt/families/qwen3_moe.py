"""The qwen3_moe family: qwen3's attention, and experts in all layers but those listed as dense.

Yang et al. 2025 (arXiv 2505.09388). Layer i has experts where i + 1 is a multiple of `decoder_sparse_step` and i is not
in `mlp_only_layers`; dense layers are `intermediate_size` wide, experts `moe_intermediate_size`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from asbuilt.families import llama
from asbuilt.families.qwen3 import REDUNDANT
from asbuilt.families.shared import experts
from asbuilt.families.shared.key import Flag, Only, Optional, Values, but
from asbuilt.families.shared.names import EXPERTS, QK_NORMS, ROUTER, STEMS, Names
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.sizes import ATTENTION_BIAS, RMS_EPS, sizes


class Window:
    """The window of all layers, where `use_sliding_window` switches it on.

    `max_window_layers` once kept windows from the first layers, and now means nothing: beside a window it is refused.
    """

    keys = ("use_sliding_window", "sliding_window")
    default = 4096

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the window."""
        used, size = self.keys
        Flag(used, "used", default=False).read(reader, own := {})
        Optional(size, "size", default=self.default).read(reader, own)
        for key in (*self.keys, "max_window_layers"):
            reader.irrelevant(key, "the blocks say it, or it has no effect without a window")
        values["window"] = own["size"] if own["used"] else None
        if values["window"] is not None:
            said = "versions of this family differ in which layers it gives windows"
            reader.only("max_window_layers", 0, reason=said)

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the keys; of a model without a window those that were carried, if they switch none on."""
        (used, size), carried = self.keys, parts.carried
        if parts.window is not None:
            return {used: True, size: parts.window}
        if carried.get(used) and carried.get(size, self.default) is not None:
            return {used: False}
        return {key: carried[key] for key in self.keys if key in carried}


FAMILY = replace(
    llama.FAMILY,
    name="qwen3_moe",
    heads=("Qwen3MoeForCausalLM",),
    keys=(  # defaults as in transformers' Qwen3MoeConfig
        *but(
            sizes(n_vocab=151936, d_model=2048, d_ff=6144, n_layers=24, n_heads=32, n_kv_heads=4, context=32768),
            d_ff=experts.dense,
        ),
        Only("shared_expert_intermediate_size", 0, None, reason="this family has no shared expert"),
        Only("num_shared_experts", 0, None, reason="this family has no shared expert"),
        experts.TRAINING,
        experts.routed(
            *experts.counts("num_experts", "num_local_experts", n_experts=128, top_k=8), experts.renormalise()
        ),
        experts.expert_width(768),
        RMS_EPS,
        ATTENTION_BIAS,
        *REDUNDANT,
        experts.DenseLayers(),
        Window(),
    ),
    build=partial(llama.build, head_norms=True),
    names=Names(stems=STEMS | QK_NORMS | ROUTER, experts=EXPERTS),
)
