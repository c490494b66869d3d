"""The cohere2 family: cohere with windows in all but every fourth layer, which has no positions.

Command R7B and Command A: Cohere 2025 (arXiv 2504.00698).
"""

from __future__ import annotations

from dataclasses import replace

from asbuilt.families import cohere
from asbuilt.families.shared.key import Irrelevant, Only, Values, but, eps
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.sizes import ATTENTION_BIAS, DerivedHeadWidth, LayerWindows, every_but_last, sizes


def _by_pattern(reader: ConfigReader, values: Values) -> tuple[bool, ...]:
    """Returns which layers have windows: all but the last of each `sliding_window_pattern`."""
    key = "sliding_window_pattern"
    interval = reader.size(key, default=4)
    reader.overruled(key, "layer_types")
    for one in (key, f"_{key}", "layer_switch"):
        reader.irrelevant(one, "layer_types, as it is written, says it")
    return every_but_last(values["n_layers"], interval)


FAMILY = replace(
    cohere.FAMILY,
    name="cohere2",
    heads=("Cohere2ForCausalLM",),
    padding=0,
    keys=(  # defaults as in transformers' Cohere2Config
        *but(
            sizes(n_vocab=256000, d_model=8192, d_ff=22528, n_layers=40, n_heads=64, context=8192, ties=True),
            d_head=DerivedHeadWidth(even=True),
        ),
        Only("head_dim", lambda values: values["d_head"], reason="heads are hidden_size / num_attention_heads wide"),
        eps("layer_norm_eps", 1e-5),
        ATTENTION_BIAS,
        cohere.LOGIT_SCALE,
        LayerWindows(default=4096, usual=_by_pattern, required=True),
        Only("order_of_interleaved_layers", "local_attn_first", reason="the last layer of each interval sees all"),
        Only("position_embedding_type", "rope_gptj", reason="RoPE pairs adjacent numbers in this family"),
        Only("rotary_pct", 1, reason="RoPE covers whole heads in this family"),
        Only("use_gated_activation", True, reason="the feed-forward part is gated"),
        Only("use_parallel_block", True, reason="both branches of a block read the same"),
        Only("use_qk_norm", False, None, reason="queries and keys are not normed in this family"),
        Irrelevant("tie_word_embeddings says it", "use_embedding_sharing"),
        Irrelevant("how devices divide the table", "use_parallel_embedding"),
    ),
)
